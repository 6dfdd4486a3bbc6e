"""Which layers are updated before the global reduction that they depend on, and why others wait."""

from __future__ import annotations

import dataclasses

from ratrain_jax.lowering.code import StepCode
from ratrain_jax.lowering.program import Program
from ratrain_jax.tables import WIDTH, wrapped

SHOWN = 6


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Deferred:
    """What deferred validation comes to for a step.

    Attributes:
        layers: layers that are updated before the last reduction that they depend on, and validated behind it.
        waits: layers that wait for it all the same, each with the reason.
    """

    layers: tuple[str, ...]
    waits: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        if not self.layers and not self.waits:
            return "Validation deferred: no layer waits for a reduction."
        head = f"Validation deferred for {len(self.layers)} of {len(self.layers) + len(self.waits)} layers"
        lines = wrapped(f"{head}: ", self.layers) if self.layers else [f"{head}."]
        if self.waits:
            lines.append("Waiting for the reduction all the same:")
            lines += [f"  {name}: {reason}" for name, reason in self.waits[:SHOWN]]
        if self.waits[SHOWN:]:
            lines.append(f"  and {len(self.waits) - SHOWN} more")
        return "\n".join(
            line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in lines
        )

    def __repr__(self) -> str:
        return f"<Deferred: {len(self.layers)} layers, {len(self.waits)} wait>"


def deferred(code: StepCode, program: Program) -> Deferred | None:
    """What deferred validation comes to; None where it was not asked for, or its schedule has no use for it."""
    if program.settings.validation == "immediate":
        return None
    found = list(zip(program.layers, code.speculations, strict=True))
    return Deferred(
        tuple(layer.name for layer, _ in found if layer.deferred),
        tuple((layer.name, s.reason) for layer, s in found if s is not None and s.reason),
    )
