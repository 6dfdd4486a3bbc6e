"""A layer's update on shards, and what of a step's state and updates cannot be on shards."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ratrain_jax.lowering.code import StepCode
from ratrain_jax.lowering.shards import PARTIAL, ShardProgram, on_shards

AXIS = "data"
"""The name of the axis over the devices of a group."""


def update_on_shards(code: StepCode, layer: int, phase: int) -> ShardProgram:
    """A layer's update program over shards.

    Args:
        code: the step's code.
        layer: the layer.
        phase: which of its phases.
    """
    update = code.update.layers[layer]
    closed = update.phases[phase]
    axes = code.shard_axes
    gradients = [code.param_axes[p] for p in update.trained]
    parameters = [axes[leaf] for leaf in update.parameters]
    optimizer = [axes[leaf] for leaf in update.optimizer]
    layouts = [*gradients, *parameters, *optimizer]
    layouts += [None] * (len(closed.in_avals) - len(layouts))
    out: list[Any] = []
    if phase == update.phase:
        outvars = code.regions.step.outvars
        extra = [code.axis(outvars[o].aval.shape) for o in update.outputs]
        out = [*parameters, *optimizer, *extra]
    out += [PARTIAL] * len(update.partials[phase])
    return on_shards(closed, layouts, out, code.data_parallel, AXIS)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Unsharded:
    """What every device of a group holds or computes whole, although its layer is on shards.

    Attributes:
        devices: D.
        leaves: leaves of the state without an axis that D divides, with their bytes.
        equations: layer, primitive and bytes of what its update runs on whole arrays: these are gathered first.
    """

    devices: int
    leaves: tuple[tuple[str, int], ...]
    equations: tuple[tuple[str, str, int], ...]

    def __str__(self) -> str:
        lines = []
        if self.leaves:
            lines.append(f"On every device of a stage, having no axis that {self.devices} divides:")
            lines += _largest([(count, name) for name, count in self.leaves])
        if self.equations:
            layers: dict[str, tuple[int, dict[str, None]]] = {}
            for layer, name, count in self.equations:
                known, names = layers.get(layer, (0, {}))
                layers[layer] = (known + count, {**names, name: None})
            lines.append("Gathered in every update, for what does not run on shards:")
            lines += _largest(
                [(n, f"{at}: {', '.join(names)}") for at, (n, names) in layers.items()]
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Unsharded: {len(self.leaves)} leaves, {len(self.equations)} equations>"


SHOWN = 6


def _largest(items: list[tuple[int, str]]) -> list[str]:
    """The largest, a line each, and the rest in one."""
    items = sorted(items, key=lambda item: -item[0])
    lines = [f"{count:>14,} B  {name}" for count, name in items[:SHOWN]]
    if items[SHOWN:]:
        rest = sum(count for count, _ in items[SHOWN:])
        lines.append(f"{rest:>14,} B  in {len(items) - SHOWN} more")
    return [line if len(line) <= 80 else f"{line[:77]}..." for line in lines]


def unsharded(code: StepCode) -> Unsharded | None:
    """What of a step is not on shards; None if all is, or a stage has one device."""
    if code.data_parallel == 1:
        return None
    invars = code.regions.step.invars
    leaves, equations = [], []
    for n, update in enumerate(code.update.layers):
        for leaf in (*update.parameters, *update.optimizer):
            aval = invars[leaf].aval
            size = math.prod(aval.shape) * aval.dtype.itemsize
            if code.shard_axes[leaf] is None and size and leaf not in code.fixed:
                leaves.append((code.names[leaf], size))
        for phase in range(len(update.phases)):
            name = code.layered.layers[n].name
            whole = update_on_shards(code, n, phase).whole
            equations += [(name, item.primitive, item.bytes) for item in whole]
    if not leaves and not equations:
        return None
    return Unsharded(code.data_parallel, tuple(leaves), tuple(equations))
