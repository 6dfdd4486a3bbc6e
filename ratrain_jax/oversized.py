"""A layer with more work than a stage should have."""

from __future__ import annotations

import dataclasses
import textwrap

from ratrain_jax.lowering.program import Program
from ratrain_jax.tables import WIDTH

MUCH_MORE = 1.25
"""Of an even share of a stage. No split balances a layer beyond it well; what is just above may be a large head."""


@dataclasses.dataclass(frozen=True, slots=True)
class Oversized:
    """A layer that no split can balance.

    Attributes:
        layer: its name.
        share: its part of the work of a step.
        even: the part that each stage would have of an even split.
    """

    layer: str
    share: float
    even: float

    def __str__(self) -> str:
        return textwrap.fill(
            f"Layer `{self.layer}` has {self.share:.0%} of the work, and a stage of an even split {self.even:.0%}, so no split"
            " balances the stages. Begin layers inside it by ratrain_jax.layer(x, name), or write layers that repeat as"
            " a scan over their stacked parameters.",
            WIDTH,
        )


def oversized(program: Program) -> Oversized | None:
    """The dearest layer of a program, if it has much more work than a stage of an even split."""
    total = sum(layer.seconds for layer in program.layers)
    if not total:
        return None
    dearest = max(program.layers, key=lambda layer: layer.seconds)
    even = 1 / program.settings.stages
    share = dearest.seconds / total
    return Oversized(dearest.name, share, even) if share > MUCH_MORE * even else None
