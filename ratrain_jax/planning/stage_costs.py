"""Seconds and bytes of a stage: of a run of layers, some of them recovered, under a configuration.

Bytes of a device, by term (a layer's own are in `LayerRow`; D the group, k the microbatches in flight):

    parameters    shards of the parameters                 Σ shard(parameters, D)
    optimizer     shards of the rest of the state          Σ shard(optimizer, D)
    view          whole parameters in compute dtype        Σ view (for D = 1 without those that need no copy), and
                  those borrowed of layers on other stages
    gradients     zero=1: whole accumulators, of borrowed parameters too; zero=2: their shards, and the whole
                  gradients of the layers whose synchronisation is behind their backward
    residuals     k · Σ residuals of layers that keep them, and once those of the layers that are recovered
    checkpoints   k · inputs of the first layer of each recovered run (what the batch gives is an operand)
    boundaries    what waits at the stage's ends: one microbatch's input and output more, and a gradient each way
    operands      what the stage reads of the batch, for all microbatches
    scratch       the most that one of its programs holds for a while (an estimate)
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterator

from ratrain_jax.kernels import Machine
from ratrain_jax.kernels.collectives import (
    all_gather_seconds,
    reduce_scatter_seconds,
    transfer_seconds,
)
from ratrain_jax.lowering.blocks import block_ends
from ratrain_jax.planning.configuration import Configuration
from ratrain_jax.planning.layer_table import LayerRow, LayerTable, running
from ratrain_jax.planning.leaves import shard_bytes

TERMS = (
    "parameters",
    "optimizer",
    "view",
    "gradients",
    "residuals",
    "checkpoints",
    "boundaries",
    "operands",
    "scratch",
)


@dataclasses.dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of each device of a stage at its fullest, by term."""

    parameters: int
    optimizer: int
    view: int
    gradients: int
    residuals: int
    checkpoints: int
    boundaries: int
    operands: int
    scratch: int

    @property
    def total(self) -> int:
        """All terms."""
        return (
            self.parameters
            + self.optimizer
            + self.view
            + self.gradients
            + self.residuals
            + self.checkpoints
            + self.boundaries
            + self.operands
            + self.scratch
        )

    @property
    def largest(self) -> str:
        """The name of the largest term."""
        return max(TERMS, key=lambda term: getattr(self, term))


