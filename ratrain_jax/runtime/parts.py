"""The parts of an array of several processes: what one device holds; several devices may hold the same."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from ratrain_jax import compat

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A part of a leaf.

    Attributes:
        index: which part of the whole, of random keys of their data.
        shape: its own.
        dtype: of its elements.
        devices: that hold it, by process; the first speaks for it.
    """

    index: Index
    shape: tuple[int, ...]
    dtype: Any
    devices: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def holder(self) -> int:
        """The process that gives it."""
        return self.devices[0].process_index


def parts_of(shape: tuple[int, ...], dtype: Any, sharding: Any) -> list[Part]:
    """The parts of an array, each once.

    Args:
        shape: of the array.
        dtype: of its elements. Random keys are never cut; their part is all of their data.
        sharding: of the array.
    """
    if compat.is_extended(dtype):
        data = compat.key_data_type(jax.ShapeDtypeStruct(shape, dtype))
        whole = tuple(slice(None) for _ in data.shape)
        return [Part(whole, data.shape, data.dtype, _in_order(sharding.device_set))]
    holders: dict[str, list[Any]] = {}
    indices: dict[str, Index] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        holders.setdefault(repr(index), []).append(device)
        indices[repr(index)] = index
    part = sharding.shard_shape(shape)
    return [Part(indices[n], part, dtype, _in_order(holders[n])) for n in sorted(indices)]


def _in_order(devices: Any) -> tuple[Any, ...]:
    return tuple(sorted(devices, key=lambda device: (device.process_index, device.id)))


def data_of(leaf: Any, part: Part) -> Any:
    """A part on its first device, random keys as their data; its type in processes that do not drive that device."""
    found = [s.data for s in leaf.addressable_shards if s.device == part.devices[0]]
    if not found:
        return jax.ShapeDtypeStruct(part.shape, part.dtype)
    return jax.random.key_data(found[0]) if compat.is_extended(leaf.dtype) else found[0]
