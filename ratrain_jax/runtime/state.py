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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ratrain_jax.lowering.code import StepCode
from ratrain_jax.runtime.groups import AXIS, Group
from ratrain_jax.runtime.instructions import Bundle
from ratrain_jax.runtime.turns import behind
from ratrain_jax.runtime.workers import Workers


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

    They use up what the step's last gathers still read, so they wait for all of these; launched by the thread that computes,
    they would keep the next step's first Forward, which wants one view only, waiting too. Arrays that lie whole on each
    device are not gathered, but read by Forwards: these are reshaped at once. A group of one device has nothing to reshape.

    Args:
        group: the devices.
        axes: the axis along which each array is cut.
        donate: whether `enter` uses up what it is given.
        link: the thread that launches gathers; this one unless given.
    """

    def __init__(
        self,
        group: Group,
        axes: Sequence[int | None],
        *,
        donate: bool = True,
        link: Workers | None = None,
    ) -> None:
        self._parts: list[tuple[list[int], _Reshapes, Callable[..., Bundle]]] = []
        for are_cut in (False, True) if group.size > 1 else ():
            numbers = [n for n, axis in enumerate(axes) if (axis is not None) == are_cut]
            launch = functools.partial(behind, link) if are_cut and link is not None else _here
            if numbers:
                reshapes = _Reshapes(group, [axes[n] for n in numbers], donate)
                self._parts.append((numbers, reshapes, launch))

    def enter(self, arrays: Sequence[Any]) -> Bundle:
        """From arrays of the user's shapes, on the group already."""
        return self._reshaped(arrays, lambda part: part.enter)

    def leave(self, arrays: Sequence[Any]) -> Bundle:
        """Uses up arrays as they lie inside a step."""
        return self._reshaped(arrays, lambda part: part.leave)

    def _reshaped(self, arrays: Sequence[Any], chosen: Callable[[_Reshapes], Any]) -> Bundle:
        made = list(arrays)
        for numbers, part, launch in self._parts:
            given = tuple(arrays[n] for n in numbers)
            results = launch(functools.partial(chosen(part), given))
            for n, array in zip(numbers, results, strict=True):
                made[n] = array
        return tuple(made)


def _here(call: Callable[[], Bundle]) -> Bundle:
    return call()


class _Reshapes:
    """Both reshapes of some arrays of a group of several devices; each call uses up what it is given, if `donate`."""

    def __init__(self, group: Group, axes: Sequence[int | None], donate: bool) -> None:
        whole = tuple(
            PartitionSpec() if a is None else PartitionSpec(*[None] * a, AXIS) for a in axes
        )
        sliced = tuple(PartitionSpec(AXIS) for _ in axes)
        enter = _mapped(group, lambda arrays: tuple(x[None] for x in arrays), whole, sliced)
        leave = _mapped(group, lambda arrays: tuple(x[0] for x in arrays), sliced, whole)
        # Said, because the compiler would leave an array of size zero on every device.
        inside = tuple(group.sharding for _ in axes)
        outside = tuple(group.state_sharding(axis) for axis in axes)
        self.enter = jax.jit(enter, donate_argnums=0 if donate else (), out_shardings=inside)
        self.leave = jax.jit(leave, donate_argnums=0, out_shardings=outside)


def _mapped(group: Group, function: Any, ins: Any, outs: Any) -> Any:
    return jax.shard_map(
        function, mesh=group.mesh, in_specs=(ins,), out_specs=outs, check_vma=False
    )
