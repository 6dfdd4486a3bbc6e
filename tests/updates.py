"""A model of three layers, and its update by a plan against the update as it was written."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ratrain_jax.losses import value_and_grad
from ratrain_jax.lowering.graph import fingerprint
from tests.update_runner import gradients, make_case, run_plan, run_whole

LAYERS = ["embed", "block0", "block1"]
BATCH = {"x": np.cos(np.arange(24.0, dtype=np.float32)).reshape(6, 4)}


def layer_of(path):
    return next(i for i, name in enumerate(LAYERS) if name in path)


def make_params(dtype: Any = np.float32) -> Any:
    def array(*shape):
        return jnp.asarray(np.sin(np.arange(np.prod(shape)) + 1).reshape(shape) / 2, dtype)

    params = {"embed": {"w": array(4, 8)}}
    for name in LAYERS[1:]:
        params[name] = {"w": array(8, 8), "b": array(8), "odd": array(3), "scale": array()}
    return params


def model(params, x):
    h = x @ params["embed"]["w"]
    for name in LAYERS[1:]:
        p = params[name]
        h = jnp.tanh(h @ p["w"] + p["b"]) * p["scale"] + jnp.sum(p["odd"] ** 2)
    return h


def loss_of(params, batch):
    return jnp.mean(model(params, batch["x"]) ** 2)


def case_of(step, state, *batch, **kwargs):
    return make_case(step, state, *(batch or [BATCH]), layer_of=layer_of, layers=3, **kwargs)


def compare(case, devices=(2,), steps=2, rtol=2e-6):
    """Runs a plan and the step as it was written, from the same gradients, over some steps."""
    state, *batch = case.inputs
    for step in range(steps):
        inputs = (state, *jax.tree.map(lambda x, n=step: x * (1 + n), batch))
        results, grads = gradients(case, inputs)
        want = run_whole(case, inputs, results, grads)
        for count in devices:
            got = run_plan(case, inputs, results, grads, count)
            assert len(got) == len(want)
            for w, g in zip(want, got, strict=True):
                if jnp.issubdtype(w.dtype, jax.dtypes.extended):
                    w, g = jax.random.key_data(w), jax.random.key_data(g)
                assert (w.dtype, w.shape) == (g.dtype, g.shape)
                largest = float(np.max(np.abs(w), initial=1e-3))
                np.testing.assert_allclose(
                    np.asarray(g, np.float64), np.asarray(w, np.float64), rtol, rtol / 10 * largest
                )
        if case.new_state:
            state = jax.tree.unflatten(jax.tree.structure(state), want[: case.new_state])


def train_step(state, batch):
    loss, grads = value_and_grad(loss_of)(state.params, batch)
    metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
    return state.apply_gradients(grads=grads), metrics


def check_equal_layers(plan):
    """Equal layers have equal programs, so that they share one executable."""
    first, second = ([fingerprint(p) for p in layer.phases] for layer in plan.layers[1:])
    assert first == second


def waits(plan):
    return [layer.phase for layer in plan.layers]
