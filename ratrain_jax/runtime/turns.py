"""The one thread that launches everything through which processes talk to each other.

XLA runs what one thread launches on a device in that order. Two programs over the same devices of several processes use the
same connection, and must come on it in the same order everywhere; so all of a process, those of all its steps, and what is
exchanged between steps, are launched from here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from ratrain_jax.runtime.processes import several
from ratrain_jax.runtime.workers import Workers

T = TypeVar("T")

_shared: list[Workers] = []
_lock = threading.Lock()
_here = threading.local()


def link_workers() -> Workers:
    """The thread for a step's link list: one of its own, or in a run of several processes the one for all."""
    if not several():
        return Workers(1, "ratrain-link")
    with _lock:
        if not _shared:
            _shared.append(Workers(1, "ratrain-link"))
            _shared[0].submit(_mark).wait()
        return _shared[0]


def _mark() -> None:
    _here.is_link = True


def in_turn(call: Callable[[], T]) -> T:
    """Makes a call that talks to other processes, behind whatever was launched before; waits for what it gives."""
    if not several() or getattr(_here, "is_link", False):
        return call()
    return link_workers().submit(call).result()
