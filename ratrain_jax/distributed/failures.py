"""Which process was lost, from what JAX says.

A process learns of another's death in one of two ways. A collective that is under way fails, because its connection is
closed: JAX raises, and says no more than an address. Or the coordinator misses the other's heartbeats: then JAX itself ends
the process, with a message in its log that names the dead one by its number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

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
