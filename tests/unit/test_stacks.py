"""A step with stacked layers is lowered as one with a leaf a layer; a scan over time stays whole."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import ratrain_jax as rt
from ratrain_jax.errors import LayoutError, UnsupportedError
from ratrain_jax.lowering.graph import fingerprint
from ratrain_jax.lowering.regions import loss_region_p
from ratrain_jax.lowering.stacked_scans import scans_of_layers
from ratrain_jax.lowering.stacks import flat_parts, open_stacks
from ratrain_jax.options import Options
from ratrain_jax.tracing import trace_step
from tests.models.case import dict_case
from tests.models.lstm import LSTM_CASE
from tests.models.scanned import (
    init_mlp,
    make_points,
    mlp_case,
    mlp_loss,
    residual_layer,
    scanned_gpt,
    scanned_mlp,
)

LAYERS = 3
SGD = optax.sgd(0.1, momentum=0.9)


def lower(case, optimizer=SGD, stages=2, **options):
    step = rt.train_step(stages=stages, **options)(case.make_step(optimizer, rt.value_and_grad))
    return step.lower(case.make_state(optimizer), case.make_batch(0, 4))


def unrolled_mlp(params, x):
    x = x @ params["first"]
    for n in range(LAYERS):
        x = residual_layer(x, params[f"layer_{n}"])
    return x @ params["last"]


def unrolled_case():
    """The scanned MLP, written out with a parameter tree a layer."""

    def init():
        params = init_mlp(LAYERS)
        stacked = params.pop("layers")
        layers = {f"layer_{n}": jax.tree.map(lambda p, n=n: p[n], stacked) for n in range(LAYERS)}
        return params | layers

    return dict_case("unrolled", init, apply=unrolled_mlp, loss=mlp_loss, make_batch=make_points)


def opened(step, state, batch, **options):
    trace, _ = trace_step(step, (state, batch), Options(**options))
    return trace, *open_stacks(trace)


# What is opened.


def test_has_the_layers_and_the_code_of_the_unrolled_model():
    scanned, unrolled = lower(mlp_case(LAYERS)), lower(unrolled_case())
    names = [layer.name for layer in scanned.program.layers]
    assert names == [
        n.replace("layer_", "layers/") for n in (x.name for x in unrolled.program.layers)
    ]
    assert [code.fingerprint for code in scanned.code.codes] == [
        code.fingerprint for code in unrolled.code.codes
    ]
    assert scanned.code.stage_of == unrolled.code.stage_of
    assert "owns(layers/1/bias layers/1/kernel layers/1/scale)" in scanned.as_text()


def test_equal_layers_share_their_update():
    code = lower(mlp_case(LAYERS)).code
    updates = {
        fingerprint(*layer.phases) for layer in code.update.layers if len(layer.parameters) == 3
    }
    assert len(updates) == 1


def test_moments_are_opened_with_their_parameters_and_counters_are_not():
    case = mlp_case(LAYERS)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = case.make_state(optimizer)
    step = case.make_step(optimizer, rt.value_and_grad)
    trace, new, stacks = opened(step, state, case.make_batch(0, 4))
    assert stacks is not None
    for name, part in zip(trace.names, stacks.states, strict=False):
        assert len(flat_parts(part)) == (LAYERS if "layers" in name else 1), name
    assert new.states == len(new.state_out) == sum(len(flat_parts(p)) for p in stacks.states)
    assert "state['params']['layers']['kernel'][2]" in new.names


@pytest.mark.parametrize(
    "optimizer",
    [optax.MultiSteps(optax.adam(1e-2), 2), optax.apply_if_finite(optax.adam(1e-2), 2)],
    ids=["multi_steps", "if_finite"],
)
def test_state_behind_a_branch_is_opened(optimizer):
    code = lower(mlp_case(LAYERS), optimizer).code
    homes = [leaf for layer in code.update.layers for leaf in layer.optimizer]
    stacked = [n for part in code.stacks.states if isinstance(part, tuple) for n in part]
    assert set(stacked) <= {*homes, *(n for layer in code.update.layers for n in layer.parameters)}


def test_nested_scans_are_opened_one_after_the_other():
    lowered = lower(scanned_gpt("nested", width=8, lengths=(2, 2)), stages=4)
    stacks = lowered.code.stacks
    assert {tuple(map(len, p)) for p in stacks.states if isinstance(p, tuple)} == {(2, 2)}
    assert [layer.checkpointed for layer in lowered.code.layered.layers].count(True) >= 4


def test_layers_under_remat_are_recovered_and_others_are_not():
    for remat in (False, True):
        case = scanned_gpt("remat", width=8, lengths=(2,), remat=remat)
        lowered = lower(case, recovery="none")
        assert any(layer.recovered for layer in lowered.program.layers) is remat


def test_a_step_without_stacks_is_left_as_it_is():
    case = unrolled_case()
    step = case.make_step(SGD, rt.value_and_grad)
    trace, new, stacks = opened(step, case.make_state(SGD), case.make_batch(0, 4))
    assert new is trace and stacks is None


def test_what_putting_the_state_together_costs():
    """Two of the three layers' kernels, biases, scales and their momenta are on the second stage."""
    lowered = lower(mlp_case(LAYERS), boundaries=["layers/1"])
    cost, layer = lowered.stacked_state(), 4 * (8 * 8 + 8 + 1) * 2
    assert (cost.leaves, cost.bytes, cost.moved) == (6, 3 * layer, 2 * layer)
    assert cost.device_bytes == cost.bytes
    assert "6 stacked leaves of the state, 0.002 MB, are put together" in lowered.summary()
    shared = lower(mlp_case(LAYERS), data_parallel=2, state_layout="layers")
    assert shared.stacked_state().device_bytes == 3 * 4 * (4 * 8 + 4 + 1) * 2
    assert "put together" not in shared.summary()
    assert lower(unrolled_case()).stacked_state() is None


