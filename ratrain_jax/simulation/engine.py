"""Runs tasks: finds when each starts and ends.

Where no two lanes of a device slow each other down, a task starts when the last of what it waits for has ended: starts
are longest paths, found front by front. Elsewhere `contention` steps from event to event.
"""

from __future__ import annotations

import itertools

import numpy as np

from ratrain_jax.kernels import Machine
from ratrain_jax.simulation.contention import run_contended
from ratrain_jax.simulation.tasks import PORTS, Port, Run, Tasks
from ratrain_jax.simulation.waiting import CycleError, Edges, edges, find_cycle


def run(tasks: Tasks, machine: Machine | None = None) -> Run:
    """Runs tasks to their end.

    Args:
        tasks: the tasks.
        machine: says which lanes of a device may work at once, and how much they slow each other down; unless given,
            all may and none does.

    Returns:
        When each task ran.

    Raises:
        CycleError: some tasks wait for each other.

    Example:
        >>> from ratrain_jax.simulation.tasks import Port
        >>> tasks = Tasks()
        >>> first = tasks.add(1.0, [(0, Port.COMPUTE)])
        >>> second = tasks.add(2.0, [(0, Port.SEND), (1, Port.RECEIVE)], after=[first])
        >>> run(tasks).end.tolist()
        [1.0, 3.0]
    """
    if machine is None or independent(tasks, machine):
        return longest_paths(edges(tasks), np.array(tasks.seconds, float))
    return run_contended(tasks, machine)


def independent(tasks: Tasks, machine: Machine) -> bool:
    """Whether no two lanes that are in use keep each other waiting or slow each other down."""
    used = set(itertools.chain.from_iterable(tasks.ports))
    lanes = {Port(port % PORTS).lane for port in used}
    return all(
        machine.overlap(one, other) == (1.0, 1.0)
        for one, other in itertools.combinations(sorted(lanes), 2)
    )


def longest_paths(waits: Edges, seconds: np.ndarray, floor: np.ndarray | None = None) -> Run:
    """Runs tasks that do not slow each other down.

    Args:
        waits: which task waits for which.
        seconds: how long each takes.
        floor: when each may start at the earliest; 0 unless given.

    Raises:
        CycleError: some tasks wait for each other.
    """
    count = len(seconds)
    first = waits.by_source(count)
    degree = np.diff(first)
    lasts = np.where(waits.ended, seconds[waits.source], 0.0)
    waiting = np.bincount(waits.target, minlength=count)
    start = np.zeros(count) if floor is None else floor.copy()
    depth, level = np.zeros(count, np.int64), 0
    front = np.flatnonzero(waiting == 0)
    while front.size:
        depth[front] = level
        level += 1
        many = degree[front]
        total = int(many.sum())
        if total == 0:
            break
        # The edges of all sources of the front, one run after the other.
        offsets = np.repeat(first[front] - (np.cumsum(many) - many), many)
        which = offsets + np.arange(total)
        target = waits.target[which]
        np.maximum.at(start, target, np.repeat(start[front], many) + lasts[which])
        np.subtract.at(waiting, target, 1)
        front = np.unique(target[waiting[target] == 0])
    stuck = np.flatnonzero(waiting)
    if stuck.size:
        raise CycleError(find_cycle(waits, stuck))
    return Run(start, start + seconds, depth)
