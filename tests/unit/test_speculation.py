"""Which updates can be made before a global reduction, and what they assume."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import OptionError
from ratrain_jax.lowering.folding import Folding, Known
from ratrain_jax.lowering.program import Kind, UpdateShard, Validate
from ratrain_jax.lowering.speculation import speculate

LAYERS, WIDTH = 3, 4


def lowered(optimizer, change=None, metrics=None, scalar=False, **options):
    """A small step; `change` makes new parameters, optimizer and other state of what it is given."""
    params = {f"l{n}": {"w": jnp.ones((WIDTH, WIDTH))} for n in range(LAYERS)}
    if scalar:
        params["l1"]["factor"] = jnp.float32(1.5)

    def step(state, batch):
        def loss_fn(params):
            x = batch
            for n in range(LAYERS):
                x = rt.layer(x, f"l{n}")
                x = jnp.tanh(x @ params[f"l{n}"]["w"]) * params[f"l{n}"].get("factor", 1.0)
            return (x**2).mean()

        loss, grads = rt.value_and_grad(loss_fn)(state["params"])
        if change is not None:
            grads = change(grads, loss)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        new = {"params": optax.apply_updates(state["params"], updates), "opt": opt}
        return new, {"loss": loss, **(metrics(grads, updates) if metrics else {})}

    state = {"params": params, "opt": optimizer.init(params)}
    return rt.train_step(**options)(step).lower(state, jnp.ones((8, WIDTH)))


def speculations(optimizer=None, change=None, metrics=None, scalar=False):
    plan = lowered(optimizer or optax.sgd(0.1), change, metrics, scalar).code.update
    return speculate(plan)


def assumed(found):
    """What each layer assumes, as a set of values; None for one that does not wait, and its reason for one that must."""
    return [
        one and (one.reason or {np.asarray(value).item() for _, value in one.assumed})
        for one in found
    ]


def skipping(grads, loss):
    finite = rt.all_finite(grads)
    return jax.tree.map(lambda g: jnp.where(finite, g, 0), grads)


def saturating(grads, loss):
    factor = jnp.minimum(1.0, 0.5 / (optax.tree.norm(grads) + 1e-6))
    return jax.tree.map(lambda g: g * factor, grads)


def without_nan(grads, loss):
    bad = jnp.bool_(False)
    for leaf in jax.tree.leaves(grads):
        bad |= jnp.isnan(leaf).any()
    return jax.tree.map(lambda g: jnp.where(bad, 0, g), grads)


def clipped(optimizer):
    return optax.chain(optax.clip_by_global_norm(0.5), optimizer)


DEFERRABLE = {
    "clip": ({"optimizer": clipped(optax.sgd(0.1))}, {True}),
    "clip, adam": ({"optimizer": clipped(optax.adam(0.1))}, {True}),
    "clip by a factor": ({"change": saturating}, {1.0}),
    "finite": ({"change": skipping}, {True}),
    "not a number": ({"change": without_nan}, {False}),
    "finite and clip": ({"optimizer": clipped(optax.sgd(0.1)), "change": skipping}, {True}),
    "finite, lamb": ({"optimizer": optax.lamb(0.1), "change": skipping}, {True}),
    "apply_if_finite": ({"optimizer": optax.apply_if_finite(optax.sgd(0.1), 2)}, {1}),
    "finite loss": (
        {"change": lambda g, loss: jax.tree.map(lambda x: jnp.where(jnp.isfinite(loss), x, 0), g)},
        {True},
    ),
    "a parameter of one number": (
        {"optimizer": clipped(optax.sgd(0.1)), "change": skipping, "scalar": True},
        {True},
    ),
    "clip, norm of the updates": (
        {
            "optimizer": clipped(optax.sgd(0.1)),
            "metrics": lambda grads, updates: {"norm": optax.tree.norm(updates)},
        },
        {True},
    ),
}


@pytest.mark.parametrize("name", DEFERRABLE)
def test_choices_by_values_of_all_layers_are_assumed(name):
    how, wanted = DEFERRABLE[name]
    assert assumed(speculations(**how)) == [wanted] * LAYERS


AT_ONCE = {
    "sgd": {},
    "lamb": {"optimizer": optax.lamb(0.1)},
    "clip by layer": {"optimizer": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1))},
    "a norm for the metrics": {"metrics": lambda grads, _: {"norm": optax.tree.norm(grads)}},
    "schedule": {"optimizer": optax.sgd(optax.linear_schedule(0.1, 0.01, 5))},
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_what_does_not_wait_is_left_alone(name):
    assert assumed(speculations(**AT_ONCE[name])) == [None] * LAYERS


MUST_WAIT = {
    "by the loss": {"change": lambda g, loss: jax.tree.map(lambda x: x / (1 + loss), g)},
    "normalized": {
        "change": lambda g, _: jax.tree.map(lambda x: x / optax.tree.norm(g), g),
    },
    # What decides between two values that both depend on all layers spares neither.
    "clip to two norms": {
        "change": lambda g, _: jax.tree.map(
            lambda x: x * jnp.where(optax.tree.norm(g) < 1, optax.tree.norm(g), 2.0), g
        )
    },
    "a bound that is not known": {
        "change": lambda g, loss: jax.tree.map(
            lambda x: jnp.where(optax.tree.norm(g) < loss, x, 0), g
        )
    },
}


@pytest.mark.parametrize("name", MUST_WAIT)
def test_what_depends_on_all_layers_otherwise_waits_and_says_where(name):
    for reason in assumed(speculations(**MUST_WAIT[name])):
        # A choice that `jnp.where` made was traced once for all places.
        known = name != "a bound that is not known"
        assert re.fullmatch(
            r"`\w+` takes a value of all layers" + r" \(test_speculation\.py:\d+\)" * known,
            str(reason),
        )


def test_what_the_loss_decides_is_waited_for_and_what_norms_decide_is_not():
    change = MUST_WAIT["by the loss"]["change"]
    for found in speculations(clipped(optax.adam(0.1)), change):
        assert found is not None
        assert (found.early, len(found.assumed)) == (1, 1)
    program = lowered(clipped(optax.adam(0.1)), change, validation="deferred").program
    assert [(layer.early, layer.update_phase) for layer in program.layers] == [(1, 2)] * LAYERS
    for kind, scalars in ((UpdateShard, ["scalars1"]), (Validate, ["scalars1", "scalars2"])):
        ops = [
            op for op in program.ops() if isinstance(op, kind) and op.phase == 2 and op.layer == 1
        ]
        (values,) = ([program.values[number] for number in op.reads] for op in ops)
        assert [value.name for value in values if value.kind is Kind.SCALARS] == scalars


def test_only_scalars_that_a_layer_reads_are_assumed():
    def change(grads, loss):
        finite = rt.all_finite(grads)
        return {**grads, "l0": jax.tree.map(lambda g: jnp.where(finite, g, 0), grads["l0"])}

    assert assumed(speculations(change=change)) == [{True}, None, None]


def test_a_norm_above_zero_is_expected_of_gradients_that_are_not_zero():
    def change(grads, loss):
        norm = optax.tree.norm(grads)
        return jax.tree.map(lambda g: jnp.where(norm > 0, g, jnp.zeros_like(g)), grads)

    assert assumed(speculations(change=change)) == [{True}] * LAYERS


def test_the_summary_names_the_layers_and_why_others_wait():
    how = {"stages": 3, "data_parallel": 2, "validation": "deferred"}
    report = lowered(clipped(optax.sgd(0.1)), **how)
    assert "Validation deferred for 3 of 3 layers: l0 l1 l2" in report.summary()

    def change(grads, loss):
        norm = optax.tree.norm(grads)
        return {**skipping(grads, loss), "l1": jax.tree.map(lambda g: g / norm, grads["l1"])}

    report = lowered(optax.sgd(0.1), change, **how).summary()
    assert "Validation deferred for 2 of 3 layers: l0 l2\nWaiting" in report
    assert "\n  l1: `add` takes a value of all layers (test_speculation.py:" in report
    assert max(map(len, report.splitlines())) <= 80
    assert "no layer waits" in lowered(optax.sgd(0.1), **how).summary()
    assert "deferred" not in lowered(clipped(optax.sgd(0.1)), stages=3).summary()


def test_validation_is_deferred_only_where_views_are_gathered_early():
    how: dict[str, Any] = {"optimizer": clipped(optax.sgd(0.1)), "stages": 3}
    how["validation"] = "deferred"
    assert all(layer.deferred for layer in lowered(**how).program.layers)
    off: Any
    for off in ({"update_prefetch": False}, {"schedule": "1f1b"}, {"schedule": "gpipe"}):
        program = lowered(**how, **off).program
        assert program.settings.validation == "immediate"
        assert not any(layer.deferred for layer in program.layers)
    with pytest.raises(OptionError, match="validation='late' is not known; choose one of"):
        rt.train_step(validation="late")


@pytest.mark.parametrize(
    ("function", "given", "output"),
    [
        (lambda x, y: (x < 1) | (y < 1), (None, Known(0.0, False)), (True, True)),
        (lambda x, y: (x < 1) & (y > 1), (None, Known(0.0, False)), (False, True)),
        (lambda x, y: jnp.minimum(2.0, x), (Known(3.0, False), None), (2.0, True)),
        (lambda x, y: jnp.minimum(4.0, x), (Known(3.0, False), None), (3.0, False)),
        (lambda x, y: jax.lax.select_n(x < 1, y, x), (Known(0.5, False), None), (0.5, False)),
        (lambda x, y: x == y, (Known(0.0, False), Known(0.0)), (False, True)),
        (lambda x, y: x <= y, (Known(0.0, False), Known(0.0)), (False, True)),
        (lambda x, y: x * y, (Known(0.0), None), None),
        (
            lambda x, y: jax.lax.concatenate([x[None], y[None]], 0).sum(),
            (Known(1.5), Known(1.5)),
            (3.0, True),
        ),
        (
            lambda x, y: jax.lax.concatenate([x[None], y[None]], 0).sum(),
            (Known(1.5), Known(2.5)),
            None,
        ),
    ],
)
def test_folding(function, given, output):
    closed = jax.make_jaxpr(function)(jnp.float32(1), jnp.float32(1))
    (found,) = Folding(closed, given).outputs
    assert (found and (found.value.item(), found.settled)) == output
