"""What handing out stacked leaves as one array each costs after every step."""

from __future__ import annotations

import dataclasses
import math

from ratrain_jax.lowering.code import StepCode
from ratrain_jax.lowering.stacks import flat_parts


@dataclasses.dataclass(frozen=True, slots=True)
class StackedState:
    """The stacked leaves of a step's state.

    Attributes:
        leaves: how many leaves of the user's state are stacked.
        bytes: what they hold.
        moved: the part of it that comes from other stages than stage 0, where the leaves are put together.
        device_bytes: what each device of stage 0 holds of them, beside its own layers' arrays.
    """

    leaves: int
    bytes: int
    moved: int
    device_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.leaves} stacked leaves of the state, {self.bytes / 1e6:,.3f} MB, are put together on stage 0 after every"
            f" step,\n{self.moved / 1e6:,.3f} MB of it from other stages, and take {self.device_bytes / 1e6:,.3f} MB a device"
            ' there.\nstate_layout="layers" hands them out as they lie.'
        )


def stacked_state(code: StepCode) -> StackedState | None:
    """The stacked leaves of a step's state; None if there are none."""
    parts = [] if code.stacks is None else [p for p in code.stacks.states if isinstance(p, tuple)]
    if not parts:
        return None
    stage = code.leaf_stages
    held = moved = on_device = 0
    for leaf in (leaf for part in parts for leaf in flat_parts(part)):
        aval = code.regions.step.invars[leaf].aval
        size = math.prod(aval.shape) * aval.dtype.itemsize
        held += size
        moved += size if stage[leaf] else 0
        on_device += size // (1 if code.shard_axes[leaf] is None else code.data_parallel)
    return StackedState(len(parts), held, moved, on_device)
