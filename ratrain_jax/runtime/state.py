"""The user's state in and out of a step.

Leaves that a step hands out are whole arrays of the user's shapes, cut over their stage's group. When they come back they are
used up: one compiled reshape a group at entry, and one at exit, give the same buffers another shape. Arrays that the user
made are copied to their group and never used up. A view that was gathered ahead is good only for the very arrays
that were handed out with it.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ratrain_jax.lowering.code import StepCode
from ratrain_jax.runtime.groups import AXIS, Group
from ratrain_jax.runtime.instructions import Bundle


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a leaf lives.

    Attributes:
        stage: its group; a leaf of no layer lives on stage 0 and is copied to the others.
        axis: the axis along which it is cut.
    """

    stage: int
    axis: int | None


def leaf_places(code: StepCode) -> dict[int, Place]:
    """The place of each state leaf, by number."""
    return {leaf: Place(stage, code.shard_axes[leaf]) for leaf, stage in code.leaf_stages.items()}


class Ownership:
    """Remembers which arrays this runtime handed out, and as which leaf of the state."""

    def __init__(self) -> None:
        self._refs: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def add(self, arrays: Mapping[int, Any]) -> None:
        """Remembers arrays, by leaf, for as long as they live."""
        for leaf, array in arrays.items():
            number = id(array)
            ref = weakref.ref(array, functools.partial(self._forget, number))
            self._refs[number] = (leaf, ref)

    def _forget(self, number: int, _: Any) -> None:
        self._refs.pop(number, None)

    def holds(self, leaf: int, array: Any) -> bool:
        """Whether an array was handed out as this very leaf, so that it lies in its place."""
        known, ref = self._refs.get(id(array), (None, None))
        return known == leaf and ref is not None and ref() is array


class Reshaper:
    """The compiled reshapes of one group: from the user's shapes to a slice a device, and back.

    Args:
        group: the devices.
        axes: the axis along which each array is cut.
        donate: whether `enter` uses up what it is given.
    """

    def __init__(self, group: Group, axes: Sequence[int | None], *, donate: bool = True) -> None:
        self._group = group
        self.shardings = [group.state_sharding(axis) for axis in axes]
        if group.size == 1:
            return
        whole = tuple(
            PartitionSpec() if a is None else PartitionSpec(*[None] * a, AXIS) for a in axes
        )
        sliced = tuple(PartitionSpec(AXIS) for _ in axes)
        enter = _mapped(group, lambda arrays: tuple(x[None] for x in arrays), whole, sliced)
        leave = _mapped(group, lambda arrays: tuple(x[0] for x in arrays), sliced, whole)
        # Said, because the compiler would leave an array of size zero on every device.
        inside = tuple(group.sharding for _ in axes)
        self._enter = jax.jit(enter, donate_argnums=0 if donate else (), out_shardings=inside)
        self._leave = jax.jit(leave, donate_argnums=0, out_shardings=tuple(self.shardings))

    def enter(self, arrays: Sequence[Any]) -> Bundle:
        """From arrays of the user's shapes, on the group already."""
        return tuple(arrays) if self._group.size == 1 else self._enter(tuple(arrays))

    def leave(self, arrays: Sequence[Any]) -> Bundle:
        """Uses up arrays as they lie inside a step."""
        return tuple(arrays) if self._group.size == 1 else self._leave(tuple(arrays))


def _mapped(group: Group, function: Any, ins: Any, outs: Any) -> Any:
    return jax.shard_map(
        function, mesh=group.mesh, in_specs=(ins,), out_specs=outs, check_vma=False
    )
