"""Tasks of a whole step, state work included, from the seconds of stages and layers.

What the program of the same configuration would do, without lowering it: forwards, recoveries and backwards in the order
of the schedule; the backward of a microbatch whose gradients are synchronised goes layer by layer; then synchronisation,
update and gathering of each layer, and the first forward of the next step.
"""

from __future__ import annotations

import dataclasses
import itertools

from ratrain_jax.lowering.blocks import block_ends
from ratrain_jax.lowering.schedules import Slot, compute_order, in_order_of_data
from ratrain_jax.planning.splits import Split
from ratrain_jax.planning.stage_costs import StageCosts
from ratrain_jax.simulation.breakdown import pacing_stage
from ratrain_jax.simulation.engine import run
from ratrain_jax.simulation.tasks import Port, Tasks, port_numbers


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
    """Simulates the step of a split.

    Args:
        costs: of the layers, under a configuration whose schedule runs.
        split: the layers over stages.
    """
    built = _Step(costs, split)
    built.compute()
    built.finish()
    tasks = built.tasks
    # State work takes a lane in the order in which it would be ready were lanes free; transfers between stages go before
    # what is not under way when they are ready.
    for holds in ({**built.updates, **built.collectives}, built.transfers):
        tasks.rank = run(tasks).rank
        for number, ports in holds.items():
            tasks.ports[number] = ports
    found = run(tasks, costs.machine)
    ends = [float(found.end[numbers[-1]]) for numbers in built.backwards]
    stage = pacing_stage(built.entered, found, ends)
    first, again = (float(found.start[n]) for n in built.entered[stage])
    return StepSeconds(again - first, ends[stage] - first, stage)


class _Step:
    """Adds the tasks of a step."""

    def __init__(self, costs: StageCosts, split: Split) -> None:
        self.costs, self.split, self.c = costs, split, costs.configuration
        self.tasks = Tasks()
        # By task, the ports that it will hold; which in what order is known only when all would be ready.
        self.updates: dict[int, tuple[int, ...]] = {}
        self.collectives: dict[int, tuple[int, ...]] = {}
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
        self.first_forward: dict[int, int] = {}
        self.gathered: dict[int, int] = {}
        self.entered: list[tuple[int, int]] = []

    def compute(self) -> None:
        """Forwards and backwards of all stages, neighbours' halves first."""
        if not self.c.prefetches:
            for number in range(self.c.stages):
                self.gathered.update(self._gathers(number, dict.fromkeys(self._layers(number))))
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

    def _collective(self, seconds: float, after: list[int], s: int) -> int:
        number = self.tasks.add_numbered(seconds, (), tuple(after))
        self.collectives[number] = self._links[s]
        return number

    def _came(self, kind: str, s: int, i: int) -> list[int]:
        return [self.arrived[kind, s, i]] if (kind, s, i) in self.arrived else []

    def _send(self, kind: str, s: int, to: int, i: int, after: int) -> None:
        if 0 <= to < self.c.stages:
            cut = self.split.stages[min(s, to)].layers[1] - 1
            self.arrived[kind, to, i] = self._transfer(self.costs.sends[cut], [after], s, to)

    def _forward(self, s: int, i: int) -> None:
        came = self._came("F", s, i)
        if i == 0:
            came += self._views(s, self.gathered)
        task = self._compute(s, self.split.stages[s].forward, came)
        self.first_forward.setdefault(s, task)
        self._send("F", s, s + 1, i, task)

    def _views(self, s: int, gathered: dict[int, int]) -> list[int]:
        """The gathers that a stage's first forward waits for: those of its first block."""
        stage = self.split.stages[s]
        block = block_ends(stage.layers[1] - stage.layers[0])[0]
        return [gathered[n] for n in list(self._layers(s))[:block] if n in gathered]

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
        return last, [(n, last) for n, _ in waiting]

    def _sync(self, s: int, layers: list[tuple[int, int]]) -> None:
        for n, after in layers:
            self.syncs[n] = self._collective(self.costs.state[n].sync, [after], s)

    def finish(self) -> None:
        """Updates, gathers, and each stage's first forward of the next step."""
        again: dict[int, int] = {}
        reduced = self._reduction()
        for s in range(self.c.stages):
            gathered = self._updates(s, reduced)
            came = [again[s - 1]] if s else []
            if s:
                cut = self.split.stages[s - 1].layers[1] - 1
                came = [self._transfer(self.costs.sends[cut], came, s - 1, s)]
            first = self._compute(s, self.split.stages[s].forward, came + self._views(s, gathered))
            again[s] = first
            self.entered.append((self.first_forward[s], first))

    def _reduction(self) -> list[int]:
        """The global reduction that late updates wait for."""
        if not any(row.late for row in self.costs.table.rows):
            return []
        after = [*self.syncs.values(), *(numbers[-1] for numbers in self.backwards)]
        rounds = max(1, (self.c.stages - 1).bit_length())
        latency = self.costs.machine.link_latency
        return [self.tasks.add(rounds * latency, after=after)]

    def _updates(self, s: int, reduced: list[int]) -> dict[int, int]:
        """The updates of a stage in the order in which their gradients are final; the gathers behind them."""
        owners = [n for n in reversed(self._layers(s)) if self.costs.table.rows[n].parameters]
        all_synced = [self.syncs[n] for n in owners if n in self.syncs]
        updates: dict[int, int] = {}
        # With room for all chains the layers that the next step wants first go first.
        roomy = len(owners) <= self.c.window
        order = sorted(owners) if self.c.prefetches and (reduced or roomy) else owners
        gathered: dict[int, int] = {}
        for n in order:
            own = [self.syncs[n]] if n in self.syncs else [self.backwards[s][-1]]
            after = own if self.c.prefetches else all_synced or own
            updates[n] = self._update(s, n, [*after, *reduced])
            if self.c.prefetches:
                gathered.update(self._gathers(s, {n: updates[n]}))
        if self.c.prefetches:
            self._keep_window(order, gathered, bool(reduced), updates)
            return gathered
        return self._gathers(s, {n: updates[n] for n in sorted(owners)})

    def _update(self, s: int, n: int, after: list[int]) -> int:
        """A layer's update: on stage 0, for whose gradients nobody waits, between backwards, elsewhere behind them."""
        seconds = self.costs.state[n].update
        if s or not self.c.prefetches:
            return self._compute(s, seconds, after)
        number = self.tasks.add_numbered(seconds, (), tuple(after))
        self.updates[number] = self._computes[s]
        return number

    def _gathers(self, s: int, after: dict[int, int | None]) -> dict[int, int]:
        if self.c.data_parallel == 1:
            return {n: task for n, task in after.items() if task is not None}
        return {
            n: self._collective(self.costs.state[n].gather, [] if task is None else [task], s)
            for n, task in after.items()
            if self.costs.table.rows[n].view
        }

    def _keep_window(
        self, order: list[int], gathered: dict[int, int], reduced: bool, updates: dict[int, int]
    ) -> None:
        """A chain opens when the one `window` before it closes."""
        openers = updates if reduced else self.syncs
        chains = [n for n in order if n in gathered and n in openers]
        for before, n in zip(chains, itertools.islice(chains, self.c.window, None), strict=False):
            self.tasks.behind[openers[n]] = (gathered[before],)
