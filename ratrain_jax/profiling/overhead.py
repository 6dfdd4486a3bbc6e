"""What launching a program costs the host, measured with one that does nothing."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from ratrain_jax.runtime.groups import Group
from ratrain_jax.runtime.launches import launcher, with_token
from ratrain_jax.runtime.recipes import INDEX_TYPE

BURST = 64
"""Launches that are timed together."""


class Overhead:
    """Measures launches on a group.

    Args:
        group: the devices.
    """

    def __init__(self, group: Group) -> None:
        several = group.size > 1

        def nothing(number: Any) -> Any:
            return number + 1

        types = [group.local_type(INDEX_TYPE.shape, INDEX_TYPE.dtype)]
        call = group.compile(with_token(nothing) if several else nothing, types, ())
        self._call = launcher(group, call, False) if several else call
        self._number = group.put_whole(np.int32(0))

    def sample(self) -> tuple[float, float]:
        """Times a burst of launches, then as many that are waited for.

        Returns:
            Seconds of the host to launch a program, and from then until one that does nothing is seen to have ended.
        """
        jax.block_until_ready(self._call(self._number))
        start = time.perf_counter()
        for _ in range(BURST):
            made = self._call(self._number)
        launched = time.perf_counter() - start
        jax.block_until_ready(made)
        start = time.perf_counter()
        for _ in range(BURST):
            jax.block_until_ready(self._call(self._number))
        waited = time.perf_counter() - start
        return launched / BURST, max(waited - launched, 0.0) / BURST
