"""What let each task start when it did, and the critical path that follows from it.

Terms.
    A cause may be a task of the step before, where a step is one of many: it is given as the task's number in its own step,
    and by how many **steps back** that one is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ratrain_jax.simulation.steady import Carried
from ratrain_jax.simulation.tasks import Run, Tasks
from ratrain_jax.simulation.waiting import edges


class Causes:
    """Finds what a task waited for last.

    Args:
        tasks: the tasks.
        run: when they ran.
        prefer: of several tasks that let another start at the same moment, the one of least `prefer` is its cause.
        carried: what they waited for of the step before; nothing unless given.
    """

    def __init__(
        self,
        tasks: Tasks,
        run: Run,
        prefer: Callable[[int], int],
        carried: Carried | None = None,
    ) -> None:
        self._run, self._prefer = run, prefer
        self._period = carried.period if carried is not None else 0.0
        # Of each task, what let it start of the step before.
        self._before: dict[int, list[int]] = {}
        if carried is not None:
            for at in np.flatnonzero(run.start[carried.target] == carried.moment):
                self._before.setdefault(int(carried.target[at]), []).append(int(carried.source[at]))
        waits = edges(tasks)
        order = np.argsort(waits.target, kind="stable")
        self._source, self._ended = waits.source[order], waits.ended[order]
        self._first = np.searchsorted(waits.target[order], np.arange(len(tasks) + 1))

    def of(self, number: int) -> tuple[int, int] | None:
        """The task at whose end (or start, see `Tasks.behind`) a task started, and its steps back; None if at none's."""
        run, begun = self._run, self._run.start[number]
        if begun == 0 and number not in self._before:
            return None
        found = [
            (int(self._source[edge]), 0)
            for edge in range(self._first[number], self._first[number + 1])
            if (run.end if self._ended[edge] else run.start)[self._source[edge]] == begun
        ]
        found += [(source, 1) for source in self._before.get(number, ())]
        return min(found, key=lambda cause: (self._prefer(cause[0]), *cause), default=None)

    def chain(self, number: int) -> Iterator[tuple[int, int]]:
        """A task, the cause of its start, the cause of that one's, and so on, each with its steps back."""
        at: tuple[int, int] | None = (number, 0)
        while at is not None:
            yield at
            found = self.of(at[0])
            at = None if found is None else (found[0], at[1] + found[1])

    def start(self, cause: tuple[int, int]) -> float:
        """When a task, so many steps back, started."""
        number, back = cause
        return float(self._run.start[number]) - back * self._period
