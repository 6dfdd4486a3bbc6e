"""The processes of a run, and what each must know that another has.

Terms.
    A device is **here** if this process drives it; an array may lie on devices of which none is. A process speaks for
    itself by its **voice**, its first device. An array is **host-local** if this process alone knows of it, and **global**
    if every process holds it, each with the parts that lie on its own devices.

What is exchanged goes through one collective over the voices of all processes. Every process must take part in it, and in the
same order; a run of one process exchanges nothing.
"""

from __future__ import annotations

import functools
import socket
import weakref
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ratrain_jax.runtime.packing import DEAR, packed

AXIS = "process"


def several() -> bool:
    """Whether the run has more than one process."""
    return jax.process_count() > 1


def is_here(device: Any) -> bool:
    """Whether this process drives a device."""
    return device.process_index == jax.process_index()


def waiting(devices: Iterable[Any]) -> list[Any]:
    """Of devices that do something together, those that are here, if they wait for others elsewhere; else none."""
    together = list(devices)
    if len({device.process_index for device in together}) == 1:
        return []
    return [device for device in together if is_here(device)]


@functools.cache
def voices() -> tuple[Any, ...]:
    """The first device of each process."""
    first: dict[int, Any] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    return tuple(first[process] for process in sorted(first))


@functools.cache
def _sharding() -> NamedSharding:
    # Said to be the same everywhere, so that each process gives and gets arrays of the very shape; they are not the same.
    return NamedSharding(Mesh(np.array(voices()), (AXIS,)), PartitionSpec())


@functools.lru_cache(maxsize=256)
def _gathering(chosen: int | None) -> Any:
    """A program that gathers arrays from every process, or gives those of one process to all."""

    def send(array: Any) -> Any:
        every = jax.lax.all_gather(array, AXIS)
        return every if chosen is None else every[chosen]

    def gather(dear: Any, arrays: Sequence[Any]) -> Any:
        return dear + 1, packed(send, arrays)

    mapped = jax.shard_map(
        gather,
        mesh=_sharding().mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return jax.jit(mapped)


def _lifted(array: Any) -> Any:
    """A host-local array as this process's part of a global one."""
    placed = jax.device_put(array, voices()[jax.process_index()])
    return jax.make_array_from_single_device_arrays(placed.shape, _sharding(), [placed])


def _lowered(array: Any) -> Any:
    return array.addressable_shards[0].data


@functools.cache
def _dear() -> Any:
    """What XLA must add up beside a gather so as not to wait for it in the launching thread."""
    return _lifted(np.zeros(DEAR, np.int32))


def _gathered(chosen: int | None, arrays: Sequence[Any]) -> Sequence[Any]:
    _, made = _gathering(chosen)(_dear(), tuple(map(_lifted, arrays)))
    return [_lowered(array) for array in made]


def spread(arrays: Sequence[Any], owner: int) -> tuple[Any, ...]:
    """Gives what one process has to all; does not wait for it.

    Args:
        arrays: host-local arrays in the owner, their types (`jax.ShapeDtypeStruct`) in the others. No typed keys.
        owner: the process.

    Returns:
        Host-local arrays, on this process's voice.
    """
    if not several():
        return tuple(arrays)
    given = [
        np.zeros(a.shape, a.dtype) if isinstance(a, jax.ShapeDtypeStruct) else a for a in arrays
    ]
    full = [n for n, array in enumerate(given) if array.size]
    made = _gathered(owner, [given[n] for n in full]) if full else ()
    found = dict(zip(full, made, strict=True))
    return tuple(found.get(n, jax.numpy.asarray(array)) for n, array in enumerate(given))


def exchange(array: np.ndarray) -> np.ndarray:
    """Gives each process what every process has, and waits for it.

    Args:
        array: of the same shape in every process.

    Returns:
        All of them, along a new axis 0, by process.
    """
    if not several():
        return array[None]
    return np.asarray(_gathered(None, [array])[0])


def exchange_text(text: str) -> list[str]:
    """Gives each process what every process says, and waits for it.

    Args:
        text: any.

    Returns:
        The texts, by process.
    """
    if not several():
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = exchange(np.array([len(data)], np.int32))[:, 0]
    padded = np.zeros(max(int(sizes.max()), 1), np.uint8)
    padded[: len(data)] = data
    rows = zip(exchange(padded), sizes, strict=True)
    return [row[:size].tobytes().decode() for row, size in rows]


def meet() -> None:
    """Waits until all processes are here."""
    if several():
        exchange(np.zeros(1, np.int32))


@functools.cache
def host_mates() -> frozenset[int]:
    """The processes on this host, this one among them; known once all processes have asked."""
    name = np.uint32(zlib.crc32(socket.gethostname().encode()))
    names = exchange(np.array([name]))[:, 0]
    return frozenset(int(process) for process in np.flatnonzero(names == name))


# Global arrays that lie wholly on devices of one process look like its own there.
_global: dict[int, weakref.ref[Any]] = {}


def make_global(array: Any) -> Any:
    """Notes that an array is global, for `is_global`; gives it back."""
    if several():
        number = id(array)
        _global[number] = weakref.ref(array, lambda _: _global.pop(number, None))
    return array


def is_global(leaf: Any) -> bool:
    """Whether a leaf is a global array, as far as this process can tell."""
    if not isinstance(leaf, jax.Array):
        return False
    ref = _global.get(id(leaf))
    return not leaf.is_fully_addressable or (ref is not None and ref() is leaf)


def elsewhere(aval: Any, sharding: Any) -> Any:
    """A global array that lies on devices of other processes alone."""
    return make_global(
        jax.make_array_from_single_device_arrays(aval.shape, sharding, [], dtype=aval.dtype)
    )
