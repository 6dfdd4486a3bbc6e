"""How programs between processes are built: small arrays are sent as one, and nothing waits in the launching thread.

Each message costs as much as thousands of bytes do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

SMALL = 1 << 16
"""Bytes of an array that is sent by itself."""

DEAR = 1024
"""Operations that XLA's CPU client does not run in the launching thread.

What it takes for cheap, less than 1,000 of them, it runs there if it can, and with it, between processes, the wait for the
others; a collective counts as none. So beside each a vector of as many numbers is added to.
"""


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
