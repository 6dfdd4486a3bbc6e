"""Bounds, splits and the search, against brute force over small spaces."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain_jax.lowering.blocks import block_ends
from ratrain_jax.planning.configuration import Configuration
from ratrain_jax.planning.search import least_seconds, search
from ratrain_jax.planning.splits import Split, best_split
from ratrain_jax.planning.stage_costs import StageCosts
from ratrain_jax.planning.step_tasks import step_seconds
from tests.planning import A100, BATCH, slow_links, space, work

CONFIGURATIONS = st.builds(
    Configuration,
    stages=st.sampled_from([1, 2, 3, 4]),
    data_parallel=st.sampled_from([1, 2, 4]),
    rows=st.just(2),
    microbatches=st.sampled_from([1, 2, 3, 6]),
    schedule=st.sampled_from(["ratrain", "1f1b", "gpipe"]),
    zero=st.sampled_from([1, 2]),
    recovery=st.sampled_from(["none", "auto", "forward", "backward"]),
)
LIMITS = st.sampled_from([10**12, 4 * 10**8, 2 * 10**8, 10**8])


def fewest_recovered(costs, number, run, limit):
    """How many layers of a stage must be recovered, from its first on, for it to fit; None if it never does."""
    prefixes = (0, *block_ends(run[1] - run[0]))
    fitting = (p for p in prefixes if costs.memory(number, *run, p).total <= limit)
    return next(fitting, None)


def every_split(costs, limit):
    """All splits of the layers into stages that fit."""
    c = costs.configuration
    for inner in itertools.combinations(range(1, costs.count), c.stages - 1):
        stages = []
        for number, run in enumerate(itertools.pairwise((0, *inner, costs.count))):
            all_of_it = run[1] - run[0]
            recovered = {
                "none": 0,
                "auto": fewest_recovered(costs, number, run, limit),
            }.get(c.recovery, all_of_it)
            if recovered is None:
                break
            stages.append(costs.stage(number, *run, recovered))
        if len(stages) == c.stages and all(s.memory.total <= limit for s in stages):
            yield tuple(stages)


@given(CONFIGURATIONS, LIMITS, st.sampled_from([1e9, 1e11]))
@settings(max_examples=60, deadline=None)
def test_no_split_beats_the_best_one_and_no_step_its_bound(configuration, limit, bandwidth):
    machine = slow_links(bandwidth)
    costs = StageCosts(work().table(2), configuration, machine)
    found = best_split(costs, limit)
    steps = [step_seconds(costs, Split(stages, 0.0)).step for stages in every_split(costs, limit)]
    if not isinstance(found, Split):
        assert not steps
        assert found.bytes > 0
        return
    assert steps
    assert found.bound <= min(steps) * (1 + 1e-9)
    assert least_seconds(costs.table, configuration) <= min(steps) * (1 + 1e-9)
    assert all(stage.memory.total <= limit for stage in found.stages)


@given(CONFIGURATIONS, LIMITS)
@settings(max_examples=30, deadline=None)
def test_what_beats_nothing_is_not_split(configuration, limit):
    costs = StageCosts(work().table(2), configuration, A100)
    found = best_split(costs, limit)
    if isinstance(found, Split):
        assert best_split(costs, limit, found.bound).bound == found.bound
        assert best_split(costs, limit, found.bound * 0.999) is None


@pytest.mark.parametrize("limit", [10**12, 6 * 10**8, 2 * 10**8, 10**8])
@pytest.mark.parametrize("bandwidth", [1e9, 3e11])
@pytest.mark.parametrize("simulated", [False, True])
def test_the_search_finds_what_simulating_everything_finds(limit, bandwidth, simulated):
    machine = slow_links(bandwidth)
    more = {
        "schedules": ("ratrain", "1f1b", "interleaved", "zb-h1"),
        "zeros": (1, 2, 3),
        "tensors": (1, 2, 4),
    }
    windows = (8,) if simulated else (1, 8)
    looked_at = space(windows=windows, **more if simulated else {})
    pruned = search(looked_at, work().table, machine, limit)
    everything = search(looked_at, work().table, machine, limit, exhaustive=True)
    assert pruned.configurations == everything.configurations == len(everything.seen)
    assert (pruned.best is None) == (everything.best is None)
    if pruned.best is not None:
        assert pruned.best.seconds == everything.best.seconds
        assert pruned.best.configuration == everything.best.configuration


@pytest.mark.parametrize("devices, idle", [(7, 0.0), (7, 0.3), (13, 0.1), (16, 0.5), (8, 0.0)])
def test_the_space_has_all_groups_that_leave_no_more_idle_than_is_allowed(devices, idle):
    found = {
        (c.stages, c.tensor, c.data_parallel)
        for c in space(devices=devices, idle=idle, tensors=(1, 2)).configurations()
    }
    layers = len(work().table(1).rows)
    assert found == {
        (stages, tensor, group)
        for stages in range(1, layers + 1)
        for tensor in (1, 2)
        for group in range(1, devices + 1)
        if (1 - idle) * devices <= stages * tensor * group <= devices and BATCH % group == 0
    }


def test_a_search_that_leaves_devices_idle_is_exact_too():
    looked_at = space(devices=7, idle=0.3)
    pruned = search(looked_at, work().table, A100, 6 * 10**8)
    everything = search(looked_at, work().table, A100, 6 * 10**8, exhaustive=True)
    assert pruned.best.configuration == everything.best.configuration
    assert 5 <= pruned.best.configuration.devices <= 7


def test_pruning_leaves_most_unsimulated():
    pruned = search(space(), work().table, A100, 10**12)
    assert sum(c.seconds is not None for c in pruned.seen) < 0.5 * pruned.configurations


def test_more_memory_never_costs_time():
    steps = []
    for limit in (10**8, 2 * 10**8, 4 * 10**8, 10**9, 10**12):
        best = search(space(), work().table, A100, limit).best
        steps.append(best.seconds.step if best else float("inf"))
    assert steps == sorted(steps, reverse=True)


def test_there_are_no_more_stages_than_layers():
    found = search(space(devices=48, layers=100), work().table, A100, 10**12)
    seen = [c.configuration.stages for c in (*found.seen, *found.rest)]
    assert max(seen) <= len(work().table(1).rows) < 48
