"""What a compiled step returns, with a new state and without, against `jax.jit` of the same step."""

import jax
import jax.numpy as jnp
import optax
import pytest

import ratrain_jax as rt
from tests.dense import (
    STEPS,
    WIDTH,
    assert_same,
    make_batch,
    make_params,
    make_state,
    mean_square,
    plain_of,
    predict,
)
from tests.training import TWO_BY_TWO, assert_close


def test_metrics_beside_the_state():
    """Norms, a schedule, the parameters' mean, the batch's mean, constants and whole gradients."""

    def step(state, batch, value_and_grad=rt.value_and_grad):
        def loss_fn(params):
            out = predict(params, batch["x"])
            return ((out - batch["y"]) ** 2).mean(), {"mean": out.mean(), "ones": (out > 9).sum()}

        (loss, aux), grads = value_and_grad(loss_fn, has_aux=True)(state["params"])
        rate = 0.1 / (1 + state["count"])
        scaled = jax.tree.map(lambda g: jnp.clip(2 * g, -0.2, 0.2), grads)
        params = jax.tree.map(lambda p, g: p - rate * g, state["params"], scaled)
        metrics = {
            "loss": loss,
            "aux": aux,
            "rate": rate,
            "norm": optax.tree.norm(grads),
            "scaled": optax.tree.norm(scaled),
            "weights": sum(leaf.sum() for leaf in jax.tree.leaves(state["params"])),
            "inputs": batch["x"].mean(),
            "two": 2,
            "gradient": grads["layer_1"],
        }
        return {**state, "params": params, "count": state["count"] + 1}, metrics

    batches = [(make_batch(seed),) for seed in range(STEPS)]
    (state, metrics), _ = assert_same(step, make_state(), *batches, **TWO_BY_TWO)
    assert int(state["count"]) == STEPS
    assert metrics["aux"]["ones"].dtype == jnp.int32
    assert metrics["gradient"]["kernel"].shape == (WIDTH, WIDTH)


def returns(result):
    """A step that returns something made of the loss and the gradients, but no state."""

    def step(state, batch, value_and_grad=rt.value_and_grad):
        loss_fn = lambda p: mean_square(p, batch["x"], batch["y"])  # noqa: E731
        return result(*value_and_grad(loss_fn)(state["params"]))

    return step


RESULTS = {
    "metrics": lambda loss, grads: {"loss": loss, "norm": optax.tree.norm(grads)},
    "loss": lambda loss, grads: loss,
    "gradients": lambda loss, grads: grads,
    "a list": lambda loss, grads: [grads, loss, loss + 1],
}


@pytest.mark.parametrize("what", RESULTS)
def test_a_step_that_returns_no_state(what):
    step, state, batch = returns(RESULTS[what]), make_state(), make_batch()
    for ranks in (1, 2):
        piped = rt.train_step(stages=2, data_parallel=ranks, microbatches=2)(step)
        for _ in range(2):
            assert_close(piped(state, batch), plain_of(step)(state, batch))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_a_state_of_bare_parameters():
    """Gradients have the tree of such a state; taken for a new state they are still right."""

    def gradients(params, batch, value_and_grad=rt.value_and_grad):
        return value_and_grad(lambda p: mean_square(p, batch["x"], batch["y"]))(params)[1]

    def descend(params, batch, value_and_grad=rt.value_and_grad):
        grads = gradients(params, batch, value_and_grad)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    for step in (gradients, descend):
        assert_same(step, make_params(), (make_batch(),), (make_batch(1),), **TWO_BY_TWO)


def test_metrics_that_read_nothing():
    def step(state, batch, value_and_grad=rt.value_and_grad):
        grads = value_and_grad(lambda p: mean_square(p, batch["x"], batch["y"]))(state)[1]
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"rate": 0.1}

    assert_same(step, make_params(), (make_batch(),), (make_batch(1),), **TWO_BY_TWO)
