"""What of a long picture is left out: repeated microbatches, and stages in the middle of many.

Terms.
    A **row** is a stage of a chart that is drawn. A **unit** is what a compute op does, apart from its microbatch. In a
    **run** a row does the same units over and over, each time for the next microbatch; one time round is a **period**.
    A **fold** is a span of time that all rows of a picture leave out, as in each of them a run goes on, or nothing happens;
    so the axis can be cut there for all. Ops that belong to no microbatch are never left out.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from ratrain_jax.lowering.program import Lane
from ratrain_jax.views.chart import Bar, Chart

FEWEST: Final = 3
"""Periods that are worth a fold."""

UNEVEN: Final = 0.03
"""By how much a period may differ from the next."""

BEAT: Final = 8
"""Up to how many periods may repeat together: lanes that keep each other waiting beat."""

Span = tuple[float, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Fold:
    """A span of time that is left out.

    Attributes:
        start: seconds from the start of the step.
        end: likewise.
        counts: of each row, how many microbatches are left out; 0 where nothing happens.
    """

    start: float
    end: float
    counts: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """A run of a row: when each of its periods starts."""

    starts: np.ndarray

    @property
    def span(self) -> Span:
        return float(self.starts[0]), float(self.starts[-1])

    @property
    def period(self) -> float:
        return float(np.median(np.diff(self.starts)))


def kept_stages(chart: Chart, most: int, few: int) -> tuple[int, ...]:
    """Which stages are drawn.

    Args:
        chart: the chart.
        most: how many stages may all be drawn.
        few: of more, how many of the first and as many of the last are; the one with the highest peak is as well.
    """
    stages = len(chart.memory)
    if stages <= most:
        return tuple(range(stages))
    fullest = max(range(stages), key=lambda stage: int(chart.memory[stage].total.max()))
    return tuple(sorted({*range(few), fullest, *range(stages - few, stages)}))


def find_folds(
    charts: Sequence[Chart], kept: Sequence[Sequence[int]], beside: int
) -> tuple[Fold, ...]:
    """Finds what can be left out of charts on one time axis.

    Args:
        charts: the charts.
        kept: of each, the stages that are drawn.
        beside: periods of a run that stay on each side of a fold.

    Returns:
        The folds, by start; their counts are of the rows in order, chart by chart.
    """
    rows = [
        (chart, [bar for bar in bars if bar.lane != Lane.NONE])
        for chart, stages in zip(charts, kept, strict=True)
        for bars in _by_stage(chart, stages)
    ]
    runs = [list(_runs(bars, chart.measured)) for chart, bars in rows]
    longest = max((run.period for some in runs for run in some), default=0.0)
    common: list[Span] = [(-np.inf, np.inf)]
    for (_, bars), some in zip(rows, runs, strict=True):
        even = [run.span for run in some] + _pauses(bars, longest)
        special = [(b.start, b.end) for b in bars if b.next_step or _microbatch(b) is None]
        common = _both(common, _without(sorted(even), _joined(special)))
    folds: list[Fold] = []
    for span in common:
        start = max(span[0], folds[-1].end) if folds else span[0]
        cut = _cut((start, span[1]), runs, beside, longest)
        if cut is not None:
            counts = tuple(left_out(bars, *cut) for _, bars in rows)
            folds.append(Fold(*cut, counts))
    return tuple(folds)


def _cut(span: Span, runs: Sequence[Sequence[_Run]], beside: int, longest: float) -> Span | None:
    """What to leave out of a span in which all rows go on evenly: whole periods of the slowest run, or a common pause."""
    inside = [
        run for some in runs for run in some if run.span[0] <= span[0] and span[1] <= run.span[1]
    ]
    if not inside:
        start, end = span[0] + beside * longest, span[1] - beside * longest
        bounded = np.isfinite(start) and np.isfinite(end)
        return (start, end) if bounded and end - start > FEWEST * longest else None
    slowest = max(inside, key=lambda run: run.period)
    near = 1e-6 * slowest.period  # starts that are equal but for rounding are on one side
    starts = slowest.starts
    starts = starts[(starts >= span[0] - near) & (starts <= span[1] + near)]
    if len(starts) <= 2 * beside + FEWEST:
        return None
    return float(starts[beside]) - near, float(starts[-1 - beside]) - near


def left_out(bars: Iterable[Bar], start: float, end: float) -> int:
    """How many microbatches of a row are left out: the most starts of one unit within the span."""
    found: dict[object, int] = {}
    for bar in bars:
        if bar.lane == Lane.COMPUTE and start <= bar.start < end:
            found[_unit(bar)] = found.get(_unit(bar), 0) + 1
    return max(found.values(), default=0)


def _by_stage(chart: Chart, stages: Sequence[int]) -> list[list[Bar]]:
    found: dict[int, list[Bar]] = {stage: [] for stage in stages}
    for bar in chart.bars:
        if bar.stage in found:
            found[bar.stage].append(bar)
    return list(found.values())


def _unit(bar: Bar) -> object:
    return type(bar.op), getattr(bar.op, "layers", None)


def _microbatch(bar: Bar) -> int | None:
    return getattr(bar.op, "microbatch", None)


def _runs(bars: Iterable[Bar], measured: bool) -> Iterable[_Run]:
    """The runs of a row."""
    mine = [b for b in bars if b.lane == Lane.COMPUTE and not b.next_step]
    places = {(_unit(b), _microbatch(b)): place for place, b in enumerate(mine)}
    # How far on the same unit comes for the next microbatch; within a run that is one number.
    ahead = np.zeros(len(mine) + 1, int)
    for (unit, microbatch), place in places.items():
        if microbatch is not None:
            ahead[place] = places.get((unit, microbatch + 1), place) - place
    bounds = np.flatnonzero(np.diff(ahead, prepend=0))
    for first, after in itertools.pairwise(bounds):
        step = int(ahead[first])
        if step > 0 and after - first > step * FEWEST:
            starts = np.array([mine[place].start for place in range(first, after + step, step)])
            if measured:  # whose periods differ as they will
                yield _Run(starts)
            else:
                cut = (_even(starts, beat) for beat in range(1, BEAT + 1))
                yield from max(cut, key=lambda found: sum(len(run.starts) for run in found))


def _even(starts: np.ndarray, beat: int) -> list[_Run]:
    """A run cut where so many periods together change."""
    together = starts[beat:] - starts[:-beat]
    uneven = np.abs(np.diff(together)) > UNEVEN * np.minimum(together[1:], together[:-1])
    cuts = [0, *(np.flatnonzero(uneven) + 1).tolist(), len(together)]
    return [
        _Run(starts[first : after + 1])
        for first, after in itertools.pairwise(cuts)
        if after - first > FEWEST * beat
    ]


def _pauses(bars: Iterable[Bar], longest: float) -> list[Span]:
    """When a row computes nothing for long, before its first op and after its last too."""
    if not longest:
        return []
    busy = _joined([(b.start, b.end) for b in bars if b.lane == Lane.COMPUTE])
    edges = [-np.inf, *(edge for span in busy for edge in span), np.inf]
    pauses = zip(edges[::2], edges[1::2], strict=True)
    return [(start, end) for start, end in pauses if end - start > FEWEST * longest]


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Spans that overlap or touch made one."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _without(spans: Iterable[Span], taken: Sequence[Span]) -> list[Span]:
    """What is left of spans."""
    edges = [-np.inf, *(edge for span in taken for edge in span), np.inf]
    return _both(list(spans), list(zip(edges[::2], edges[1::2], strict=True)))


def _both(some: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Where a span of each of two lists overlaps; both ascend."""
    found = []
    mine, theirs = 0, 0
    while mine < len(some) and theirs < len(others):
        start = max(some[mine][0], others[theirs][0])
        end = min(some[mine][1], others[theirs][1])
        if start < end:
            found.append((start, end))
        if some[mine][1] < others[theirs][1]:
            mine += 1
        else:
            theirs += 1
    return found
