"""A state's leaves as whole arrays on the host, and back onto devices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ratrain_jax import compat
from ratrain_jax.checkpoints.manifest import Leaf
from ratrain_jax.errors import CheckpointError
from ratrain_jax.stacked_leaf import StackedLeaf, is_stacked_leaf

SHOWN = 3


def describe(state: Any) -> list[Leaf]:
    """The leaves of a state, real or abstract, without digests.

    Raises:
        CheckpointError: a leaf is no array.
    """
    paths = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_stacked_leaf)
    return [_described(_parts(path), leaf) for path, leaf in paths]


def _parts(path: Sequence[Any]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _described(path: tuple[str, ...], leaf: Any) -> Leaf:
    part = leaf
    while isinstance(part, StackedLeaf):
        part = part.slices[0]
    try:
        kind = part if isinstance(part, jax.ShapeDtypeStruct) else jax.typeof(part)
    except TypeError as error:
        name = "/".join(path)
        raise CheckpointError(
            f"{name}: {type(part).__name__} is no array: {part!r}. Put what is no array into the extras."
        ) from error
    if compat.is_extended(kind.dtype):
        key = str(jax.random.key_impl(part)) if isinstance(part, jax.Array) else None
        return Leaf(path, tuple(leaf.shape), str(kind.dtype), key=key)
    # JAX's types have no float64 where it is off, but a numpy array may well.
    dtype = part.dtype if isinstance(part, (np.ndarray, np.generic)) else kind.dtype
    weak = bool(getattr(kind, "weak_type", False))
    return Leaf(path, np.shape(leaf), str(dtype), weak)


def check_alive(state: Any, leaves: Sequence[Leaf]) -> None:
    """Checks that no leaf was used up.

    Args:
        state: any.
        leaves: what `describe` says of it.

    Raises:
        CheckpointError: one was.
    """
    found = jax.tree.leaves(state, is_leaf=is_stacked_leaf)
    for leaf, described in zip(found, leaves, strict=True):
        if isinstance(leaf, (jax.Array, StackedLeaf)) and leaf.is_deleted():
            raise CheckpointError(
                f"{described.name} was used up by a later step; save a state before the step that takes it, or keep states"
                " with donate_state=False."
            )


def host_copy(leaf: Any) -> np.ndarray:
    """A copy of an array on the host, whole; random keys as their data."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return np.array(leaf)
    if not isinstance(leaf, jax.Array):
        return np.array(leaf, jax.typeof(leaf).dtype)
    if compat.is_extended(leaf.dtype):
        leaf = jax.random.key_data(leaf)
    whole = np.empty(leaf.shape, leaf.dtype)
    # Shard by shard: a numpy view of the leaf itself would outlive this, and the next step could not use its buffer.
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            whole[shard.index] = shard.data
    return whole


def compare(saved: Sequence[Leaf], wanted: Sequence[Leaf], what: str) -> None:
    """Checks that a checkpoint has the leaves of a state.

    Raises:
        CheckpointError: it is of another model or optimizer; the message has the first leaves that differ.
    """
    old = {leaf.path: leaf for leaf in saved}
    new = {leaf.path: leaf for leaf in wanted}
    faults = itertools.chain(
        (f"{leaf.name} is missing in it" for path, leaf in new.items() if path not in old),
        (f"{leaf.name} is only in it" for path, leaf in old.items() if path not in new),
        (
            f"{leaf.name} is {old[path].type} in it and {leaf.type} in the state"
            for path, leaf in new.items()
            if path in old and not _same_type(old[path], leaf)
        ),
    )
    found = list(faults)
    if found:
        more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise CheckpointError(
            f"{what} is of another model or optimizer: {'; '.join(found[:SHOWN])}{more}. Restore it like the state that"
            " was saved, or use another folder."
        )


def _same_type(saved: Leaf, wanted: Leaf) -> bool:
    if saved.shape != wanted.shape or saved.dtype == wanted.dtype:
        return saved.shape == wanted.shape
    # A state may begin with numpy's float64, of which the first step made float32.
    key = "<" in wanted.dtype
    return not key and saved.dtype == str(jax.dtypes.canonicalize_dtype(wanted.dtype))


def place(array: np.ndarray, leaf: Leaf, like: Any) -> Any:
    """A leaf as it was saved, where a like one lies or is to lie.

    Args:
        array: what was saved, whole; of a stacked leaf, a layer of it.
        leaf: what is said of it.
        like: an array, a type with or without a sharding, or a Python number.
    """
    if isinstance(like, (np.ndarray, np.generic)):
        return array
    sharding = _sharding(like)
    if leaf.key is not None:
        made = jax.random.wrap_key_data(jnp.asarray(array), impl=leaf.key)
    else:
        made = _weak(array) if leaf.weak else array
    return jnp.asarray(made) if sharding is None else jax.device_put(made, sharding)


def _sharding(like: Any) -> Any:
    """Where the user put a leaf; None where JAX chose."""
    if isinstance(like, jax.Array) and not like.committed:
        return None
    return getattr(like, "sharding", None)


def _weak(array: np.ndarray) -> Any:
    """An array whose type JAX may widen, as that of a Python number."""
    weak = jnp.full(array.shape, array.dtype.type(0).item())
    return weak.at[...].set(array) if weak.dtype == array.dtype else array
