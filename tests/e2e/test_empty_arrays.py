"""Parameters without elements, in a layer of their own or beside others, on groups of several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ratrain_jax as rt

ADAM = optax.adam(0.1)
LAYOUTS = [
    {"data_parallel": 2, "microbatches": 2, "zero": 2},
    {"data_parallel": 3, "schedule": "1f1b"},
    {"stages": 2, "data_parallel": 3, "microbatches": 2},
]


def loss_of(params, x):
    hidden = jnp.tanh(x @ params["first"]) @ params["second"]["kernel"]
    return (hidden**2).mean() + params["second"]["none"].sum() + (params["empty"] * 2.0).sum()


def make_step(value_and_grad):
    def step(state, x):
        loss, grads = value_and_grad(lambda params: loss_of(params, x))(state[0])
        updates, moments = ADAM.update(grads, state[1])
        return (optax.apply_updates(state[0], updates), moments), loss

    return step


def make_state():
    kernels = jax.random.split(jax.random.key(0))
    params = {
        "first": jax.random.normal(kernels[0], (3, 6)),
        "second": {"kernel": jax.random.normal(kernels[1], (6, 6)), "none": jnp.zeros((0, 6))},
        "empty": jnp.zeros((0, 3)),
    }
    return params, ADAM.init(params)


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_they_train_beside_others(options):
    x = jnp.linspace(-1, 1, 36).reshape(12, 3)
    piped = rt.train_step(**options)(make_step(rt.value_and_grad))
    plain = jax.jit(make_step(jax.value_and_grad))
    found, wanted = make_state(), make_state()
    for _ in range(3):
        found, loss = piped(found, x)
        wanted, expected = plain(wanted, x)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
