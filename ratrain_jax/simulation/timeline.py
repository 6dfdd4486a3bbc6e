"""A simulated step: when every op runs, and what can be read off it."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from ratrain_jax.kernels import Machine
from ratrain_jax.lowering.mnemonics import op_label
from ratrain_jax.lowering.program import Lane, Op, Program, Recover
from ratrain_jax.simulation.breakdown import Breakdown, body_ends, break_down
from ratrain_jax.simulation.causes import Causes
from ratrain_jax.simulation.program_tasks import ProgramTasks
from ratrain_jax.simulation.reliability import Expected, Failures, expected_step
from ratrain_jax.simulation.steady import Carried
from ratrain_jax.simulation.tasks import PORTS, Port, Run
from ratrain_jax.words import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ratrain_jax.planning.plan import Plan
    from ratrain_jax.runtime.measured import MeasuredRun
    from ratrain_jax.views.chart import Chart
    from ratrain_jax.views.comparison import Comparison


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One op of a simulated step.

    Attributes:
        op: the op.
        start: when it starts, in seconds from the start of the step.
        end: when it ends.
    """

    op: Op
    start: float
    end: float

    def __str__(self) -> str:
        return f"{self.start:.6f} {self.end:.6f} stage {self.op.stage} {op_label(self.op)}"


