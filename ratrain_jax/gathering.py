"""`gather`: a trained state on one device, for evaluation or export."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ratrain_jax.runtime.placing import copied_to, whole
from ratrain_jax.runtime.processes import is_global
from ratrain_jax.runtime.turns import in_turn
from ratrain_jax.stacked_leaf import StackedLeaf, is_stacked_leaf


def gather(state: Any, device: Any = None) -> Any:
    """Brings every leaf of a state whole to one device.

    A step hands out leaves on the devices of their stages, and leaves of different stages do not mix in one `jax.jit`.
    What this gives does. The state stays usable: training goes on from it, not from the copy.

    Args:
        state: any tree; leaves that are no JAX arrays stay as they are, stacked leaves become arrays.
        device: where to; the first of `jax.devices()` unless given.

    Returns:
        The tree with copies of its arrays.

    Raises:
        RuntimeError: as JAX does for an array that was used up.

    Example:
        >>> import jax.numpy as jnp, ratrain_jax as rt
        >>> state = rt.gather({"w": jnp.ones(3), "name": "small"})
        >>> float(state["w"].sum()), state["name"]
        (3.0, 'small')
    """
    target = jax.local_devices()[0] if device is None else device

    def move(leaf: Any) -> Any:
        if isinstance(leaf, StackedLeaf):
            return jnp.stack([move(part) for part in leaf.slices])
        if not isinstance(leaf, jax.Array):
            return leaf
        if is_global(leaf):
            return jax.device_put(whole(leaf), target)
        moved = jax.device_put(leaf, target)
        # The same buffer would be used up with the state.
        shared = leaf.sharding.device_set & moved.sharding.device_set
        return copied_to(moved, moved.sharding) if shared else moved

    return in_turn(lambda: jax.tree.map(move, state, is_leaf=is_stacked_leaf))
