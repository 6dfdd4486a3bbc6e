"""Which process was lost, from what JAX says.

A process learns of another's death in one of two ways. A collective that is under way fails, because its connection is
closed: JAX raises, and says no more than an address; `named` finds out whose. Or the coordinator misses the other's
heartbeats: then JAX itself ends the process, with a message in its log that names the dead one by its number, which
`explained` reads for `ratrain launch`.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Iterator, Sequence
from typing import Final

from ratrain_jax.distributed import departures, peers
from ratrain_jax.errors import DistributedError

_LOGGER: Final = logging.getLogger("ratrain_jax.distributed")
_LOOK: Final = 1.0
"""Seconds in which a process that closed its connections has really ended."""
_LOST: Final = re.compile(
    r"Gloo .*failed|Connection (?:closed|reset) by peer|Socket closed|coordination.?service|ncclRemoteError|heartbeat",
    re.IGNORECASE,
)
"""What JAX's errors say when another process is gone."""

_heartbeat = 100.0
"""Seconds until the coordinator takes a silent process for dead; JAX's own unless `initialize` said others."""

_RESTART: Final = "Restart all processes; training goes on from the last checkpoint."

_SAID: Final[tuple[tuple[str, str], ...]] = (
    (
        r"Unexpected task registered with task=(?P<id>\d+)",
        "the coordinator knows no process {id}: start all processes with the same number of processes.",
    ),
    (
        r"(?P<id>\d+) unexpectedly tried to connect",
        "two processes have the id {id}, or process {id} was started again while the others ran: give each process an"
        " id of its own, and restart all together.",
    ),
    (
        r"request from a newer incarnation",
        "another process came with the id of this one: give each process an id of its own.",
    ),
    (
        r"unhealthy \(stopped sending heartbeats\):\s*(?P<id>\d+)",
        f"process {{id}} has died or cannot be reached, says JAX's coordinator. {_RESTART}",
    ),
    (
        r"Task (?P<id>\d+) heartbeat timeout",
        f"process {{id}} has died or cannot be reached, says JAX's coordinator. {_RESTART}",
    ),
    (
        r"leader task was preempted/died",
        f"process 0, which holds the coordinator, has died or cannot be reached. {_RESTART}",
    ),
    (
        r"first task at the barrier: (?P<id>\d+)",
        "process {id} ended while the others were still at work: let all processes run the same steps.",
    ),
)
"""What JAX's log says, and what it means."""


def expect(heartbeat: float) -> None:
    """Says how soon the coordinator misses a process.

    Args:
        heartbeat: in seconds.
    """
    global _heartbeat
    _heartbeat = heartbeat


@contextlib.contextmanager
def named() -> Iterator[None]:
    """Turns an error that JAX raises because another process is gone into one that names it.

    Raises:
        DistributedError: instead of JAX's error.
    """
    try:
        yield
    except Exception as error:
        found = lost(error)
        if found is None:
            raise
        raise found from error


def lost(error: BaseException) -> DistributedError | None:
    """The error that names the process whose end was behind an error of JAX; None if none was.

    A process on this machine is looked up, once `peers.meet` was called. Of one on another machine only the coordinator
    knows; this function then waits until JAX itself ends this process, and names the other in its log.

    Args:
        error: what JAX raised.
    """
    import jax

    if isinstance(error, DistributedError) or not _LOST.search(str(error)):
        return None
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return None
    departures.fail()
    gone = _ended_here()
    if not gone:
        _LOGGER.error(
            "the connection to another process is lost; JAX's coordinator names it within %.0f s: %s",
            1.5 * _heartbeat,
            str(error).splitlines()[0],
        )
        time.sleep(2 * _heartbeat)
        return DistributedError(
            f"the connection to another process is lost, and yet all give signs of life: see the other processes' logs,"
            f" and the network. {_RESTART}"
        )
    who = " and ".join(map(str, gone))
    if len(gone) == 1:
        return DistributedError(f"{who} has ended; its own log says why. {_RESTART}")
    return DistributedError(
        f"{who} have ended; the log of the one that ended first says why. {_RESTART}"
    )


def _ended_here() -> list[peers.Peer]:
    """The processes on this machine that have ended; a connection is closed a moment before."""
    until = time.monotonic() + _LOOK
    while not (gone := peers.ended()) and time.monotonic() < until:
        time.sleep(0.02)
    return gone


def explained(log: Sequence[str]) -> str | None:
    """What JAX's log says of the end of a process, in a sentence.

    Args:
        log: its last lines.

    Examples:
        >>> explained(["The first task at the barrier: 1. Some timed out task names:"])
        'process 1 ended while the others were still at work: let all processes run the same steps.'
    """
    text = "\n".join(log)
    for pattern, meaning in _SAID:
        found = re.search(pattern, text)
        if found:
            return meaning.format(**found.groupdict())
    return None