@dataclasses.dataclass(frozen=True, slots=True)
class PortUse:
    """How a port of a stage is used between the step's start and the end of its last op.

    Attributes:
        stage: whose.
        port: `compute`, `send`, `receive`, `memory` or `host`.
        busy: seconds in which an op holds it.
        idle: the rest.
    """

    stage: int
    port: str
    busy: float
    idle: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A simulated step.

    Attributes:
        program: what was simulated.
        machine: on what.
        made: its tasks.
        run: when they ran.
        carried: what they waited for of the step before; None where that is nothing.
    """

    program: Program
    machine: Machine
    made: ProgramTasks
    run: Run
    carried: Carried | None = None

    @functools.cached_property
    def events(self) -> tuple[Event, ...]:
        """Every op, with its start and end."""
        start, end = self.run.start.tolist(), self.run.end.tolist()
        return tuple(
            Event(op, start[n], end[n]) for n, op in enumerate(self.made.ops[: self.made.steps])
        )

    @property
    def step_seconds(self) -> float:
        """Seconds from step to step, where steps follow each other: the longest of `periods`."""
        return self.breakdown.step

    @functools.cached_property
    def periods(self) -> tuple[float, ...]:
        """For each stage, seconds from its first Forward to its first of the next step.

        Later steps take at least the least and at most the greatest of them.
        """
        return tuple(self.made.periods(self.run).tolist())

    @functools.cached_property
    def breakdown(self) -> Breakdown:
        """The terms of a step; they add up to `step_seconds`."""
        return break_down(self.made, self.run, self._causes)

    def expected(self, failures: Failures | None = None, *, stragglers: float = 0.0) -> Expected:
        """What a step takes in the long run, with what no single undisturbed step shows.

        All devices of the program are counted as ranks that wait for each other once a step.

        Args:
            failures: how devices fail, and what checkpoints and restarts cost; left out unless given.
            stragglers: standard deviation of what a rank computes in a step over its mean, normally distributed.

        Raises:
            SimulationError: stragglers is out of range.
        """
        ranks = self.program.settings.stages * self.program.settings.data_parallel
        return expected_step(self.breakdown, ranks, failures, stragglers)

    @property
    def bubble_rate(self) -> float:
        """Share of the step in which the pacing stage waits for other stages or for communication."""
        return (self.breakdown.bubble + self.breakdown.exposed) / self.step_seconds

    @functools.cached_property
    def critical_path(self) -> tuple[Event, ...]:
        """The ops of which each starts when the one before ends, up to the next step of the pacing stage, in order.

        To shorten the step one of them must get shorter. The first may be of the step before, where later forwards wait for
        what is still under way when this one begins; of an op that began earlier there is only the rest.
        """
        first, again = self.made.entered[self.breakdown.stage]
        begun = float(self.run.start[first])
        path = []
        for n, back in self._causes.chain(again):
            start = self._causes.start((n, back))
            if n < self.made.steps:
                event = self.events[n]
                end = start + event.end - event.start
                if back and end <= begun:
                    break
                path.append(Event(event.op, max(start, begun), end) if back else event)
            if n == first or (back and start <= begun):
                break
        return tuple(reversed(path))

    @functools.cached_property
    def ports(self) -> tuple[PortUse, ...]:
        """Busy and idle seconds of every port that is used."""
        held = [n for n in range(self.made.steps) for _ in self.made.tasks.ports[n]]
        ports = [port for ports in self.made.tasks.ports[: self.made.steps] for port in ports]
        took = (self.run.end - self.run.start)[held] if held else np.zeros(0)
        busy = np.bincount(ports, weights=took) if held else np.zeros(0)
        last = float(self.run.end[: self.made.steps].max(initial=0.0))
        return tuple(
            PortUse(
                port // PORTS,
                Port(port % PORTS).name.lower(),
                float(busy[port]),
                last - float(busy[port]),
            )
            for port in sorted(set(ports))
        )

    @functools.cached_property
    def recovery(self) -> tuple[float, float]:
        """Seconds of recovery of all stages on the critical path, and off it."""
        on = sum(e.end - e.start for e in self.critical_path if isinstance(e.op, Recover))
        every = sum(e.end - e.start for e in self.events if isinstance(e.op, Recover))
        return on, every - on

    @functools.cached_property
    def communication(self) -> tuple[tuple[float, float], ...]:
        """For each stage, seconds in which its link is busy while its compute lane waits, and while it computes.

        That a lane computes for the step before or the next counts as well.
        """
        found, period = [], self.step_seconds
        for stage in range(len(self.program.order)):
            own = self._spans(stage, Lane.COMPUTE)
            compute = _union(np.sort(np.concatenate([own - period, own, own + period]), axis=0))
            link = _union(self._spans(stage, Lane.LINK))
            both = _overlap(link, compute)
            total = float((link[:, 1] - link[:, 0]).sum())
            found.append((total - both, both))
        return tuple(found)

    @functools.cached_property
    def tails(self) -> tuple[float, ...]:
        """For each stage, seconds from the end of its last Backward to its first Forward of the next step."""
        ends = body_ends(self.made, self.run)
        return tuple(
            float(self.run.start[again]) - end
            for (_, again), end in zip(self.made.entered, ends, strict=True)
        )

    @functools.cached_property
    def chart(self) -> Chart:
        """What pictures of the step are drawn from: bars by lane, arrows, bytes over time."""
        from ratrain_jax.views.chart import timeline_chart

        return timeline_chart(self)

    def plot(self, *others: Timeline | MeasuredRun) -> Figure:
        """Draws the step, lane by lane, with the bytes of each stage.

        Args:
            others: more steps, simulated or measured, drawn below on the same time axis.

        Returns:
            The figure; `figure.savefig("step.png")` writes it.
        """
        from ratrain_jax.views.picture import draw

        return draw([self.chart, *(other.chart for other in others)])

    def to_perfetto(self, path: str | os.PathLike[str], *others: Timeline | MeasuredRun) -> None:
        """Writes the step as a trace that https://ui.perfetto.dev opens.

        Args:
            path: where to; the usual ending is `.json`.
            others: more steps, simulated or measured, beside it on the same time axis.
        """
        from ratrain_jax.views.perfetto import write_trace

        write_trace(path, [self.chart, *(other.chart for other in others)])

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        plan: Plan | None = None,
        measured: MeasuredRun | None = None,
    ) -> None:
        """Writes all there is to see of the step as one HTML file, which opens without a network.

        Args:
            path: where to; the usual ending is `.html`.
            plan: the plan it is from, for its assumptions and what was not taken.
            measured: the step as it ran, to be compared.
        """
        from ratrain_jax.views.report import write_report

        write_report(path, self, plan=plan, measured=measured)

    def compare(self, measured: MeasuredRun) -> Comparison:
        """This step beside the same step as it ran, by kind of op; `print` shows a table.

        Args:
            measured: the step as it ran, from `compiled.trace`.

        Raises:
            SimulationError: another program ran; the message says in what they differ.
        """
        from ratrain_jax.views.comparison import compare

        return compare(self, measured)

    @functools.cached_property
    def _causes(self) -> Causes:
        # Where an op waited for a transfer and for its own lane alike, the lane would have kept it anyway.
        links = [op.lane == Lane.LINK for op in self.made.ops]
        return Causes(self.made.tasks, self.run, lambda n: links[n], self.carried)

    def _spans(self, stage: int, lane: Lane) -> np.ndarray:
        """Starts and ends of the ops of a stage's lane, by start."""
        return np.array(sorted(self._spans_of_lanes.get((stage, lane), ())), float).reshape(-1, 2)

    @functools.cached_property
    def _spans_of_lanes(self) -> dict[tuple[int, Lane], list[tuple[float, float]]]:
        found: dict[tuple[int, Lane], list[tuple[float, float]]] = {}
        for event in self.events:
            if event.end > event.start:
                for stage in event.op.stages:
                    found.setdefault((stage, event.op.lane), []).append((event.start, event.end))
        return found

    def __str__(self) -> str:
        return f"{self.breakdown}\npaced by stage {self.breakdown.stage} of {len(self.program.order)}, on {self.machine.name}"

    def _repr_html_(self) -> str:
        from ratrain_jax.views.notebook import timeline_html

        return timeline_html(self)

    def __repr__(self) -> str:
        s: Any = self.program.settings
        return (
            f"<Timeline {self.step_seconds:.4g} s: {counted(s.stages, 'stage')} × {s.data_parallel},"
            f" {counted(s.microbatches, 'microbatch')}, {s.schedule}, on {self.machine.name}>"
        )


def _union(spans: np.ndarray) -> np.ndarray:
    """Spans that overlap or touch made one."""
    if not len(spans):
        return spans
    ends = np.maximum.accumulate(spans[:, 1])
    fresh = np.append(True, spans[1:, 0] > ends[:-1])
    return np.stack([spans[fresh, 0], ends[np.append(fresh[1:], True)]], 1)


def _overlap(some: np.ndarray, others: np.ndarray) -> float:
    """Seconds that lie in both of two lists of spans without overlaps of their own."""
    total, i, j = 0.0, 0, 0
    while i < len(some) and j < len(others):
        total += max(0.0, min(some[i, 1], others[j, 1]) - max(some[i, 0], others[j, 0]))
        if some[i, 1] < others[j, 1]:
            i += 1
        else:
            j += 1
    return total
