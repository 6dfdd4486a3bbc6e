"""The bars of a chart as columns, small enough that a page holds the steps of large pipelines.

Terms.
    An **entry** is what all bars of equal ops of different microbatches have in common: what they are, which layers, how
    many bytes. Bars name their entry by number. A **span** is a part of a bar of the link lane in which the compute lane of
    its stage is idle: what is exposed of it.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from ratrain_jax.lowering.mnemonics import SHORT_NAMES
from ratrain_jax.lowering.program import Lane, Op, Program, Send
from ratrain_jax.lowering.text import readable_bytes
from ratrain_jax.views.chart import KINDS, Bar, Chart

COMPUTE_HEIGHT: Final = 0.5
LINK_HEIGHT: Final = 0.28
COMPUTE_AT: Final = 0.32
LINK_AT: Final = 0.75
"""Centres and heights of the lanes of stage 0; each further stage is 1 below. Transfers take the upper half of the link lane
where they are sent, and the lower one where they are received, for both may be under way at once."""

_MOST_NAMES: Final = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Columns:
    """Bars of one kind.

    Attributes:
        kind: which.
        height: of each.
        data: `x` start and `width` seconds, `y` the upper edge, `exposed` seconds, `op` the entry, `microbatch` or -1.
    """

    kind: str
    height: float
    data: dict[str, np.ndarray]


class Entries:
    """The entries of a program's bars.

    Args:
        program: whose.

    Attributes:
        rows: for each entry what it is, its layers, its bytes, its short name, and its layer or -1,
            which its label tells where there is no microbatch.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.rows: list[tuple[str, str, str, str, int]] = []
        self._known: dict[tuple[Any, ...], int] = {}

    def number(self, op: Op) -> int:
        """The entry of an op."""
        read, written = self._bytes(op.reads), self._bytes(op.writes)
        where = (getattr(op, name, None) for name in ("layers", "layer", "target", "phase"))
        key = (type(op), op.stage, *where, read, written)
        if key not in self._known:
            self._known[key] = len(self.rows)
            self.rows.append(self._row(op, read, written))
        return self._known[key]

    def _bytes(self, values: Iterable[int]) -> int:
        return sum(self.program.values[v].bytes for v in values)

    def _row(self, op: Op, read: int, written: int) -> tuple[str, str, str, str, int]:
        layer = getattr(op, "layer", None)
        if isinstance(op, Send):
            moved = f"{readable_bytes(written)} sent"
        else:
            moved = f"{readable_bytes(read)} read, {readable_bytes(written)} written"
        number = -1 if layer is None else layer
        return name_of(op), layers_of(self.program, op), moved, SHORT_NAMES[type(op)], number


def name_of(op: Op) -> str:
    """What an op is, in words.

    Example:
        >>> from ratrain_jax.lowering.program import SendActivation
        >>> name_of(SendActivation(0, target=1, microbatch=2))
        'Send activation, stage 0 to 1'
    """
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(op).__name__).capitalize()
    target = getattr(op, "target", None)
    return words if target is None else f"{words}, stage {op.stage} to {target}"


def layers_of(program: Program, op: Op) -> str:
    """The names of the layers that an op works for; of many the first and the last."""
    layer = getattr(op, "layer", None)
    run = getattr(op, "layers", None) or (() if layer is None else (layer, layer + 1))
    names = [program.layers[n].name for n in range(*run)] if run else []
    if len(names) > _MOST_NAMES:
        return f"{names[0]} … {names[-1]} ({len(names)})"
    return ", ".join(names)


def columns(bars: Iterable[Bar], entries: Entries) -> list[Columns]:
    """Bars by kind, in the order of `ratrain_jax.views.chart.KINDS`.

    Args:
        bars: the bars.
        entries: where ops are entered.
    """
    kinds: dict[str, list[Bar]] = {kind: [] for kind in KINDS.values()}
    for bar in bars:
        kinds[bar.kind].append(bar)
    return [_columns(kind, some, entries) for kind, some in kinds.items() if some]


def _columns(kind: str, bars: Sequence[Bar], entries: Entries) -> Columns:
    data = {
        "x": np.array([bar.start for bar in bars], np.float64),
        "width": np.array([bar.end - bar.start for bar in bars], np.float64),
        "y": np.array([upper_edge(bar) for bar in bars], np.float32),
        "exposed": np.array([exposed_of(bar) for bar in bars], np.float64),
        "op": np.array([entries.number(bar.op) for bar in bars], np.int32),
        "microbatch": np.array([_microbatch(bar.op) for bar in bars], np.int32),
    }
    return Columns(kind, height_of(bars[0]), data)


def _microbatch(op: Op) -> int:
    number = getattr(op, "microbatch", None)
    return -1 if number is None else number


def exposed_of(bar: Bar) -> float:
    """Seconds of a bar that are exposed; what rounding leaves of a hidden one is nothing."""
    return bar.exposed if bar.exposed > 1e-6 * (bar.end - bar.start) else 0.0


def upper_edge(bar: Bar) -> float:
    """Where a bar is on the axis of stages, on which 0 is at the top."""
    if bar.lane == Lane.COMPUTE:
        return bar.stage + COMPUTE_AT - COMPUTE_HEIGHT / 2
    received = isinstance(bar.op, Send) and bar.op.stage != bar.stage
    return bar.stage + LINK_AT - (0 if received else LINK_HEIGHT / 2)


def height_of(bar: Bar) -> float:
    """How high it is."""
    if bar.lane == Lane.COMPUTE:
        return COMPUTE_HEIGHT
    return LINK_HEIGHT / 2 if isinstance(bar.op, Send) else LINK_HEIGHT


def exposed_spans(chart: Chart) -> dict[str, dict[str, np.ndarray]]:
    """The exposed parts of a chart's bars.

    Args:
        chart: a chart.

    Returns:
        By kind `x` start and `width` seconds, `y` the upper edge of each part.
    """
    busy = [_busy(chart, stage) for stage in range(len(chart.program.order))]
    kinds: dict[str, list[tuple[float, float, float]]] = {}
    for bar in chart.bars:
        if bar.lane == Lane.LINK and exposed_of(bar) > 0:
            edge = upper_edge(bar)
            some = kinds.setdefault(bar.kind, [])
            some += [(start, end - start, edge) for start, end in _idle(bar, *busy[bar.stage])]
    return {
        kind: dict(zip(("x", "width", "y"), np.array(some, np.float64).T, strict=True))
        for kind, some in kinds.items()
    }


def _busy(chart: Chart, stage: int) -> tuple[list[float], list[float]]:
    """Starts and ends of the times in which a stage computes, ascending, none touching the next."""
    starts: list[float] = []
    ends: list[float] = []
    for bar in chart.bars:
        if bar.stage == stage and bar.lane == Lane.COMPUTE and bar.end > bar.start:
            if ends and bar.start <= ends[-1]:
                ends[-1] = max(ends[-1], bar.end)
            else:
                starts.append(bar.start)
                ends.append(bar.end)
    return starts, ends


def _idle(bar: Bar, starts: list[float], ends: list[float]) -> Iterable[tuple[float, float]]:
    """The parts of a bar that lie in no busy time."""
    at = bar.start
    n = bisect.bisect_right(ends, at)
    while n < len(starts) and starts[n] < bar.end:
        if starts[n] > at:
            yield at, starts[n]
        at = max(at, ends[n])
        n += 1
    if at < bar.end:
        yield at, bar.end
