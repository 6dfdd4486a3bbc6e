"""What an update waits for: the loss, norms of all layers or of one, several reductions, or nothing."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ratrain_jax.losses import value_and_grad
from tests.update_runner import gradients, run_plan, run_whole
from tests.updates import BATCH, case_of, check_equal_layers, compare, loss_of, make_params, waits


def test_a_loss_in_the_update_makes_it_wait_for_the_loss_alone():
    def step(state, batch):
        loss, grads = value_and_grad(loss_of)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * loss * g, state, grads)

    case = case_of(step, make_params())
    compare(case)
    (reduction,) = case.plan.reductions
    assert reduction.loss and reduction.layers == ()
    assert waits(case.plan) == [1, 1, 1]
    assert all(not partials for layer in case.plan.layers for partials in layer.partials)


def test_metrics_do_not_make_updates_wait():
    def step(state, batch):
        loss, grads = value_and_grad(loss_of)(state, batch)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)
        norms = {name: optax.tree.norm(group) for name, group in grads.items()}
        largest = jnp.max(jnp.stack([jnp.max(jnp.abs(p)) for p in jax.tree.leaves(new)]))
        finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
        return new, {"loss": loss, "norms": norms, "largest": largest, "finite": finite}

    case = case_of(step, make_params())
    compare(case)
    assert waits(case.plan) == [0, 0, 0]
    assert len(case.plan.reductions) == 1
    combined = {p.combine for layer in case.plan.layers for p in layer.partials[0]}
    assert {"sum", "max", "and"} <= combined


def test_reductions_can_follow_each_other():
    def step(state, batch):
        _, grads = value_and_grad(loss_of)(state, batch)
        clipped: Any = optax.clip_by_global_norm(0.1).update(grads, optax.EmptyState())
        grads = clipped[0]
        mean = sum(jnp.sum(g) for g in jax.tree.leaves(grads)) / 100
        new = jax.tree.map(lambda p, g: p - (g - mean), state, grads)
        return new, {"norm": optax.tree.norm(new), "embed": jnp.sum(grads["embed"]["w"])}

    case = case_of(step, make_params())
    compare(case)
    assert waits(case.plan) == [2, 2, 2]
    assert len(case.plan.reductions) == 3
    check_equal_layers(case.plan)


def test_a_metric_may_need_a_later_phase_than_the_update():
    def step(state, batch):
        _, grads = value_and_grad(loss_of)(state, batch)
        clipped: Any = optax.clip_by_global_norm(0.1).update(grads, optax.EmptyState())
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)
        return new, {"clipped": optax.tree.norm(clipped[0])}

    case = case_of(step, make_params())
    compare(case)
    assert waits(case.plan) == [1, 1, 1]
    assert len(case.plan.reductions) == 2


def test_arrays_that_grow_from_global_scalars_are_not_sent():
    def step(state, batch, key):
        _, grads = value_and_grad(loss_of)(state, batch)
        norm = optax.tree.norm(grads)
        noise = jax.random.uniform(key["noise"], (8, 8))
        new = jax.tree.map(lambda p, g: p - 0.1 * g / jnp.broadcast_to(norm, g.shape), state, grads)
        new["block0"]["w"] = new["block0"]["w"] + noise * norm
        return new

    case = case_of(step, make_params(), BATCH, {"noise": jax.random.key(3)})
    results, grads = gradients(case, case.inputs)
    got = run_plan(case, case.inputs, results, grads, 2)
    want = run_whole(case, case.inputs, results, grads)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-6, atol=1e-7)
    assert sorted(str(aval) for aval in case.plan.reductions[0].scalars) == [
        "float32[]",
        "key<fry>[]",
    ]


def test_one_layer_may_scale_by_a_norm_of_another():
    def step(state, batch):
        _, grads = value_and_grad(loss_of)(state, batch)
        norm = jnp.linalg.norm(grads["embed"]["w"])
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)
        new["block1"]["b"] = state["block1"]["b"] - grads["block1"]["b"] * norm
        return new

    case = case_of(step, make_params())
    compare(case)
    assert waits(case.plan) == [0, 0, 1]
    assert case.plan.reductions[0].layers == (0,)


@flax.struct.dataclass
class Scaled:
    params: dict
    scale: jax.Array
    steps: jax.Array


def test_a_dynamic_loss_scale_is_replicated_and_waits():
    def step(state, batch):
        def loss_fn(params):
            return loss_of(params, batch) * state.scale

        loss, grads = value_and_grad(loss_fn)(state.params)
        grads = jax.tree.map(lambda g: g / state.scale, grads)
        finite = jnp.all(jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
        new = jax.tree.map(lambda p, g: jnp.where(finite, p - 0.1 * g, p), state.params, grads)
        scale = jnp.where(finite, state.scale, state.scale / 2)
        return Scaled(new, scale, state.steps + finite), {"loss": loss / state.scale}

    state = Scaled(make_params(), jnp.float32(8), jnp.int32(0))
    case = case_of(step, state)
    compare(case)
    assert waits(case.plan) == [1, 1, 1]
    assert len(case.plan.replicated) == 2 and case.plan.replicated_phase == 1
    check_equal_layers(case.plan)
    inputs = (state, {"x": BATCH["x"].copy()})
    results, grads = gradients(case, inputs)
    grads[0] = grads[0].at[0].set(jnp.inf)
    got, want = run_plan(case, inputs, results, grads, 2), run_whole(case, inputs, results, grads)
    assert float(want[9]) == 4.0
    jax.tree.map(np.testing.assert_allclose, got, want)
