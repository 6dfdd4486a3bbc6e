"""A state's leaves from their devices to the host, and back: each by itself, or in a run of several processes by all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ratrain_jax import compat
from ratrain_jax.checkpoints.between import Wanted, collect, common, give_out, put_common
from ratrain_jax.checkpoints.leaves import describe, host_copy, place
from ratrain_jax.checkpoints.manifest import Leaf
from ratrain_jax.distributed.failures import named
from ratrain_jax.runtime.parts import parts_of
from ratrain_jax.runtime.processes import several
from ratrain_jax.runtime.turns import in_turn
from ratrain_jax.stacked_leaf import StackedLeaf, is_stacked_leaf


def host_copies(state: Any) -> list[np.ndarray]:
    """Copies of a state's leaves on process 0's host, whole; random keys as their data. A collective.

    Args:
        state: any; stacked leaves count as one leaf.

    Returns:
        An array a leaf; nothing in other processes.
    """
    flat = jax.tree.leaves(state)
    brought = _brought(flat) if several() else {}
    if jax.process_index() != 0:
        return []
    copies = (brought.pop(n) if n in brought else host_copy(leaf) for n, leaf in enumerate(flat))
    return [_stacked(leaf, copies) for leaf in jax.tree.leaves(state, is_leaf=is_stacked_leaf)]


def _brought(flat: Sequence[Any]) -> dict[int, np.ndarray]:
    with named():
        return in_turn(lambda: collect(flat, common(flat)))


def _stacked(leaf: Any, copies: Iterator[np.ndarray]) -> np.ndarray:
    """A leaf from the copies of its layers, which come in order."""
    if not isinstance(leaf, StackedLeaf):
        return next(copies)
    return np.stack([_stacked(part, copies) for part in leaf.slices])


def placed(arrays: Sequence[np.ndarray] | None, saved: Sequence[Leaf], like: Any) -> Any:
    """A state that was saved, with its leaves in the order and the places of a like one. A collective.

    Args:
        arrays: what was saved, whole; None in all processes but 0.
        saved: what is said of the arrays.
        like: a state or its types.
    """
    leaves, tree = jax.tree.flatten(like, is_leaf=is_stacked_leaf)
    numbers = {leaf.path: n for n, leaf in enumerate(saved)}
    order = [numbers[leaf.path] for leaf in describe(like)]
    pairs = list(zip(order, leaves, strict=True))
    flat = [(saved[n], part) for n, leaf in pairs for part in jax.tree.leaves(leaf)]
    whole = None
    if arrays is not None:
        whole = [part for n, leaf in pairs for part in _layers(arrays[n], leaf)]
    if several():
        with named():
            made = iter(in_turn(lambda: _given_out(whole, flat)))
    else:
        made = (place(array, *pair) for array, pair in zip(whole or (), flat, strict=True))
    return tree.unflatten([_rebuilt(leaf, made) for leaf in leaves])


def _given_out(whole: Sequence[np.ndarray] | None, flat: Sequence[tuple[Leaf, Any]]) -> list[Any]:
    shared = common([like for _, like in flat])
    wanted = [_wanted(*pair, cut) for pair, cut in zip(flat, shared, strict=True)]
    made = []
    for (leaf, like), cut, parts in zip(flat, shared, give_out(whole, wanted), strict=True):
        if cut:
            made.append(put_common(parts, like, leaf.key))
        else:
            (array,) = parts.values()
            made.append(place(array, leaf, like))
    return jax.block_until_ready(made)


def _wanted(leaf: Leaf, like: Any, is_common: bool) -> Wanted:
    shape, dtype = np.shape(like), compat.dtype_named(leaf.dtype)
    parts = parts_of(shape, dtype, like.sharding) if is_common else None
    if compat.is_extended(dtype):
        data = compat.key_data_type(jax.ShapeDtypeStruct(shape, dtype))
        shape, dtype = data.shape, data.dtype
    return Wanted(shape, dtype, parts)


def _layers(array: np.ndarray, like: Any) -> Iterator[np.ndarray]:
    """The layers of a leaf, as a like one holds them."""
    if not isinstance(like, StackedLeaf):
        yield array
        return
    for n, part in enumerate(like.slices):
        yield from _layers(array[n, ...], part)


def _rebuilt(like: Any, made: Iterator[Any]) -> Any:
    """A leaf from its layers, which come in order."""
    if not isinstance(like, StackedLeaf):
        return next(made)
    return StackedLeaf([_rebuilt(part, made) for part in like.slices])
