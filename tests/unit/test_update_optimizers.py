"""Optax's optimizers run layer by layer on shards, and wait for as few reductions as they may."""

import jax
import optax
import optax.contrib
import pytest
from flax.training.train_state import TrainState

from ratrain_jax.losses import value_and_grad
from tests.updates import (
    LAYERS,
    case_of,
    check_equal_layers,
    compare,
    loss_of,
    make_params,
    model,
    train_step,
    waits,
)


def optax_case(tx):
    state = TrainState.create(apply_fn=model, params=make_params(), tx=tx)
    return case_of(train_step, state)


def decayed(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


# The optimizer, how many reductions its updates wait for, and how many leaves stay replicated.
OPTIMIZERS = {
    "sgd": (optax.sgd(0.1), 0, 1),
    "momentum": (optax.sgd(0.1, momentum=0.9, nesterov=True), 0, 1),
    "adam": (optax.adam(0.1), 0, 2),
    "adamw": (optax.adamw(0.1, weight_decay=0.1, mask=decayed), 0, 2),
    "lion": (optax.lion(0.1), 0, 2),
    "rmsprop": (optax.rmsprop(0.1, momentum=0.9), 0, 1),
    "adagrad": (optax.adagrad(0.1), 0, 1),
    "lamb": (optax.lamb(0.1), 0, 2),
    "lars": (optax.lars(0.1), 0, 1),
    "novograd": (optax.novograd(0.1), 0, 2),
    "schedule": (optax.adam(optax.cosine_decay_schedule(0.1, 9)), 0, 3),
    "clip": (optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)), 1, 2),
    "clip_blocks": (optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(0.1)), 0, 1),
    "adaptive_clip": (optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)), 0, 1),
    "multi_steps": (optax.MultiSteps(optax.adam(0.1), 2), 0, 4),
    "if_finite": (optax.apply_if_finite(optax.adam(0.1), 3), 1, 5),
    "freeze": (
        optax.multi_transform(
            {"train": optax.adam(0.1), "freeze": optax.set_to_zero()},
            {name: "freeze" if name == "embed" else "train" for name in LAYERS},
        ),
        0,
        2,
    ),
    "dog": (optax.contrib.dog(0.1), 1, 4),
    "schedule_free": (optax.contrib.schedule_free_adamw(0.1), 0, 6),
}
QUICK = {"momentum", "adamw", "lion", "lamb", "clip", "schedule", "multi_steps", "if_finite"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in OPTIMIZERS],
)
def test_an_optimizer_runs_layer_by_layer_on_shards(name):
    tx, phase, replicated = OPTIMIZERS[name]
    case = optax_case(tx)
    compare(case)
    check_equal_layers(case.plan)
    assert waits(case.plan) == [phase] * 3
    assert len(case.plan.replicated) == replicated
    # One reduction, for the gradients' norm and the loss, whatever the updates wait for.
    assert [reduction.layers for reduction in case.plan.reductions] == [(0, 1, 2)]
    assert case.plan.reductions[0].loss
    assert all(aval.shape == () for aval in case.plan.reductions[0].scalars)


@pytest.mark.parametrize("devices", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_the_number_of_devices_does_not_matter(devices):
    compare(optax_case(OPTIMIZERS["clip"][0]), devices=[devices])


def test_adafactor_runs_layer_by_layer_on_shards():
    case = optax_case(optax.adafactor(0.1, min_dim_size_to_factor=4))
    compare(case, rtol=5e-6)
    check_equal_layers(case.plan)
    assert waits(case.plan) == [0, 0, 0]
    # The two factors of each matrix belong to its layer.
    assert [len(layer.optimizer) for layer in case.plan.layers] == [2, 5, 5]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "mechanize", "prodigy", "noise"])
def test_optimizers_of_other_kinds_run_layer_by_layer(name):
    noise = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1))
    tx = {
        "muon": lambda: optax.contrib.muon(0.1),
        "mechanize": lambda: optax.contrib.mechanize(optax.adam(0.1)),
        "prodigy": lambda: optax.contrib.prodigy(0.1),
        "noise": lambda: noise,
    }[name]()
    case = optax_case(tx)
    compare(case, rtol=5e-5)
    if name != "noise":  # each layer draws other numbers
        check_equal_layers(case.plan)


def test_a_plateau_makes_updates_wait_for_the_loss():
    tx = optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=1))

    def step(state, batch):
        loss, grads = value_and_grad(loss_of)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"], value=loss)
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    params = make_params()
    case = case_of(step, {"params": params, "opt": tx.init(params)})
    compare(case, steps=3)
    assert len(case.plan.reductions) == 1 and case.plan.reductions[0].layers == ()
    # The scale that this step's updates use was made in the last step.
    assert waits(case.plan) == [1, 1, 1] and case.plan.replicated_phase == 1
