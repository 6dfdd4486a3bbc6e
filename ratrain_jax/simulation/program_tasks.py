"""A program as tasks: every op but `Free` once, then what the next step does before its first forwards.

Terms.
    The **entry** of the next step is what must run of it before each stage's first Forward can start, that Forward
    included. It reads what this step hands back, so that it shows when the step after this one begins, and with it how
    long a step takes when steps follow each other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

from ratrain_jax.errors import SimulationError
from ratrain_jax.lowering.mnemonics import op_label
from ratrain_jax.lowering.program import (
    Borrow,
    Forward,
    Free,
    GradSync,
    Kind,
    Lane,
    Op,
    PrefetchView,
    Program,
    Send,
    UpdateShard,
)
from ratrain_jax.simulation.steady import RepeatedTasks
from ratrain_jax.simulation.tasks import Port, Tasks, port_numbers


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class ProgramTasks(RepeatedTasks):
    """The tasks of a program.

    Attributes:
        ops: the op of each; those of the entry stand at the end, once more.
    """

    ops: tuple[Op, ...]

    def __repr__(self) -> str:
        return f"<ProgramTasks: {self.steps} of a step, {len(self.ops) - self.steps} of the next>"


def program_tasks(program: Program, seconds: Callable[[Op], float]) -> ProgramTasks:
    """Makes the tasks of a program.

    Args:
        program: a verified program.
        seconds: how long each op takes by itself.

    Raises:
        SimulationError: stages have ops between them in different orders; the message lists the cycle.
    """
    ops = merged_order(program)
    built = _Builder(program, seconds)
    built.add_step(ops)
    built.keep_windows()
    steps, handed = len(built.ops), tuple(built.handed())
    built.add_step(_entry(ops))
    first, again = _first_forwards(built.ops, 0, steps), _first_forwards(built.ops, steps)
    entered = tuple((first[stage], again[stage]) for stage in sorted(first))
    return ProgramTasks(built.tasks, steps, len(built.ops), entered, handed, ops=tuple(built.ops))


def _first_forwards(ops: Sequence[Op], start: int, stop: int | None = None) -> dict[int, int]:
    """For each stage, the first Forward among some ops."""
    found: dict[int, int] = {}
    for n, op in enumerate(ops[start:stop], start):
        if type(op) is Forward:
            found.setdefault(op.stage, n)
    return found


def merged_order(program: Program) -> list[Op]:
    """One order of all ops but `Free` that agrees with the list of every stage.

    Raises:
        SimulationError: there is none, for stages have ops between them in different orders.
    """
    lists = [[op for op in ops if not isinstance(op, Free)] for ops in program.order]
    place = [0] * len(lists)
    merged: list[Op] = []
    waiting = list(range(len(lists)))
    while waiting:
        stage = waiting.pop()
        while place[stage] < len(lists[stage]):
            op = lists[stage][place[stage]]
            shared = op.stages
            if len(shared) > 1:
                if not all(_is_at(lists[s], place[s], op) for s in shared):
                    break
                others = [s for s in shared if s != stage]
                for s in others:
                    place[s] += 1
                waiting.extend(others)
            merged.append(op)
            place[stage] += 1
    stuck = [stage for stage, ops in enumerate(lists) if place[stage] < len(ops)]
    if stuck:
        raise SimulationError(_cycle(lists, place, stuck[0]))
    return merged


def _is_at(ops: Sequence[Op], place: int, op: Op) -> bool:
    """Whether an op stands at a place of a list: mostly it is the very same object in the lists of all its stages."""
    return place < len(ops) and (ops[place] is op or ops[place] == op)


def _cycle(lists: Sequence[Sequence[Op]], place: Sequence[int], stage: int) -> str:
    """Which stages wait for each other, each at which op."""
    path: dict[int, Op] = {}
    while stage not in path:
        op = path[stage] = lists[stage][place[stage]]
        others = [s for s in op.stages if s != stage]
        stage = next(s for s in others if place[s] == len(lists[s]) or lists[s][place[s]] != op)
        if place[stage] == len(lists[stage]):
            return f"stage {stage} never gets to {op_label(op)}, for which others wait."
    stages = list(path)
    cycle = stages[stages.index(stage) :]
    waits = "; ".join(f"stage {s} waits at {op_label(path[s])}" for s in cycle)
    return f"stages wait for each other in a cycle: {waits}."


def _entry(ops: Sequence[Op]) -> list[Op]:
    """The ops of a step that each stage's first Forward waits for, with those Forwards, in order."""
    stages = len(_first_forwards(ops, 0))
    writer: dict[int, int] = {}
    ahead: list[list[int]] = []
    last: dict[int, int] = {}
    wanted: list[int] = []
    entered: set[int] = set()
    for n, op in enumerate(ops):
        held = _ports(type(op), op.stages)
        ahead.append([last[port] for port in held if port in last])
        last.update(dict.fromkeys(held, n))
        writer.update(dict.fromkeys(op.writes, n))
        if type(op) is Forward and op.stage not in entered:
            entered.add(op.stage)
            wanted.append(n)
            if len(entered) == stages:
                break
    found: set[int] = set()
    while wanted:
        n = wanted.pop()
        if n in found:
            continue
        found.add(n)
        wanted += ahead[n]
        wanted += [writer[v] for v in (*ops[n].reads, *ops[n].waits) if v in writer]
    return [ops[n] for n in sorted(found)]


