"""Puts the ops of a step in order: a list schedule over lanes.

Terms.
    A **task** is an op with its duration on the described machine. It is *ready* when the values it reads exist and the tasks it
    comes `after` have ended. Each stage has a compute and a link lane; a lane takes its ready task of lowest rank as
    soon as it is idle, an op between stages needs the link lanes of all of them.

    The **window** bounds how far a stage's state tasks run ahead: a layer's chain is in flight from the start of the task
    that opens it to the start of the one that closes it, and no chain opens while the window is full.

Because all lists are cut from one order in which every op stands after what it reads, no two stages can wait for each other.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import defaultdict
from collections.abc import Sequence

from ratrain_jax.lowering.program import Lane, Op


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """An op to be ordered.

    Attributes:
        op: the op.
        seconds: how long it takes.
        rank: lower goes first among ready tasks of a lane.
        after: numbers of tasks that must end before it starts.
        opens: the chain (stage, layer) that it opens in the stage's window, if one.
        closes: the chain that it closes.
        bytes: what the chain holds while in flight.
    """

    op: Op
    seconds: float
    rank: tuple[int, ...]
    after: tuple[int, ...] = ()
    opens: tuple[int, int] | None = None
    closes: tuple[int, int] | None = None
    bytes: int = 0


class _Window:
    """Which chains of each stage are in flight."""

    def __init__(self, layers: int, limit: int | None) -> None:
        self.layers = layers
        self.limit = limit
        self.flying: dict[int, dict[int, int]] = defaultdict(dict)

    def admits(self, task: Task) -> bool:
        if task.opens is None:
            return True
        stage, layer = task.opens
        flying = self.flying[stage]
        if layer in flying or not flying:
            return True
        if len(flying) >= self.layers:
            return False
        return self.limit is None or sum(flying.values()) + task.bytes <= self.limit

    def start(self, task: Task) -> None:
        if task.opens is not None:
            stage, layer = task.opens
            self.flying[stage][layer] = task.bytes
        if task.closes is not None:
            stage, layer = task.closes
            self.flying[stage].pop(layer, None)


def order_tasks(tasks: Sequence[Task], *, window_layers: int, window_bytes: int | None) -> list[Op]:
    """One order of all ops, by the time they start.

    Args:
        tasks: what to order; `after` counts in this list.
        window_layers: chains that may be in flight on a stage.
        window_bytes: the bytes they may hold; one chain alone may hold more.
    """
    waiting, followers = _dependencies(tasks)
    window = _Window(window_layers, window_bytes)
    ready: list[tuple[tuple[int, ...], int]] = []
    for number, count in enumerate(waiting):
        if count == 0:
            heapq.heappush(ready, (tasks[number].rank, number))
    busy: set[tuple[int, Lane]] = set()
    running: list[tuple[float, int]] = []
    order: list[Op] = []
    now = 0.0
    while ready or running:
        held: list[tuple[tuple[int, ...], int]] = []
        while ready:
            entry = heapq.heappop(ready)
            task = tasks[entry[1]]
            lanes = {(stage, task.op.lane) for stage in task.op.stages}
            if lanes & busy or not window.admits(task):
                held.append(entry)
                continue
            window.start(task)
            busy |= lanes
            order.append(task.op)
            heapq.heappush(running, (now + task.seconds, entry[1]))
        ready = held
        heapq.heapify(ready)
        now = running[0][0]
        while running and running[0][0] <= now:
            _, number = heapq.heappop(running)
            op = tasks[number].op
            busy -= {(stage, op.lane) for stage in op.stages}
            for follower in followers[number]:
                waiting[follower] -= 1
                if waiting[follower] == 0:
                    heapq.heappush(ready, (tasks[follower].rank, follower))
    return order


def _dependencies(tasks: Sequence[Task]) -> tuple[list[int], list[list[int]]]:
    """How many tasks each one waits for, and which wait for it."""
    writer = {value: number for number, task in enumerate(tasks) for value in task.op.writes}
    followers: list[list[int]] = [[] for _ in tasks]
    waiting = [0] * len(tasks)
    for number, task in enumerate(tasks):
        sources = {writer[v] for v in (*task.op.reads, *task.op.waits) if v in writer}
        sources.update(task.after)
        waiting[number] = len(sources)
        for source in sources:
            followers[source].append(number)
    return waiting, followers
