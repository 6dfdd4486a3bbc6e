"""What every picture of a step over time shows, in one form for simulated and measured steps.

Terms.
    A **bar** is an op in one lane of one stage; an op between stages is a bar in each of them. Its **kind** decides its
    colour. A bar of the link lane is **exposed** for as long as the compute lane of its stage is idle meanwhile, else hidden.
    An **arrow** leads from the gather of a view, or from its validation where that is deferred, to the forward that waited
    for it, which may be the next step's first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from ratrain_jax.lowering.collector import collector_paused
from ratrain_jax.lowering.mnemonics import SHORT_NAMES
from ratrain_jax.lowering.program import (
    Backward,
    Borrow,
    Forward,
    GlobalReduce,
    GradSync,
    Lane,
    Metrics,
    Op,
    PrefetchView,
    Program,
    Prologue,
    Recover,
    SendActivation,
    SendGradient,
    UpdateShard,
    Validate,
    ZeroGradient,
)
from ratrain_jax.views.memory_curve import MemoryCurve, memory_curves
from ratrain_jax.words import counted

if TYPE_CHECKING:
    from ratrain_jax.runtime.measured import DeviceTime, MeasuredRun
    from ratrain_jax.simulation.timeline import Timeline

KINDS: Final[dict[type[Op], str]] = {
    Forward: "forward",
    Recover: "recovery",
    Backward: "backward",
    SendActivation: "transfer",
    SendGradient: "transfer",
    Borrow: "prefetch",
    GradSync: "sync",
    GlobalReduce: "sync",
    UpdateShard: "update",
    Validate: "update",
    PrefetchView: "prefetch",
    Prologue: "other",
    ZeroGradient: "other",
    Metrics: "other",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """An op in one lane of one stage.

    Attributes:
        op: the op.
        stage: whose lane.
        lane: which.
        kind: one of the values of `KINDS`.
        label: what it is, in few letters: `F3`, `GS7`.
        start: seconds from the start of the step.
        end: likewise.
        exposed: seconds of a bar of the link lane in which the stage computes nothing; 0 for others.
        next_step: whether it belongs to the step after this one.
        devices: when it ran on each device of the stage, in rank order; nothing for a simulated op.
    """

    op: Op
    stage: int
    lane: Lane
    kind: str
    label: str
    start: float
    end: float
    exposed: float = 0.0
    next_step: bool = False
    devices: tuple[DeviceTime, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Chart:
    """A step over time.

    Attributes:
        title: what ran, and how long a step takes.
        program: what ran.
        bars: by start.
        arrows: places in `bars` of a gather and of the forward that it unblocks.
        memory: bytes of each stage over time.
        seconds: until the last bar of this step ends.
        measured: whether it ran, rather than being simulated.
        subtitle: where its time goes, in one line; empty if not known.
    """

    title: str
    program: Program
    bars: tuple[Bar, ...]
    arrows: tuple[tuple[int, int], ...]
    memory: tuple[MemoryCurve, ...]
    seconds: float
    measured: bool
    subtitle: str = ""

    def __repr__(self) -> str:
        return f"<Chart of {len(self.bars)} bars: {self.title}>"


def timeline_chart(timeline: Timeline) -> Chart:
    """The chart of a simulated step, with each stage's first forward of the next."""
    program, made, run = timeline.program, timeline.made, timeline.run
    ran = [(e.op, e.start, e.end) for e in timeline.events]
    again = [
        (made.ops[n], float(run.start[n]), float(run.end[n])) for _, n in timeline.made.entered
    ]
    limits = program.settings.memory_limit or [timeline.machine.usable_bytes] * len(program.order)
    title = f"{_settings(program)} on {timeline.machine.name}: {timeline.step_seconds:.4g} s"
    chart = _chart(title, program, ran, again, limits, measured=False)
    return dataclasses.replace(chart, subtitle=str(timeline.breakdown))


