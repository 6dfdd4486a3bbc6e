"""Leaves of no layer, such as a step counter, in a run of several processes: every process is handed a copy.

Inside a step they lie on stage 0's group; a process without devices of it could not even print them. When such a copy comes
back, the array that it was made of takes its place.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from ratrain_jax import compat
from ratrain_jax.runtime.groups import Group
from ratrain_jax.runtime.processes import several, spread
from ratrain_jax.runtime.turns import in_turn


class Shared:
    """Hands out copies of leaves, and takes them back.

    Args:
        leaves: their numbers.
        home: the group on which each of its devices has them whole.
        donate: whether copies that were handed out are used up when they come back.
    """

    def __init__(self, leaves: Sequence[int], home: Group, *, donate: bool) -> None:
        self._leaves, self._home, self._donate = tuple(leaves), home, donate
        self._known: dict[int, tuple[weakref.ref[Any], int, Any]] = {}
        self._entered: list[Any] = []

    def enter(self, state: Sequence[Any]) -> Sequence[Any]:
        """A state with the arrays that its copies were made of."""
        if not self._known:
            return state
        arrays = list(state)
        self._entered.clear()  # what a call that failed has left
        for n in self._leaves:
            known = self._known.get(id(arrays[n]))
            if known is None:
                continue
            ref, leaf, original = known
            if ref() is arrays[n] and leaf == n and not original.is_deleted():
                self._entered.append(arrays[n])
                arrays[n] = original
        return arrays

    def use_up(self) -> None:
        """Gives up the copies that came back."""
        for copy in self._entered if self._donate else ():
            copy.delete()
        self._entered.clear()

    def leave(self, out: Mapping[int, Any]) -> dict[int, Any]:
        """A state in which every process has its own copy of these leaves."""
        if not several() or not self._leaves:
            return dict(out)
        originals = [out[n] for n in self._leaves]
        copies = dict(zip(self._leaves, everywhere(originals, self._home), strict=True))
        for n, original in zip(self._leaves, originals, strict=True):
            number = id(copies[n])
            ref = weakref.ref(copies[n], functools.partial(self._forget, number))
            self._known[number] = (ref, n, original)
        return {**out, **copies}

    def _forget(self, number: int, _: Any) -> None:
        self._known.pop(number, None)


def everywhere(arrays: Sequence[Any], home: Group) -> list[Any]:
    """Host-local copies, in every process, of arrays that each device of a group has whole; does not wait for them."""
    if not several():
        return list(arrays)
    if len({device.process_index for device in home.devices}) == jax.process_count():
        return [array.addressable_shards[0].data for array in arrays]
    owner = home.devices[0]
    given = [_data(array, owner) for array in arrays]
    copies = in_turn(lambda: spread(given, owner.process_index))
    return [_like(copy, array.dtype) for copy, array in zip(copies, arrays, strict=True)]


def _data(array: Any, owner: Any) -> Any:
    """An array's data on its owner; their type in the processes that do not have it."""
    parts = [shard.data for shard in array.addressable_shards if shard.device == owner]
    if compat.is_extended(array.dtype):
        return jax.random.key_data(parts[0]) if parts else compat.key_data_type(array)
    return parts[0] if parts else jax.ShapeDtypeStruct(array.shape, array.dtype)


def _like(copy: Any, dtype: Any) -> Any:
    if not compat.is_extended(dtype):
        return copy
    return jax.random.wrap_key_data(copy, impl=compat.key_implementation(dtype))
