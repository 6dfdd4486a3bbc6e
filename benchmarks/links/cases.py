"""What is measured: steps of one model, each in variants that run the very same executables."""

from __future__ import annotations

import dataclasses
from typing import Any

LAYERS, WIDTH = 8, 192
"""Of the model."""
WINDOW = 16
"""Layers whose state work may be under way at once: all, so that views are gathered in the order in which they are wanted."""
SHARES = (0.25, 0.5, 1.0)
"""Link seconds of one reduce-scatter and one all-gather of all parameters, as shares of a step's compute seconds.

A step with `zero=2` has a reduce-scatter for each microbatch, so that its link is busy for (m + 1) / 2 as long.
"""
CLIPPED_FROM = 1e3
"""Global norm from which gradients are clipped: not reached, as in most steps of a run that trains well."""
BOUNDARY_SHARES = (0.1, 0.25, 0.5)
"""Seconds of a transfer between stages, as shares of a stage's forward of a microbatch."""

MOST = 2.6
"""Link seconds over compute seconds above which a step is not measured: almost nothing of them can hide."""

BASE, FULL = "1f1b", "ratrain"
RECOVERED, RECOVERED_AHEAD = "1f1b, recovered", "ratrain, recovered"
VARIANTS: dict[str, dict[str, Any]] = {
    BASE: {"schedule": "1f1b"},
    FULL: {},
    "without layer-wise state": {"layerwise_state": False},
    "without update–prefetch": {"update_prefetch": False},
    "deferred": {"validation": "deferred"},
    RECOVERED: {"schedule": "1f1b", "recovery": "backward"},
    RECOVERED_AHEAD: {"recovery": "forward"},
}
"""Options of each variant, beside those of its case."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A step.

    Attributes:
        microbatches: m.
        zero: 1 or 2.
        clip: whether the global norm of the gradients is clipped.
        stages: P.
        ranks: D.
    """

    microbatches: int
    zero: int = 1
    clip: bool = False
    stages: int = 1
    ranks: int = 2

    def options(self, variant: str) -> dict[str, Any]:
        """The options of `train_step`."""
        return {
            "stages": self.stages,
            "data_parallel": self.ranks,
            "microbatches": self.microbatches,
            "zero": self.zero,
            "recovery": "none",
            **VARIANTS[variant],
        }

    @property
    def rows(self) -> int:
        """Of a microbatch on each rank.

        Computation must be long beside what cores do for a transfer, as it is where models are large; what they do for it
        falls on each microbatch with `zero=2`, and on the whole step otherwise.
        """
        whole_step = self.stages == 1 and self.zero == 1
        return max(12 // self.microbatches, 3) if whole_step else 8

    @property
    def steps(self) -> int:
        """How many steps of a block are counted: long ones differ less."""
        return 4 if self.rows * self.microbatches <= 24 else 2 if self.microbatches <= 4 else 1


DATA_PARALLEL = tuple(
    Case(m, zero, clip) for clip in (False, True) for zero in (1, 2) for m in (1, 2, 4, 8)
)
ABLATED = (Case(1, 1), Case(4, 2))
"""Measured without each mechanism in turn."""
PIPELINES = (Case(1, stages=2, ranks=1), Case(2, stages=2, ranks=1), Case(8, stages=2, ranks=1))
QUICK = (Case(1, 1), Case(4, 2))


def variants(case: Case) -> tuple[str, ...]:
    """What is measured of a case."""
    if case.stages > 1:
        return (RECOVERED, RECOVERED_AHEAD, BASE, FULL)
    if case in ABLATED:
        return (BASE, FULL, "without layer-wise state", "without update–prefetch")
    return (BASE, FULL, "deferred") if case.clip else (BASE, FULL)
