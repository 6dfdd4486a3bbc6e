"""The planner's space: which configurations are looked at.

Declared so that a search can be checked against looking at all of it: every depth, group and size of microbatch that
uses all devices, or leaves no more idle than is allowed, and divides the batch, with every schedule, ZeRO stage and
recovery asked for.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from ratrain_jax.errors import OptionError
from ratrain_jax.planning.configuration import RECOVERIES, RUNNABLE, Configuration

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Sizes of microbatches that are tried, in examples."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What a search goes through.

    Attributes:
        devices: how many devices.
        global_batch: examples of a step.
        layers: the most stages that there can be.
        rows: sizes of microbatches.
        schedules: names.
        zeros: ZeRO stages.
        recoveries: names.
        chunks: runs of layers a stage, for `interleaved`.
        stages: depths; every one unless given.
        tensors: numbers of tensor-parallel ranks.
        windows: how many layers' state tasks may be in flight on a stage.
        idle: the share of the devices that may stay idle.
    """

    devices: int
    global_batch: int
    layers: int
    rows: tuple[int, ...] = ROWS
    schedules: tuple[str, ...] = RUNNABLE
    zeros: tuple[int, ...] = (1, 2)
    recoveries: tuple[str, ...] = RECOVERIES
    chunks: tuple[int, ...] = (2, 3, 4)
    stages: tuple[int, ...] | None = None
    tensors: tuple[int, ...] = (1,)
    windows: tuple[int, ...] = (8,)
    idle: float = 0.0

    def __post_init__(self) -> None:
        if self.devices < 1 or self.global_batch < 1:
            raise OptionError(
                f"a plan needs at least one device and one example, got {self.devices} and {self.global_batch}."
            )
        if not 0 <= self.idle < 1:
            raise OptionError(
                f"idle is {self.idle}; give the share of the devices that may stay idle, from 0 to less than 1."
            )

    def configurations(self) -> Iterator[Configuration]:
        """Every configuration."""
        for stages in self.stages or range(1, min(self.layers, self.devices) + 1):
            for tensor in self.tensors:
                for group in self._groups(stages * tensor):
                    yield from self._of(stages, group, tensor)

    def _groups(self, times: int) -> Iterator[int]:
        """Sizes of data-parallel groups that divide the batch; of each there are `times`."""
        used = math.ceil((1 - self.idle) * self.devices)
        for group in range(self.devices // times, max(1, math.ceil(used / times)) - 1, -1):
            if self.global_batch % group == 0:
                yield group

    def _of(self, stages: int, group: int, tensor: int) -> Iterator[Configuration]:
        share = self.global_batch // group
        for rows in self.rows:
            if share % rows:
                continue
            zeros = self.zeros if group > 1 else self.zeros[:1]
            choices = itertools.product(self.schedules, zeros, self.recoveries, self.windows)
            for schedule, zero, recovery, window in choices:
                for chunks in self._chunks(schedule, stages, share // rows):
                    yield Configuration(
                        stages=stages,
                        data_parallel=group,
                        rows=rows,
                        microbatches=share // rows,
                        schedule=schedule,
                        zero=zero,
                        recovery=recovery,
                        chunks=chunks,
                        window=window,
                        tensor=tensor,
                    )

    def _chunks(self, schedule: str, stages: int, microbatches: int) -> tuple[int, ...]:
        if schedule != "interleaved":
            return (1,)
        if stages == 1 or microbatches % stages:
            return ()
        return tuple(c for c in self.chunks if c * stages <= self.layers)
