"""Measures when each op of a running step started and ended.

Launching is asynchronous, so an op's end on a device is when what it made there is ready, seen by a thread a stage and lane. Its
start is the latest of: its launch, the end of what made its inputs, and the end of the op before it in its lane. To see an
array that the next op will use up, a tiny program reads one element of it first; so a measured step is a little slower
than others. A device that is through while the thread waits for another of its stage is seen when that one is: a thread
a device would slow small steps down to half their speed.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from ratrain_jax import compat
from ratrain_jax.lowering.program import Op, Program
from ratrain_jax.runtime.instructions import LINK, THREAD_OF, Bundle, Inbox, Instruction
from ratrain_jax.runtime.processes import meet
from ratrain_jax.runtime.records import Place, Record, joined_records
from ratrain_jax.runtime.turns import in_turn
from ratrain_jax.stacked_leaf import StackedLeaf

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ratrain_jax.simulation.timeline import Timeline
    from ratrain_jax.views.chart import Chart


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceTime:
    """When an op ran on one device.

    Attributes:
        stage: whose device.
        rank: which one of the stage's.
        device: its id.
        start: seconds from the start of the step.
        end: likewise.
    """

    stage: int
    rank: int
    device: int
    start: float
    end: float


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredOp:
    """One op as it ran.

    Attributes:
        op: the op.
        start: seconds from the start of the step.
        end: seconds from the start of the step, on the last device.
        devices: when it ran on each device of each of its stages. A transfer is seen where it arrives, and has the same
            times where it comes from.
    """

    op: Op
    start: float
    end: float
    devices: tuple[DeviceTime, ...] = dataclasses.field(default=(), repr=False)


@dataclasses.dataclass(frozen=True)
class MeasuredRun:
    """One step as it ran.

    Attributes:
        program: what ran.
        ops: every op but frees, by start.
        seconds: until the last op ended.
    """

    program: Program
    ops: tuple[MeasuredOp, ...]
    seconds: float

    def of(self, kind: type[Op]) -> list[MeasuredOp]:
        """The ops of one kind."""
        return [measured for measured in self.ops if type(measured.op) is kind]

    @functools.cached_property
    def chart(self) -> Chart:
        """What pictures of the step are drawn from: bars by lane, arrows, bytes over time."""
        from ratrain_jax.views.chart import measured_chart

        return measured_chart(self)

    def plot(self, *others: Timeline | MeasuredRun) -> Figure:
        """Draws the step, lane by lane, with the bytes of each stage; others below on the same time axis."""
        from ratrain_jax.views.picture import draw

        return draw([self.chart, *(other.chart for other in others)])

    def to_perfetto(self, path: str | os.PathLike[str], *others: Timeline | MeasuredRun) -> None:
        """Writes the step as a trace that https://ui.perfetto.dev opens; others beside it on the same time axis."""
        from ratrain_jax.views.perfetto import write_trace

        write_trace(path, [self.chart, *(other.chart for other in others)])

    def __repr__(self) -> str:
        return f"<MeasuredRun {len(self.ops)} ops in {self.seconds * 1e3:.1f} ms>"


