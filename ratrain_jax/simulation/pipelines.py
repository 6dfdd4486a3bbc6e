"""Tasks of a pipeline known only by the seconds of its stages: to search configurations, and for schedules that do not run.

The schedules are those that the runtime knows (`gpipe`, `1f1b`, `ratrain`) and two that are only simulated:

* `zb-h1` splits backward into the part for the input (B) and the part for the weights (W). The order is that of 1F1B; stage
  r (from 0) holds back r of its W: after each B it runs the oldest W if more than r are pending, the rest at the end
  (P. Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024).
* `interleaved` gives each stage `chunks` runs of layers, P stages apart, and goes through microbatches in groups of P
  (D. Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, SC 2021, section 2.2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from ratrain_jax.errors import OptionError
from ratrain_jax.lowering.collector import collector_paused
from ratrain_jax.lowering.schedules import compute_order, in_order_of_data
from ratrain_jax.simulation.engine import run
from ratrain_jax.simulation.tasks import Hold, Port, Tasks, port_numbers

SIMULATED = ("interleaved", "zb-h1")
"""Schedules that are simulated but do not run."""

Slot = tuple[str, int, int]
"""What a stage computes (`F`, `R`, `B` or `W`), for which microbatch, of which of its chunks."""


@dataclasses.dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of one microbatch in one stage, or one chunk of it.

    Attributes:
        forward: of its forward.
        backward: of its whole backward.
        weight: what of `backward` the gradients of the weights take; only `zb-h1` does that part later.
        recover: of making its residuals again; 0 where they are kept.
        send: of sending its output on, which is also that of sending the output's gradient back.
    """

    forward: float
    backward: float
    weight: float = 0.0
    recover: float = 0.0
    send: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Pipeline:
    """A step of a pipeline without its state work.

    Attributes:
        schedule: `gpipe`, `1f1b`, `ratrain`, `zb-h1` or `interleaved`.
        stages: seconds of each stage; of an interleaved schedule, of all chunks in the order of the model.
        microbatches: how many.
        chunks: chunks a stage of an interleaved schedule.
        late_recovery: recover only when the gradient has come.
        links: whether a transfer keeps the links of both stages busy; else it is a pure delay.
    """

    schedule: str
    stages: tuple[StageSeconds, ...]
    microbatches: int
    chunks: int = 1
    late_recovery: bool = False
    links: bool = True

    def __post_init__(self) -> None:
        if len(self.stages) % self.chunks or (self.chunks > 1) != (self.schedule == "interleaved"):
            raise OptionError(
                f"{len(self.stages)} chunks do not make stages of {self.chunks} under {self.schedule!r};"
                " give each stage as many, and chunks=1 unless the schedule is 'interleaved'."
            )
        if self.schedule == "interleaved" and self.microbatches % self.devices:
            raise OptionError(
                f"an interleaved schedule needs microbatches in groups of {self.devices}, got"
                f" {self.microbatches}; make it a multiple."
            )

    @property
    def devices(self) -> int:
        """P, the pipeline stages."""
        return len(self.stages) // self.chunks


@collector_paused()
def pipeline_tasks(pipeline: Pipeline) -> tuple[Tasks, dict[tuple[str, int, int], int]]:
    """The tasks of a pipeline.

    Args:
        pipeline: the pipeline.

    Returns:
        The tasks, and the number of each by (`F`, `R`, `B` or `W`, place in the model, microbatch).

    Raises:
        OptionError: no such schedule.

    Example:
        >>> from ratrain_jax.simulation.engine import run
        >>> even = StageSeconds(forward=1.0, backward=2.0)
        >>> run(pipeline_tasks(Pipeline("1f1b", (even,) * 4, 8))[0]).last  # (8 + 4 - 1) · 3
        33.0
    """
    order = [slots(pipeline, device) for device in range(pipeline.devices)]
    built = _Builder(pipeline)
    built.build(order)
    if pipeline.links:
        # A link serves first what is ready first, were there no other transfer.
        built.tasks.rank = run(built.tasks).rank
        for number, holds in built.holds.items():
            built.tasks.ports[number] = port_numbers(holds)
    return built.tasks, built.numbers


