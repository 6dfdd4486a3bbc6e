"""By how much ops slow each other down that run on several devices at once, such as on the cores of one host.

The forwards of a microbatch are launched over and over, on the first stage alone, on the first two, and so on, each
stage's so often that all would take about as long by themselves. The slowdown is the time until all have ended, over the
mean of what each stage's took by themselves.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ratrain_jax.lowering.program import Forward
from ratrain_jax.runtime.processes import exchange, meet, several
from ratrain_jax.runtime.serial import Serial

LEAST = 6
"""How often the longest forwards are launched."""
MOST = 60
"""How often the shortest are."""

Job = tuple[Callable[[Any], Any], list[Any]]


ROUNDS = 3
"""How often each number of stages is measured, in turn."""


def sample(step: Serial) -> dict[int, float]:
    """Measures with each number of stages.

    Args:
        step: a step that has not begun; it is not run to its end.

    Returns:
        For each number of busy devices, the slowdown.
    """
    devices, jobs = step.groups[0].size, _forwards(step)
    once = [min(_burst([job], [1]) for _ in range(2)) for job in jobs]
    times = [min(MOST, max(LEAST, round(LEAST * max(once) / seconds))) for seconds in once]
    found: dict[int, list[float]] = {devices: [1.0]}
    for _ in range(ROUNDS if len(jobs) > 1 else 0):
        alone = [_burst([job], [count]) for job, count in zip(jobs, times, strict=True)]
        for busy in range(2, len(jobs) + 1):
            together = _burst(jobs[:busy], times[:busy])
            found.setdefault(busy * devices, []).append(together / statistics.mean(alone[:busy]))
    return {busy: statistics.median(factors) for busy, factors in found.items()}


def slowdowns(samples: Sequence[Mapping[int, float]]) -> tuple[tuple[int, float], ...]:
    """Busy devices and the median slowdown.

    Args:
        samples: what `sample` gave, each time.
    """
    return tuple((busy, statistics.median(s[busy] for s in samples)) for busy in sorted(samples[0]))


def _forwards(step: Serial) -> list[list[Job]]:
    """The forwards of each stage for the first microbatch. Their values live on, for the step goes no further."""
    jobs: list[list[Job]] = [[] for _ in step.groups]
    wanted = {
        (op.stage, op.layers)
        for op in step.program.ops()
        if isinstance(op, Forward) and op.microbatch == 0
    }
    for op, _ in step.run():
        if isinstance(op, Forward) and op.microbatch == 0:
            if step.has(op):
                jobs[op.stage].append(step.call(op))
            wanted.discard((op.stage, op.layers))
            if not wanted:
                break
    return jobs


def _burst(jobs: Iterable[list[Job]], times: Iterable[int]) -> float:
    """Seconds until the jobs of some stages, each launched some times, have all ended, in whatever process."""
    pairs = list(zip(jobs, times, strict=True))
    made: dict[int, Any] = {}
    meet()
    start = time.perf_counter()
    for turn in range(max(count for _, count in pairs)):
        for stage, (job, count) in enumerate(pairs):
            if turn < count:
                for execute, bundles in job:
                    made[stage] = execute(bundles)
    jax.block_until_ready(made)
    taken = time.perf_counter() - start
    return float(exchange(np.array([taken], np.float32)).max()) if several() else taken
