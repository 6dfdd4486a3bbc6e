"""Brings the leaves of a state to where they are wanted, in runs of one process and of several.

A host-local leaf is taken to be the same in every process. A global one is left where it is if it lies there already, and
else brought whole to every process first, in which all of them take part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ratrain_jax import compat
from ratrain_jax.runtime.groups import put_global
from ratrain_jax.runtime.processes import (
    elsewhere,
    exchange,
    is_global,
    is_here,
    make_global,
    several,
    spread,
)
from ratrain_jax.runtime.turns import in_turn


def agree_on_globals(leaves: Sequence[Any]) -> None:
    """Makes all processes see the same leaves as global: one that lies in one process looks like its own there.

    Args:
        leaves: the same in every process.
    """
    if not several() or not leaves:
        return
    mine = np.array([is_global(leaf) for leaf in leaves])
    seen = in_turn(lambda: exchange(mine))
    for leaf, anywhere in zip(leaves, seen.T.tolist(), strict=True):
        if any(anywhere):
            make_global(leaf)


def placed(leaf: Any, sharding: Any) -> Any:
    """A leaf where it is wanted; perhaps the very buffers.

    Args:
        leaf: whole, host-local or global.
        sharding: where, over devices of any process.
    """
    if not several():
        return jax.device_put(leaf, sharding)
    if is_global(leaf):
        if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            return leaf
        leaf = whole(leaf)
    here = [is_here(device) for device in sharding.device_set]
    if not any(here):
        return elsewhere(jax.typeof(leaf), sharding)
    made = jax.device_put(leaf, sharding) if all(here) else put_global(leaf, sharding)
    return made if made is leaf else make_global(made)  # the user's own array stays what it is


def private_copy(arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Copies of arrays where they are wanted; never the same buffers."""
    made = [placed(a, s) for a, s in zip(arrays, shardings, strict=True)]
    return [_copied(p) if p is a or _shares(p, a) else p for p, a in zip(made, arrays, strict=True)]


def _shares(placed: Any, original: Any) -> bool:
    """Whether placing an array may have given the same buffers again."""
    return not isinstance(original, jax.Array) or bool(
        placed.sharding.device_set & original.sharding.device_set
    )


def _copied(array: Any) -> Any:
    if any(map(is_here, array.sharding.device_set)):
        return make_global(_copy(array))
    return elsewhere(jax.typeof(array), array.sharding)


@jax.jit
def _copy(array: Any) -> Any:
    return jax.numpy.copy(array)


def whole(leaf: Any) -> Any:
    """A global array as a host-local one, in every process: numpy's, or for typed keys JAX's own.

    All processes must take part, in the same order of leaves.
    """
    return in_turn(lambda: _whole_keys(leaf) if compat.is_extended(leaf.dtype) else _whole(leaf))


def _whole(leaf: Any) -> np.ndarray:
    found = np.empty(leaf.shape, leaf.dtype)
    shape = leaf.sharding.shard_shape(leaf.shape)
    parts = {shard.device: shard.data for shard in leaf.addressable_shards}
    for device, index in _one_holder_each(leaf):
        part = parts.get(device, jax.ShapeDtypeStruct(shape, leaf.dtype))
        (found[index],) = spread([part], device.process_index)
    return found


def _one_holder_each(leaf: Any) -> list[tuple[Any, Any]]:
    """For each distinct part of a global array, the first device that has it, and the part's index."""
    holders: dict[str, tuple[Any, Any]] = {}
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        known = holders.get(repr(index))
        if known is None or device.id < known[0].id:
            holders[repr(index)] = (device, index)
    return [holders[name] for name in sorted(holders)]


def _whole_keys(leaf: Any) -> Any:
    """Keys are never cut: one process gives their data to all."""
    impl = compat.key_implementation(leaf.dtype)
    device = min(leaf.sharding.device_set, key=lambda device: device.id)
    parts = [shard.data for shard in leaf.addressable_shards if shard.device == device]
    given = jax.random.key_data(parts[0]) if parts else compat.key_data_type(leaf)
    (data,) = spread([given], device.process_index)
    return jax.random.wrap_key_data(data, impl=impl)
