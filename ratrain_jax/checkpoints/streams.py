"""Bytes of many arrays from process 0 to another one, or from another one to it, past all the rest.

Both launch the same programs over their voices, in the same order. The bytes go in pieces of one size, whatever arrays they
are of: small arrays go together, and of large ones neither process holds more than a piece on its device.
"""

from __future__ import annotations

from typing import Any, Final

import jax
import numpy as np

from ratrain_jax.distributed import peers
from ratrain_jax.runtime.crossings import crossed
from ratrain_jax.runtime.processes import meet, several, voices
from ratrain_jax.runtime.turns import in_turn

PIECE: Final = 1 << 23
"""Bytes of a piece."""
_SHORTEST: Final = 1 << 10
"""Bytes of the shortest message: the last piece has one of few sizes, for each is another program to compile."""


def connect() -> None:
    """Connects process 0 with every other one, once all are there; a first message waits half a minute, and no longer."""
    if several():
        in_turn(_connect)


def _connect() -> None:
    peers.meet()
    meet()
    for other in range(1, jax.process_count()):
        _moved(0, other, np.zeros(_SHORTEST, np.uint8))
        _moved(other, 0, np.zeros(_SHORTEST, np.uint8))


class Stream:
    """Bytes on their way from one process to another. Both pass the same arrays, in the same order.

    Args:
        source: the process that has them.
        target: the other one.
        size: how many bytes there are in all.
    """

    def __init__(self, source: int, target: int, size: int) -> None:
        self._source, self._target, self._left = source, target, size
        self._sends = jax.process_index() == source
        self._piece = np.empty(0, np.uint8)
        self._at = 0
        self._begin()

    def send(self, array: np.ndarray) -> None:
        """Sends an array; in the source."""
        self._pass(np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    def receive(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Waits for the array that is sent; in the target."""
        found = np.empty(shape, dtype)
        self._pass(found.reshape(-1).view(np.uint8))
        return found

    def _begin(self) -> None:
        """A new piece: empty in the source, full in the target."""
        size = min(PIECE, self._left)
        self._left -= size
        self._at = 0
        self._piece = np.empty(size, np.uint8)
        if size and not self._sends:
            self._move()

    def _move(self) -> None:
        """Moves a piece."""
        size = self._piece.size
        padded = np.zeros(max(_SHORTEST, 1 << (size - 1).bit_length()), np.uint8)
        if self._sends:
            padded[:size] = self._piece
        moved = _moved(self._source, self._target, padded)
        if not self._sends:
            self._piece[:] = moved[:size]

    def _pass(self, data: np.ndarray) -> None:
        done = 0
        while done < data.size:
            size = min(data.size - done, self._piece.size - self._at)
            outside = data[done : done + size]
            inside = self._piece[self._at : self._at + size]
            if self._sends:
                inside[:] = outside
            else:
                outside[:] = inside
            done += size
            self._at += size
            if self._at == self._piece.size:
                if self._sends:
                    self._move()
                self._begin()


def _moved(source: int, target: int, data: np.ndarray) -> np.ndarray:
    """Moves bytes between two processes and waits; what is there then, in the target the source's."""
    if jax.process_index() not in (source, target):
        return data
    own = jax.device_put(data, voices()[jax.process_index()])
    return np.asarray(crossed(voices()[source], voices()[target], (own,))[0])
