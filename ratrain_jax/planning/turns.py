"""In which turn a stage's link serves its state work: as programs have it, from when tasks would be ready."""

from __future__ import annotations

import collections
import heapq
import math
from collections.abc import Mapping

import numpy as np

from ratrain_jax.simulation.tasks import Run, Tasks

_SAME = 1 + 1e-12  # sums in another order differ in their last bits


def turns(
    tasks: Tasks, found: Run, syncs: np.ndarray, gathers: Mapping[int, int]
) -> dict[int, float]:
    """When a link would start each of a stage's tasks: gathers while no synchronisation waits, those of first layers first.

    Args:
        tasks: all tasks.
        found: when they ran with the link held by synchronisations alone.
        syncs: those of the stage.
        gathers: the stage's gathers for the next step, by layer.

    Returns:
        The start of each gather, and of each synchronisation that is not over before the first of them is ready.
    """
    if not gathers:
        return {}
    ready = {n: float(found.start[n]) for n in gathers.values()}
    coming = collections.deque(sorted(gathers.items(), key=lambda item: (ready[item[1]], item)))
    now = ready[coming[0][1]]
    late = syncs[found.end[syncs] > now]
    late = late[np.lexsort((found.depth[late], found.start[late]))]
    ready |= dict(zip(late.tolist(), found.start[late].tolist(), strict=True))
    queue = collections.deque(late.tolist())
    opened: list[tuple[int, int]] = []
    starts: dict[int, float] = {}
    now = min([now, *(ready[n] for n in queue)])
    while queue or coming or opened:
        sync = ready[queue[0]] if queue else math.inf
        # What a synchronisation that waits for the window waits for was ready before it.
        while coming and ready[coming[0][1]] <= min(now * _SAME, sync):
            heapq.heappush(opened, coming.popleft())
        room = queue and all(n in starts for n in tasks.behind.get(queue[0], ()))
        if room and sync <= now * _SAME:
            task = queue.popleft()
        elif opened:
            _, task = heapq.heappop(opened)
        else:
            now = min([sync, *(ready[n] for _, n in list(coming)[:1])])
            continue
        starts[task] = now
        now += tasks.seconds[task]
    return starts
