"""A network of dense layers, its steps and batches, for tests of what a compiled step does.

A module that asks for a fixture imports it `as` itself, so that the linter sees that it is wanted.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ratrain_jax as rt
from tests.training import TWO_BY_TWO, assert_close

WIDTH = 8
ROWS = 8
STEPS = 4


def make_params(layers=3, width=WIDTH, seed=0):
    rng = np.random.default_rng(seed)
    return {
        f"layer_{n}": {
            "kernel": jnp.asarray(rng.normal(size=(width, width)) / np.sqrt(width), jnp.float32),
            "bias": jnp.asarray(rng.normal(size=width) / 4, jnp.float32),
        }
        for n in range(layers)
    }


def make_batch(seed=0, rows=ROWS, width=WIDTH):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, width)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, ::-1])}


def predict(params, x):
    for layer in params.values():
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x


def mean_square(params, x, y):
    return ((predict(params, x) - y) ** 2).mean()


def sgd_step(state, batch, value_and_grad=rt.value_and_grad):
    """A dict state; nothing waits for a global norm, so views are gathered behind updates."""
    loss, grads = value_and_grad(lambda p: mean_square(p, batch["x"], batch["y"]))(state["params"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
    new = {"params": params, "momentum": momentum, "count": state["count"] + 1}
    return new, {"loss": loss}


def make_state(**shape):
    params = make_params(**shape)
    return {
        "params": params,
        "momentum": jax.tree.map(jnp.zeros_like, params),
        "count": jnp.int32(0),
    }


def plain_of(step):
    return jax.jit(lambda *args: step(*args, value_and_grad=jax.value_and_grad))


def assert_same(step, state, *batches, **options):
    """Trains the step plainly and piped; a batch is a tuple of arguments. Gives both last results."""
    piped, plain = rt.train_step(**options)(step), plain_of(step)
    results = []
    for run in (piped, plain):
        now, kept = state, []
        for batch in batches:
            result = run(now, *batch)
            now = result[0] if isinstance(result, tuple) else result
            kept.append(jax.tree.map(np.array, result))  # a copy: the state will be used up
        results.append(kept)
    assert_close(*results)
    return results[0][-1], results[1][-1]


@pytest.fixture(scope="module", params=[{"stages": 2, "microbatches": 2}, TWO_BY_TWO], ids=str)
def layout(request):
    return request.param


@pytest.fixture(scope="module")
def decorated(layout):
    step = rt.train_step(**layout)(sgd_step)
    step(make_state(), make_batch())  # compiles it once for all tests
    return step


def stack(layers):
    """A step over equal layers, each marked."""

    def step(params, batch):
        def loss_fn(params):
            x = batch["x"]
            for n in range(layers):
                x = rt.layer(x, f"layer_{n}")
                x = jnp.tanh(x @ params[f"layer_{n}"]["kernel"] + params[f"layer_{n}"]["bias"])
            return ((rt.layer(x, "head") - batch["y"]) ** 2).mean()

        loss, grads = rt.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step
