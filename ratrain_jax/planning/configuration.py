"""A point of the planner's space."""

from __future__ import annotations

import dataclasses
from typing import Final

from ratrain_jax.words import counted

RUNNABLE: Final = ("ratrain", "1f1b", "gpipe")
"""Schedules that the runtime runs."""

RECOVERIES: Final = ("none", "auto", "forward", "backward")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """How a step is laid out, before its layers are split over stages.

    Attributes:
        stages: P, pipeline stages.
        data_parallel: D, devices of a stage that share its work.
        tensor: tensor-parallel ranks that share the work of each of them; more than one are only simulated.
        rows: examples of a microbatch.
        microbatches: m, for each of the D ranks.
        schedule: `gpipe`, `1f1b` or `ratrain`; `interleaved` and `zb-h1` are only simulated.
        zero: 1, 2, or 3, which is only simulated.
        recovery: `none`, `auto`, `forward` or `backward`.
        chunks: runs of layers a stage, of an interleaved schedule.
        window: layers whose state tasks may be in flight on a stage.
        layerwise_state: whether each layer is synchronised behind its last gradient; as the schedule says unless given.
        update_prefetch: whether updates and gathers follow each synchronisation; likewise.
    """

    stages: int
    data_parallel: int
    rows: int
    microbatches: int
    schedule: str = "ratrain"
    zero: int = 1
    recovery: str = "auto"
    chunks: int = 1
    window: int = 8
    layerwise_state: bool | None = None
    update_prefetch: bool | None = None
    tensor: int = 1

    @property
    def devices(self) -> int:
        """All devices."""
        return self.stages * self.group

    @property
    def group(self) -> int:
        """Devices of a stage."""
        return self.data_parallel * self.tensor

    @property
    def runs(self) -> bool:
        """Whether the runtime runs it; else it is only simulated."""
        return self.zero < 3 and self.tensor == 1 and self.schedule in RUNNABLE

    @property
    def layerwise(self) -> bool:
        """Whether each layer is synchronised behind its last gradient."""
        given = self.layerwise_state
        return self.schedule not in ("gpipe", "1f1b") if given is None else given

    @property
    def prefetches(self) -> bool:
        """Whether each layer is updated and gathered behind its synchronisation."""
        given = self.update_prefetch
        return self.schedule not in ("gpipe", "1f1b") if given is None else given

    @property
    def fills(self) -> bool:
        """Whether a stage waits for a whole forward and backward of each stage before it."""
        return self.schedule in RUNNABLE

    def in_flight(self, stage: int) -> int:
        """The most microbatches whose activations a stage holds at once; of an interleaved schedule, a chunk on average.

        Args:
            stage: its number; of an interleaved schedule the chunk's, in the order of the model.
        """
        if self.schedule == "gpipe":
            return self.microbatches
        if self.schedule == "interleaved":
            warm_up = 2 * (self.stages - stage % self.stages - 1) + (self.chunks - 1) * self.stages
            return -(-min(self.microbatches * self.chunks, warm_up + 1) // self.chunks)
        return min(self.microbatches, self.stages - stage)

    def __str__(self) -> str:
        tensor = f" × {self.tensor} tensor" if self.tensor > 1 else ""
        return (
            f"{counted(self.stages, 'stage')} × {self.data_parallel}{tensor},"
            f" {counted(self.microbatches, 'microbatch')} of {self.rows},"
            f" {self.schedule}, zero={self.zero}, recovery={self.recovery}"
        )
