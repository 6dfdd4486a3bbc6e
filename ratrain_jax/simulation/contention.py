"""Runs tasks on devices whose lanes slow each other down, or take turns: from event to event.

Terms.
    While tasks of two lanes of a device run at once, each proceeds at 1 / *slowdown* of its speed; the slowdowns by
    several others multiply, and a task on two devices goes at the pace of the slower. The two directions of a link do not
    disturb each other. Lanes that may not work at once take turns: of the tasks that could start, the one that
    was ready first goes first, then the one that was added first.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

import numpy as np

from ratrain_jax.kernels import Machine
from ratrain_jax.simulation.tasks import PORTS, Port, Run, Tasks
from ratrain_jax.simulation.waiting import CycleError, edges, find_cycle


def run_contended(tasks: Tasks, machine: Machine) -> Run:
    """Runs tasks to their end; see `ratrain_jax.simulation.engine.run`.

    Args:
        tasks: the tasks.
        machine: its overlaps are heeded.

    Raises:
        CycleError: some tasks wait for each other.
    """
    return _Contention(tasks, machine).run()


class _Contention:
    """The state of a run.

    Attributes:
        left: seconds of work left in each task, at full speed.
        active: the running tasks of each device.
        blocked: ready tasks that may not start yet, with the moment when each became ready.
    """

    def __init__(self, tasks: Tasks, machine: Machine) -> None:
        self.tasks, count = tasks, len(tasks)
        self.slow, self.turns = _pairs(machine)
        self.start, self.end = np.zeros(count), np.full(count, np.nan)
        self.depth = np.zeros(count, np.int64)
        self.begun = 0
        self.left = list(tasks.seconds)
        self.seen = [0.0] * count  # when `left` was true
        self.pace = [1.0] * count
        self.version = [0] * count
        self.active: dict[int, set[int]] = {d: set() for d in range(tasks.devices)}
        self.blocked: list[tuple[float, int]] = []
        self.events: list[tuple[float, int, int]] = []
        self.devices = [{port // PORTS for port in held} for held in tasks.ports]
        self._link_up()

    def _link_up(self) -> None:
        self.waits = edges(self.tasks)
        self.first = self.waits.by_source(len(self.tasks))
        self.waiting = np.bincount(self.waits.target, minlength=len(self.tasks)).tolist()

    def run(self) -> Run:
        for number, count in enumerate(self.waiting):
            if count == 0:
                heapq.heappush(self.blocked, (0.0, number))
        self._start_what_can(0.0)
        finished = 0
        while self.events:
            now, number, version = heapq.heappop(self.events)
            if version != self.version[number]:
                continue
            finished += 1
            self._finish(number, now)
            self._start_what_can(now)
        if finished < len(self.tasks):
            raise CycleError(find_cycle(self.waits, np.flatnonzero(np.isnan(self.end))))
        return Run(self.start, self.end, self.depth)

    def _finish(self, number: int, now: float) -> None:
        self.end[number] = now
        self.version[number] += 1
        for device in self.devices[number]:
            self.active[device].discard(number)
        self._repace(self.devices[number], now)
        self._release(number, True, now)

    def _release(self, source: int, ended: bool, now: float) -> None:
        for edge in range(self.first[source], self.first[source + 1]):
            if self.waits.ended[edge] == ended:
                follower = int(self.waits.target[edge])
                self.waiting[follower] -= 1
                if self.waiting[follower] == 0:
                    heapq.heappush(self.blocked, (now, follower))

    def _start_what_can(self, now: float) -> None:
        held_back = []
        while self.blocked:
            since, number = heapq.heappop(self.blocked)
            rival = next(self._rivals(number), None)
            if rival is not None:
                held_back.append((since, number))
                continue
            self._begin(number, now)
        self.blocked = held_back
        heapq.heapify(self.blocked)

    def _rivals(self, number: int) -> Iterator[int]:
        """Running tasks that a task must give way to."""
        for port in self.tasks.ports[number]:
            device, mine = divmod(port, PORTS)
            for other in self.active[device]:
                for theirs in self.tasks.ports[other]:
                    if theirs // PORTS == device and self.turns[mine][theirs % PORTS]:
                        yield other

    def _begin(self, number: int, now: float) -> None:
        self.start[number] = self.seen[number] = now
        self.depth[number] = self.begun
        self.begun += 1
        for device in self.devices[number]:
            self.active[device].add(number)
        self._repace(self.devices[number] or {-1}, now, number)
        self._release(number, False, now)

    def _repace(self, devices: set[int], now: float, fresh: int | None = None) -> None:
        """Sets the speed of all tasks that run on some devices."""
        touched = set().union(*(self.active.get(device, ()) for device in devices))
        for number in touched | ({fresh} if fresh is not None else set()):
            pace = max((self._slowdown(number, d) for d in self.devices[number]), default=1.0)
            if pace == self.pace[number] and number != fresh:
                continue
            self.left[number] -= (now - self.seen[number]) / self.pace[number]
            self.seen[number], self.pace[number] = now, pace
            self.version[number] += 1
            done = now + max(self.left[number], 0.0) * pace
            heapq.heappush(self.events, (done, number, self.version[number]))

    def _slowdown(self, number: int, device: int) -> float:
        factor = 1.0
        mine = [p % PORTS for p in self.tasks.ports[number] if p // PORTS == device]
        for other in self.active[device]:
            if other != number:
                theirs = [p % PORTS for p in self.tasks.ports[other] if p // PORTS == device]
                factor *= max(self.slow[a][b] for a, b in itertools.product(mine, theirs))
        return factor


def _pairs(machine: Machine) -> tuple[list[list[float]], list[list[bool]]]:
    """For each pair of ports of a device: how much the first is slowed down, and whether they take turns."""
    slow = [[1.0] * PORTS for _ in Port]
    turns = [[False] * PORTS for _ in Port]
    for one, other in itertools.product(Port, Port):
        if one.lane == other.lane:
            continue
        overlap = machine.overlap(one.lane, other.lane)
        if overlap is None:
            turns[one][other] = True
        else:
            slow[one][other] = overlap[0]
    return slow, turns
