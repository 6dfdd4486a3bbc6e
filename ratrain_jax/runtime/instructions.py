"""Turns a program into two flat lists of instructions, one a launching thread.

The compute thread launches the compute ops of all stages, the link thread everything else. Each thread keeps its own
table of values. A value that the other thread reads is handed over through a queue, in the order in which it is made; a `Free`
clears it from both tables. Launching is asynchronous: an instruction returns when its work is queued on the devices.

A thread that fails stops the other, and a note on its error names the op that was being launched.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ratrain_jax import compat
from ratrain_jax.lowering.mnemonics import op_label
from ratrain_jax.lowering.program import (
    Backward,
    Forward,
    Free,
    Op,
    Program,
    Prologue,
    Recover,
    ZeroGradient,
)
from ratrain_jax.runtime.merge import launch_order

PATIENCE = 1.0
"""Seconds without a value after which a thread looks whether the other is still there to give one."""

Bundle = tuple[Any, ...]
Execute = Callable[[Sequence[Any]], Sequence[Any]]
"""From bundles to bundles; None stands for one that is on other processes alone."""

COMPUTE, LINK = 0, 1
THREAD_OF: dict[type[Op], int] = dict.fromkeys(
    (Prologue, Forward, Recover, Backward, ZeroGradient), COMPUTE
)


class Stopped(Exception):
    """The other thread failed; its error is the one to raise."""


@dataclasses.dataclass(slots=True)
class Instruction:
    """One launch.

    Attributes:
        op: what it launches.
        execute: takes the bundles of `reads`, gives those of `writes`.
        reads: values it reads, then those it waits for.
        writes: values it makes.
        needs: values it must have from the other thread first.
        hands: values it hands to the other thread.
        clears: values that this thread forgets afterwards.
    """

    op: Op
    execute: Execute
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    needs: tuple[int, ...] = ()
    hands: tuple[int, ...] = ()
    clears: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The instructions of one program.

    Attributes:
        threads: the compute thread's list and the link thread's.
        inputs: the entry values that each thread reads.
        results: for each output, the thread that holds it.
    """

    threads: tuple[list[Instruction], list[Instruction]]
    inputs: tuple[frozenset[int], frozenset[int]]
    results: dict[int, int]


def flatten(
    program: Program, executes: Callable[[Op], Execute], here: Sequence[bool] | None = None
) -> Plan:
    """Makes the instructions of a program.

    Args:
        program: a verified program.
        executes: gives what an op runs.
        here: for each stage whether this process has devices of it; ops of other stages alone, and values on them, are left
            out. All are here unless given.
    """
    absent = _absent(program, here)
    threads: tuple[list[Instruction], list[Instruction]] = ([], [])
    maker: dict[int, Instruction] = {}
    thread_of: dict[int, int] = {}
    holds: tuple[set[int], set[int]] = (set(), set())
    entry: tuple[set[int], set[int]] = (set(), set())
    clears: dict[int, list[int]] = {}
    for op in launch_order(program):
        if isinstance(op, Free):
            for thread in (COMPUTE, LINK):
                if op.reads[0] in holds[thread] and threads[thread]:
                    clears.setdefault(id(threads[thread][-1]), []).append(op.reads[0])
            continue
        if here is not None and not any(here[stage] for stage in op.stages):
            continue
        thread = THREAD_OF.get(type(op), LINK)
        instruction = _instruction(op, executes(op), absent)
        needs = []
        for value in instruction.reads:
            if value in holds[thread]:
                continue
            holds[thread].add(value)
            if value in maker:
                needs.append(value)
                giver = maker[value]
                giver.hands = (*giver.hands, value)
            else:
                entry[thread].add(value)
        instruction.needs = tuple(needs)
        for value in instruction.writes:
            maker[value] = instruction
            thread_of[value] = thread
            holds[thread].add(value)
        instruction.clears = op.donates
        threads[thread].append(instruction)
    for instructions in threads:
        for instruction in instructions:
            extra = clears.get(id(instruction), ())
            instruction.clears = tuple(dict.fromkeys((*instruction.clears, *extra)))
    outputs = [value for value in program.outputs if value not in absent]
    results = {value: thread_of.get(value, LINK) for value in outputs}
    return Plan(threads, (frozenset(entry[0]), frozenset(entry[1])), results)