def slots(pipeline: Pipeline, device: int) -> list[Slot]:
    """What a stage computes, in order."""
    if pipeline.schedule == "interleaved":
        return list(_interleaved(pipeline, device))
    if pipeline.schedule == "zb-h1":
        return list(_zero_bubble(pipeline, device))
    order = compute_order(pipeline.schedule, pipeline.devices, pipeline.microbatches)[device]
    return [(kind, i, 0) for kind, i in order]


def _zero_bubble(pipeline: Pipeline, device: int) -> Iterator[Slot]:
    pending: list[int] = []
    for kind, i in compute_order("1f1b", pipeline.devices, pipeline.microbatches)[device]:
        yield kind, i, 0
        if kind == "B":
            pending.append(i)
            if len(pending) > device:
                yield "W", pending.pop(0), 0
    yield from (("W", i, 0) for i in pending)


def _interleaved(pipeline: Pipeline, device: int) -> Iterator[Slot]:
    """Warm-up, then one forward and one backward in turn, over virtual microbatches."""
    count, chunks, m = pipeline.devices, pipeline.chunks, pipeline.microbatches
    total = m * chunks
    warm_up = min(total, 2 * (count - device - 1) + (chunks - 1) * count)

    def at(number: int, forward: bool) -> Slot:
        group, place = divmod(number, count * chunks)
        chunk, within = divmod(place, count)
        return (
            "F" if forward else "B",
            group * count + within,
            chunk if forward else chunks - 1 - chunk,
        )

    for number in range(total + warm_up):
        if number < total:
            yield at(number, True)
        if number >= warm_up:
            yield at(number - warm_up, False)


class _Builder:
    """Adds the slots of all stages in an order in which what a slot reads stands before it."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.tasks = Tasks()
        self.numbers: dict[tuple[str, int, int], int] = {}
        self.arrived: dict[tuple[str, int, int], int] = {}
        self.holds: dict[int, list[Hold]] = {}

    def build(self, order: Sequence[Sequence[Slot]]) -> None:
        added = 0
        for device, slot in in_order_of_data(order, self._ready):
            self._add(device, slot)
            added += 1
        if added < sum(map(len, order)):
            raise AssertionError(f"the order of {self.pipeline.schedule!r} waits for itself")

    def _place(self, device: int, chunk: int) -> int:
        return chunk * self.pipeline.devices + device

    def _ready(self, device: int, slot: Slot) -> bool:
        kind, i, chunk = slot
        place = self._place(device, chunk)
        if kind == "F":
            return place == 0 or ("F", place, i) in self.arrived
        last = place == len(self.pipeline.stages) - 1
        return kind == "W" or last or ("B", place, i) in self.arrived

    def _add(self, device: int, slot: Slot) -> None:
        kind, i, chunk = slot
        place = self._place(device, chunk)
        stage = self.pipeline.stages[place]
        compute = [(device, Port.COMPUTE)]
        came = [self.arrived[kind, place, i]] if (kind, place, i) in self.arrived else []
        seconds = {"F": stage.forward, "W": stage.weight, "B": stage.backward}[kind]
        if kind == "B":
            if self.pipeline.schedule == "zb-h1":
                seconds -= stage.weight
            if stage.recover:
                wait = came if self.pipeline.late_recovery else []
                self.numbers["R", place, i] = self.tasks.add(stage.recover, compute, wait)
        number = self.numbers[kind, place, i] = self.tasks.add(seconds, compute, came)
        step = {"F": 1, "B": -1}.get(kind, 0)
        if step and 0 <= place + step < len(self.pipeline.stages):
            self._send(kind, place, place + step, i, number)

    def _send(self, kind: str, source: int, target: int, i: int, number: int) -> None:
        count = self.pipeline.devices
        seconds = self.pipeline.stages[min(source, target)].send
        sent = self.arrived[kind, target, i] = self.tasks.add(seconds, after=[number])
        if source % count != target % count:
            self.holds[sent] = [(source % count, Port.SEND), (target % count, Port.RECEIVE)]
