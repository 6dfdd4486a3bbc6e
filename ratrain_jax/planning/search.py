"""Finds the fastest configuration of a space that fits.

Whatever has the least bound is looked at next: a configuration that was only bounded as a whole gets its layers split,
which gives a closer bound; one that has a split is simulated. The search ends where the least bound passes the best time.
All bounds are admissible, so the result is that of simulating everything.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import operator
from collections.abc import Callable, Iterator, Sequence

from ratrain_jax.kernels import Machine
from ratrain_jax.planning.configuration import RUNNABLE, Configuration
from ratrain_jax.planning.layer_table import LayerTable
from ratrain_jax.planning.simulated import costs_of, estimated_step, interleaved_split
from ratrain_jax.planning.space import Space
from ratrain_jax.planning.splits import Shortfall, Split, best_split
from ratrain_jax.planning.step_tasks import StepSeconds, step_seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration that was looked at.

    Attributes:
        configuration: which.
        bound: seconds that a step takes at least.
        split: its layers over stages; None if it does not fit or was ruled out before.
        seconds: its simulated step; None if it was not simulated.
        shortfall: why it does not fit; None if it does.
    """

    configuration: Configuration
    bound: float
    split: Split | None = None
    seconds: StepSeconds | None = None
    shortfall: Shortfall | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What a search found.

    Attributes:
        best: the fastest candidate that fits; None if none does.
        seen: every candidate that was looked at more closely, in that order.
        rest: the configurations whose first bound was enough, as candidates.
    """

    best: Candidate | None
    seen: tuple[Candidate, ...]
    rest: tuple[Candidate, ...]

    @property
    def configurations(self) -> int:
        """How many the space has."""
        return len(self.seen) + len(self.rest)


def search(
    space: Space,
    tables: Callable[[int, int], LayerTable],
    machine: Machine,
    limit: int,
    *,
    exhaustive: bool = False,
) -> Found:
    """Searches a space.

    Args:
        space: what to go through.
        tables: gives the layers at a size of microbatch, on one of so many tensor-parallel ranks.
        machine: what the step is to run on.
        limit: bytes a device.
        exhaustive: whether to simulate all that fits, bounds or not.
    """
    bounded = [
        Candidate(c, least_seconds(tables(c.rows, c.tensor), c)) for c in candidates(space, tables)
    ]
    waiting = [(candidate.bound, number, candidate) for number, candidate in enumerate(bounded)]
    heapq.heapify(waiting)
    best: Candidate | None = None
    seen: list[Candidate] = []
    while waiting:
        bound, number, candidate = heapq.heappop(waiting)
        to_beat = math.inf if best is None or exhaustive else _seconds(best)
        if bound > to_beat:
            heapq.heappush(waiting, (bound, number, candidate))
            break
        configuration = candidate.configuration
        if candidate.split is None:
            found = with_split(
                candidate, tables(configuration.rows, configuration.tensor), machine, limit, to_beat
            )
            if found.split is not None:
                heapq.heappush(waiting, (found.bound, number, found))
            else:
                seen.append(found)
            continue
        found = simulated(candidate, tables(configuration.rows, configuration.tensor), machine)
        seen.append(found)
        if best is None or _key(found) < _key(best):
            best = found
    return Found(best, tuple(seen), tuple(candidate for _, _, candidate in sorted(waiting)))


def candidates(space: Space, tables: Callable[[int, int], LayerTable]) -> Iterator[Configuration]:
    """The configurations of a space that have a layer for each of their stages."""
    for c in space.configurations():
        if c.stages * c.chunks <= len(tables(c.rows, c.tensor).rows):
            yield c


def _seconds(candidate: Candidate) -> float:
    assert candidate.seconds is not None
    return candidate.seconds.step


def _key(candidate: Candidate) -> tuple[float, int, int]:
    """Less is better: time, then memory, then depth."""
    assert candidate.split is not None
    most = max(stage.memory.total for stage in candidate.split.stages)
    return (_seconds(candidate), most, candidate.configuration.stages)


def with_split(
    candidate: Candidate,
    table: LayerTable,
    machine: Machine,
    limit: int,
    to_beat: float = math.inf,
) -> Candidate:
    """A candidate with the best split of its layers and the bound that this gives, or with why none fits.

    Args:
        candidate: a configuration.
        table: the layers at its size of microbatch.
        machine: what the step is to run on.
        limit: bytes a device.
        to_beat: seconds; where no split can be faster, the candidate is given back as it was.
    """
    costs = costs_of(table, candidate.configuration, machine)
    if candidate.configuration.schedule == "interleaved":
        split = interleaved_split(costs, limit)
    else:
        split = best_split(costs, limit, to_beat)
    if split is None:
        return candidate
    if isinstance(split, Shortfall):
        return dataclasses.replace(candidate, shortfall=split)
    return dataclasses.replace(candidate, split=split, bound=max(candidate.bound, split.bound))


def simulated(candidate: Candidate, table: LayerTable, machine: Machine) -> Candidate:
    """A candidate with its step simulated."""
    assert candidate.split is not None
    costs = costs_of(table, candidate.configuration, machine)
    if candidate.configuration.schedule in RUNNABLE:
        seconds = step_seconds(costs, candidate.split)
    else:
        seconds = StepSeconds(*estimated_step(costs, candidate.split.stages))
    return dataclasses.replace(candidate, seconds=seconds)


def look_at(
    configuration: Configuration, table: LayerTable, machine: Machine, limit: int
) -> Candidate:
    """Splits and simulates one configuration."""
    bounded = Candidate(configuration, least_seconds(table, configuration))
    found = with_split(bounded, table, machine, limit)
    return found if found.split is None else simulated(found, table, machine)


def least_seconds(table: LayerTable, configuration: Configuration) -> float:
    """Seconds that no split of the layers can beat.

    Were layers divisible at will, the best pipeline would have all terms m·x(s) + Σ x(before s) equal: x falls by
    1 - 1/m from stage to stage, and with Σ x = X, one microbatch's compute, the step is X / (1 - (1 - 1/m)^P).
    """
    whole = table.forward[-1] + table.backward[-1]
    # Recovery is compute of its stage like any other, though it delays no neighbour.
    recovers = configuration.recovery in ("forward", "backward")
    again = recovers * table.forward[-1]
    m, stages = configuration.microbatches, configuration.stages
    depth = 1 - (1 - 1 / m) ** stages if configuration.fills else stages / m
    even = max(whole / depth, (whole + again) * m / stages)
    # Some stage has at least its share of the layers, whatever the split.
    share = -(-len(table.rows) // stages)
    each = [f + b for f, b in zip(table.forward, table.backward, strict=True)]
    if configuration.recovery in ("forward", "backward"):
        each = [seconds + f for seconds, f in zip(each, table.forward, strict=True)]
    widest = min(map(operator.sub, each[share:], each))
    return max(even, m * widest)


def ordered(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates that were simulated, fastest first."""
    return sorted((c for c in candidates if c.seconds is not None), key=_key)
