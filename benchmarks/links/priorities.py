"""Keeps the threads of a process that has one core from holding each other up.

Gloo moves bytes with a lock for each connection. Its receiving thread only tries to take it, and polls until it can. Where it
shares a core with the thread that has the lock, it polls until the scheduler's next tick, 3.5 ms for every all-gather;
so has a thread that computes while the owner of the lock waits for the core. Hence, in each process:

* the receiving thread runs on the other process's core: both cores bear the same;
* XLA's compute threads are less urgent than all others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

COMPUTE = "tf_XLAEigen"
"""The name of XLA's compute threads."""
NICER = 10
"""How much nicer they are than the others."""
EPOLL = ("232", "0x40", "0xa")
"""The system call in which Gloo's receiving thread waits on x86-64: its number, how many events it takes and for how many ms."""


def arrange(core: int) -> tuple[int, int]:
    """Arranges this process's threads, once JAX has computed something.

    Args:
        core: where the receiving threads are to run.

    Returns:
        How many receiving and how many compute threads there are.
    """
    receiving = _receiving()
    for thread in receiving:
        os.sched_setaffinity(thread, {core})
    compute = [n for n, task in _tasks() if (task / "comm").read_text().startswith(COMPUTE)]
    for thread in compute:
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, 0) + NICER)
    return len(receiving), len(compute)


def _tasks() -> Iterator[tuple[int, Path]]:
    return ((int(task.name), task) for task in Path("/proc/self/task").iterdir())


def _receiving() -> set[int]:
    """The threads that wait as Gloo's do; looked for often, as they wait for a few milliseconds only."""
    found = set()
    for _ in range(20):
        for thread, task in _tasks():
            call = (task / "syscall").read_text().split()
            if len(call) > 4 and (call[0], call[3], call[4]) == EPOLL:
                found.add(thread)
        time.sleep(0.005)
    return found
