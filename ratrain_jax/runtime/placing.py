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
from ratrain_jax.runtime.parts import data_of, parts_of
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
    return [_private(array, to) for array, to in zip(arrays, shardings, strict=True)]


def _private(leaf: Any, sharding: Any) -> Any:
    if not several():
        return copied_to(leaf, sharding)
    made = placed(leaf, sharding)
    if made is not leaf and not _shares(made, leaf):
        return made
    if any(map(is_here, made.sharding.device_set)):
        return make_global(_copy(made))
    return elsewhere(jax.typeof(made), made.sharding)


@jax.jit
def _copy(array: Any) -> Any:
    """A copy of a global array, which `device_put` does not take in every case."""
    return jax.numpy.copy(array)


def copied_to(array: Any, sharding: Any) -> Any:
    """A copy of an array, nothing of which is the same buffer; unlike `jax.numpy.copy` it compiles nothing.

    Args:
        array: one of JAX's or numpy's, which may change once this has returned.
        sharding: where the copy lies.
    """
    if isinstance(array, np.ndarray):
        return jax.device_put(array.copy(), sharding)
    devices = [getattr(array, "sharding", sharding).device_set, sharding.device_set]
    if max(map(len, devices)) > 1:
        # Between unlike shardings `device_put` hands on what lies in its place already, whatever it is told of aliases.
        array = jax.device_put(array, sharding)
    return jax.device_put(array, sharding, may_alias=False)


def _shares(placed: Any, original: Any) -> bool:
    """Whether placing an array may have given the same buffers again."""
    return not isinstance(original, jax.Array) or bool(
        placed.sharding.device_set & original.sharding.device_set
    )


def whole(leaf: Any) -> Any:
    """A global array as a host-local one, in every process: numpy's, or for typed keys JAX's own.

    All processes must take part, in the same order of leaves.
    """
    return in_turn(lambda: _whole(leaf))


def _whole(leaf: Any) -> Any:
    is_key = compat.is_extended(leaf.dtype)
    kind = compat.key_data_type(leaf) if is_key else leaf
    found = np.empty(kind.shape, kind.dtype)
    for part in parts_of(leaf.shape, leaf.dtype, leaf.sharding):
        (found[part.index],) = spread([data_of(leaf, part)], part.holder)
    if not is_key:
        return found
    return jax.random.wrap_key_data(
        jax.numpy.asarray(found), impl=compat.key_implementation(leaf.dtype)
    )
