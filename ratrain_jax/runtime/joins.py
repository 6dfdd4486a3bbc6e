"""Joins what ranks hold apart: what the loss returns for each microbatch (see `ratrain_jax.lowering.results`), and scalars."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ratrain_jax import compat
from ratrain_jax.lowering.collectives import all_sum
from ratrain_jax.runtime.groups import AXIS


def join(values: Sequence[Any], how: str, dtype: Any, devices: int) -> Any:
    """Joins the values of a rank's microbatches, in their order, with those of the other ranks.

    Args:
        values: one a microbatch.
        how: the join.
        dtype: the type of the result.
        devices: D; more than one inside `pmap` alone.
    """
    if not compat.is_extended(dtype):
        return _JOINS[how](values, devices).astype(dtype)
    data = _JOINS[how]([jax.random.key_data(value) for value in values], devices)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(values[0]))


def _sum(values: Sequence[Any], devices: int) -> Any:
    """Floats are added in float32 at least."""
    dtype = values[0].dtype
    if jnp.issubdtype(dtype, jnp.inexact):
        dtype = jnp.promote_types(dtype, jnp.float32)
    total = values[0].astype(dtype)
    for value in values[1:]:
        total = total + value.astype(dtype)
    return all_sum(total, AXIS) if devices > 1 else total


def _mean(values: Sequence[Any], devices: int) -> Any:
    return _sum(values, devices) / (len(values) * devices)


def _rows(values: Sequence[Any], devices: int) -> Any:
    """The rows of a rank lie together in the batch."""
    rows = jnp.concatenate(values)
    return jax.lax.all_gather(rows, AXIS, axis=0, tiled=True) if devices > 1 else rows


def _first(values: Sequence[Any], devices: int) -> Any:
    return jax.lax.all_gather(values[0], AXIS)[0] if devices > 1 else values[0]


_JOINS: dict[str, Callable[[Sequence[Any], int], Any]] = {
    "mean": _mean,
    "sum": _sum,
    "rows": _rows,
    "first": _first,
}


def combine(values: Sequence[Any], how: Sequence[str], devices: int) -> list[Any]:
    """Joins what the ranks hold of partial scalars; one collective a kind."""
    joined = list(values)
    if devices == 1:
        return joined
    for kind in dict.fromkeys(how):
        places = [i for i, h in enumerate(how) if h == kind]
        if kind == "same":
            continue
        for i, value in zip(places, _COMBINES[kind](tuple(values[i] for i in places)), strict=True):
            joined[i] = value
    return joined


def _join_bool(reduce: Callable[..., Any], values: Sequence[Any]) -> list[Any]:
    counts = reduce(tuple(v.astype(jnp.int32) for v in values), AXIS)
    return [c.astype(bool) for c in counts]


_COMBINES: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "sum": lambda values: all_sum(values, AXIS),
    "max": lambda values: jax.lax.pmax(values, AXIS),
    "min": lambda values: jax.lax.pmin(values, AXIS),
    "and": functools.partial(_join_bool, jax.lax.pmin),
    "or": functools.partial(_join_bool, jax.lax.pmax),
}
