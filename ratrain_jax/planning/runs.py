"""Runs of layers as stages, as the search for a split asks for them: again and again, at any place of the pipeline.

What a run takes depends on its place only through the microbatches that are in flight there: its bytes are linear in
their number, so that for each way to recover it there is a most that fits. Equal runs are costed once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

from ratrain_jax.lowering.blocks import block_ends
from ratrain_jax.planning.layer_table import LayerTable
from ratrain_jax.planning.stage_costs import StageCosts


@functools.lru_cache(maxsize=1 << 17)
def kind_of_run(table: LayerTable, first: int, end: int) -> int:
    """Equal for runs of one table that have equal layers, edges and operands, and so equal costs but for what they borrow.

    Args:
        table: the layers.
        first: the run's first layer.
        end: the layer after its last.
    """
    edges = (
        table.cuts[first - 1] if first else 0,
        table.cuts[end - 1] if end < len(table.rows) else 0,
    )
    layers, known = _known(table)
    return known.setdefault((layers[first:end], edges, table.operands[first:end]), len(known))


@functools.lru_cache(maxsize=512)
def _known(table: LayerTable) -> tuple[tuple[int, ...], dict[tuple, int]]:
    """The kinds of a table's layers, and those of runs of them that were met."""
    return tuple(row.kind for row in table.rows), {}


class Ways:
    """The ways to recover a run of layers, least recovery first; each costed when it is first asked for.

    Args:
        costs: of the layers, under a configuration.
        limit: bytes a device.
        first: the run's first layer.
        end: the layer after its last.
    """

    def __init__(self, costs: StageCosts, limit: int, first: int, end: int) -> None:
        self._costs, self._limit, self._run = costs, limit, (first, end)
        self._found: list[tuple[float, float, int]] = []
        self._rest = self._prefixes()

    def fitting(self, flying: int) -> tuple[float, int] | None:
        """Seconds of a microbatch and how many layers are recovered from the first on; None if nothing fits.

        Args:
            flying: microbatches in flight.
        """
        for most, seconds, prefix in self._found:
            if flying <= most:
                return seconds, prefix
        for prefix in self._rest:
            most = self._most(prefix)
            if most < 1:
                continue
            _, forward, backward, recover = self._costs.times(*self._run, prefix)
            self._found.append((most, forward + backward + recover, prefix))
            if flying <= most:
                return forward + backward + recover, prefix
        return None

    def _prefixes(self) -> Iterator[int]:
        recovery, count = self._costs.configuration.recovery, self._run[1] - self._run[0]
        if recovery == "auto":
            return iter((0, *block_ends(count)))
        return iter((0 if recovery == "none" else count,))

    def _most(self, prefix: int) -> float:
        """How many microbatches in flight fit."""
        fixed, each = self._costs.bytes_in_flight(*self._run, prefix)
        if fixed > self._limit:
            return 0
        return (self._limit - fixed) // each if each else math.inf


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A run of layers at one place of the model.

    Attributes:
        ways: what it takes as a stage.
        tail: seconds from its last backward to its first forward of the next step, at least.
        synced: seconds for which its link is busy with each microbatch's gradients.
    """

    ways: Ways
    tail: float
    synced: float


class Runs:
    """All runs of layers under one configuration.

    Args:
        costs: of the layers, under a configuration.
        limit: bytes a device.
    """

    def __init__(self, costs: StageCosts, limit: int) -> None:
        self._costs, self._limit = costs, limit
        self._ways: dict[tuple[int, tuple[int, int]], Ways] = {}
        self._from: list[dict[int, Run]] = [{} for _ in range(costs.count)]

    def of(self, first: int, end: int) -> Run:
        """The run of the layers from `first` on that ends before `end`."""
        found = self._from[first].get(end)
        if found is None:
            found = self._from[first][end] = self._make(first, end)
        return found

    def _make(self, first: int, end: int) -> Run:
        costs = self._costs
        key = (kind_of_run(costs.table, first, end), costs.borrowed(first, end))
        if key not in self._ways:
            self._ways[key] = Ways(costs, self._limit, first, end)
        filled, synced = costs.configuration.fills, costs.configuration.zero == 2
        return Run(
            self._ways[key],
            costs.least_tail(first, end) if filled else 0.0,
            costs.syncs[end] - costs.syncs[first] if synced else 0.0,
        )
