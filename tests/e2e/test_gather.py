"""A trained state is brought to one device, for evaluation, and training goes on from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ratrain_jax as rt
from tests.models.case import OPTIMIZERS, linen_case
from tests.models.gpt import GPT, loss, make_batch
from tests.training import differing

CASE = linen_case(
    "gpt", GPT(width=8, layers=2), inputs=("inputs",), loss=loss, make_batch=make_batch
)


def trained(**options):
    optimizer = OPTIMIZERS["adamw"]()
    step = rt.train_step(stages=2, microbatches=2, **options)(
        CASE.make_step(optimizer, rt.value_and_grad)
    )
    state, _ = step(CASE.make_state(optimizer), CASE.make_batch(0, 8))
    return step, state


@pytest.mark.parametrize("data_parallel", [1, 2])
def test_a_gathered_state_evaluates_in_one_jit_and_outlives_training(data_parallel):
    step, state = trained(data_parallel=data_parallel)
    batch = CASE.make_batch(1, 8)
    evaluate = jax.jit(lambda s: loss(s.apply_fn, s.params, batch))
    gathered = rt.gather(state)
    assert not differing(state, gathered)
    devices = {d for leaf in jax.tree.leaves(gathered) for d in jnp.asarray(leaf).devices()}
    assert devices == {jax.devices()[0]}
    before = evaluate(gathered)
    state, metrics = step(state, batch)
    assert np.isfinite(metrics["loss"])
    assert evaluate(gathered) == before
    assert evaluate(rt.gather(state)) != before


def test_an_evaluation_between_leaves_training_as_it_is():
    losses = []
    for evaluates in (False, True):
        step, state = trained()
        for seed in range(1, 4):
            if evaluates:
                rt.gather(state, jax.devices()[3])
            state, metrics = step(state, CASE.make_batch(seed, 8))
            losses.append(float(metrics["loss"]))
    assert losses[:3] == losses[3:]


def test_stacked_leaves_become_arrays_and_other_leaves_stay():
    leaf = rt.StackedLeaf([jax.device_put(jnp.full(2, n), jax.devices()[n]) for n in range(3)])
    found = rt.gather({"stacked": leaf, "name": "small", "count": 3}, jax.devices()[1])
    assert found["stacked"].devices() == {jax.devices()[1]}
    np.testing.assert_array_equal(found["stacked"], [[0, 0], [1, 1], [2, 2]])
    assert (found["name"], found["count"]) == ("small", 3)
