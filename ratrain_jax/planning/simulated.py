"""What the runtime does not run, costed to compare with: ZeRO-3, interleaved 1F1B and ZB-H1.

ZeRO-3 gathers each layer's view before its forward and again before its backward, and reduce-scatters its gradients after
it, for every microbatch; this goes on beside the compute of the same layer, and the slower of the two sets the pace. Views
and whole gradients of two layers are there at a time. State work of the other two is not overlapped.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from ratrain_jax.kernels import Machine
from ratrain_jax.planning.configuration import RUNNABLE, Configuration
from ratrain_jax.planning.layer_table import LayerTable, running
from ratrain_jax.planning.splits import Shortfall, Split, best_split
from ratrain_jax.planning.stage_costs import LayerState, Stage, StageCosts, StageMemory
from ratrain_jax.simulation.engine import run
from ratrain_jax.simulation.pipelines import Pipeline, StageSeconds, pipeline_tasks

_NO_LIMIT = 1 << 62

SIMULATED_SCHEDULES = ("interleaved", "zb-h1")

TENSORS = (1, 2, 4, 8)
"""Numbers of tensor-parallel ranks that are searched; more than a node's devices rarely pay."""

WEIGHT_SHARE = 0.5
"""The part of a backward that makes the gradients of the weights: each product of a forward has one for either side."""


def costs_of(table: LayerTable, configuration: Configuration, machine: Machine) -> StageCosts:
    """The costs of a configuration, whether it runs or is only simulated."""
    kind = StageCosts if configuration.zero < 3 else _ShardedViews
    return kind(table, configuration, machine)


class _ShardedViews(StageCosts):
    """ZeRO-3: nothing but shards lasts."""

    def __init__(self, table: LayerTable, configuration: Configuration, machine: Machine) -> None:
        super().__init__(table, configuration, machine)
        state = super().state
        rows = table.rows
        self.forward = running(
            [max(row.forward.seconds, s.gather) for row, s in zip(rows, state, strict=True)]
        )
        self.backward = running(
            [
                max(row.backward.seconds, s.gather + s.sync)
                for row, s in zip(rows, state, strict=True)
            ]
        )

    @functools.cached_property
    def state(self) -> tuple[LayerState, ...]:
        """Nothing is left to synchronise or to gather when a step ends."""
        return tuple(LayerState(0.0, state.update, 0.0) for state in super().state)

    def _without_activations(self, first: int, end: int) -> StageMemory:
        """As of a stage whose views and whole gradients are those of two layers."""
        found = super()._without_activations(first, end)
        rows = self.table.rows[first:end]
        views = sorted(row.view for row in rows)[-2:]
        whole = sorted(self.sums.whole[first:end])[-2:]
        sharded = self.sums.sharded[end] - self.sums.sharded[first]
        return dataclasses.replace(found, view=sum(views), gradients=sharded + sum(whole))


def interleaved_split(costs: StageCosts, limit: int) -> Split | Shortfall:
    """Chunks of an interleaved schedule: as even as can be in time, all of a device recovered or none.

    Args:
        costs: of the layers.
        limit: bytes a device, which holds several chunks.
    """
    c = costs.configuration
    row = dataclasses.replace(
        c, stages=c.stages * c.chunks, chunks=1, schedule="1f1b", recovery="none"
    )
    even = best_split(StageCosts(costs.table, row, costs.machine), _NO_LIMIT)
    if not isinstance(even, Split):
        raise AssertionError("chunks without a limit can always be cut")
    runs = [stage.layers for stage in even.stages]
    least: Shortfall | None = None
    for everything in {"none": (False,), "auto": (False, True)}.get(c.recovery, (True,)):
        stages = [
            costs.stage(place, *run, everything * (run[1] - run[0]))
            for place, run in enumerate(runs)
        ]
        held = [stages[device :: c.stages] for device in range(c.stages)]
        most = max(range(c.stages), key=lambda device: _held(held[device]))
        if _held(held[most]) <= limit:
            seconds = max(sum(stage.seconds for stage in chunks) for chunks in held)
            return Split(tuple(stages), c.microbatches * seconds)
        largest = max(held[most], key=lambda stage: stage.memory.total).memory
        least = Shortfall(_held(held[most]) - limit, most, largest)
    assert least is not None
    return least


def _held(chunks: Sequence[Stage]) -> int:
    """Bytes of all chunks of a device, of whose programs one runs at a time."""
    scratch = [stage.memory.scratch for stage in chunks]
    return sum(stage.memory.total for stage in chunks) - sum(scratch) + max(scratch)


def estimated_step(costs: StageCosts, stages: tuple[Stage, ...]) -> tuple[float, float, int]:
    """Seconds of a step under a schedule that is only simulated, of its body, and the slowest stage.

    Args:
        costs: of the layers.
        stages: the stages, or of an interleaved schedule all chunks in the order of the model.
    """
    c = costs.configuration
    assert c.schedule not in RUNNABLE
    seconds = tuple(
        StageSeconds(
            stage.forward,
            stage.backward,
            weight=WEIGHT_SHARE * stage.backward,
            recover=stage.recover,
            send=costs.sends[stage.layers[1] - 1] if stage.layers[1] < costs.count else 0.0,
        )
        for stage in stages
    )
    late = c.recovery == "backward"
    pipeline = Pipeline(c.schedule, seconds, c.microbatches, c.chunks, late)
    body = run(pipeline_tasks(pipeline)[0]).last
    tails = [0.0] * c.stages
    for number, stage in enumerate(stages):
        for state in costs.state[slice(*stage.layers)]:
            tails[number % c.stages] += state.sync + state.update + state.gather
    slowest = max(range(c.stages), key=tails.__getitem__)
    return body + tails[slowest], body, slowest
