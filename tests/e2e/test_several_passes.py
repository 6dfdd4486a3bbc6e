"""Losses that run their network more than once train as under plain `jax.jit`, each pass beside the others."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import ratrain_jax as rt
from tests.training import TWO_BY_TWO, named_leaves, train

WIDTH = 8


class Encoder(nn.Module):
    """An MLP with skips; bounded, so that no gradient is zero in exact arithmetic."""

    @nn.compact
    def __call__(self, x):
        for n in range(4):
            x = x + nn.Dense(WIDTH, name=f"dense_{n}")(jnp.tanh(x))
        return jnp.tanh(x)


class Recurrent(nn.Module):
    """A recurrent net of three layers, unrolled over time."""

    @nn.compact
    def __call__(self, xs):
        layers = [nn.SimpleCell(WIDTH, name=f"cell_{n}") for n in range(3)]
        states = [jnp.zeros_like(xs[:, 0])] * 3
        for x in jnp.moveaxis(xs, 1, 0):
            for n, layer in enumerate(layers):
                states[n], x = layer(states[n], x)
        return x


def apart(model, params, batch):
    """Brings an example near the next one of its triple, and away from the last."""
    anchor, near, far = (model.apply(params, batch[:, n]) for n in range(3))
    near, far = (jnp.sum((anchor - other) ** 2, axis=-1) for other in (near, far))
    return jnp.mean(nn.softplus(near - far))


def forecast(model, params, batch):
    """Foretells the last step of a sequence."""
    return jnp.mean((model.apply(params, batch[:, :-1]) - batch[:, -1]) ** 2)


def make_step(model, loss, value_and_grad):
    def step(state, batch):
        value, grads = value_and_grad(lambda params: loss(model, params, batch))(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    return step


@pytest.mark.parametrize(
    ("model", "loss"), [(Encoder(), apart), (Recurrent(), forecast)], ids=["triplet", "recurrent"]
)
def test_it_trains_as_under_plain_jit_and_borrows_nothing(model, loss, double_precision):
    batches = [np.random.default_rng(seed).standard_normal((8, 3, WIDTH)) for seed in range(4)]
    params = model.init(jax.random.key(0), batches[0] if loss is forecast else batches[0][:, 0])
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(1e-2))
    step = rt.train_step(**TWO_BY_TWO)(make_step(model, loss, rt.value_and_grad))
    found = train(step, state, batches)
    wanted = train(jax.jit(make_step(model, loss, jax.value_and_grad)), state, batches)
    np.testing.assert_allclose(found.losses(), wanted.losses(), rtol=1e-9)
    theirs = named_leaves(wanted.state)
    for name, leaf in named_leaves(found.state).items():
        assert np.abs(leaf - theirs[name]).max() <= 1e-9 * np.abs(theirs[name]).max(), name
    layers = step.lower(state, batches[0]).program.layers
    assert not any(layer.borrows for layer in layers)
