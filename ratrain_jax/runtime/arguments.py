"""Checks the arguments of a call against what a step was compiled for, before anything is used up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ratrain_jax.errors import BatchError, StateError
from ratrain_jax.stacked_leaf import StackedLeaf, is_stacked_leaf
from ratrain_jax.tracing import Signature, leaf_names


def check_arguments(signature: Signature, args: Sequence[Any]) -> list[Any]:
    """The flat arguments of a call.

    Args:
        signature: of the compiled step.
        args: the call's arguments.

    Raises:
        StateError: the state has another structure, a leaf of another type, or an array that was used up.
        BatchError: the batch has.
    """
    state = jax.tree.structure(args[0], is_leaf=is_stacked_leaf) if args else None
    if state is None or state != signature.state:
        raise StateError(_structure("state", signature, args))
    if jax.tree.structure(tuple(args[1:])) != signature.batch:
        raise BatchError(_structure("batch", signature, args))
    leaves = [leaf for arg in args for leaf in jax.tree.leaves(arg, is_leaf=is_stacked_leaf)]
    for leaf, aval, name in zip(leaves, signature.avals, signature.names, strict=True):
        shape = np.shape(leaf)
        dtype = leaf.dtype if is_stacked_leaf(leaf) else jax.typeof(leaf).dtype
        kind = StateError if name.startswith("state") else BatchError
        if shape != aval.shape or dtype != aval.dtype:
            raise kind(
                f"{name} is {dtype}{list(shape)}, but the step was compiled for"
                f" {aval.dtype}{list(aval.shape)}; call the decorated step, which compiles anew."
            )
        if isinstance(leaf, (jax.Array, StackedLeaf)) and leaf.is_deleted():
            raise kind(
                f"{name} was used up, by an earlier step or by other code. Go on from the newest state, or from a"
                " checkpoint if that step failed; donate_state=False keeps old ones."
            )
    return leaves


def _structure(what: str, signature: Signature, args: Sequence[Any]) -> str:
    """Says where a tree differs from the one that was compiled."""
    wanted = [name for name in signature.names if name.startswith(what)]
    given = [name for name in leaf_names(args) if name.startswith(what)]
    extra = [name for name in given if name not in wanted]
    missing = [name for name in wanted if name not in given]
    where = "the leaves are the same, but containers or static fields (a TrainState's tx) are not"
    if missing:
        where = f"{missing[0]} is missing"
    elif extra:
        where = f"{extra[0]} is new"
    return (
        f"the {what} has another structure than the one that was compiled: {where}. Call the decorated step,"
        " which compiles anew, or bring it into the old structure."
    )
