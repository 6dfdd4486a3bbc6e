"""Measures when each op of a running step started and ended.

Launching is asynchronous, so an op's end is when what it made is ready, seen by a thread a stage and lane. Its start is the
latest of: its launch, the end of what made its inputs, and the end of the op before it in its lane. To see an array that the
next op will use up, a tiny program reads one element of it first; so a measured step is a little slower than others.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from ratrain_jax import compat
from ratrain_jax.lowering.program import Op, Program
from ratrain_jax.runtime.instructions import LINK, THREAD_OF, Bundle, Instruction
from ratrain_jax.stacked_leaf import StackedLeaf

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ratrain_jax.simulation.timeline import Timeline
    from ratrain_jax.views.chart import Chart


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredOp:
    """One op as it ran.

    Attributes:
        op: the op.
        start: seconds from the start of the step.
        end: seconds from the start of the step.
    """

    op: Op
    start: float
    end: float


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

    Args:
        program: what runs.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._start = time.perf_counter()
        self._queues: dict[tuple[int, int], queue.SimpleQueue[Any]] = {}
        self._threads: list[threading.Thread] = []
        self._ends: dict[int, float] = {}
        self._records: list[tuple[tuple[int, int], Op, int, float]] = []
        self._lock = threading.Lock()

    def watch(self, instruction: Instruction, made: Sequence[Bundle]) -> None:
        """Notes a launch."""
        launched = time.perf_counter() - self._start
        op = instruction.op
        lane = (THREAD_OF.get(type(op), LINK), op.stages[-1])
        marks = [_mark(shard.data) for shard in _shards(made)]
        with self._lock:
            number = len(self._records)
            self._records.append((lane, op, number, launched))
            if lane not in self._queues:
                self._open(lane)
        self._queues[lane].put((number, marks))

    def _open(self, lane: tuple[int, int]) -> None:
        self._queues[lane] = queue.SimpleQueue()
        thread = threading.Thread(target=self._wait, args=(self._queues[lane],), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _wait(self, items: queue.SimpleQueue[Any]) -> None:
        while (item := items.get()) is not None:
            number, marks = item
            jax.block_until_ready(marks)
            self._ends[number] = time.perf_counter() - self._start

    def finish(self) -> MeasuredRun:
        """Waits for the step to end and gives what was seen."""
        for items in self._queues.values():
            items.put(None)
        for thread in self._threads:
            thread.join()
        born: dict[int, float] = {}
        before: dict[tuple[int, int], float] = {}
        ops = []
        for lane, op, number, launched in self._records:
            end = self._ends[number]
            ready = max((born.get(v, 0.0) for v in (*op.reads, *op.waits)), default=0.0)
            start = min(max(launched, ready, before.get(lane, 0.0)), end)
            before[lane] = end
            born.update((value, end) for value in op.writes)
            ops.append(MeasuredOp(op, start, end))
        ops.sort(key=lambda measured: measured.start)
        return MeasuredRun(self._program, tuple(ops), max((m.end for m in ops), default=0.0))


def _shards(made: Sequence[Bundle]) -> Sequence[Any]:
    """The shards of one array of what an op made."""
    for bundle in made:
        for array in bundle:
            if not compat.is_extended(array.dtype):
                return array.addressable_shards
    return ()


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
