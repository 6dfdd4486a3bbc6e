"""Finds the fastest configuration of a space that fits.

Configurations are looked at in the order of a bound that costs nothing to find, and the search ends where that bound
passes the best time so far; the next bound, of the best split, is tried before a step is simulated. Both are
admissible, so the result is that of simulating everything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ratrain_jax.kernels import Machine
from ratrain_jax.planning.configuration import RUNNABLE, Configuration
from ratrain_jax.planning.layer_table import LayerTable
from ratrain_jax.planning.simulated import costs_of, estimated_step
from ratrain_jax.planning.space import Space
from ratrain_jax.planning.splits import Shortfall, Split, best_split
from ratrain_jax.planning.stage_costs import StageCosts
from ratrain_jax.planning.step_tasks import StepSeconds, step_seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration that was looked at.

    Attributes:
        configuration: which.
        bound: seconds that a step takes at least.
        split: its layers over stages; None if it does not fit or its bound ruled it out.
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
    tables: Callable[[int], LayerTable],
    machine: Machine,
    limit: int,
    *,
    exhaustive: bool = False,
) -> Found:
    """Searches a space.

    Args:
        space: what to go through.
        tables: gives the layers at a size of microbatch.
        machine: what the step is to run on.
        limit: bytes a device.
        exhaustive: whether to simulate all that fits, bounds or not.
    """
    bounded = [Candidate(c, least_seconds(tables(c.rows), c)) for c in space.configurations()]
    bounded.sort(key=lambda candidate: candidate.bound)
    best: Candidate | None = None
    seen: list[Candidate] = []
    for candidate in bounded:
        to_beat = None if best is None or exhaustive else best.seconds
        if to_beat is not None and candidate.bound > to_beat.step:
            break
        configuration = candidate.configuration
        found = look_at(configuration, tables(configuration.rows), machine, limit, to_beat)
        seen.append(found)
        if found.seconds is not None and (best is None or _key(found) < _key(best)):
            best = found
    return Found(best, tuple(seen), tuple(bounded[len(seen) :]))


def _key(candidate: Candidate) -> tuple[float, int, int]:
    """Less is better: time, then memory, then depth."""
    assert candidate.seconds is not None
    assert candidate.split is not None
    most = max(stage.memory.total for stage in candidate.split.stages)
    return (candidate.seconds.step, most, candidate.configuration.stages)


def look_at(
    configuration: Configuration,
    table: LayerTable,
    machine: Machine,
    limit: int,
    best: StepSeconds | None = None,
) -> Candidate:
    """Splits, and if need be simulates, one configuration.

    Args:
        configuration: which.
        table: the layers at its size of microbatch.
        machine: what the step is to run on.
        limit: bytes a device.
        best: a step that it must beat to be simulated; None to simulate it anyway.
    """
    costs = costs_of(table, configuration, machine)
    split = best_split(costs, limit)
    if isinstance(split, Shortfall):
        return Candidate(configuration, least_seconds(table, configuration), shortfall=split)
    if best is not None and split.bound > best.step:
        return Candidate(configuration, split.bound, split)
    return Candidate(configuration, split.bound, split, _simulated(costs, split))


def _simulated(costs: StageCosts, split: Split) -> StepSeconds:
    if costs.configuration.schedule in RUNNABLE:
        return step_seconds(costs, split)
    return StepSeconds(*estimated_step(costs, split.stages))


def least_seconds(table: LayerTable, configuration: Configuration) -> float:
    """Seconds that no split of the layers can beat.

    Were layers divisible at will, the best pipeline would have all terms m·x(s) + Σ x(before s) equal: x falls by
    1 - 1/m from stage to stage, and with Σ x = X, one microbatch's compute, the step is X / (1 - (1 - 1/m)^P).
    """
    whole = sum(row.forward.seconds + row.backward.seconds for row in table.rows)
    # Recovery is compute of its stage like any other, though it delays no neighbour.
    recovers = configuration.recovery in ("forward", "backward")
    again = recovers * sum(row.forward.seconds for row in table.rows)
    m, stages = configuration.microbatches, configuration.stages
    tensor = configuration.tensor_parallel
    depth = 1 - (1 - 1 / m) ** stages if configuration.fills else stages / m
    even = max(whole / depth, (whole + again) * m / stages) / tensor
    widest = max(row.forward.seconds + row.backward.seconds for row in table.rows) / tensor
    return max(even, m * widest)


def ordered(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates that were simulated, fastest first."""
    return sorted((c for c in candidates if c.seconds is not None), key=_key)
