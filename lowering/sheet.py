"""What the parts of the builder share: the tasks and values so far, and where to find each value again."""

from __future__ import annotations

import dataclasses

from ratrain_jax.lowering.code import StepCode
from ratrain_jax.lowering.durations import Durations
from ratrain_jax.lowering.order import Task
from ratrain_jax.lowering.program import Op, Reduction, Settings
from ratrain_jax.lowering.values import Values

TRANSFER, COMPUTE, SYNC, UPDATE, GATHER, RESULT = range(6)
"""Ranks of tasks: what others wait for soonest goes first."""


@dataclasses.dataclass
class Sheet:
    """The growing program.

    Attributes:
        code: the step's code.
        settings: the schedule and its switches.
        durations: seconds of ops.
        recovered: whether each layer is recovered.
        early: the reductions that the early update of each layer waits for; None for a layer without one.
        reductions: who gives and takes at each global reduction.
        values: all values so far.
        tasks: all tasks so far.
        inputs: values that exist at the start.
        outputs: values that outlive the step.
        operands: the value of (operand, stage).
        views: the view of (stage, owning layer) that this step's compute ops read.
        accumulators: the newest accumulator, or with ZeRO-2 gradient shard, of (stage, owning layer).
        microbatch_gradients: with ZeRO-2, the newest gradient of (stage, owning layer, microbatch).
        backwards: the tasks that add to (stage, owning layer, microbatch).
        losses: loss and auxiliary values, by (microbatch, variable).
        last_backward: the task of the last backward of (stage, microbatch).
        state: the entry values of each layer: parameters and optimizer.
        replicated: the replicated state of each stage.
    """

    code: StepCode
    settings: Settings
    durations: Durations
    recovered: tuple[bool, ...]
    early: tuple[int | None, ...]
    reductions: tuple[Reduction, ...]
    values: Values = dataclasses.field(init=False)
    tasks: list[Task] = dataclasses.field(default_factory=list)
    inputs: list[int] = dataclasses.field(default_factory=list)
    outputs: list[int] = dataclasses.field(default_factory=list)
    operands: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    views: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    accumulators: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    microbatch_gradients: dict[tuple[int, int, int], int] = dataclasses.field(default_factory=dict)
    backwards: dict[tuple[int, int, int], list[int]] = dataclasses.field(default_factory=dict)
    losses: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    last_backward: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    state: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    replicated: dict[int, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.values = Values(self.code)

    def add(
        self,
        op: Op,
        seconds: float,
        rank: tuple[int, ...],
        after: tuple[int, ...] = (),
        opens: tuple[int, int] | None = None,
        closes: tuple[int, int] | None = None,
        held: int = 0,
    ) -> int:
        """Adds a task and gives its number."""
        self.tasks.append(Task(op, seconds, rank, after, opens, closes, held))
        return len(self.tasks) - 1

    def bytes(self, value: int) -> int:
        """Bytes of a value on each device."""
        return self.values.made[value].bytes