def _absent(program: Program, here: Sequence[bool] | None) -> frozenset[int]:
    """The values that are on other processes alone."""
    if here is None or all(here):
        return frozenset()
    return frozenset(value.id for value in program.values if not here[value.stage])


def _instruction(op: Op, execute: Execute, absent: frozenset[int]) -> Instruction:
    """An op's launch; where some of its values are absent, it is given None for them and gives None."""
    reads, writes = (*op.reads, *op.waits), op.writes
    if not absent.intersection((*reads, *writes)):
        return Instruction(op, execute, reads, writes)
    given = [value not in absent for value in reads]
    made = [value not in absent for value in writes]

    def partly(bundles: Sequence[Bundle]) -> Sequence[Bundle]:
        present = iter(bundles)
        results = execute([next(present) if there else None for there in given])
        return [bundle for bundle, there in zip(results, made, strict=True) if there]

    return Instruction(
        op,
        partly,
        tuple(value for value, there in zip(reads, given, strict=True) if there),
        tuple(value for value, there in zip(writes, made, strict=True) if there),
    )


class Inbox:
    """What one thread takes from the other.

    Args:
        giver: held by the other thread as long as it may give something; without it, the other always says when it stops.
    """

    __slots__ = ("_giver", "_queue")

    def __init__(self, giver: threading.Lock | None = None) -> None:
        self._queue: queue.SimpleQueue[tuple[Any, Any] | None] = queue.SimpleQueue()
        self._giver = giver

    def put(self, value: Any, bundle: Any) -> None:
        """Hands a value over, by its number."""
        self._queue.put((value, bundle))

    def stop(self) -> None:
        """Tells the reader that nothing more will come."""
        self._queue.put(None)

    def fetch(self, value: int, table: dict[int, Bundle]) -> None:
        """Takes what comes until `value` is in the table."""
        while value not in table:
            item = self.next()
            if item is None:
                raise Stopped
            table[item[0]] = item[1]

    def next(self) -> tuple[Any, Any] | None:
        """What comes next; None if nothing more will."""
        while True:
            # Asked before the wait: what was given before the other left comes first.
            left = self._giver is not None and not self._giver.locked()
            try:
                return self._queue.get(timeout=0 if left else PATIENCE)
            except queue.Empty:
                if left:
                    return None


def run(
    instructions: Sequence[Instruction],
    table: dict[int, Bundle],
    inbox: Inbox,
    other: Inbox,
    watch: Callable[[Instruction, Sequence[Bundle]], None] | None = None,
) -> None:
    """Launches a thread's instructions in order.

    Args:
        instructions: what to launch.
        table: the thread's values; starts with its inputs.
        inbox: what the other thread hands over.
        other: the other thread's inbox.
        watch: called after each launch with what it made.

    Raises:
        Stopped: the other thread failed.
        FloatingPointError: `jax_debug_nans` is on, and an op made a NaN.
    """
    op = None
    try:
        for instruction in instructions:
            op = instruction.op
            for value in instruction.needs:
                if value not in table:
                    inbox.fetch(value, table)
            made = instruction.execute([table[value] for value in instruction.reads])
            table.update(zip(instruction.writes, made, strict=True))
            if watch is not None:
                watch(instruction, made)  # before the other thread may use up what was made
            for value in instruction.hands:
                other.put(value, table[value])
            for value in instruction.clears:
                table.pop(value, None)
    except BaseException as error:
        other.stop()
        if op is None or isinstance(error, Stopped):
            raise
        found = compat.found_by_debug_nans(error)
        if found is not None:
            raise FloatingPointError(f"invalid value ({found}) made by {place_of(op)}.") from None
        error.add_note(f"It came up in the launch of {place_of(op)}.")
        raise


def place_of(op: Op) -> str:
    """An op with its stage, in words.

    Example:
        >>> place_of(Forward(1, layers=(2, 3), microbatch=0))
        'Forward (F L2:3 i0) on stage 1'
    """
    return f"{type(op).__name__} ({op_label(op)}) on stage {op.stages[-1]}"