class Watcher:
    """Collects the ends of ops while a step runs. Use `watch` as the runtime's hook, then `finish`.

    It is a context, behind which no thread of it is left. A Ctrl-C may come at any moment; so its lock must be held around
    it: once that is released, the threads end by themselves.

    Args:
        program: what runs.
        devices: ids of each stage's devices, in rank order.

    Attributes:
        held: the lock.
    """

    def __init__(self, program: Program, devices: Sequence[Sequence[int]]) -> None:
        self._program = program
        self._devices = devices
        self._start = time.perf_counter()
        self.held = threading.Lock()
        self._queues: dict[tuple[int, int], Inbox] = {}
        self._threads: list[threading.Thread] = []
        self._records: list[Record] = []
        self._errors: list[Exception] = []

    def __enter__(self) -> Watcher:
        # All threads start before the step: a Ctrl-C in the midst of a start is none in the midst of a step.
        for lane in {_lane(op) for ops in self._program.order for op in ops}:
            self._open(lane)
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def begin(self) -> None:
        """The step starts now, in all processes at once."""
        in_turn(meet)
        self._start = time.perf_counter()

    def watch(self, instruction: Instruction, made: Sequence[Bundle]) -> None:
        """Notes a launch."""
        launched = time.perf_counter() - self._start
        lane = _lane(instruction.op)
        marks = self._marks(instruction, made)
        record = Record(instruction.op, lane[0], launched, {})
        self._records.append(record)
        self._queues[lane].put(record, marks)

    def _marks(self, instruction: Instruction, made: Sequence[Bundle]) -> dict[Place, Any]:
        """For each device that made something, an array that is ready once it has."""
        found: dict[Place, Any] = {}
        seen: set[int] = set()
        for value, bundle in zip(instruction.writes, made, strict=True):
            stage = self._program.values[value].stage
            array = next((a for a in bundle if not compat.is_extended(a.dtype)), None)
            if stage in seen or array is None:
                continue
            seen.add(stage)
            ranks = {device: rank for rank, device in enumerate(self._devices[stage])}
            for shard in array.addressable_shards:
                found[stage, ranks[shard.device.id]] = _mark(shard.data)
        return found

    def _open(self, lane: tuple[int, int]) -> None:
        self._queues[lane] = items = Inbox(giver=self.held)
        thread = threading.Thread(target=self._wait, args=(items,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _wait(self, items: Inbox) -> None:
        try:
            self._take(items)
        except Exception as error:  # of an op that failed
            self._errors.append(error)

    def _take(self, items: Inbox) -> None:
        while (item := items.next()) is not None:
            record, marks = item
            while marks:
                # Only those that are ready count now, lest one device is taken to end no sooner than another.
                for place in [place for place, mark in marks.items() if mark.is_ready()]:
                    record.ends[place] = time.perf_counter() - self._start
                    del marks[place]
                if marks:
                    next(iter(marks.values())).block_until_ready()

    def finish(self) -> MeasuredRun:
        """Waits for the step to end and gives what was seen.

        Raises:
            Exception: that of an op that failed on its device.
        """
        self._close()
        for error in self._errors:
            raise error
        clock = _Clock(self._devices)
        records = joined_records(self._program, self._records)
        ops = sorted(map(clock.measured, records), key=lambda measured: measured.start)
        return MeasuredRun(self._program, tuple(ops), max((m.end for m in ops), default=0.0))

    def _close(self) -> None:
        for items in self._queues.values():
            items.stop()
        for thread in self._threads:
            if thread.is_alive():  # a Ctrl-C may have kept it from its start
                thread.join()


def _lane(op: Op) -> tuple[int, int]:
    """The thread that launches an op, and the stage that it is seen on."""
    return THREAD_OF.get(type(op), LINK), op.stages[-1]


class _Clock:
    """Gives ops their starts, one after the other, in the order of their launches."""

    def __init__(self, devices: Sequence[Sequence[int]]) -> None:
        self._devices = devices
        self._born: dict[int, dict[int, float]] = {}  # by value and rank
        self._before: dict[tuple[int, Place], float] = {}

    def measured(self, record: Record) -> MeasuredOp:
        """When an op ran, as a whole and on each device."""
        op, last = record.op, record.op.stages[-1]
        ranks = range(len(self._devices[last]))
        # What makes nothing that can be seen is taken to end at once.
        seen = record.ends or {(last, r): self._ready(record, (last, r)) for r in ranks}
        began = {place: min(self._ready(record, place), end) for place, end in seen.items()}
        started = min(max(self._ready(record, (last, r)) for r in ranks), max(seen.values()))
        for place, end in seen.items():
            self._before[record.thread, place] = end
        times = []
        for stage in op.stages:
            for rank, device in enumerate(self._devices[stage]):
                place = (stage, rank) if (stage, rank) in seen else _counterpart(rank, seen)
                times.append(DeviceTime(stage, rank, device, began[place], seen[place]))
        for value in op.writes:
            self._born[value] = {rank: end for (_, rank), end in seen.items()}
        return MeasuredOp(op, started, max(seen.values()), tuple(times))

    def _ready(self, record: Record, place: Place) -> float:
        """The earliest moment at which an op can start on a device."""
        inputs = (self._born[v] for v in (*record.op.reads, *record.op.waits) if v in self._born)
        born = (ends.get(place[1], max(ends.values())) for ends in inputs)
        return max(record.launched, self._before.get((record.thread, place), 0.0), *born, 0.0)


def _counterpart(rank: int, seen: Mapping[Place, float]) -> Place:
    """The device on which an op was seen that works for a rank of another stage."""
    return next((place for place in seen if place[1] == rank), next(iter(seen)))


@jax.jit
def _mark(array: Any) -> Any:
    return array.reshape(-1)[:1] + 0


def marks(leaves: Sequence[Any]) -> list[Any]:
    """For each device that holds a leaf, an array that exists once its first leaf does; the leaves may be used up."""
    first: dict[Any, Any] = {}
    for leaf in leaves:
        for array in leaf.slices if isinstance(leaf, StackedLeaf) else (leaf,):
            for shard in array.addressable_shards:
                if shard.data.size:
                    first.setdefault(shard.device, shard.data)
    return list(map(_mark, first.values()))