@functools.cache
def _ports(kind: type[Op], stages: tuple[int, ...]) -> tuple[int, ...]:
    """The numbers of the ports that ops keep busy, whose kinds and stages are few."""
    first, last = stages[0], stages[-1]
    if issubclass(kind, Borrow):
        # The shards are sent over, then gathered among the borrower's devices.
        return port_numbers([(first, Port.SEND), (last, Port.SEND), (last, Port.RECEIVE)])
    if issubclass(kind, Send):
        return port_numbers([(first, Port.SEND), (last, Port.RECEIVE)])
    if kind.lane == Lane.LINK:
        return port_numbers((s, port) for s in stages for port in (Port.SEND, Port.RECEIVE))
    return port_numbers([(first, Port.COMPUTE)])


_NOBODY = -1


class _Builder:
    """Adds one op after another.

    Attributes:
        tasks: what was added.
        ops: the op of each task.
        writer: the task of the newest step that writes each value, by its number.
        readers: the tasks of the newest step that read each value that is handed in or donated.
        first: the first task of the newest step.
    """

    def __init__(self, program: Program, seconds: Callable[[Op], float]) -> None:
        self.program, self.seconds = program, seconds
        self.tasks = Tasks()
        self.ops: list[Op] = []
        self.writer = [_NOBODY] * len(program.values)
        self.readers: dict[int, list[int]] = {}
        self.first = 0

    def add_step(self, ops: Sequence[Op]) -> None:
        """Adds a step, or the beginning of one, behind those that are there."""
        writer = [_NOBODY] * len(self.program.values)
        for value, source in self._handed().items():
            writer[value] = source
        readers: dict[int, list[int]] = {value: [] for value in self.program.inputs}
        self.first = len(self.ops)
        # What follows is done for each of hundreds of thousands of ops.
        for number, op in enumerate(ops, self.first):
            for value in op.writes:
                writer[value] = number
            for value in op.donates:
                readers[value] = []
        seconds, add = self.seconds, self.tasks.add_numbered
        for number, op in enumerate(ops, self.first):
            after = {writer[value] for value in op.reads}
            if op.waits:
                after.update([writer[value] for value in op.waits])
            for value in op.donates:
                # Its buffer is used anew, so whoever reads it must be through.
                after.update(readers[value])
            after.discard(_NOBODY)
            add(seconds(op), _ports(type(op), op.stages), tuple(after))
            for value in op.reads:
                if value in readers:
                    readers[value].append(number)
        self.writer, self.readers = writer, readers
        self.ops.extend(ops)

    def handed(self) -> Iterator[tuple[int, int]]:
        """Of the newest step, the tasks that write what the next one begins with, each with those that read it first."""
        for value, source in self._handed().items():
            # Of tasks that hold the same ports, others start behind the first.
            readers = reversed(self.readers[value])
            firsts = {self.tasks.ports[reader]: reader for reader in readers}
            yield from ((source, reader) for reader in firsts.values())

    def _handed(self) -> dict[int, int]:
        """The inputs that the newest step hands to the next, with the tasks that write them."""
        values = self.program.values
        handed = {values[v].role: self.writer[v] for v in self.program.outputs}
        found = {v: handed.get(values[v].role, _NOBODY) for v in self.program.inputs}
        return {v: source for v, source in found.items() if source != _NOBODY}

    def keep_windows(self) -> None:
        """In the newest step, a chain of state ops opens only when the window has room: some before it must have closed."""
        settings = self.program.settings
        if not settings.update_prefetch:
            return
        for tasks in self._state_tasks():
            openers, closers = self._chains(tasks)
            held = [self._held(n) for n in openers]
            for k, opener in enumerate(openers):
                needed = _closed_before(
                    held[: k + 1], settings.window_layers, settings.window_bytes
                )
                ready = [c for c in closers if c < opener]
                if 0 < needed <= len(ready):
                    self.tasks.behind[opener] = (ready[needed - 1],)

    def _state_tasks(self) -> Iterable[list[int]]:
        """The tasks of state ops of the newest step, stage by stage."""
        found: dict[int, list[int]] = {}
        for n, op in enumerate(self.ops[self.first :], self.first):
            if isinstance(op, (GradSync, UpdateShard, PrefetchView)):
                found.setdefault(op.stage, []).append(n)
        return found.values()

    def _chains(self, tasks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Of a stage's state ops, the tasks that open chains, and those that close them."""
        last = self.program.settings.microbatches - 1
        final: dict[int, int] = {}
        closers = []
        for n in tasks:
            op = self.ops[n]
            if isinstance(op, GradSync) and self._phase(op.layer) == 0:
                if op.microbatch in (None, last):
                    final[op.layer] = n
            elif isinstance(op, UpdateShard) and op.layer is not None:
                if 0 < op.phase == self._phase(op.layer):
                    final[op.layer] = n
            elif isinstance(op, PrefetchView) and op.layer in final:
                closers.append(n)
        return sorted(final.values()), closers

    def _phase(self, layer: int) -> int:
        return self.program.layers[layer].update_phase

    def _held(self, opener: int) -> int:
        """Bytes of the gradient and the new view of the layer whose chain an op opens."""
        op, values = self.ops[opener], self.program.values
        gradient = op.writes[0] if isinstance(op, GradSync) else op.reads[0]
        view = next(
            (
                values[v].bytes
                for v in self.program.outputs
                if values[v].layer == values[gradient].layer and values[v].kind is Kind.VIEW
            ),
            0,
        )
        return values[gradient].bytes + view


def _closed_before(held: Sequence[int], layers: int, limit: int | None) -> int:
    """How many of the chains before the last of `held` must have closed for it to open."""
    before = len(held) - 1
    for closed in range(before):
        flying = held[closed:before]
        if len(flying) < layers and (limit is None or sum(flying) + held[-1] <= limit):
            return closed
    return before
