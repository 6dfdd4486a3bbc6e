"""Sums and gathers over the devices of a group.

Sums are always in rank order, so that they have the same bits however devices are spread. XLA's CPU client adds in rank order
where all devices belong to one process. Over several it adds as its algorithm passes the numbers on. For more than two devices
that makes other bits; `between_processes` then gathers and adds by hand, which moves no more bytes in a reduce-scatter.

Between processes each collective costs much beside its bytes, so all arrays of one dtype go in one.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_tracing = threading.local()


@contextlib.contextmanager
def between_processes() -> Iterator[None]:
    """Within, what this thread traces is for devices of several processes."""
    _tracing.between = True
    try:
        yield
    finally:
        _tracing.between = False


def _between() -> bool:
    return getattr(_tracing, "between", False)


def _by_hand(devices: int) -> bool:
    # Two numbers have one sum, whichever comes first.
    return devices > 2 and _between()


def all_sum(values: Any, axis_name: str) -> Any:
    """The sum over all devices, on each.

    Args:
        values: a tree of what this device has.
        axis_name: the mapped axis.
    """
    if not _by_hand(lax.axis_size(axis_name)):
        return lax.psum(values, axis_name)
    return jax.tree.map(lambda value: _added(lax.all_gather(value, axis_name)), values)


def sum_scatter(value: Any, axis_name: str, axis: int) -> Any:
    """Each device's part of the sum over all devices.

    Args:
        value: what this device has.
        axis_name: the mapped axis.
        axis: the axis along which the sum is cut; a multiple of the devices.
    """
    devices = lax.axis_size(axis_name)
    if not _by_hand(devices):
        return lax.psum_scatter(value, axis_name, scatter_dimension=axis, tiled=True)
    before, size, after = value.shape[:axis], value.shape[axis], value.shape[axis + 1 :]
    parts = value.reshape(*before, devices, size // devices, *after)
    return _added(lax.all_to_all(parts, axis_name, split_axis=axis, concat_axis=0))


def sums_scattered(
    arrays: Sequence[Any], axes: Sequence[int | None], axis_name: str
) -> tuple[Any, ...]:
    """Each device's part of the sums over all devices, of several arrays.

    Args:
        arrays: what this device has.
        axes: the axis along which each sum is cut; None where every device has it whole.
        axis_name: the mapped axis.
    """
    if not _between():
        return tuple(
            all_sum(array, axis_name) if axis is None else sum_scatter(array, axis_name, axis)
            for array, axis in zip(arrays, axes, strict=True)
        )
    devices = lax.axis_size(axis_name)
    made: dict[int, Any] = {}
    for (cut, _), numbers in _alike(arrays, axes).items():
        if not cut:
            whole = jnp.concatenate([arrays[n].reshape(-1) for n in numbers])
            made.update(_split(all_sum(whole, axis_name), numbers, arrays))
            continue
        rows = [_by_rank(arrays[n], axes[n], devices) for n in numbers]
        sums = sum_scatter(jnp.concatenate(rows, axis=1), axis_name, 0)
        parts = {n: _part(arrays[n], axes[n], devices) for n in numbers}
        made.update(_split(sums.reshape(-1), numbers, parts))
    return tuple(made[n] for n in range(len(arrays)))


def gathered(shards: Sequence[Any], axes: Sequence[int | None], axis_name: str) -> tuple[Any, ...]:
    """Whole arrays from each device's part.

    Args:
        shards: what this device has.
        axes: the axis along which each array is cut; None where every device has it whole.
        axis_name: the mapped axis.
    """
    if not _between():
        return tuple(
            shard if axis is None else lax.all_gather(shard, axis_name, axis=axis, tiled=True)
            for shard, axis in zip(shards, axes, strict=True)
        )
    made = {n: shard for n, shard in enumerate(shards) if axes[n] is None}
    for (cut, _), numbers in _alike(shards, axes).items():
        if not cut:
            continue
        flat = jnp.concatenate([shards[n].reshape(-1) for n in numbers])
        every = lax.all_gather(flat, axis_name)
        start = 0
        for n in numbers:
            size, axis = shards[n].size, axes[n] or 0
            rows = every[:, start : start + size].reshape(-1, *shards[n].shape)
            shape = list(shards[n].shape)
            shape[axis] *= every.shape[0]
            made[n] = jnp.moveaxis(rows, 0, axis).reshape(shape)
            start += size
    return tuple(made[n] for n in range(len(shards)))


def _alike(arrays: Sequence[Any], axes: Sequence[int | None]) -> dict[tuple[bool, Any], list[int]]:
    """Numbers of the arrays that may go in one collective: cut or not, and of one dtype."""
    found: dict[tuple[bool, Any], list[int]] = {}
    for n, (array, axis) in enumerate(zip(arrays, axes, strict=True)):
        found.setdefault((axis is not None, array.dtype), []).append(n)
    return found


def _by_rank(array: Any, axis: int | None, devices: int) -> Any:
    """An array as one row a rank."""
    axis = axis or 0
    shape = array.shape
    parts = array.reshape(*shape[:axis], devices, shape[axis] // devices, *shape[axis + 1 :])
    return jnp.moveaxis(parts, axis, 0).reshape(devices, -1)


def _part(array: Any, axis: int | None, devices: int) -> jax.ShapeDtypeStruct:
    shape = list(array.shape)
    shape[axis or 0] //= devices
    return jax.ShapeDtypeStruct(tuple(shape), array.dtype)


def _split(flat: Any, numbers: Sequence[int], like: Any) -> Iterator[tuple[int, Any]]:
    """Arrays from one that holds all their elements."""
    start = 0
    for n in numbers:
        size = math.prod(like[n].shape)
        yield n, flat[start : start + size].reshape(like[n].shape)
        start += size


def _added(parts: Any) -> Any:
    total = parts[0]
    for rank in range(1, parts.shape[0]):
        total = total + parts[rank]
    return total
