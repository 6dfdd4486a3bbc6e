"""Runs a step one op at a time, each waited for: to count what is alive after it, or to time it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from ratrain_jax.lowering.program import Free, Op, Program
from ratrain_jax.runtime.groups import Group
from ratrain_jax.runtime.instructions import Bundle, Execute, Plan
from ratrain_jax.runtime.merge import launch_order
from ratrain_jax.runtime.processes import meet, waiting


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """What one op took.

    Attributes:
        launch: seconds until the call that launched it returned.
        total: seconds until all that it makes was there.
        idle: seconds for which each of its devices here kept no core busy: it waited for other processes.
    """

    launch: float = 0.0
    total: float = 0.0
    idle: float = 0.0

    @property
    def hidden(self) -> float:
        """The launch, where the op ran on behind it; else the op, or what little there is of it, ran in the launching thread."""
        return self.launch if self.launch < self.total / 2 else 0.0

    @property
    def behind(self) -> float:
        """Seconds of the op without a launch that it ran on behind."""
        return self.total - self.hidden

    @property
    def share(self) -> float:
        """Of a core, what each device used while the op ran, without a launch that it ran on behind."""
        return max(1 - self.idle / self.behind, 0.0) if self.behind > 0 else 1.0


def time_call(
    execute: Callable[..., Any], *args: Any, waits: Sequence[Any] = ()
) -> tuple[Any, Taken]:
    """Runs what an op runs, and waits for it.

    Args:
        execute: what it runs.
        *args: on what.
        waits: its devices here, if it waits for other processes meanwhile.

    Returns:
        What it made, and what it took.
    """
    start, busy = time.perf_counter(), time.process_time()
    made = execute(*args)
    launched = time.perf_counter()
    jax.block_until_ready(made)
    total, busy = time.perf_counter() - start, time.process_time() - busy
    idle = max(total - busy / len(waits), 0.0) if waits else 0.0
    return made, Taken(launched - start, total, idle)


class Serial:
    """One step, to be run op by op.

    Args:
        program: a verified program.
        groups: the devices of each stage.
        plan: its instructions.
        table: the program's inputs; afterwards its outputs.

    Attributes:
        program: the program.
        groups: the devices of each stage.
        table: the values that are alive.
    """

    def __init__(
        self, program: Program, groups: Sequence[Group], plan: Plan, table: dict[int, Bundle]
    ) -> None:
        self.program, self.groups, self.table = program, groups, table
        self._here = {id(each.op): each for thread in plan.threads for each in thread}

    def run(self) -> Iterator[tuple[Op, Taken | None]]:
        """Runs the ops in launch order, and gives each once it has ended, with what it took.

        Ops of other processes alone are given too, with None. Before one of several processes, these meet. Such a run goes on
        in one thread (see `ratrain_jax.runtime.turns`).
        """
        jax.block_until_ready(self.table)
        for op in launch_order(self.program):
            if isinstance(op, Free):
                self.table.pop(op.reads[0], None)
                yield op, Taken()
                continue
            devices = [d for stage in op.stages for d in self.groups[stage].devices]
            if len({device.process_index for device in devices}) > 1:
                meet()
            yield op, self._run(op, waiting(devices)) if self.has(op) else None

    def has(self, op: Op) -> bool:
        """Whether this process takes part in an op."""
        return id(op) in self._here

    def makes(self, op: Op) -> bool:
        """Whether this process gets what an op makes."""
        return self.has(op) and bool(self._here[id(op)].writes)

    def _run(self, op: Op, waits: Sequence[Any]) -> Taken:
        made, taken = time_call(*self.call(op), waits=waits)
        self.table.update(zip(self._here[id(op)].writes, made, strict=True))
        for value in op.donates:
            self.table.pop(value, None)
        return taken

    def call(self, op: Op) -> tuple[Execute, list[Bundle]]:
        """What an op runs, and on what; its values must be alive."""
        found = self._here[id(op)]
        return found.execute, [self.table[value] for value in found.reads]
