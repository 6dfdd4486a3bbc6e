"""What the engine runs: tasks that hold lanes of devices for some seconds, and what each waits for.

Terms.
    A **device** here is a pipeline stage: its data-parallel ranks do the same, so one stands for all. Each device has five
    **ports**: compute, send, receive (the two directions of its link), memory and host. A task *holds* some ports, all of
    them from its start to its end; a task that holds none is a pure delay. The tasks of a port run one after the other,
    by their ranks, or in the order in which they were added.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable

import numpy as np


class Port(enum.IntEnum):
    """What of a device a task holds."""

    COMPUTE = 0
    SEND = 1
    RECEIVE = 2
    MEMORY = 3
    HOST = 4

    @property
    def lane(self) -> str:
        """The lane of a `Machine` that the port belongs to."""
        return _LANES[self]


_LANES = ("compute", "link", "link", "memory", "host")
PORTS = len(Port)

Hold = tuple[int, Port]
"""A device and one of its ports."""


@dataclasses.dataclass(slots=True)
class Tasks:
    """A growing list of tasks, field by field.

    Attributes:
        seconds: how long each takes when nothing slows it down.
        ports: numbers of the ports that each holds: device × PORTS + port.
        after: tasks that must have ended before each may start.
        behind: tasks that must have started before each may start.
        shares: of a core, that tasks use while they run (see `ratrain_jax.simulation.sharing`); all of it unless given.
        rank: places in the queues of ports, one number a task, where they are not those of addition.

    Example:
        >>> tasks = Tasks()
        >>> first = tasks.add(1.0, [(0, Port.COMPUTE)])
        >>> tasks.add(2.0, [(0, Port.COMPUTE)], after=[first])
        1
    """

    seconds: list[float] = dataclasses.field(default_factory=list)
    ports: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    after: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    behind: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    shares: dict[int, float] = dataclasses.field(default_factory=dict)
    rank: np.ndarray | None = None

    def add(
        self,
        seconds: float,
        holds: Iterable[Hold] = (),
        after: Iterable[int] = (),
        behind: Iterable[int] = (),
    ) -> int:
        """Adds a task and gives its number.

        Args:
            seconds: how long it takes.
            holds: the ports that it holds.
            after: tasks that must have ended before it starts; they may be added later.
            behind: tasks that must have started before it starts.
        """
        number = self.add_numbered(seconds, port_numbers(holds), tuple(after))
        started = tuple(behind)
        if started:
            self.behind[number] = started
        return number

    def add_numbered(
        self, seconds: float, ports: tuple[int, ...], after: tuple[int, ...] = ()
    ) -> int:
        """Adds a task as `add` does, by the numbers of its ports; for those who add very many.

        Args:
            seconds: how long it takes.
            ports: the ports that it holds, from `port_numbers`.
            after: tasks that must have ended before it starts.
        """
        self.seconds.append(seconds)
        self.ports.append(ports)
        self.after.append(after)
        return len(self.seconds) - 1

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return 1 + max((port // PORTS for held in self.ports for port in held), default=-1)


def port_numbers(holds: Iterable[Hold]) -> tuple[int, ...]:
    """The numbers by which `Tasks` knows ports."""
    return tuple(device * PORTS + port for device, port in holds)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Run:
    """When each task ran.

    Attributes:
        start: seconds, one a task.
        end: seconds, one a task.
        depth: of tasks that start at the same moment, those that wait for others have more.
    """

    start: np.ndarray
    end: np.ndarray
    depth: np.ndarray

    def __repr__(self) -> str:
        return f"<Run of {len(self.start)} tasks: {self.last:.4g} s>"

    @property
    def rank(self) -> np.ndarray:
        """Places of the tasks, by start; none comes before one that it waited for."""
        rank = np.empty(len(self.start), np.int64)
        rank[np.lexsort((self.depth, self.start))] = np.arange(len(self.start))
        return rank

    @property
    def last(self) -> float:
        """When the last task ends."""
        return float(self.end.max()) if self.end.size else 0.0
