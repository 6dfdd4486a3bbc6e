"""Splits layers over stages: the split of which the pipeline takes least, by a bound that no split of it can beat.

Stage s is busy m · C(s) seconds, its first microbatch arrives after the forwards of all layers before it, and the
gradient of its last one passes through their backwards:

    step ≥ max over s of  m · C(s) + (forward and backward of one microbatch in all layers before s) + transfers

which depends on a stage's own layers only, so that the least maximum is a shortest path: over (stages so far, layers so
far), by the largest term on the way.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator

from ratrain_jax.planning.configuration import Configuration
from ratrain_jax.planning.stage_costs import Stage, StageCosts, StageMemory, fewest_recovered


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """Layers over stages.

    Attributes:
        stages: the stages, in order.
        bound: seconds that a step takes at least.
    """

    stages: tuple[Stage, ...]
    bound: float


@dataclasses.dataclass(frozen=True, slots=True)
class Shortfall:
    """Why no split fits.

    Attributes:
        bytes: by how much the least that some stage needs is over the limit.
        stage: that stage.
        memory: what it needs.
    """

    bytes: int
    stage: int
    memory: StageMemory


def best_split(costs: StageCosts, limit: int) -> Split | Shortfall:
    """The split of the least bound of those that fit.

    Args:
        costs: of the layers, under a configuration.
        limit: bytes a device.

    Returns:
        The split, or why there is none.
    """
    search = _Search(costs, limit)
    path = search.shortest()
    if path is None:
        return search.shortfall()
    bound, ends = path
    stages = []
    for number, (first, end) in enumerate(zip((0, *ends), ends, strict=False)):
        stage = search.stage(number, first, end)
        assert stage is not None
        stages.append(stage)
    return Split(tuple(stages), bound)


class _Search:
    """Finds the path; costs each kind of stage once."""

    def __init__(self, costs: StageCosts, limit: int) -> None:
        self.costs, self.limit = costs, limit
        self.configuration: Configuration = costs.configuration
        self.known: dict[tuple, Stage | None] = {}

    def stage(self, number: int, first: int, end: int) -> Stage | None:
        """A run of layers as a stage, recovered as the configuration says; None if it does not fit."""
        key = (self.configuration.in_flight(number), *self._signature(first, end))
        if key not in self.known:
            self.known[key] = self._stage(number, first, end)
        found = self.known[key]
        return found and dataclasses.replace(found, layers=(first, end))

    def _signature(self, first: int, end: int) -> tuple:
        """What of a run of layers its cost depends on."""
        table = self.costs.table
        edges = (
            table.cuts[first - 1] if first else 0,
            table.cuts[end - 1] if end < self.costs.count else 0,
        )
        return (tuple(self.costs.kinds[first:end]), edges, table.operands[first:end])

    def _stage(self, number: int, first: int, end: int) -> Stage | None:
        recovered = self._recovered(number, first, end)
        if recovered is None:
            return None
        found = self.costs.stage(number, first, end, recovered)
        return found if self._fits(found.memory) else None

    def _recovered(self, number: int, first: int, end: int) -> int | None:
        recovery = self.configuration.recovery
        if recovery == "auto":
            return fewest_recovered(self.costs, number, first, end, self._fits)
        return 0 if recovery == "none" else end - first

    def _fits(self, memory: StageMemory) -> bool:
        return memory.total <= self.limit

    def _term(self, number: int, stage: Stage) -> float:
        """The bound that a stage gives."""
        first = stage.layers[0] if self.configuration.fills else 0
        costs = self.costs
        before = costs.forward[first] + costs.backward[first]
        if self.configuration.recovery == "backward":
            before += costs.forward[first]
        sends = 2 * number * min(costs.sends[:first], default=0.0)  # nothing for the first
        return self.configuration.microbatches * stage.seconds + before + sends

    def shortest(self) -> tuple[float, tuple[int, ...]] | None:
        """The least maximum, and where its stages end."""
        stages, count = self.configuration.stages, self.costs.count
        if stages > count:
            return None
        queue: list[tuple[float, int, int, tuple[int, ...]]] = [(0.0, 0, 0, ())]
        done: set[tuple[int, int]] = set()
        while queue:
            label, number, first, ends = heapq.heappop(queue)
            number = -number  # of equal labels the one that is furthest
            if (number, first) in done:
                continue
            done.add((number, first))
            if number == stages:
                return label, ends
            for end, term in self._steps(number, first):
                if (number + 1, end) not in done:
                    heapq.heappush(queue, (max(label, term), -(number + 1), end, (*ends, end)))
        return None

    def _steps(self, number: int, first: int) -> Iterator[tuple[int, float]]:
        """Where a stage that begins at `first` may end, with its term."""
        stages, count = self.configuration.stages, self.costs.count
        left = stages - number - 1
        ends = range(first + 1, count - left + 1) if left else (count,)
        for end in ends:
            stage = self.stage(number, first, end)
            if stage is None:
                return  # more layers need more memory
            yield end, self._term(number, stage)

    def shortfall(self) -> Shortfall:
        """The stage that is over the limit in the split that comes closest to it: as even as it can be in bytes."""
        costs, stages = self.costs, min(self.configuration.stages, self.costs.count)
        least: tuple[int, int, StageMemory] | None = None
        for number in range(stages):
            first = number * costs.count // stages
            end = (number + 1) * costs.count // stages
            everything = 0 if self.configuration.recovery == "none" else end - first
            options = {0, everything} if self.configuration.recovery == "auto" else {everything}
            memory = min(
                (costs.memory(number, first, end, recovered) for recovered in options),
                key=lambda m: m.total,
            )
            if least is None or memory.total > least[0]:
                least = (memory.total, number, memory)
        assert least is not None
        return Shortfall(least[0] - self.limit, least[1], least[2])
