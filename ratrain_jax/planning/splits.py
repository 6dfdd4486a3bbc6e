"""Splits layers over stages: the split of which the pipeline takes least, by a bound that no split of it can beat.

Stage s computes for m · C(s) seconds, its first microbatch arrives after the forwards of all layers before it, and the
gradient of its last one passes through their backwards:

    step ≥ max over s of  m · C(s) + (forward and backward of one microbatch in all layers before s) + transfers
                          + the tail of stage 0

and the stage itself needs m · C(s) and then its own tail, and with ZeRO-2 its link m times its synchronisation. That
depends on a stage's own layers only, so that the least maximum is a shortest path: over (stages so far, layers so far),
by the largest term on the way.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Iterator

from ratrain_jax.planning.configuration import Configuration
from ratrain_jax.planning.runs import Runs
from ratrain_jax.planning.stage_costs import Stage, StageCosts, StageMemory

_HALVINGS = 8  # of the interval in which a bound that can be reached is looked for


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


def best_split(
    costs: StageCosts, limit: int, to_beat: float = math.inf
) -> Split | Shortfall | None:
    """The split of the least bound of those that fit.

    Args:
        costs: of the layers, under a configuration.
        limit: bytes a device.
        to_beat: seconds; splits whose bound is more are of no interest.

    Returns:
        The split, or why there is none; None if something is to be beaten, and no split that fits does.
    """
    search = _Search(costs, limit)
    if search.hopeless():
        return search.shortfall()
    most = min(to_beat, search.reachable(to_beat))
    path = search.shortest(most)
    if path is None:
        return search.shortfall() if to_beat == math.inf else None
    bound, ends = path
    stages = []
    for number, (first, end) in enumerate(zip((0, *ends), ends, strict=False)):
        stages.append(search.stage(number, first, end))
    return Split(tuple(stages), bound)


class _Search:
    """Finds the path."""

    def __init__(self, costs: StageCosts, limit: int) -> None:
        self.costs, self.limit = costs, limit
        self.configuration: Configuration = costs.configuration
        self.runs = Runs(costs, limit)
        self.flying = [self.configuration.in_flight(n) for n in range(self.configuration.stages)]
        self.before = [
            f + b + (f if self.configuration.recovery == "backward" else 0.0)
            for f, b in zip(costs.forward, costs.backward, strict=True)
        ]

    def hopeless(self) -> bool:
        """Whether it is plain that nothing fits: a stage of the share of layers that some stage must have at least."""
        share = -(-self.costs.count // self.configuration.stages)
        fewest = self.flying[-1]  # the last stage holds fewest microbatches
        starts = range(self.costs.count - share + 1)
        return not any(self.runs.of(n, n + share).ways.fitting(fewest) for n in starts)

    def stage(self, number: int, first: int, end: int) -> Stage:
        """A run of layers that fits as a stage, recovered as the configuration says."""
        found = self.runs.of(first, end).ways.fitting(self.flying[number])
        assert found is not None
        return self.costs.stage(number, first, end, found[1])

    @functools.cached_property
    def _least_send(self) -> float:
        return min(self.costs.sends, default=0.0)

    @functools.cached_property
    def _entry_tail(self) -> float:
        """The least tail of the first layer alone, before which stage 0 cannot begin the next step."""
        return self.costs.least_tail(0, 1)

    def reachable(self, to_beat: float) -> float:
        """A bound that some split has: of the longest runs under it; found by halving, infinite if none is found."""
        low = max(
            self.before[-1] / self.configuration.stages * self.configuration.microbatches, 1e-300
        )
        high, best = min(2 * low, to_beat), math.inf
        for _ in range(_HALVINGS):
            found = self._greedy(high)
            if found is not None:
                best, high = found, (low + found) / 2
            elif best < math.inf:
                low, high = high, (high + best) / 2
            else:
                low, high = high, 2 * high
        return best

    def _greedy(self, most: float) -> float | None:
        """The bound of the split into the longest runs whose terms are at most `most`; None if they do not reach."""
        stages, count = self.configuration.stages, self.costs.count
        first, label = 0, 0.0
        for number in range(stages):
            longest: tuple[int, float] | None = None
            for end, term in self._steps(number, first, most):
                longest = (end, term)
            if longest is None:
                return None
            first, label = longest[0], max(label, longest[1])
        return label if first == count else None

    def shortest(self, most: float) -> tuple[float, tuple[int, ...]] | None:
        """The least maximum that is at most `most`, and where its stages end."""
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
            for end, term in self._steps(number, first, most):
                if (number + 1, end) not in done:
                    heapq.heappush(queue, (max(label, term), -(number + 1), end, (*ends, end)))
        return None

    def _steps(self, number: int, first: int, most: float) -> Iterator[tuple[int, float]]:
        """Where a stage that begins at `first` may end, with its term, which is at most `most`."""
        left = self.configuration.stages - number - 1
        last = self.costs.count - left
        m, flying, fill = self.configuration.microbatches, self.flying[number], 0.0
        if self.configuration.fills and first:
            fill = self.before[first] + 2 * number * self._least_send + self._entry_tail
        for end in range(first + 1, last + 1) if left else (last,):
            run = self.runs.of(first, end)
            found = run.ways.fitting(flying)
            if found is None:
                return  # more layers need more memory
            term = max(m * found[0] + max(fill, run.tail), m * run.synced)
            if term > most:
                return
            yield end, term

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
