"""Runs a layer's update program on shards, inside `pmap`.

Terms.
    The **layout** of a value is the axis that is cut over the D devices, or None for a value that every device holds
    whole. `PARTIAL` is asked of an output that may be left uncombined: each device gives what its own shards
    contribute, and `ShardProgram.combine` says how these join.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

from jax.extend import core as jex

PARTIAL: Final = "partial"

Layout = int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Whole:
    """An equation that runs on whole operands.

    Attributes:
        primitive: its name.
        bytes: what is gathered for it, and what it makes only to be sliced.
    """

    primitive: str
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ShardProgram:
    """A program over local shards; call `run` inside `pmap(axis_name=...)`.

    Attributes:
        run: takes the local inputs and returns a list of local outputs.
        combine: for each output asked as `PARTIAL`, in order: `sum`, `max`, `min`, `and`, `or`, or `same`
            (every device holds the same, whole value).
        whole: what runs whole.
    """

    run: Callable[..., list[Any]]
    combine: tuple[str, ...]
    whole: tuple[Whole, ...]


def shard_axis(shape: Sequence[int], devices: int) -> Layout:
    """The axis that is cut over the devices: the largest that they divide, the first of equals.

    Returns:
        The axis; None if there is one device, or none divides (the value is then whole everywhere).

    Example:
        >>> shard_axis((6, 8, 8), 4)
        1
        >>> shard_axis((3, 5), 2) is None
        True
    """
    fitting = [axis for axis, size in enumerate(shape) if size and size % devices == 0]
    if devices == 1 or not fitting:
        return None
    return max(fitting, key=lambda axis: (shape[axis], -axis))


def shard_shape(shape: Sequence[int], devices: int) -> tuple[int, ...]:
    """The shape that each device holds.

    Example:
        >>> shard_shape((6, 8), 4)
        (6, 2)
    """
    axis = shard_axis(shape, devices)
    return tuple(size // devices if i == axis else size for i, size in enumerate(shape))


def on_shards(
    closed: jex.ClosedJaxpr,
    layouts_in: Sequence[Layout],
    layouts_out: Sequence[Layout | str],
    devices: int,
    axis_name: str,
) -> ShardProgram:
    """Rewrites a program to run on local shards.

    Args:
        closed: the program, over whole shapes.
        layouts_in: the axis along which each input comes cut; None for whole.
        layouts_out: the same for each output; `PARTIAL` for one that may be left uncombined.
        devices: D.
        axis_name: the name of `pmap`'s axis.

    Returns:
        The program over shards.
    """
    raise NotImplementedError
