"""Sends many small arrays as one: between processes each message costs as much as thousands of bytes do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

SMALL = 1 << 16
"""Bytes of an array that is sent by itself."""


def packed(send: Callable[[Any], Any], arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Applies a collective to arrays.

    Args:
        send: takes an array and gives one that has its shape behind any further axes; must treat all elements alike.
        arrays: no typed keys. Small ones of one dtype are sent together, those without elements not at all.
    """
    made: dict[int, Any] = {}
    groups: dict[Any, list[int]] = {}
    for n, array in enumerate(arrays):
        if array.size and array.nbytes >= SMALL:
            made[n] = send(array)
        elif array.size:
            groups.setdefault(array.dtype, []).append(n)
    for numbers in groups.values():
        if len(numbers) == 1:
            made[numbers[0]] = send(arrays[numbers[0]])
            continue
        sent = send(jnp.concatenate([arrays[n].reshape(-1) for n in numbers]))
        start = 0
        for n in numbers:
            size = math.prod(arrays[n].shape)
            made[n] = sent[..., start : start + size].reshape(*sent.shape[:-1], *arrays[n].shape)
            start += size
    return tuple(made.get(n, array) for n, array in enumerate(arrays))