# What stays whole.


def scans(loss, params, *rest):
    closed = jax.make_jaxpr(lambda p, *r: rt.value_and_grad(loss)(p, *r))(params, *rest)
    region = next(eqn for eqn in closed.jaxpr.eqns if eqn.primitive is loss_region_p)
    return scans_of_layers(region.params["loss"], region.params["diff"])


X = np.ones((5, 4), np.float32)
CELL = {"w": np.ones((4, 4), np.float32)}
STACK = {"w": np.ones((5, 4, 4), np.float32)}


def test_a_scan_over_time_stays_whole():
    assert lower(LSTM_CASE, stages=1).code.stacks is None

    def loss(p, x):
        return lax.scan(lambda c, x: (jnp.tanh(c @ p["w"] + x), None), x[0], x)[0].sum()

    assert scans(loss, CELL, X) == []


def test_a_scan_over_embedded_inputs_stays_whole():
    def loss(p, x):
        embedded = jnp.tanh(x * p["scale"])
        return lax.scan(lambda c, x: (jnp.tanh(c @ p["w"] + x), None), x[0], embedded)[0].sum()

    assert scans(loss, CELL | {"scale": np.ones((5, 4), np.float32)}, X) == []


def test_a_scan_over_few_parameters_and_time_stays_whole():
    """An embedding of positions is scanned with the inputs; the cell's own parameters are more."""

    def loss(p, x):
        cell = lambda c, x: (jnp.tanh(c @ p["w"] + x[0] + x[1]), None)  # noqa: E731
        return lax.scan(cell, x[0], (x, p["positions"]))[0].sum()

    assert scans(loss, CELL | {"positions": np.ones((5, 2), np.float32)[:, :1]}, X) == []


def test_layers_with_a_small_shared_parameter_are_opened():
    def loss(p, x):
        layer = lambda c, w: (jnp.tanh(c @ w) * p["scale"], None)  # noqa: E731
        return lax.scan(layer, x, p["w"])[0].sum()

    assert scans(loss, STACK | {"scale": np.float32(2)}, X) == [(1,)]


def test_layers_are_found_behind_casts_calls_and_checkpoints():
    def loss(p, x):
        stack = p["w"].astype(jnp.bfloat16) * 2
        call = jax.checkpoint(jax.jit(lambda w, x: lax.scan(lambda c, w: (c @ w, None), x, w)[0]))
        return call(stack, x.astype(jnp.bfloat16)).sum().astype(jnp.float32)

    assert scans(loss, STACK, X) == [(0,)]


def test_a_leaf_of_another_length_is_not_opened():
    """A table with as many rows as there are layers, and an average of something else."""
    params = STACK | {"table": np.ones((5, 4), np.float32), "six": np.ones((6, 4), np.float32)}

    def loss(p, x):
        x = lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x @ p["table"].T @ p["table"], p["w"])[0]
        return (x @ p["six"].T).sum()

    def step(state, batch):
        value, grads = rt.value_and_grad(loss)(state["params"], batch["x"])
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, {"params": grads}), value

    trace, _, stacks = opened(step, {"params": params}, {"x": X[:4]})
    assert {n: len(flat_parts(p)) for n, p in zip(trace.names, stacks.states, strict=False)} == {
        "state['params']['six']": 1,
        "state['params']['table']": 1,
        "state['params']['w']": 5,
    }


# Updates.


def sum_over_layers(step_rule):
    """A step whose update is `step_rule(parameter, gradient)`."""

    def step(state, batch):
        loss = lambda p: mlp_loss(scanned_mlp, p, batch)  # noqa: E731
        value, grads = rt.value_and_grad(loss)(state)
        return jax.tree.map(step_rule, state, grads), {"loss": value}

    return step


def test_an_update_across_layers_is_refused_by_name_on_several_stages_and_runs_on_one():
    step = sum_over_layers(lambda p, g: p - 0.1 * (g + g.mean(axis=0, keepdims=True)))
    state, batch = init_mlp(LAYERS), make_points(0, 4)
    with pytest.raises(UnsupportedError, match=r"layers/0.*layers/1.*test_stacks"):
        rt.train_step(stages=2)(step).lower(state, batch)
    lowered = rt.train_step()(step).lower(state, batch)
    assert lowered.code.stacks is None


def test_a_whole_norm_is_a_reduction_over_all_layers():
    step = sum_over_layers(lambda p, g: p - 0.1 * g / (1e-3 + jnp.sqrt((g * g).sum())))
    code = rt.train_step(stages=2)(step).lower(init_mlp(LAYERS), make_points(0, 4)).code
    (reduction,) = code.update.reductions
    assert reduction.layers == (1, 2, 3)
    assert len(reduction.scalars) == 4  # one norm a stacked leaf, and the loss


def test_too_many_stages_are_refused_as_before():
    with pytest.raises(LayoutError):
        lower(mlp_case(2), stages=16)


def test_a_state_that_begins_with_a_stacked_leaf_is_taken():
    """The microbatch-sized trace has no new state: its first result is the loss, not the state's first leaf."""

    def step(params, x):
        def loss(p):
            out, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["blocks"])
            return (out @ p["head"]).mean()

        value, grads = rt.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "blocks": jax.random.normal(keys[0], (3, 8, 8)),
        "head": jax.random.normal(keys[1], (8, 2)),
    }
    x = jax.random.normal(keys[2], (4, 8))
    expected, plain = jax.jit(step)(params, x)
    state, value = rt.train_step(microbatches=2)(step)(params, x)
    np.testing.assert_allclose(value, plain, rtol=1e-6)
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
