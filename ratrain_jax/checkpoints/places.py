"""Where a compiled step wants the leaves of its state."""

from __future__ import annotations

from typing import Any

import jax

from ratrain_jax.errors import CheckpointError
from ratrain_jax.lowering.stacks import flat_parts
from ratrain_jax.runtime.compiled import Compiled
from ratrain_jax.runtime.groups import Group
from ratrain_jax.runtime.processes import several
from ratrain_jax.runtime.state import leaf_places
from ratrain_jax.stacked_leaf import StackedLeaf


def abstract_state(compiled: Compiled) -> Any:
    """The types of a compiled step's state, with the shardings that its leaves have between steps.

    Raises:
        CheckpointError: the step returns no state: it evaluates.
    """
    lowered = compiled.lowered
    code, signature = lowered.code, lowered.signature
    if not signature.has_state:
        raise CheckpointError(
            f"{compiled!r} returns no state. Give a compiled train step, or a state."
        )
    ranks = code.data_parallel
    groups = [
        Group(compiled.devices[first : first + ranks])
        for first in range(0, len(compiled.devices), ranks)
    ]
    stacked = lowered.options.state_layout == "stacked"
    places = leaf_places(code)
    # Leaves of no layer each process is handed for itself.
    own = set(code.update.replicated) if several() else set()

    def sharded(part: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        if isinstance(part, tuple) and not stacked:
            return StackedLeaf([sharded(inner, shape[1:], dtype) for inner in part])
        first = flat_parts(part)[0]
        if first in own:
            return jax.ShapeDtypeStruct(shape, dtype)
        place = places[first]
        stage, axis = place.stage, place.axis
        if isinstance(part, tuple):  # put together on stage 0, cut as its layers are
            layers = len(shape) - len(code.regions.step.invars[first].aval.shape)
            stage, axis = 0, None if axis is None else axis + layers
        sharding = groups[stage].state_sharding(axis)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    parts = range(signature.states) if code.stacks is None else code.stacks.states
    avals = signature.avals[: signature.states]
    return signature.state.unflatten(
        [sharded(part, aval.shape, aval.dtype) for part, aval in zip(parts, avals, strict=True)]
    )
