"""A small step of types alone, and the error that its lowering is refused with; nothing is compiled."""

import jax
import jax.numpy as jnp
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import RATrainError

ROWS = 24


def types(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


STATE = {"first": types(4, 8), "second": types(8, 8), "third": types(8, 4)}
BATCH = {"x": types(ROWS, 4), "y": types(ROWS, 4)}


def loss_of(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["first"])
    hidden = jnp.tanh(hidden @ params["second"])
    return ((hidden @ params["third"] - batch["y"]) ** 2).mean()


def descend(state, grads):
    return jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, state, grads)


def step(state, batch):
    loss, grads = rt.value_and_grad(lambda params: loss_of(params, batch))(state)
    return descend(state, grads), {"loss": loss}


def step_of(loss):
    """A step that descends by `loss(params, state, batch)`."""

    def step(state, batch):
        return descend(state, rt.grad(lambda params: loss(params, state, batch))(state))

    return step


def refused(error, step, *args, words=(), **options):
    """Asserts that lowering is refused with an error of this very class whose message has the words."""
    with pytest.raises(RATrainError) as caught:
        rt.train_step(**options)(step).lower(*(args or (STATE, BATCH)))
    assert type(caught.value) is error
    message = str(caught.value)
    for word in words:
        assert word in message
    assert "let " not in message  # no dumped jaxpr
    return message
