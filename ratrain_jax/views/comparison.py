"""A simulated step beside the same step as it ran: seconds by kind of op, and the ops that differ most."""

from __future__ import annotations

import dataclasses
import heapq
from typing import TYPE_CHECKING, Final

from rich.table import Table

from ratrain_jax.errors import SimulationError
from ratrain_jax.lowering.mnemonics import op_label
from ratrain_jax.lowering.program import Op, Program
from ratrain_jax.tables import render
from ratrain_jax.views.chart import KINDS

if TYPE_CHECKING:
    from ratrain_jax.runtime.measured import MeasuredRun
    from ratrain_jax.simulation.timeline import Timeline

_LARGEST: Final = 5


@dataclasses.dataclass(frozen=True, slots=True)
class KindDifference:
    """All ops of one kind together.

    Attributes:
        kind: one of the values of `ratrain_jax.views.chart.KINDS`.
        count: how many ops.
        predicted: seconds that the simulation gives them, added up.
        measured: seconds that they took, added up.
    """

    kind: str
    count: int
    predicted: float
    measured: float

    @property
    def difference(self) -> float:
        """Seconds that they took beyond the prediction; negative if less."""
        return self.measured - self.predicted


@dataclasses.dataclass(frozen=True, slots=True)
class OpDifference:
    """One op.

    Attributes:
        op: the op.
        predicted: seconds that the simulation gives it.
        measured: seconds that it took.
    """

    op: Op
    predicted: float
    measured: float

    @property
    def difference(self) -> float:
        """Seconds that it took beyond the prediction; negative if less."""
        return self.measured - self.predicted


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """A simulated step beside a measured one; its `str` is a table.

    Ops run side by side, so the seconds of the kinds add up to more than the step's.

    Attributes:
        rows: one a kind that the program has, in the order of `ratrain_jax.views.chart.KINDS`.
        predicted_step: seconds until the last op ends, simulated.
        measured_step: seconds until the last op ended.
        largest: the ops whose seconds differ most, the largest difference first.
    """

    rows: tuple[KindDifference, ...]
    predicted_step: float
    measured_step: float
    largest: tuple[OpDifference, ...] = ()

    @property
    def difference(self) -> float:
        """Seconds that the step took beyond the prediction; negative if less."""
        return self.measured_step - self.predicted_step

    def __str__(self) -> str:
        parts = [_kinds(self)]
        if self.largest:
            parts.append(_ops(self.largest))
        return "\n\n".join(parts)

    def __repr__(self) -> str:
        return (
            f"<Comparison: step {self.predicted_step:.4g} s predicted,"
            f" {self.measured_step:.4g} s measured>"
        )


def compare(timeline: Timeline, run: MeasuredRun) -> Comparison:
    """Compares a simulated step with the same step as it ran.

    Args:
        timeline: the simulated step.
        run: the measured one.

    Raises:
        SimulationError: they are of different programs; the message says in what.
    """
    if timeline.program != run.program:
        raise SimulationError(
            f"the measured step is of another program: {_unlike(timeline.program, run.program)}."
            " Simulate the one that ran, `compiled.lowered`."
        )
    took = {m.op: m.end - m.start for m in run.ops}
    ops = [OpDifference(e.op, e.end - e.start, took[e.op]) for e in timeline.events]
    by_kind: dict[str, list[OpDifference]] = {kind: [] for kind in KINDS.values()}
    for op in ops:
        by_kind[KINDS[type(op.op)]].append(op)
    rows = tuple(
        KindDifference(kind, len(of), sum(o.predicted for o in of), sum(o.measured for o in of))
        for kind, of in by_kind.items()
        if of
    )
    last = max((event.end for event in timeline.events), default=0.0)
    largest = heapq.nlargest(_LARGEST, ops, key=lambda op: abs(op.difference))
    return Comparison(rows, last, run.seconds, tuple(largest))


def _unlike(simulated: Program, ran: Program) -> str:
    """In what two programs differ."""
    for field in dataclasses.fields(ran.settings):
        mine, other = (getattr(p.settings, field.name) for p in (simulated, ran))
        if mine != other:
            return f"it ran with {field.name}={other!r}, and {mine!r} was simulated"
    if simulated.fingerprint != ran.fingerprint:
        return "its code differs"
    return "its ops or their order differ"


def _kinds(comparison: Comparison) -> str:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "ops", "predicted ms", "measured ms", "difference ms", "%"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in comparison.rows:
        table.add_row(row.kind, str(row.count), *_seconds(row.predicted, row.measured))
    step = _seconds(comparison.predicted_step, comparison.measured_step)
    table.add_row("step", "", *step)
    return render(table)


def _ops(largest: tuple[OpDifference, ...]) -> str:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("largest differences", no_wrap=True, overflow="ellipsis")
    for name in ("predicted ms", "measured ms", "difference ms", "%"):
        table.add_column(name, justify="right", no_wrap=True)
    for op in largest:
        label = f"stage {op.op.stage} {op_label(op.op)}"
        table.add_row(label, *_seconds(op.predicted, op.measured))
    return render(table)


def _seconds(predicted: float, measured: float) -> tuple[str, str, str, str]:
    """Both in milliseconds, and what the second has beyond the first, also in per cent."""
    beyond = measured - predicted
    share = f"{beyond / predicted:+.0%}" if predicted else ""
    return f"{1e3 * predicted:.4g}", f"{1e3 * measured:.4g}", f"{1e3 * beyond:+.4g}", share