@dataclasses.dataclass(frozen=True, slots=True)
class LayerState:
    """Seconds of a layer's state work on its stage.

    Attributes:
        sync: reduce-scatter of its gradients.
        update: update of its shards.
        gather: all-gather of its view.
    """

    sync: float
    update: float
    gather: float


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a plan.

    Attributes:
        layers: its run of layers, half-open.
        recovered: how many of them are recovered.
        prefix: how many of those from the first on, whether or not the user checkpoints them.
        forward: seconds of one microbatch's forward.
        backward: seconds of its backward.
        recover: seconds of its recovery.
        memory: its bytes.
    """

    layers: tuple[int, int]
    recovered: int
    prefix: int
    forward: float
    backward: float
    recover: float
    memory: StageMemory

    @property
    def seconds(self) -> float:
        """Compute of one microbatch."""
        return self.forward + self.backward + self.recover


@dataclasses.dataclass(frozen=True, slots=True)
class _Sums:
    """Bytes of the first layers, for each number of them, on each device of a group."""

    kinds: tuple[int, ...]
    borrowers: tuple[int, ...]  # layers that read parameters of others
    checkpointed: tuple[int, ...]
    whole: tuple[int, ...]  # gradients of each layer
    parameters: list[int]
    optimizer: list[int]
    view: list[int]
    gradients: list[int]
    sharded: list[int]
    residuals: list[int]
    operands: list[int]


@functools.lru_cache(maxsize=512)
def _sums(table: LayerTable, devices: int) -> _Sums:
    rows = table.rows
    whole = tuple(sum(leaf.bytes for leaf in row.gradients) for row in rows)
    return _Sums(
        kinds=tuple(row.kind for row in rows),
        borrowers=tuple(n for n, row in enumerate(rows) if row.borrows),
        checkpointed=tuple(n for n, row in enumerate(rows) if row.checkpointed),
        whole=whole,
        parameters=running([shard_bytes(row.parameters, devices) for row in rows]),
        optimizer=running([shard_bytes(row.optimizer, devices) for row in rows]),
        view=running([row.copied(devices) for row in rows]),
        gradients=running(whole),
        sharded=running([shard_bytes(row.gradients, devices) for row in rows]),
        residuals=running([row.residuals for row in rows]),
        operands=running(table.operands),
    )


class StageCosts:
    """Costs runs of layers under one configuration; runs of equal layers once.

    Args:
        table: the layers.
        configuration: how the step is laid out.
        machine: what it runs on.
    """

    def __init__(self, table: LayerTable, configuration: Configuration, machine: Machine) -> None:
        self.table, self.configuration, self.machine = table, configuration, machine
        self.count = len(table.rows)
        self.forward, self.backward = table.forward, table.backward
        self.sums = _sums(table, configuration.data_parallel)
        self.kinds = self.sums.kinds
        self._lasting: dict[tuple[int, int], StageMemory] = {}

    @functools.cached_property
    def state(self) -> tuple[LayerState, ...]:
        """Seconds of every layer's state work."""
        known = {row.kind: row for row in self.table.rows}
        states = {kind: self._state(row) for kind, row in known.items()}
        return tuple(states[kind] for kind in self.kinds)

    @functools.cached_property
    def sends(self) -> tuple[float, ...]:
        """Seconds to send what crosses behind each layer but the last."""
        group = self.configuration.group
        return tuple(
            transfer_seconds(self.machine, count, distance=group, sharing=group)
            for count in self.table.cuts
        )

    def _state(self, row: LayerRow) -> LayerState:
        devices, tensor = self.configuration.data_parallel, self.configuration.tensor
        held = shard_bytes(row.parameters, devices) + shard_bytes(row.optimizer, devices)
        swept = 2 * held + shard_bytes(row.gradients, devices)
        launch = self.machine.launch_seconds if row.parameters else 0.0
        gradients = sum(leaf.bytes for leaf in row.gradients)
        return LayerState(
            reduce_scatter_seconds(self.machine, gradients, devices, stride=tensor),
            swept / self.machine.streaming_bandwidth + launch,
            all_gather_seconds(self.machine, row.copied(devices), devices, stride=tensor),
        )

    def stage(self, number: int, first: int, end: int, prefix: int) -> Stage:
        """Costs a run of layers as a stage.

        Args:
            number: the stage's number.
            first: its first layer.
            end: the layer after its last.
            prefix: how many layers are recovered from the first on; those that the user checkpoints are in any case.
        """
        again, forward, backward, recover = self.times(first, end, prefix)
        memory = self.memory(number, first, end, prefix)
        return Stage((first, end), again, prefix, forward, backward, recover, memory)

    def times(self, first: int, end: int, prefix: int) -> tuple[int, float, float, float]:
        """How many layers of a run are recovered; seconds of its forward, its backward and its recovery. See `stage`."""
        blocks = block_ends(end - first)
        launches = len(blocks) * self.machine.launch_seconds
        again, recover = 0, 0.0
        for start, stop in self.recovered_runs(first, end, prefix):
            again += stop - start
            recover += self.forward[stop] - self.forward[start]
            launched = stop - start if len(blocks) > 1 else stop == end
            recover += launched * self.machine.launch_seconds
        forward = self.forward[end] - self.forward[first] + launches
        return again, forward, self.backward[end] - self.backward[first] + launches, recover

    def recovered_runs(self, first: int, end: int, prefix: int) -> list[tuple[int, int]]:
        """The runs of layers of a stage that are recovered; see `stage`."""
        runs = [(first, first + prefix)] if prefix else []
        marked = [n for n in self.sums.checkpointed if first + prefix <= n < end]
        if not marked:
            return runs
        ends = [first + block for block in block_ends(end - first)]
        for start, stop in zip((first, *ends), ends, strict=False):
            if any(start <= n < stop for n in marked):
                if runs and runs[-1][1] == start:
                    start, _ = runs.pop()
                runs.append((start, stop))
        return runs

    def memory(self, number: int, first: int, end: int, prefix: int) -> StageMemory:
        """Bytes of a run of layers as a stage; see `stage`."""
        lasting, flying = self._lasting_of(first, end), self.configuration.in_flight(number)
        kept, once, checkpoints = self._activations(first, end, prefix)
        return StageMemory(
            lasting.parameters,
            lasting.optimizer,
            lasting.view,
            lasting.gradients,
            flying * kept + once,
            flying * checkpoints,
            lasting.boundaries,
            lasting.operands,
            lasting.scratch,
        )

    def bytes_in_flight(self, first: int, end: int, prefix: int) -> tuple[int, int]:
        """Bytes of a run of layers as a stage: those that are always there, and those of each microbatch in flight."""
        kept, once, checkpoints = self._activations(first, end, prefix)
        return self._lasting_of(first, end).total + once, kept + checkpoints

    def _activations(self, first: int, end: int, prefix: int) -> tuple[int, int, int]:
        """Bytes of residuals for each microbatch in flight, of those that are there once, and of checkpoints for each."""
        sums = self.sums
        kept = sums.residuals[end] - sums.residuals[first]
        once = checkpoints = 0
        for start, stop in self.recovered_runs(first, end, prefix):
            again = sums.residuals[stop] - sums.residuals[start]
            incoming = self.table.cuts[start - 1] if start else 0
            kept -= again
            once += again - incoming  # what comes in is the checkpoint
            checkpoints += incoming
        return kept, once, checkpoints

    def _lasting_of(self, first: int, end: int) -> StageMemory:
        if (first, end) not in self._lasting:
            self._lasting[first, end] = self._without_activations(first, end)
        return self._lasting[first, end]

    def _without_activations(self, first: int, end: int) -> StageMemory:
        """The terms that depend on neither recovery nor the stage's place."""
        sums = self.sums
        edges = [self.table.cuts[n] for n in (first - 1, end - 1) if 0 <= n < self.count - 1]
        view, gradients = self.borrowed(first, end)
        return StageMemory(
            parameters=sums.parameters[end] - sums.parameters[first],
            optimizer=sums.optimizer[end] - sums.optimizer[first],
            view=sums.view[end] - sums.view[first] + view,
            gradients=self._gradients(first, end) + gradients,
            residuals=0,
            checkpoints=0,
            boundaries=2 * sum(edges),
            operands=self.configuration.microbatches * (sums.operands[end] - sums.operands[first]),
            scratch=max(row.scratch for row in self.table.rows[first:end]),
        )

    def borrowed(self, first: int, end: int) -> tuple[int, int]:
        """Bytes of the views of parameters that layers on other stages own, and of their gradients."""
        if not self.sums.borrowers:
            return 0, 0  # asked for every run of layers that a search looks at
        views: dict[int, int] = {}
        gradients: dict[int, int] = {}
        for row in self._borrowers(first, end):
            for owner, view, gradient in row.borrows:
                if not first <= owner < end:
                    views[owner] = max(views.get(owner, 0), view)
                    gradients[owner] = max(gradients.get(owner, 0), gradient)
        return sum(views.values()), sum(gradients.values())

    def _borrowers(self, first: int, end: int) -> Iterator[LayerRow]:
        return (self.table.rows[n] for n in self.sums.borrowers if first <= n < end)

    def _gradients(self, first: int, end: int) -> int:
        if self.configuration.zero == 1:
            return self.sums.gradients[end] - self.sums.gradients[first]
        sharded = self.sums.sharded[end] - self.sums.sharded[first]
        if self.configuration.data_parallel == 1:
            return sharded + max(self.sums.whole[first:end])
        return sharded + self._unsynchronised(first, end)

    def least_tail(self, first: int, end: int) -> float:
        """Seconds that a stage needs at least from its last backward to its first forward of the next step."""
        owner = self._next_owner[first]
        if owner >= end:
            return 0.0
        state = self.state[owner]
        if self.configuration.data_parallel == 1:
            return state.update
        syncs, gathers = state.sync, state.gather
        if not (self.configuration.layerwise or self.configuration.prefetches):
            syncs = self.syncs[end] - self.syncs[first]
        if not self.configuration.prefetches:
            gathers = self._gathers[end] - self._gathers[first]
        return syncs + state.update + gathers

    @functools.cached_property
    def syncs(self) -> list[float]:
        """Seconds of the synchronisations of the first layers, for each number of them."""
        return running([state.sync for state in self.state])

    @functools.cached_property
    def _gathers(self) -> list[float]:
        """Seconds of the gathers of the first layers' views, for each number of them."""
        rows = zip(self.state, self.table.rows, strict=True)
        return running([state.gather if row.view else 0.0 for state, row in rows])

    @functools.cached_property
    def _next_owner(self) -> list[int]:
        """For each layer, the first from it on that has parameters."""
        owners, following = [], self.count
        for n in reversed(range(self.count)):
            following = n if self.table.rows[n].parameters else following
            owners.append(following)
        return owners[::-1]

    def _unsynchronised(self, first: int, end: int) -> int:
        """Whole gradients of one microbatch whose synchronisation has not begun, where memory is fullest for them.

        While a backward goes from layer to layer, residuals end as gradients come: what has ended is taken off.
        """
        whole, residuals = self.sums.whole, self.sums.residuals
        if not self.configuration.layerwise:
            return self.sums.gradients[end] - self.sums.gradients[first]
        now = free = 0.0
        begun: collections.deque[tuple[float, int]] = (
            collections.deque()
        )  # when each starts, ascending
        most = waiting = 0
        for n in reversed(range(first, end)):
            while begun and begun[0][0] < now:
                waiting -= begun.popleft()[1]
            ended = residuals[end] - residuals[n + 1]
            most = max(most, waiting + whole[n] - ended)
            now += self.table.rows[n].backward.seconds
            start = max(free, now)
            begun.append((start, whole[n]))
            waiting += whole[n]
            free = start + self.state[n].sync
        # The next microbatch fills up again while the rest waits.
        return max(most, sum(count for start, count in begun if start >= now))
