"""How a value lies on the devices of a group, and how it is brought from one layout to another.

Terms. A value of D devices is laid out in one of these ways:
    None          every device holds it whole
    an axis       cut along that axis into D blocks, in rank order
    `Flat`        cut along an axis and then flattened: every device holds its block, flattened
    `UNIFORM`     all elements are equal; every device holds one of them, as a scalar
    `Pending`     every device holds what its blocks contribute to a reduction
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import jax.numpy as jnp
from jax import lax

from ratrain_jax.lowering.collectives import all_sum


class _Uniform(enum.Enum):
    UNIFORM = "uniform"


UNIFORM = _Uniform.UNIFORM


@dataclasses.dataclass(frozen=True, slots=True)
class Flat:
    """The layout of a flattened array.

    Attributes:
        shape: the whole shape before it was flattened.
        axis: the axis that is cut.
    """

    shape: tuple[int, ...]
    axis: int


@dataclasses.dataclass(frozen=True, slots=True)
class Pending:
    """The layout of a reduction that is not combined yet.

    Attributes:
        combine: how the devices' contributions join: `sum`, `max`, `min`, `and` or `or`.
    """

    combine: str


Axis = int | None
Layout = int | Flat | _Uniform | Pending | None


def shard_axis(shape: Sequence[int], devices: int) -> Axis:
    """The axis that is cut over the devices: the largest that they divide, the first of equals.

    Returns:
        The axis; None if there is one device, none divides, or there are no elements (the value is then whole everywhere).

    Example:
        >>> shard_axis((6, 8, 8), 4)
        1
        >>> shard_axis((3, 5), 2) is None
        True
    """
    fitting = [axis for axis, size in enumerate(shape) if size % devices == 0]
    if devices == 1 or not fitting or 0 in shape:
        return None
    return max(fitting, key=lambda axis: (shape[axis], -axis))


def local_shape(shape: Sequence[int], axis: Axis, devices: int) -> tuple[int, ...]:
    """The shape of one block of an array that is cut along an axis."""
    return tuple(size // devices if i == axis else size for i, size in enumerate(shape))


def shard_shape(shape: Sequence[int], devices: int) -> tuple[int, ...]:
    """The shape that each device holds of an array that is cut along `shard_axis`.

    Example:
        >>> shard_shape((6, 8), 4)
        (6, 2)
    """
    return local_shape(shape, shard_axis(shape, devices), devices)


def is_cut(layout: Layout) -> TypeGuard[int | Flat]:
    """Whether each device holds only its own block."""
    return isinstance(layout, (int, Flat))


def convert(
    value: Any, shape: tuple[int, ...], have: Layout, want: Layout, devices: int, axis_name: str
) -> Any:
    """Brings a value from one layout to another; to be called inside `pmap`.

    Args:
        value: what this device holds.
        shape: the whole shape.
        have: how it lies.
        want: how it shall lie: whole, cut along an axis, or flat.
        devices: D.
        axis_name: `pmap`'s axis.
    """
    if have == want:
        return value
    if have is UNIFORM:
        return jnp.broadcast_to(value, _held_shape(shape, want, devices))
    if want is None:
        return _whole(value, have, devices, axis_name)
    whole = value if have is None else _whole(value, have, devices, axis_name)
    if isinstance(want, Flat):
        return _block(whole.reshape(want.shape), want.axis, devices, axis_name).reshape(-1)
    if isinstance(want, int):
        return _block(whole, want, devices, axis_name)
    raise TypeError(f"no value is brought to {want}")


def _held_shape(shape: tuple[int, ...], layout: Layout, devices: int) -> tuple[int, ...]:
    if isinstance(layout, Flat):
        return (math.prod(layout.shape) // devices,)
    return local_shape(shape, layout if isinstance(layout, int) else None, devices)


def _block(whole: Any, axis: int, devices: int, axis_name: str) -> Any:
    size = whole.shape[axis] // devices
    return lax.dynamic_slice_in_dim(whole, lax.axis_index(axis_name) * size, size, axis)


def _whole(value: Any, have: Layout, devices: int, axis_name: str) -> Any:
    if isinstance(have, Pending):
        return _COMBINE[have.combine](value, axis_name)
    if isinstance(have, Flat):
        block = value.reshape(local_shape(have.shape, have.axis, devices))
        return lax.all_gather(block, axis_name, axis=have.axis, tiled=True).reshape(-1)
    if isinstance(have, int):
        return lax.all_gather(value, axis_name, axis=have, tiled=True)
    raise TypeError(f"no value is gathered from {have}")


def _of_booleans(combine: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """A collective on integers as one on booleans, which not every backend reduces."""

    def run(value: Any, axis_name: str) -> Any:
        if value.dtype == jnp.bool_:
            return combine(value.astype(jnp.int32), axis_name).astype(jnp.bool_)
        return combine(value, axis_name)

    return run


def _bitwise(fold: Callable[[Any, Any], Any]) -> Callable[[Any, str], Any]:
    """A reduction that has no collective: gathered, and folded in rank order."""

    def run(value: Any, axis_name: str) -> Any:
        parts = lax.all_gather(value, axis_name)
        result = parts[0]
        for part in parts[1:]:
            result = fold(result, part)
        return result

    return run


_COMBINE: dict[str, Callable[[Any, str], Any]] = {
    "sum": all_sum,
    "max": _of_booleans(lax.pmax),
    "min": _of_booleans(lax.pmin),
    "and": _bitwise(lax.bitwise_and),
    "or": _bitwise(lax.bitwise_or),
}
