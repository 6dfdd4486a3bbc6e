"""What let each task start when it did, and the critical path that follows from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ratrain_jax.simulation.tasks import Run, Tasks
from ratrain_jax.simulation.waiting import edges


class Causes:
    """Finds what a task waited for last.

    Args:
        tasks: the tasks.
        run: when they ran.
        prefer: of several tasks that let another start at the same moment, the one of least `prefer` is its cause.
    """

    def __init__(self, tasks: Tasks, run: Run, prefer: Callable[[int], int]) -> None:
        self._run, self._prefer = run, prefer
        waits = edges(tasks)
        order = np.argsort(waits.target, kind="stable")
        self._source, self._ended = waits.source[order], waits.ended[order]
        self._first = np.searchsorted(waits.target[order], np.arange(len(tasks) + 1))

    def of(self, number: int) -> int | None:
        """The task at whose end (or start, see `Tasks.behind`) a task started; None if at none's."""
        run, begun = self._run, self._run.start[number]
        if begun == 0:
            return None
        found = [
            int(self._source[edge])
            for edge in range(self._first[number], self._first[number + 1])
            if (run.end if self._ended[edge] else run.start)[self._source[edge]] == begun
        ]
        return min(found, key=lambda n: (self._prefer(n), n), default=None)

    def chain(self, number: int) -> Iterator[int]:
        """A task, the cause of its start, the cause of that one's, and so on."""
        at: int | None = number
        while at is not None:
            yield at
            at = self.of(at)
