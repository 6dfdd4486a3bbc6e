"""Failures and stragglers: formulas against simulations drawn at random, known values, and what is refused."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import SimulationError
from ratrain_jax.simulation.breakdown import Breakdown
from ratrain_jax.simulation.engine import run
from ratrain_jax.simulation.pipelines import Pipeline, StageSeconds, pipeline_tasks
from ratrain_jax.simulation.reliability import (
    Failures,
    best_interval,
    expected_step,
    greatest_of_normals,
    slowest_factor,
)

DAY = 86400.0


# --- failures -----------------------------------------------------------------------------------


def drawn(mean, interval, checkpoint, restart, segments, seed):
    """Seconds of work, checkpoints, rework and restarts of a system whose failures are drawn one by one."""
    rng = np.random.default_rng(seed)
    spent = dict.fromkeys(("work", "checkpoint", "rework", "restart"), 0.0)
    for _ in range(segments):
        while (until := rng.exponential(mean)) < interval + checkpoint:
            spent["rework"] += until
            while (until := rng.exponential(mean)) < restart:
                spent["restart"] += until
            spent["restart"] += restart
        spent["work"] += interval
        spent["checkpoint"] += checkpoint
    return spent


@pytest.mark.parametrize(
    "mean, interval, checkpoint, restart",
    [(1000.0, 100.0, 10.0, 30.0), (100.0, 100.0, 50.0, 80.0), (50.0, 20.0, 1.0, 0.0)],
)
def test_lost_time_is_that_of_failures_drawn_one_by_one(mean, interval, checkpoint, restart):
    devices = 7
    failures = Failures(
        mtbf=mean * devices, checkpoint=checkpoint, restart=restart, interval=interval
    )
    lost = failures.expected(devices)
    spent = drawn(mean, interval, checkpoint, restart, 40_000, seed=1)
    total = sum(spent.values())
    assert lost.goodput == pytest.approx(spent["work"] / total, rel=0.02)
    assert lost.checkpoint == pytest.approx(spent["checkpoint"] / total, rel=0.02)
    assert lost.rework == pytest.approx(spent["rework"] / total, rel=0.03)
    assert lost.restart == pytest.approx(spent["restart"] / total, rel=0.03)
    assert lost.goodput + lost.checkpoint + lost.rework + lost.restart == pytest.approx(1)


def test_lost_time_is_dalys_formula():
    lost = Failures(mtbf=DAY, checkpoint=300.0, restart=600.0, interval=7000.0).expected(1)
    whole = DAY * math.exp(600 / DAY) * (math.exp(7300 / DAY) - 1)
    assert lost.goodput == pytest.approx(7000 / whole, rel=1e-12)


@pytest.mark.parametrize("share", [1e-5, 1e-3, 0.03, 0.3])
def test_the_interval_chosen_loses_hardly_more_than_the_least(share):
    checkpoint = share * DAY
    chosen = Failures(mtbf=DAY, checkpoint=checkpoint).expected(1)
    young = math.sqrt(2 * checkpoint * DAY)
    assert chosen.interval == pytest.approx(young, rel=1.1 * math.sqrt(share))
    others = np.geomspace(chosen.interval / 10, chosen.interval * 10, 2001)
    best = max(
        Failures(mtbf=DAY, checkpoint=checkpoint, interval=float(t)).expected(1).goodput
        for t in others
    )
    assert 1 - chosen.goodput <= (1 - best) * 1.0005
    # Which Young's first order does not reach.
    of_young = Failures(mtbf=DAY, checkpoint=checkpoint, interval=young).expected(1)
    assert chosen.goodput > of_young.goodput


def test_where_a_checkpoint_takes_longer_than_devices_last_the_interval_is_their_mean():
    assert best_interval(100.0, 200.0) == 100.0
    assert best_interval(100.0, 1e4) == 100.0


def test_failures_come_with_the_number_of_devices():
    failures = Failures(mtbf=DAY, checkpoint=1.0, restart=10.0, interval=100.0)
    assert failures.expected(10).mtbf == DAY / 10
    shares = [failures.expected(n).goodput for n in (1, 10, 100, 1000, 100_000)]
    assert shares == sorted(shares, reverse=True)
    assert failures.expected(10**9).goodput == 0


def test_checkpoints_are_written_between_steps():
    failures = Failures(mtbf=DAY, checkpoint=1.0)
    free = failures.expected(10).interval
    assert failures.expected(10, step=free / 3.4).interval == pytest.approx(3 * free / 3.4)
    assert failures.expected(10, step=50 * free).interval == 50 * free


@pytest.mark.parametrize(
    "wrong, told",
    [
        ({"mtbf": 0.0}, "mtbf is 0.0; give seconds, more than 0"),
        ({"checkpoint": -1.0}, "checkpoint is -1.0"),
        ({"interval": math.nan}, "interval is nan"),
        ({"restart": -1.0}, "restart is -1.0; give seconds, 0 or more"),
    ],
)
def test_what_cannot_be_is_refused(wrong, told):
    with pytest.raises(SimulationError, match=told):
        rt.Failures(**{"mtbf": 1e6, "checkpoint": 10.0, **wrong})
    with pytest.raises(SimulationError, match="devices is 0"):
        rt.Failures(mtbf=1.0, checkpoint=1.0).expected(0)


# --- stragglers ---------------------------------------------------------------------------------


def test_the_greatest_of_normals_is_known_for_few():
    assert greatest_of_normals(1) == pytest.approx(0, abs=1e-12)
    assert greatest_of_normals(2) == pytest.approx(1 / math.sqrt(math.pi))
    assert greatest_of_normals(3) == pytest.approx(1.5 / math.sqrt(math.pi))
    # Tabulated by H. L. Harter, "Expected values of normal order statistics", Biometrika 48, 1961.
    assert greatest_of_normals(100) == pytest.approx(2.50759, abs=1e-5)


@pytest.mark.parametrize("ranks", [8, 1000, 100_000])
def test_the_slowest_is_that_of_draws(ranks):
    rng = np.random.default_rng(2)
    draws = 1 + 0.05 * np.array([rng.standard_normal(ranks).max() for _ in range(200)])
    error = draws.std() / math.sqrt(len(draws))
    assert slowest_factor(0.05, ranks) == pytest.approx(draws.mean(), abs=4 * error)


def test_a_balanced_pipeline_waits_for_its_slowest_rank():
    stages, ranks, microbatches, variation = 4, 8, 64, 0.05
    rng = np.random.default_rng(3)

    def step(factors):
        seconds = tuple(StageSeconds(1.0 * f, 2.0 * f) for f in factors)
        return run(pipeline_tasks(Pipeline("1f1b", seconds, microbatches))[0]).last

    plain = step([1.0] * stages)
    drawn = [
        max(step(row) for row in 1 + variation * rng.standard_normal((ranks, stages)))
        for _ in range(60)
    ]
    line = Breakdown(0, ideal=3.0 * microbatches, bubble=plain - 3.0 * microbatches, exposed=0.0,
                     recovery=0.0, tail=0.0)  # fmt: skip
    found = expected_step(line, stages * ranks, None, variation)
    # An upper bound: while the pipeline fills, faster stages than the slowest work.
    assert np.mean(drawn) <= found.step <= 1.02 * np.mean(drawn)
    assert found.step > 1.05 * plain


def test_only_compute_is_held_up():
    line = Breakdown(0, ideal=10.0, bubble=2.0, exposed=3.0, recovery=4.0, tail=5.0)
    found = expected_step(line, 2, None, 0.1)
    assert found.step == pytest.approx(24 + 0.1 / math.sqrt(math.pi) * 16)
    assert (found.mean_step, found.lost) == (found.step, None)


@pytest.mark.parametrize("wrong", [-0.1, 0.31, math.nan])
def test_a_variation_out_of_range_is_refused(wrong):
    with pytest.raises(SimulationError, match="give a standard deviation over the mean from 0"):
        slowest_factor(wrong, 8)


# --- of a timeline ------------------------------------------------------------------------------


def test_a_timeline_tells_what_a_step_takes_in_the_long_run():
    @rt.train_step(stages=2, data_parallel=2, microbatches=2)
    def step(w, x):
        def loss(w):
            return (jnp.tanh(x @ w["a"]) @ w["b"]).mean()

        value, grad = rt.value_and_grad(loss)(w)
        return {k: w[k] - grad[k] for k in w}, value

    state = {"a": jnp.ones((64, 64)), "b": jnp.ones((64, 64))}
    timeline = rt.simulate(step.lower(state, jnp.ones((8, 64))), "generic")
    seconds = timeline.step_seconds
    failures = rt.Failures(mtbf=4e4 * seconds, checkpoint=2 * seconds, restart=5 * seconds)
    found = timeline.expected(failures, stragglers=0.1)
    assert found.ranks == found.lost.devices == 4
    assert found.slowest == slowest_factor(0.1, 4)
    assert found.undisturbed == seconds
    assert found.undisturbed < found.step < found.slowest * seconds
    assert found.mean_step == pytest.approx(found.step / found.lost.goodput)
    steps = found.lost.interval / found.step
    assert steps == pytest.approx(round(steps))
    text = str(found)
    assert "the slowest of 4 ranks" in text
    assert f"{round(steps)} steps between checkpoints" in text
    assert str(timeline.expected()) == f"step {seconds:.4g} s"
    hopeless = timeline.expected(rt.Failures(mtbf=1e-6 * seconds, checkpoint=seconds))
    assert hopeless.mean_step is None
    assert "no step is ever finished" in str(hopeless)
