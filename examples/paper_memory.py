"""How much memory a cluster needs, for `reproduce_paper.py`: all that is counted, and the paper's terms alone.

The paper's peaks fit (derived), for P stages of D clusters and g bytes a gradient,

    parameters of the stage · (2 + (g + 12) / D) + checkpoints of the microbatches in flight
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

from paper_planning import ALLOCATIONS, LIMIT, MACHINE, best

from ratrain_jax.planning.configuration import Configuration
from ratrain_jax.planning.fewest import fewest_devices, fits
from ratrain_jax.planning.layer_table import LayerTable
from ratrain_jax.planning.search import look_at
from ratrain_jax.planning.space import Space
from ratrain_jax.planning.workload import Workload

GRADIENT_BYTES = 2
"""g: with 4, LLaMA-2-7B would not fit the 8 clusters of the paper."""
BATCH = 3840
"""Examples of a step: shares factors with every number of clusters."""
MOST = 256
_HALVINGS = 14


def fewest_of_any(work: Workload) -> float:
    """The fewest clusters on which a step fits, of any number."""
    found = fewest_devices(_space(work), work.table, work.machine, LIMIT, range(2, MOST + 1))
    return float("inf") if found is None else found


def fewest_allocated(work: Workload) -> tuple[float, float]:
    """The smallest allocation on which it fits with groups of two or more, and the depth of the fastest plan there."""
    for count in ALLOCATIONS:
        stages = _grouped(work.table(1), count)
        space = dataclasses.replace(_space(work), devices=count, stages=stages)
        if stages and fits(space, work.table, work.machine, LIMIT):
            found = best(work, count, rows=(1,), zeros=(2,), stages=stages, schedules=("ratrain",))
            assert found is not None
            return count, found.configuration.stages
    return float("inf"), float("inf")


def least_peak(work: Workload, clusters: int, stages: int) -> float:
    """GB of the fullest cluster of the split that needs least, whether or not it fits.

    Args:
        work: the step.
        clusters: all of them.
        stages: pipeline stages.
    """
    chosen = _configuration(work, clusters, stages)

    def peak(limit: float) -> float | None:
        split = look_at(chosen, work.table(1), work.machine, int(limit)).split
        return None if split is None else max(stage.memory.total for stage in split.stages)

    return _least(peak)


def peak_of_the_papers_terms(table: LayerTable, clusters: int, stages: int) -> float:
    """Likewise, of the terms that the paper's peaks are made of.

    Args:
        table: the layers.
        clusters: all of them.
        stages: pipeline stages.
    """
    return _least(lambda limit: _packed(table, clusters, stages, limit))


def fewest_by_the_papers_terms(table: LayerTable) -> float:
    """The smallest allocation on which those terms fit all usable bytes, with groups of two or more."""
    for count in ALLOCATIONS:
        for stages in _grouped(table, count):
            if _packed(table, count, stages, MACHINE.usable_bytes) is not None:
                return count
    return float("inf")


def _grouped(table: LayerTable, count: int) -> tuple[int, ...]:
    """Depths at which each stage has two clusters or more."""
    return tuple(p for p in range(1, len(table.rows) + 1) if count % p == 0 and count // p > 1)


def _space(work: Workload) -> Space:
    layers = len(work.table(1).rows)
    return Space(devices=1, global_batch=work.global_batch, layers=layers, rows=(1,), zeros=(2,))


def _configuration(work: Workload, clusters: int, stages: int) -> Configuration:
    group = clusters // stages
    return Configuration(
        stages=stages,
        data_parallel=group,
        rows=1,
        microbatches=work.global_batch // group,
        zero=2,
        recovery="forward",
    )


def _least(peak: Callable[[float], float | None]) -> float:
    """GB: the least limit under which there is a split, by halving."""
    low, high = 0.0, 1e12
    for _ in range(_HALVINGS):
        found = peak((low + high) / 2)
        if found is None:
            low = (low + high) / 2
        else:
            high = found
    return high / 1e9


def _packed(table: LayerTable, clusters: int, stages: int, limit: float) -> float | None:
    """The fullest stage's bytes where each takes as many layers as the limit allows; None if some are left over."""
    group = clusters // stages
    sizes = [sum(leaf.bytes for leaf in row.parameters) // 4 for row in table.rows]  # float32
    sums = list(itertools.accumulate(sizes, initial=0))
    first, most = 0, 0.0
    for stage in range(stages):
        end = first
        while end < len(sizes):
            held = (sums[end + 1] - sums[first]) * (2 + (GRADIENT_BYTES + 12) / group)
            held += sum(table.cuts[max(0, n - 1)] for n in range(first, end + 1)) * (stages - stage)
            if held > limit:
                break
            end, most = end + 1, max(most, held)
        first = end
    return most if first == len(sizes) else None
