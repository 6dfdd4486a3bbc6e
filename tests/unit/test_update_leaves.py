"""What belongs to a layer: leaves of the state, gradients, and what a step returns; and what stays replicated."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

from ratrain_jax.losses import value_and_grad
from ratrain_jax.lowering.update import split_update
from tests.updates import (
    BATCH,
    case_of,
    check_equal_layers,
    compare,
    layer_of,
    loss_of,
    make_params,
    model,
    train_step,
    waits,
)


def test_an_average_of_the_parameters_belongs_to_their_layer():
    tx = optax.adam(0.1)

    def step(state, batch):
        loss, grads = value_and_grad(loss_of)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        ema = optax.incremental_update(params, state["ema"], 0.1)
        return {"params": params, "opt": opt, "ema": ema}, {"loss": loss}

    params = make_params()
    case = case_of(step, {"params": params, "opt": tx.init(params), "ema": params})
    compare(case)
    check_equal_layers(case.plan)
    assert [len(layer.optimizer) for layer in case.plan.layers] == [3, 12, 12]


def test_what_training_began_with_belongs_to_its_layer():
    def step(state, batch):
        _, grads = value_and_grad(loss_of)(state["params"], batch)
        pull = lambda p, g, start: p - 0.1 * (g + 0.5 * (p - start))  # noqa: E731
        return state | {"params": jax.tree.map(pull, state["params"], grads, state["start"])}

    params = make_params()
    case = case_of(step, {"params": params, "start": params})
    compare(case)
    assert case.plan.replicated == () and case.plan.reductions == ()
    assert [len(layer.optimizer) for layer in case.plan.layers] == [1, 4, 4]


def test_frozen_state_that_the_loss_reads_stays_replicated():
    def step(state, batch):
        def loss_fn(params):
            return loss_of(params, {"x": batch["x"] * state["frozen"]})

        _, grads = value_and_grad(loss_fn)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        params["embed"]["w"] += 0.01 * state["frozen"][:, None]
        return state | {"params": params}

    case = case_of(step, {"params": make_params(), "frozen": jnp.arange(4.0)})
    compare(case)
    assert case.plan.replicated == (0,)


def test_gradients_and_updates_can_be_returned():
    def step(state, batch):
        loss, grads = value_and_grad(loss_of)(state, batch)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)
        return new, {"grads": grads, "old": state["embed"], "loss": loss}

    case = case_of(step, make_params())
    compare(case)
    # The scalar parameters' gradients come through the reduction, arrays from their layers.
    assert [len(layer.outputs) for layer in case.plan.layers] == [2, 3, 3]


@pytest.mark.parametrize("what", ["grads", "loss", "norm"])
def test_a_step_may_return_no_state(what):
    def step(state, batch):
        loss, grads = value_and_grad(loss_of)(state, batch)
        return {"grads": grads, "loss": loss, "norm": optax.tree.norm(grads)}[what]

    compare(case_of(step, make_params(), returns_state=False), steps=1)


def test_metrics_and_learning_rates_may_come_from_the_batch():
    def step(state, batch, rate):
        loss, grads = value_and_grad(loss_of)(state["params"], batch)
        params = jax.tree.map(lambda p, g: p - rate["scale"] * 0.1 * g, state["params"], grads)
        new = {"params": params, "last": rate["scale"], "count": state["count"] + 1}
        metrics = {"mean": jnp.mean(batch["x"]) + loss, "rows": batch["x"][:, 0] * 2}
        return new, metrics | {"rate": rate["scale"]}

    state = {"params": make_params(), "last": jnp.float32(0), "count": jnp.int32(0)}
    case = case_of(step, state, BATCH, {"scale": jnp.float32(2)})
    compare(case)
    assert len(case.plan.reductions[0].batch) == 1
    assert len(case.plan.metrics_batch) == 2
    assert len(set(case.plan.metrics.jaxpr.invars)) == len(case.plan.metrics.jaxpr.invars)
    assert case.plan.replicated_phase == 1


def test_auxiliary_values_pass_through_a_reduction_into_the_state():
    def step(state, batch):
        def loss_fn(params):
            h = model(params, batch["x"])
            return jnp.mean(h**2), {"mean": jnp.mean(h)}

        (loss, aux), grads = value_and_grad(loss_fn, has_aux=True)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        stats = 0.9 * state["stats"] + 0.1 * aux["mean"]
        return {"params": params, "stats": stats}, {"loss": loss, "mean": aux["mean"]}

    case = case_of(step, {"params": make_params(), "stats": jnp.zeros(())})
    compare(case)
    assert waits(case.plan) == [0, 0, 0]


def test_gradients_arrive_in_the_accumulators_dtype():
    tx = optax.sgd(0.1)
    state = TrainState.create(apply_fn=model, params=make_params(jnp.bfloat16), tx=tx)
    case = case_of(train_step, state)
    grads = case.plan.layers[1].phases[0].in_avals[:4]
    assert {aval.dtype for aval in grads} == {jnp.dtype("float32")}
    compare(case, rtol=1e-2)


def test_layers_without_parameters_have_empty_updates():
    case = case_of(
        train_step, TrainState.create(apply_fn=None, params=make_params(), tx=optax.sgd(0.1))
    )
    plan = split_update(
        case.regions,
        owner=[3 * layer_of(name) for name in ["block0"] * 4 + ["block1"] * 4 + ["embed"]],
        layers=8,
        state_out=range(case.new_state),
        metrics_out=range(case.new_state, case.new_state + 2),
    )
    assert [len(layer.params) for layer in plan.layers] == [1, 0, 0, 4, 0, 0, 4, 0]
    assert plan.layers[1].phase == 0 and len(plan.layers[1].phases) == 1
