"""Tasks of a whole step, state work included, from the seconds of stages and layers.

What the program of the same configuration would do, without lowering it: forwards, recoveries and backwards in the order
of the schedule; the backward of a microbatch whose gradients are synchronised goes layer by layer; then synchronisation,
update and gathering of each layer, and the first forward of the next step.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

import numpy as np

from ratrain_jax.lowering.blocks import block_ends
from ratrain_jax.lowering.schedules import Slot, compute_order, in_order_of_data
from ratrain_jax.planning.splits import Split
from ratrain_jax.planning.stage_costs import StageCosts
from ratrain_jax.planning.turns import turns
from ratrain_jax.simulation.breakdown import pacing_stage
from ratrain_jax.simulation.engine import run
from ratrain_jax.simulation.steady import RepeatedTasks, settle
from ratrain_jax.simulation.tasks import Port, Run, Tasks, port_numbers


@dataclasses.dataclass(frozen=True, slots=True)
class StepSeconds:
    """A simulated step.

    Attributes:
        step: seconds from step to step.
        body: seconds from the pacing stage's first forward to the end of its last backward.
        stage: the pacing stage.
    """

    step: float
    body: float
    stage: int

    @property
    def tail(self) -> float:
        """The rest of the step."""
        return self.step - self.body


def step_seconds(costs: StageCosts, split: Split) -> StepSeconds:
    """Simulates the step of a split, as it is when steps follow each other.

    Args:
        costs: of the layers, under a configuration whose schedule runs.
        split: the layers over stages.
    """
    built = _Step(costs, split)
    built.compute()
    built.finish()
    steps = len(built.tasks)
    entered = built.enter_again()
    tasks = built.tasks
    # State work takes a lane in the order in which it would be ready were lanes free, gathers for the next step while no
    # synchronisation waits; transfers between stages go before what is not under way when they are ready. What is of the
    # next step goes behind all of this one.
    for holds in built.phases():
        tasks.rank = built.in_turn(run(tasks), holds).rank
        tasks.rank[steps:] += len(tasks)
        for number, ports in holds.items():
            tasks.ports[number] = ports
    made = RepeatedTasks(tasks, steps, len(tasks), tuple(entered), tuple(built.handed()))
    found, _ = settle(made, costs.machine)
    ends = [float(found.end[numbers[-1]]) for numbers in built.backwards]
    stage = pacing_stage(entered, found, ends)
    first, again = (float(found.start[n]) for n in entered[stage])
    return StepSeconds(again - first, ends[stage] - first, stage)


class _Step:
    """Adds the tasks of a step."""

    def __init__(self, costs: StageCosts, split: Split) -> None:
        self.costs, self.split, self.c = costs, split, costs.configuration
        self.tasks = Tasks()
        # By task, the ports that it will hold; which in what order is known only when all would be ready.
        self.collectives: dict[int, tuple[int, ...]] = {}
        self.ahead: dict[int, tuple[int, ...]] = {}
        self.transfers: dict[int, tuple[int, ...]] = {}
        stages = range(self.c.stages)
        self._computes = [port_numbers([(s, Port.COMPUTE)]) for s in stages]
        self._links = [port_numbers([(s, Port.SEND), (s, Port.RECEIVE)]) for s in stages]
        self._hops = {
            (source, target): port_numbers([(source, Port.SEND), (target, Port.RECEIVE)])
            for source in stages
            for target in (source - 1, source + 1)
        }
        self.arrived: dict[tuple[str, int, int], int] = {}
        self.backwards: list[list[int]] = [[] for _ in split.stages]
        self.syncs: dict[int, int] = {}
        self.updated: dict[int, int] = {}
        # Of each layer that has a view, what gathers it at the step's start, and at its end.
        self.there: dict[int, int] = {}
        self.gathered: dict[int, int] = {}
        self.first_forward: dict[int, int] = {}
        self.reads: dict[int, int] = {}

    def compute(self) -> None:
        """Forwards and backwards of all stages, neighbours' halves first."""
        if not self.c.prefetches:
            for number in range(self.c.stages):
                self.there.update(self._gathers(number, {n: [] for n in self._layers(number)}))
        slots = compute_order(self.c.schedule, self.c.stages, self.c.microbatches)
        for s, (kind, i) in in_order_of_data(slots, self._ready):
            self._forward(s, i) if kind == "F" else self._backward(s, i)

    def _ready(self, s: int, slot: Slot) -> bool:
        kind, i = slot
        return s == (0 if kind == "F" else self.c.stages - 1) or (kind, s, i) in self.arrived

    def _layers(self, s: int) -> range:
        return range(*self.split.stages[s].layers)

    def _compute(self, s: int, seconds: float, after: list[int]) -> int:
        return self.tasks.add_numbered(seconds, self._computes[s], tuple(after))

    def _transfer(self, seconds: float, after: list[int], source: int, target: int) -> int:
        number = self.tasks.add_numbered(seconds, (), tuple(after))
        self.transfers[number] = self._hops[source, target]
        return number

    def _collective(self, seconds: float, after: list[int], s: int, *, ahead: bool = False) -> int:
        number = self.tasks.add_numbered(seconds, (), tuple(after))
        (self.ahead if ahead else self.collectives)[number] = self._links[s]
        return number

    def phases(self) -> list[dict[int, tuple[int, ...]]]:
        """The ports that tasks will hold, in the order in which their turns are found."""
        if self.collectives and self.c.prefetches:
            return [self.collectives, self.ahead, self.transfers]
        return [{**self.collectives, **self.ahead}, self.transfers]

    def in_turn(self, found: Run, holds: dict[int, tuple[int, ...]]) -> Run:
        """A run whose starts are the places of tasks in queues, `holds` among them."""
        if holds is not self.ahead:
            return found
        start, syncs = found.start.copy(), {ports: [] for ports in self._links}
        for number, ports in self.collectives.items():
            syncs[ports].append(number)
        for s, ports in enumerate(self._links):
            mine = np.array(syncs[ports], np.int64)
            gathers = {n: self.gathered[n] for n in self._layers(s) if n in self.gathered}
            for number, at in turns(self.tasks, found, mine, gathers).items():
                start[number] = at
        return dataclasses.replace(found, start=start)

    def _came(self, kind: str, s: int, i: int) -> list[int]:
        return [self.arrived[kind, s, i]] if (kind, s, i) in self.arrived else []

    def _send(self, kind: str, s: int, to: int, i: int, after: int) -> None:
        if 0 <= to < self.c.stages:
            cut = self.split.stages[min(s, to)].layers[1] - 1
            self.arrived[kind, to, i] = self._transfer(self.costs.sends[cut], [after], s, to)

    def _forward(self, s: int, i: int) -> None:
        came = self._came("F", s, i)
        if i:
            task = self._compute(s, self.split.stages[s].forward, came)
        else:
            task, read = self._first_forward(s, came, self.there)
            self.first_forward[s] = min(read.values())
            self.reads.update(read)
        self._send("F", s, s + 1, i, task)

    def _first_forward(
        self, s: int, came: list[int], views: dict[int, int]
    ) -> tuple[int, dict[int, int]]:
        """The last task of a stage's first forward, and the one that first reads each layer's view.

        It goes block by block, each when its views are there; without prefetch the first waits for all.
        """
        first, end = self.split.stages[s].layers
        task, reads = -1, dict[int, int]()
        for start, stop in itertools.pairwise((0, *block_ends(end - first))):
            blocks = (start, stop) if self.c.prefetches or start else (0, end - first)
            read = range(first + blocks[0], first + blocks[1])
            seconds = self.costs.forward[first + stop] - self.costs.forward[first + start]
            seconds += self.costs.machine.launch_seconds
            task = self._compute(s, seconds, [*came, *(views[n] for n in read if n in views)])
            for n in read:
                reads.setdefault(n, task)
            came = []
        return task, reads

    def _backward(self, s: int, i: int) -> None:
        stage, came = self.split.stages[s], self._came("B", s, i)
        if stage.recovered:
            self._compute(s, stage.recover, came if self.c.recovery == "backward" else [])
        synced = self.c.data_parallel > 1 and (self.c.zero == 2 or i == self.c.microbatches - 1)
        if synced:
            task, waiting = self._backward_by_layer(s, came)
        else:
            task, waiting = self._compute(s, stage.backward, came), []
        self.backwards[s].append(task)
        # Added first, so that it goes first where the last synchronisation is ready at the same moment.
        self._send("B", s, s - 1, i, task)
        self._sync(s, waiting)

    def _backward_by_layer(self, s: int, came: list[int]) -> tuple[int, list[tuple[int, int]]]:
        """The last task of a backward, and the layers that are yet to be synchronised, with what each waits for."""
        launch = self.costs.machine.launch_seconds
        last: int = -1
        waiting: list[tuple[int, int]] = []
        for n in reversed(self._layers(s)):
            held = [self.syncs[n]] if n in self.syncs else []  # zero=2: the gradient before
            if self.c.layerwise:
                self._sync(s, waiting)
                waiting = []
            last = self._compute(s, self.costs.table.rows[n].backward.seconds + launch, came + held)
            came = []
            if self.costs.table.rows[n].gradients:
                waiting.append((n, last))
        # Late ones begin with the layer whose gradient is last, and go on from there.
        return last, [(n, last) for n, _ in reversed(waiting)]

    def _sync(self, s: int, layers: list[tuple[int, int]]) -> None:
        for n, after in layers:
            self.syncs[n] = self._collective(self.costs.state[n].sync, [after], s)

    def finish(self) -> None:
        """Updates, and gathers for the next step where they are this one's work."""
        reduced = self._reduction()
        for s in range(self.c.stages):
            self._updates(s, reduced)

    def handed(self) -> list[tuple[int, int]]:
        """What writes state for the next step, with the task that reads it there first."""
        writers, readers = self.updated, self.there
        if self.c.prefetches:
            writers, readers = self.gathered, self.reads
        return [(writers[n], reader) for n, reader in readers.items() if n in writers]

    def enter_again(self) -> list[tuple[int, int]]:
        """Adds each stage's first forward of the next step; gives the first task of both steps' first forwards."""
        came: list[int] = []
        entered = []
        for s in range(self.c.stages):
            if not self.c.prefetches:
                self._gather_again(s)
            last, read = self._first_forward(s, came, self.gathered)
            entered.append((self.first_forward[s], min(read.values())))
            if s + 1 < self.c.stages:
                cut = self.split.stages[s].layers[1] - 1
                came = [self._transfer(self.costs.sends[cut], [last], s, s + 1)]
        return entered

    def _gather_again(self, s: int) -> None:
        """Gathers a stage's views for the next step, in the same order as for this one."""
        before: list[int] = []
        for n in self._layers(s):
            if n in self.updated:
                found = self._gathers(s, {n: [self.updated[n], *before]})
                self.gathered.update(found)
                before = [*found.values()] or before

    def _reduction(self) -> list[int]:
        """The global reduction that late updates wait for."""
        if not any(row.late for row in self.costs.table.rows):
            return []
        after = [*self.syncs.values(), *(numbers[-1] for numbers in self.backwards)]
        rounds = max(1, (self.c.stages - 1).bit_length())
        latency = self.costs.machine.link_latency
        return [self.tasks.add(rounds * latency, after=after)]

    def _updates(self, s: int, reduced: list[int]) -> None:
        """The updates of a stage, with prefetch in the order in which gradients are final, and gathers behind them."""
        order = [n for n in self._layers(s) if self.costs.table.rows[n].parameters]
        all_synced = [self.syncs[n] for n in order if n in self.syncs]
        # With room for all chains the layers that the next step wants first go first.
        if self.c.prefetches and not reduced and len(order) > self.c.window:
            order.reverse()
        gathered: dict[int, int] = {}
        # A lone stage gathers behind its last synchronisation and its first layer's update, if there is room.
        alone = self.c.stages == 1 and len(order) <= self.c.window
        for n in order:
            own = [self.syncs[n]] if n in self.syncs else [self.backwards[s][-1]]
            after = own if self.c.prefetches else all_synced or own
            self.updated[n] = self._update(s, n, [*after, *reduced])
            if self.c.prefetches:
                behind = [*all_synced, self.updated[order[0]]] if alone else []
                gathered.update(self._gathers(s, {n: [self.updated[n], *behind]}))
        if self.c.prefetches:
            self._keep_window(order, gathered, bool(reduced))
        self.gathered.update(gathered)

    def _update(self, s: int, n: int, after: list[int]) -> int:
        """A layer's update: on stage 0, for whose gradients nobody waits, between backwards, elsewhere behind them."""
        seconds = self.costs.state[n].update
        if s or not self.c.prefetches:
            return self._compute(s, seconds, after)
        number = self.tasks.add_numbered(seconds, (), tuple(after))
        self.ahead[number] = self._computes[s]
        return number

    def _gathers(self, s: int, after: Mapping[int, list[int]]) -> dict[int, int]:
        """The gathers of layers that have views, each behind some tasks; for one device the first of these."""
        if self.c.data_parallel == 1:
            return {n: tasks[0] for n, tasks in after.items() if tasks}
        state, ahead = self.costs.state, self.c.prefetches
        return {
            n: self._collective(state[n].gather, tasks, s, ahead=ahead)
            for n, tasks in after.items()
            if self.costs.table.rows[n].view
        }

    def _keep_window(self, order: list[int], gathered: dict[int, int], reduced: bool) -> None:
        """A chain opens when the one `window` before it closes."""
        openers = self.updated if reduced else self.syncs
        chains = [n for n in order if n in gathered and n in openers]
        for before, n in zip(chains, itertools.islice(chains, self.c.window, None), strict=False):
            self.tasks.behind[openers[n]] = (gathered[before],)