def measured_chart(run: MeasuredRun) -> Chart:
    """The chart of a step that ran."""
    program = run.program
    ran = [(m.op, m.start, m.end) for m in run.ops]
    limits = program.settings.memory_limit or [None] * len(program.order)
    title = f"{_settings(program)}, measured: {run.seconds:.4g} s"
    chart = _chart(title, program, ran, [], limits, measured=True)
    times = {m.op: m.devices for m in run.ops}
    bars = (
        dataclasses.replace(bar, devices=tuple(t for t in times[bar.op] if t.stage == bar.stage))
        for bar in chart.bars
    )
    return dataclasses.replace(chart, bars=tuple(bars))


def label_of(op: Op) -> str:
    """An op in few letters: its short name with its microbatch, else with its layer.

    Example:
        >>> label_of(Forward(0, layers=(0, 3), microbatch=2)), label_of(GradSync(0, layer=7))
        ('F2', 'GS7')
    """
    number = getattr(op, "microbatch", None)
    if number is None:
        number = getattr(op, "layer", None)
    return SHORT_NAMES[type(op)] + ("" if number is None else str(number))


def _settings(program: Program) -> str:
    s = program.settings
    return f"{s.schedule}, {counted(s.stages, 'stage')} × {s.data_parallel}, {counted(s.microbatches, 'microbatch')}"


@collector_paused()
def _chart(
    title: str,
    program: Program,
    ran: Sequence[tuple[Op, float, float]],
    again: Sequence[tuple[Op, float, float]],
    limits: Iterable[int | None],
    measured: bool,
) -> Chart:
    bars = [
        Bar(op, stage, op.lane, KINDS[type(op)], label_of(op), start, end, next_step=late)
        for late, some in ((False, ran), (True, again))
        for op, start, end in some
        for stage in op.stages
    ]
    bars.sort(key=lambda bar: (bar.start, bar.end))
    shown = tuple(_exposed(bars, len(program.order)))
    memory = memory_curves(program, {op: (start, end) for op, start, end in ran}, limits)
    seconds = max((end for _, _, end in ran), default=0.0)
    return Chart(title, program, shown, _arrows(program, shown), memory, seconds, measured)


def _exposed(bars: Sequence[Bar], stages: int) -> Iterable[Bar]:
    """The bars with `exposed` known."""
    busy: list[tuple[list[float], list[float]]] = [([0.0], [0.0]) for _ in range(stages)]
    for bar in bars:
        if bar.lane == Lane.COMPUTE:
            times, sums = busy[bar.stage]
            start = max(bar.start, times[-1])
            if bar.end > start:
                times += [start, bar.end]
                sums += [sums[-1], sums[-1] + bar.end - start]
    done = [(np.array(times), np.array(sums)) for times, sums in busy]  # once, not for each bar
    for bar in bars:
        if bar.lane == Lane.LINK:
            start, end = np.interp([bar.start, bar.end], *done[bar.stage])
            alone = max(0.0, bar.end - bar.start - float(end - start))
            yield dataclasses.replace(bar, exposed=alone)
        else:
            yield bar


def _arrows(program: Program, bars: Sequence[Bar]) -> tuple[tuple[int, int], ...]:
    """From each gather of a view to the first forward that reads it, in this step or the next."""
    handed = {
        (v.layer, v.stage): v.id
        for v in map(program.values.__getitem__, program.outputs)
        if v.kind == "view"
    }
    entering = {
        v.id: handed.get((v.layer, v.stage))
        for v in map(program.values.__getitem__, program.inputs)
        if v.kind == "view"
    }
    first: dict[int, int] = {}
    for place, bar in enumerate(bars):
        if isinstance(bar.op, Forward):
            for value in bar.op.reads:
                read = entering.get(value) if bar.next_step else value
                if read is not None:
                    first.setdefault(read, place)
    return tuple(
        (place, first[value])
        for place, bar in enumerate(bars)
        if isinstance(bar.op, (PrefetchView, Validate)) and not bar.next_step
        for value in bar.op.writes
        if value in first
    )
