"""Runs tasks whose devices share what they run on, such as the cores of one host: from event to event.

Terms.
    While some tasks run at once, each proceeds at 1 / *pace* of its speed; the pace depends on how many they are, each
    counted by its share of a core, whatever they hold. So one clock serves all: it advances at 1 / pace of real time, and on
    it every task takes the seconds that it takes alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from ratrain_jax.simulation.tasks import Run, Tasks
from ratrain_jax.simulation.waiting import CycleError, edges, find_cycle


def run_shared(tasks: Tasks, pace: Callable[[float], float]) -> Run:
    """Runs tasks to their end.

    Args:
        tasks: the tasks.
        pace: by which factor every task takes longer while so many run at once, counted by their shares.

    Returns:
        When each task ran.

    Raises:
        CycleError: some tasks wait for each other.

    Example:
        Two tasks share one core; the first ends after twice its time, and then the second gets the core to itself.

        >>> from ratrain_jax.simulation.tasks import Port
        >>> tasks = Tasks()
        >>> first = tasks.add(1.0, [(0, Port.COMPUTE)])
        >>> second = tasks.add(3.0, [(1, Port.COMPUTE)])
        >>> run_shared(tasks, lambda running: float(running)).end.tolist()
        [2.0, 4.0]
    """
    return _Sharing(tasks, pace).run()


class _Sharing:
    """The state of a run.

    Attributes:
        now: real seconds.
        clock: seconds on the common clock.
        running: the running tasks, by when each ends on the common clock.
        begun: how many tasks have started.
    """

    def __init__(self, tasks: Tasks, pace: Callable[[float], float]) -> None:
        self.seconds, self.shares, self.pace = tasks.seconds, tasks.shares, pace
        self.waits = edges(tasks)
        count = len(tasks)
        self.first = self.waits.by_source(count).tolist()
        self.target, self.ended = self.waits.target.tolist(), self.waits.ended.tolist()
        self.waiting = np.bincount(self.waits.target, minlength=count).tolist()
        self.start, self.end = [0.0] * count, [np.nan] * count
        self.depth, self.begun = [0] * count, 0
        self.now = self.clock = 0.0
        self.running: list[tuple[float, int]] = []

    def run(self) -> Run:
        for number in [n for n, count in enumerate(self.waiting) if count == 0]:
            self._begin(number)
        while self.running:
            pace = self.pace(sum(self.shares.get(task, 1) for _, task in self.running))
            clock, number = heapq.heappop(self.running)
            self.now += (clock - self.clock) * pace
            self.clock = clock
            self.end[number] = self.now
            for follower in self._released(number, True):
                self._begin(follower)
        end = np.array(self.end, float)
        if np.isnan(end).any():
            raise CycleError(find_cycle(self.waits, np.flatnonzero(np.isnan(end))))
        return Run(np.array(self.start, float), end, np.array(self.depth, np.int64))

    def _begin(self, number: int) -> None:
        """Starts a task, and those that waited for nothing but its start."""
        ready = [number]
        while ready:
            task = ready.pop()
            self.start[task], self.depth[task] = self.now, self.begun
            self.begun += 1
            heapq.heappush(self.running, (self.clock + self.seconds[task], task))
            ready += self._released(task, False)

    def _released(self, source: int, ended: bool) -> list[int]:
        """The tasks that wait for nothing more, now that another has ended, or started."""
        found = []
        for edge in range(self.first[source], self.first[source + 1]):
            if self.ended[edge] == ended:
                follower = self.target[edge]
                self.waiting[follower] -= 1
                if self.waiting[follower] == 0:
                    found.append(follower)
        return found
