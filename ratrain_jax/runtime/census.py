"""Counts the bytes that are really alive on each device while a step runs: the check of `memory_analysis`.

The step runs one op at a time, each waited for. After an op, every JAX array that the process holds is asked for its
buffers, and each distinct buffer on the op's devices counts once, unless it was there before and is no input of the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from ratrain_jax import compat
from ratrain_jax.lowering.memory import memory_analysis
from ratrain_jax.runtime.groups import Group
from ratrain_jax.runtime.serial import Serial

Buffers = set[tuple[int, int, int]]
"""Device, address and bytes of each."""


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class StageCensus:
    """Bytes alive on the first device of a stage, after each op of the stage's list.

    Attributes:
        predicted: by `memory_analysis`.
        counted: in buffers.
    """

    predicted: tuple[int, ...]
    counted: tuple[int, ...]

    @property
    def largest_difference(self) -> float:
        """The largest difference of the two after any op, as a share of the predicted peak."""
        pairs = zip(self.predicted, self.counted, strict=True)
        return max(abs(a - b) for a, b in pairs) / max(self.predicted)

    def __repr__(self) -> str:
        return f"<StageCensus after {len(self.counted)} ops: at most {self.largest_difference:.2%} apart>"


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class MemoryCensus:
    """What was alive while a step ran. Scratch inside one op's executable is no array and is not counted.

    Attributes:
        stages: one series a stage.
    """

    stages: tuple[StageCensus, ...]

    @property
    def largest_difference(self) -> float:
        """The largest difference on any stage, as a share of its predicted peak."""
        return max(stage.largest_difference for stage in self.stages)

    def __str__(self) -> str:
        lines = [f"{'most bytes a device':<22}{'predicted':>14}{'counted':>14}{'apart':>9}"]
        for number, stage in enumerate(self.stages):
            apart = f"{100 * stage.largest_difference:.2f} %"
            most = max(stage.predicted), max(stage.counted)
            lines.append(f"{f'stage {number}':<22}{most[0]:>14,}{most[1]:>14,}{apart:>9}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        apart = self.largest_difference
        return f"<MemoryCensus of {len(self.stages)} stages: at most {apart:.2%} apart>"


def take_census(step: Serial) -> MemoryCensus:
    """Runs a step op by op and counts.

    Args:
        step: a step that has not begun.
    """
    groups = step.groups
    jax.block_until_ready(step.table)
    others = _buffers(groups, jax.live_arrays()) - _buffers(groups, jax.tree.leaves(step.table))
    counted: list[list[int]] = [[] for _ in groups]
    for op, _ in step.run():
        alive = _buffers(groups, jax.live_arrays()) - others
        for stage in op.stages:
            device = groups[stage].devices[0].id
            counted[stage].append(sum(size for where, _, size in alive if where == device))
    series = memory_analysis(step.program).stages
    return MemoryCensus(
        tuple(
            StageCensus(stage.series.total_after, tuple(found))
            for stage, found in zip(series, counted, strict=True)
        )
    )


def _buffers(groups: Sequence[Group], arrays: Iterable[Any]) -> Buffers:
    """The arrays' buffers on the first device of each group."""
    devices = {group.devices[0] for group in groups}
    found: Buffers = set()
    for array in arrays:
        if array.is_deleted() or not array.nbytes or not array.sharding.device_set & devices:
            continue
        for shard in _physical(array).addressable_shards:
            if shard.device in devices:
                found.add((shard.device.id, shard.data.unsafe_buffer_pointer(), shard.data.nbytes))
    return found


def _physical(array: Any) -> Any:
    """The numbers behind an array of typed keys."""
    return jax.random.key_data(array) if compat.is_extended(array.dtype) else array
