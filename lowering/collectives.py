"""Sums over the devices of a group, always in rank order, so that they have the same bits however devices are spread.

XLA's CPU client adds in rank order where all devices belong to one process. Over several it adds as its algorithm passes
the numbers on. For more than two devices that makes other bits; `in_rank_order` then gathers and adds by hand, which moves
no more bytes in a reduce-scatter.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax import lax

_tracing = threading.local()


@contextlib.contextmanager
def in_rank_order() -> Iterator[None]:
    """Within, what this thread traces adds by hand."""
    _tracing.by_hand = True
    try:
        yield
    finally:
        _tracing.by_hand = False


def _by_hand(devices: int) -> bool:
    # Two numbers have one sum, whichever comes first.
    return devices > 2 and getattr(_tracing, "by_hand", False)


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


def _added(parts: Any) -> Any:
    total = parts[0]
    for rank in range(1, parts.shape[0]):
        total = total + parts[rank]
    return total
