"""Losses that are made in the middle of a network, or at each of its layers, train as under `jax.jit`."""

import jax
import jax.numpy as jnp
import pytest

import ratrain_jax as rt
from tests.dense import predict
from tests.sequences import LAYOUTS, halves, make_batch, make_params, plain_of
from tests.training import assert_close


def middle_step(loss):
    def step(state, batch, value_and_grad=rt.value_and_grad):
        (value, aux), grads = value_and_grad(lambda p: loss(p, batch), has_aux=True)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": value, **aux}

    return step


def deep_supervision(params, batch):
    """Each layer's output is compared with the goal, also early ones."""
    x, losses = batch["x"], []
    for layer in params.values():
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
        losses.append(((x - batch["y"]) ** 2).mean())
    weights = jnp.arange(1.0, 1 + len(losses))
    return (jnp.stack(losses) * weights).sum(), {f"loss_{n}": v for n, v in enumerate(losses)}


def early_loss(params, batch):
    """The loss is made by the second layer; the others only make an auxiliary value."""
    first, second = halves(params)
    hidden = predict(first, batch["x"])
    rest = predict(second, hidden)
    return ((hidden - batch["y"]) ** 2).mean(), {"later": ((rest - batch["y"]) ** 2).mean()}


def early_penalty(params, batch):
    """A small penalty on an early activation, added to the loss of the last layer."""
    first, second = halves(params)
    hidden = predict(first, batch["x"])
    out = predict(second, hidden)
    penalty = jnp.abs(hidden).mean()
    return ((out - batch["y"]) ** 2).mean() + 0.3 * penalty, {"penalty": penalty}


@pytest.mark.parametrize("loss", [deep_supervision, early_loss, early_penalty])
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(LAYOUTS[1], marks=pytest.mark.slow),
        {**LAYOUTS[2], "recovery": "backward"},
    ],
    ids=str,
)
def test_losses_from_the_middle_of_the_network(loss, layout):
    step = middle_step(loss)
    piped = rt.train_step(**layout)(step)
    plain = plain_of(step)
    ours = theirs = make_params()
    for seed in range(2):
        ours, found = piped(ours, make_batch(seed))
        theirs, wanted = plain(theirs, make_batch(seed))
        assert_close(found, wanted)
    assert_close(ours, theirs)
