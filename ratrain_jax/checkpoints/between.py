"""Leaves of a run of several processes: brought to process 0 to be saved, and given out by it when restored.

Terms.
    A leaf is **common** if it is one array of all processes, each with what lies on its own devices: all name the same
    devices for it. Any other leaf each process has for itself, and process 0's is saved.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ratrain_jax import compat
from ratrain_jax.checkpoints.streams import Stream
from ratrain_jax.runtime.parts import Part, data_of, parts_of
from ratrain_jax.runtime.processes import elsewhere, exchange, is_here, make_global


def common(leaves: Sequence[Any]) -> list[bool]:
    """Which leaves are common; a collective.

    Args:
        leaves: arrays or types, the same in every process but for where they lie.
    """
    if not leaves:
        return []
    named = exchange(np.array([_place(leaf) for leaf in leaves], np.uint32))
    return [bool(column[0]) and bool((column == column[0]).all()) for column in named.T]


def _place(leaf: Any) -> int:
    """A number for the devices that a leaf is bound to; 0 without."""
    if isinstance(leaf, jax.Array) and not leaf.committed:
        return 0
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return 0
    devices = sorted(device.id for device in sharding.device_set)
    return zlib.crc32(repr(devices).encode()) or 1


# To process 0.


def collect(leaves: Sequence[Any], is_common: Sequence[bool]) -> dict[int, np.ndarray]:
    """Brings the common leaves to process 0, whole; random keys as their data. A collective.

    Args:
        leaves: of the state.
        is_common: which to bring.

    Returns:
        They, by number; nothing in other processes.
    """
    numbers = [n for n, wanted in enumerate(is_common) if wanted]
    parts = {n: parts_of(leaves[n].shape, leaves[n].dtype, leaves[n].sharding) for n in numbers}
    found: dict[int, np.ndarray] = {}
    if jax.process_index() == 0:
        found = {n: _empty(leaves[n]) for n in numbers}
    _pass_on(leaves, parts, 0, found)
    for process in range(1, jax.process_count()):
        _pass_on(leaves, parts, process, found)
    return found


def _empty(leaf: Any) -> np.ndarray:
    kind = compat.key_data_type(leaf) if compat.is_extended(leaf.dtype) else leaf
    return np.empty(kind.shape, kind.dtype)


def _pass_on(
    leaves: Sequence[Any],
    parts: dict[int, list[Part]],
    process: int,
    found: dict[int, np.ndarray],
) -> None:
    """Brings what one process holds to process 0."""
    held = [(n, part) for n, mine in parts.items() for part in mine if part.holder == process]
    if jax.process_index() == process == 0:
        for n, part in held:
            found[n][part.index] = np.asarray(data_of(leaves[n], part))
        return
    if jax.process_index() not in (0, process) or not held:
        return
    stream = Stream(process, 0, sum(part.nbytes for _, part in held))
    for n, part in held:
        if jax.process_index() == 0:
            found[n][part.index] = stream.receive(part.shape, part.dtype)
        else:
            stream.send(np.asarray(data_of(leaves[n], part)))


# From process 0.


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What is wanted of a leaf that is restored.

    Attributes:
        shape: of what was saved, of random keys their data's.
        dtype: likewise.
        parts: of a common leaf; None for one that each process has for itself.
    """

    shape: tuple[int, ...]
    dtype: Any
    parts: list[Part] | None

    def of(self, process: int) -> list[Part]:
        """The parts that a process needs."""
        if self.parts is None:
            return [Part(tuple(slice(None) for _ in self.shape), self.shape, self.dtype, ())]
        return [p for p in self.parts if any(d.process_index == process for d in p.devices)]


def give_out(arrays: Sequence[np.ndarray] | None, wanted: Sequence[Wanted]) -> Iterator[Any]:
    """Gives every process what it needs of each leaf. A collective, once all that it gives was taken.

    Args:
        arrays: the leaves, whole; None in all processes but 0.
        wanted: of each leaf.

    Yields:
        Of each leaf the parts that are needed here, by the `repr` of their index.
    """
    if arrays is not None:
        for process in range(1, jax.process_count()):
            stream = _stream_to(process, wanted)
            for array, leaf in zip(arrays, wanted, strict=True):
                for part in leaf.of(process):
                    stream.send(array[part.index])
        for array, leaf in zip(arrays, wanted, strict=True):
            yield {repr(part.index): array[part.index] for part in leaf.of(0)}
        return
    stream = _stream_to(jax.process_index(), wanted)
    for leaf in wanted:
        yield {
            repr(part.index): stream.receive(part.shape, part.dtype)
            for part in leaf.of(jax.process_index())
        }


def _stream_to(process: int, wanted: Sequence[Wanted]) -> Stream:
    size = sum(part.nbytes for leaf in wanted for part in leaf.of(process))
    return Stream(0, process, size)


def put_common(parts: dict[str, np.ndarray], like: Any, key: str | None) -> Any:
    """A common leaf from the parts that are here.

    Args:
        parts: by the `repr` of their index.
        like: its type, with where it is to lie.
        key: the implementation of random keys; None for other leaves.
    """
    sharding = like.sharding
    kind = jax.ShapeDtypeStruct(like.shape, like.dtype)
    if not any(map(is_here, sharding.device_set)):
        return elsewhere(kind, sharding)
    if key is not None:
        (data,) = parts.values()
        made = jax.make_array_from_callback(data.shape, sharding, lambda index: data[index])
        return make_global(jax.random.wrap_key_data(made, impl=key))
    return make_global(
        jax.make_array_from_callback(like.shape, sharding, lambda index: parts[repr(index)])
    )
