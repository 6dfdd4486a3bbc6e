"""The thread that launches a step's link list, and whatever must stand behind it.

XLA runs what one thread launches on a device in that order. Two programs over the same devices of several processes use the
same connection, and must come on it in the same order everywhere; so all of a process, those of all its steps, and what is
exchanged between steps, are launched from one thread.
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
        return _marked()
    with _lock:
        if not _shared:
            _shared.append(_marked())
        return _shared[0]


def _marked() -> Workers:
    made = Workers(1, "ratrain-link")
    made.submit(_mark)
    return made


def _mark() -> None:
    _here.is_link = True


def in_turn(call: Callable[[], T]) -> T:
    """Makes a call that talks to other processes, behind whatever was launched before; waits for what it gives."""
    return behind(link_workers(), call) if several() else call()


def behind(link: Workers, call: Callable[[], T]) -> T:
    """Makes a call in a link thread, behind whatever was launched there before; waits for what it gives."""
    return call() if getattr(_here, "is_link", False) else link.call(call)
