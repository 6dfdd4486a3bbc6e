"""Updates with random numbers, matrix products, branches or joined gradients run layer by layer."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import optax
import pytest

from ratrain_jax.losses import value_and_grad
from tests.updates import LAYERS, case_of, check_equal_layers, compare, loss_of, make_params, waits


def test_noise_is_the_same_on_shards():
    def step(state, batch):
        _, grads = value_and_grad(loss_of)(state["params"], batch)
        key, *keys = jax.random.split(state["key"], 4)
        params = dict(state["params"])
        for name, own in zip(LAYERS, keys, strict=True):
            grad = grads[name]["w"] + jax.random.uniform(own, grads[name]["w"].shape)
            params[name] = params[name] | {"w": params[name]["w"] - 0.1 * grad}
        return {"params": params, "key": key}

    case = case_of(step, {"params": make_params(), "key": jax.random.key(0)})
    compare(case)
    assert waits(case.plan) == [0, 0, 0]
    assert case.plan.replicated == (0,)


def test_products_of_matrices_run_layer_by_layer():
    def step(state, batch):
        _, grads = value_and_grad(loss_of)(state, batch)
        precondition = lambda g: g @ g.T @ g if g.ndim == 2 else g  # noqa: E731
        return jax.tree.map(lambda p, g: p - 0.1 * precondition(g), state, grads)

    case = case_of(step, make_params())
    compare(case, rtol=1e-5)
    assert waits(case.plan) == [0, 0, 0]


def primitives(closed):
    return [eqn.primitive.name for eqn in closed.jaxpr.eqns]


@pytest.mark.parametrize("every", ["step", "finite"])
def test_a_branch_around_heavy_work_becomes_one_branch_a_layer(every):
    def step(state, batch):
        _, grads = value_and_grad(loss_of)(state["params"], batch)
        finite = jnp.isfinite(sum(jnp.sum(g) for g in jax.tree.leaves(grads)))
        count = state["count"] + 1
        update = lambda p, g: p - 0.1 * (g @ g.T @ g if g.ndim == 2 else g)  # noqa: E731
        params, count = jax.lax.cond(
            finite if every == "finite" else count % 2 == 0,
            lambda params, grads: (jax.tree.map(update, params, grads), count),
            lambda params, grads: (params, count * 2),
            state["params"],
            grads,
        )
        return {"params": params, "count": count}

    case = case_of(step, {"params": make_params(), "count": jnp.int32(0)})
    compare(case, rtol=1e-5)
    check_equal_layers(case.plan)
    waiting = 1 if every == "finite" else 0
    assert waits(case.plan) == [waiting] * 3
    for layer in case.plan.layers:
        assert primitives(layer.phases[-1]).count("cond") == 1
        assert "dot_general" not in primitives(layer.phases[-1])
    assert case.plan.replicated_phase == waiting


def test_a_heavy_branch_that_joins_layers_is_computed_and_selected():
    def step(state, batch):
        _, grads = value_and_grad(loss_of)(state["params"], batch)

        def update(params, grads):
            norm = optax.tree.norm(grads)
            precondition = lambda g: g @ g.T @ g if g.ndim == 2 else g  # noqa: E731
            return jax.tree.map(lambda p, g: p - precondition(g) / norm, params, grads)

        params = jax.lax.cond(
            state["count"] % 2 == 0, update, lambda params, _: params, state["params"], grads
        )
        return {"params": params, "count": state["count"] + 1}

    case = case_of(step, {"params": make_params(), "count": jnp.int32(0)})
    compare(case, rtol=1e-5)
    assert waits(case.plan) == [1, 1, 1]


def test_joined_gradients_are_taken_apart():
    def step(state, batch):
        _, grads = value_and_grad(loss_of)(state, batch)
        flat, restore = jax.flatten_util.ravel_pytree(grads)
        norm, largest = jnp.sqrt(jnp.vdot(flat, flat)), jnp.max(jnp.abs(flat))
        flat = jnp.where(norm < 1e-3, flat, flat / norm) + jnp.full_like(flat, 0.1)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state, restore(flat))
        stacked = jnp.stack([new["block0"]["w"], new["block1"]["w"]])
        new["block0"]["b"], new["block1"]["b"] = jnp.unstack(
            jnp.stack([new["block0"]["b"], new["block1"]["b"]], axis=1) * 2, axis=1
        )
        return new, {"norm": norm, "largest": largest, "mean": jnp.mean(stacked**2)}

    case = case_of(step, make_params())
    compare(case)
    assert waits(case.plan) == [1, 1, 1]
    for layer in case.plan.layers:
        assert not {"concatenate", "split"} & set(primitives(layer.phases[-1]))
