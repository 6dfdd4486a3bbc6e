"""Moves bundles from one group to another, rank by rank.

Within a process that is a copy between its devices. Between processes both launch the same program over the pair of devices
(`ppermute`), in the same order; the receiver gives it zeros, the sender throws away what it gets.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ratrain_jax import compat
from ratrain_jax.runtime.groups import Group
from ratrain_jax.runtime.packing import DEAR, packed
from ratrain_jax.runtime.processes import is_here, make_global, several

Bundle = tuple[Any, ...]
AXIS = "pair"

_DEAR = jax.ShapeDtypeStruct((DEAR,), np.dtype(np.int32))
"""What XLA must add up beside a move so as not to wait for it in the launching thread."""


class Crossing:
    """From the devices of one group to those of another.

    Args:
        source: where from.
        target: where to; of the same size.
        types: of the bundle's arrays, on one device.
    """

    def __init__(self, source: Group, target: Group, types: Sequence[Any]) -> None:
        self._source, self._target, self._types = source, target, tuple(types)
        self._within = source.is_whole and target.is_whole
        pairs = zip(source.devices, target.devices, strict=True)
        self._pairs = [(a, b) for a, b in pairs if is_here(a) or is_here(b)]
        lead = () if source.size == 1 else (1,)
        self._slices = tuple(jax.ShapeDtypeStruct((*lead, *t.shape), t.dtype) for t in self._types)

    @property
    def between(self) -> bool:
        """Whether this process has to do with another one in it."""
        return any(is_here(a) != is_here(b) for a, b in self._pairs)

    def __call__(self, bundle: Bundle | None) -> Bundle | None:
        """Launches the move.

        Args:
            bundle: what lies on the source; None where nothing of it is here.

        Returns:
            What lies on the target then; None where nothing of it is here.
        """
        if self._within:
            return tuple(jax.device_put(bundle, self._target.sharding))
        parts = [
            _moved(a, b, _slices_on(a, bundle) if is_here(a) else None, self._slices)
            for a, b in self._pairs
        ]
        if not self._target.is_here:
            return None
        return self._joined([part for part in parts if part is not None])

    def rehearse(self) -> Any:
        """Connects the processes: moves zeros, and gives what is there once that is done."""
        if not self.between:
            return None
        return [crossed(a, b, _zeros(_own(a, b), self._slices)) for a, b in self._pairs]

    def _joined(self, parts: Sequence[Bundle]) -> Bundle:
        """Arrays of the target's group from the slices that are here."""
        if self._target.size == 1:
            return parts[0]
        size, sharding = self._target.size, self._target.sharding
        return tuple(
            jax.make_array_from_single_device_arrays((size, *t.shape), sharding, list(slices))
            for t, slices in zip(self._types, zip(*parts, strict=True), strict=True)
        )


def relocated(arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Global arrays on other devices, cut as before; in a run of one process any arrays.

    Args:
        arrays: with as many devices each as wanted.
        shardings: where to, one an array.
    """
    if not several():
        return list(jax.device_put(list(arrays), list(shardings)))
    moves: dict[Any, list[int]] = {}
    for n, (array, sharding) in enumerate(zip(arrays, shardings, strict=True)):
        moves.setdefault((_devices(array.sharding), _devices(sharding)), []).append(n)
    parts: dict[int, list[Any]] = {n: [] for n in range(len(arrays))}
    for (source, target), numbers in moves.items():
        types = tuple(_slice(arrays[n]) for n in numbers)
        for a, b in zip(source, target, strict=True):
            own = tuple(_on(a, arrays[n]) for n in numbers) if is_here(a) else None
            for n, part in zip(numbers, _moved(a, b, own, types) or (), strict=False):
                parts[n].append(part)
    return [
        make_global(jax.make_array_from_single_device_arrays(x.shape, s, parts[n], dtype=x.dtype))
        for n, (x, s) in enumerate(zip(arrays, shardings, strict=True))
    ]


def _devices(sharding: Any) -> tuple[Any, ...]:
    """A sharding's devices in rank order."""
    mesh = getattr(sharding, "mesh", None)
    return tuple(sharding.device_set) if mesh is None else tuple(mesh.devices.flat)


def _slice(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.sharding.shard_shape(array.shape), array.dtype)


def _moved(a: Any, b: Any, own: Bundle | None, types: tuple[Any, ...]) -> Bundle | None:
    """Moves what a device has to another one; gives it where it arrives.

    Args:
        a: where from.
        b: where to.
        own: what lies on `a`; None where that is in another process.
        types: of the arrays.
    """
    if is_here(a) and is_here(b):
        return tuple(jax.device_put(own, b))
    if is_here(b):
        return crossed(a, b, _zeros(b, types))
    if own is not None:
        crossed(a, b, own)
    return None


def _own(a: Any, b: Any) -> Any:
    return a if is_here(a) else b


def _slices_on(device: Any, bundle: Bundle | None) -> Bundle:
    return tuple(_on(device, array) for array in bundle or ())


def _on(device: Any, array: Any) -> Any:
    """An array's slice on a device."""
    return next(s.data for s in array.addressable_shards if s.device == device)


@functools.lru_cache(maxsize=1024)
def _zeros(device: Any, types: tuple[Any, ...]) -> Bundle:
    """What a receiver gives: the same arrays again and again."""
    return tuple(jax.device_put(_zero(t), device) for t in types)


def _zero(aval: Any) -> Any:
    if not compat.is_extended(aval.dtype):
        return np.zeros(aval.shape, aval.dtype)
    data = compat.key_data_type(aval)
    return jax.random.wrap_key_data(
        jax.numpy.zeros(data.shape, data.dtype), impl=compat.key_implementation(aval.dtype)
    )


@functools.lru_cache(maxsize=1024)
def _pair(a: Any, b: Any) -> tuple[NamedSharding, Any]:
    """How a bundle lies on two devices, each with its own, and the program that moves the first's to the second."""
    mesh = Mesh(np.array([a, b]), (AXIS,))
    # Said to be the same on both, so that each gives and gets arrays of the very shape; they are not the same.
    spec = PartitionSpec()

    def move(dear: Any, bundle: Bundle) -> tuple[Any, Bundle]:
        keys = {n: jax.random.key_impl(x) for n, x in enumerate(bundle) if _is_key(x)}
        data = [jax.random.key_data(x) if n in keys else x for n, x in enumerate(bundle)]
        moved = packed(lambda x: jax.lax.ppermute(x, AXIS, [(0, 1)]), data)
        made = tuple(
            jax.random.wrap_key_data(x, impl=keys[n]) if n in keys else x
            for n, x in enumerate(moved)
        )
        return dear + 1, made

    mapped = jax.shard_map(
        move,
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    return NamedSharding(mesh, spec), jax.jit(mapped)


def _is_key(array: Any) -> bool:
    return compat.is_extended(array.dtype)


def crossed(a: Any, b: Any, own: Bundle) -> Bundle:
    """Moves a bundle from one device to another, of which one is here; gives what lies on that one then."""
    sharding, call = _pair(a, b)
    dear, *lifted = (
        jax.make_array_from_single_device_arrays(x.shape, sharding, [x])
        for x in (*_zeros(_own(a, b), (_DEAR,)), *own)
    )
    _, moved = call(dear, tuple(lifted))
    return tuple(x.addressable_shards[0].data for x in moved)
