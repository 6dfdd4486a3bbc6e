"""What tasks wait for: as edges between them, and as cycles where they wait for each other."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence

import numpy as np

from ratrain_jax.errors import SimulationError
from ratrain_jax.simulation.tasks import Tasks


@dataclasses.dataclass(frozen=True, slots=True)
class Edges:
    """Which task waits for which.

    Attributes:
        source: the task waited for, one an edge, ascending.
        target: the task that waits.
        ended: whether the source must have ended, rather than only started.
    """

    source: np.ndarray
    target: np.ndarray
    ended: np.ndarray

    def by_source(self, tasks: int) -> np.ndarray:
        """Where the edges of each source begin, and of the last end."""
        return np.searchsorted(self.source, np.arange(tasks + 1))


def edges(tasks: Tasks) -> Edges:
    """All waiting: for inputs, for the task before in a port, for the start of others."""
    parts = [
        (*_flat(tasks.after), True),
        (*_port_neighbours(tasks), True),
        (*_flat(tasks.behind.values(), list(tasks.behind)), False),
    ]
    source = np.concatenate([part[0] for part in parts])
    target = np.concatenate([part[1] for part in parts])
    ended = np.concatenate([np.full(len(part[0]), part[2]) for part in parts])
    order = np.argsort(source, kind="stable")
    return Edges(source[order], target[order], ended[order])


def _flat(
    sources: Collection[Collection[int]], targets: Sequence[int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """All sources in a row, and the target of each: its place in the list unless targets are given."""
    counts = np.fromiter(map(len, sources), np.int64, len(sources))
    flat = np.fromiter(itertools.chain.from_iterable(sources), np.int64, int(counts.sum()))
    numbers = np.arange(len(counts)) if targets is None else np.array(targets, np.int64)
    return flat, np.repeat(numbers, counts)


def queues(tasks: Tasks, count: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Ports, ascending, and the tasks that hold each, in the order of its queue: one number each for every hold.

    Args:
        tasks: the tasks.
        count: how many of them, from the first on; all unless given.
    """
    port, task = _flat(tasks.ports[:count])
    rank = task if tasks.rank is None else tasks.rank[task]
    order = np.lexsort((task, rank, port))
    return port[order], task[order]


def _port_neighbours(tasks: Tasks) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of tasks of which one is right behind the other in the queue of a port."""
    port, task = queues(tasks)
    same = port[1:] == port[:-1]
    return task[:-1][same], task[1:][same]


class CycleError(SimulationError):
    """Tasks that wait for each other.

    Attributes:
        cycle: their numbers; each waits for the next, the last for the first.
    """

    def __init__(self, cycle: list[int]) -> None:
        self.cycle = cycle
        path = " -> ".join(map(str, (*cycle, cycle[0])))
        super().__init__(f"tasks wait for each other, so none of them can start: {path}.")


def find_cycle(waits: Edges, stuck: np.ndarray) -> list[int]:
    """Some tasks of which each waits for the next and the last for the first.

    Args:
        waits: who waits for whom.
        stuck: numbers of tasks that never got to start.
    """
    # Each stuck task waits for a stuck one, so following these must come round.
    inside = np.isin(waits.source, stuck) & np.isin(waits.target, stuck)
    waits_for = dict(zip(waits.target[inside].tolist(), waits.source[inside].tolist(), strict=True))
    path: dict[int, None] = {}
    number = int(stuck[0])
    while number not in path:
        path[number] = None
        number = waits_for[number]
    walked = list(path)
    return walked[walked.index(number) :]
