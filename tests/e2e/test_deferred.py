"""Deferred validation: layers are updated before the check, and what comes out is what comes out without it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ratrain_jax as rt
from ratrain_jax.lowering.program import GlobalReduce, PrefetchView, UpdateShard, Validate
from tests.training import differing

LAYERS, WIDTH, ROWS = 4, 16, 16
FINE, CLIPPED, BAD = 0.01, 1.0, np.inf
"""The weight of the loss: gradients below the bound, above it, and infinite."""

OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "momentum": lambda: optax.chain(optax.add_decayed_weights(0.01), optax.sgd(0.1, momentum=0.9)),
    "lamb": lambda: optax.lamb(1e-2),
}


def make_step(optimizer="adamw", tied=False, dtype=jnp.float32, reduction="mean"):
    chain = optax.chain(optax.clip_by_global_norm(0.05), OPTIMIZERS[optimizer]())

    def step(state, batch):
        loss_scale = state["loss_scale"]

        def loss_fn(params):
            x = batch["x"].astype(dtype)
            for n in range(LAYERS):
                x = rt.layer(x, f"layer_{n}")
                p = params[f"layer_{n}"]
                x = x + jnp.tanh(x @ p["w"].astype(dtype) + p["b"].astype(dtype))
            if tied:
                x = x @ params["layer_0"]["w"].astype(dtype).T
            error = ((x - batch["y"].astype(dtype)) ** 2).astype(jnp.float32).mean(-1)
            loss = error * batch["weight"]
            if reduction == "weighted":
                return loss_scale.scaled(loss.sum()), batch["count"].sum()
            return loss_scale.scaled(loss.mean())

        loss, grads = rt.value_and_grad(loss_fn, reduction=reduction)(state["params"])
        loss, grads = loss_scale.unscale((loss, grads))
        finite = rt.all_finite(grads)
        updates: Any
        updates, opt_state = chain.update(grads, state["opt_state"], state["params"])
        new = {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
            "step": state["step"] + 1,
        }
        kept = rt.select_tree(finite, new, {name: state[name] for name in new})
        metrics = {
            "loss": loss,
            "finite": finite,
            "norm": optax.tree.norm(grads),
            "moved": optax.tree.norm(updates),
            "first": updates["layer_0"]["w"],
        }
        return {**kept, "loss_scale": loss_scale.adjust(finite)}, metrics

    return step, chain


def make_state(chain):
    rng = np.random.default_rng(0)
    params = {
        f"layer_{n}": {
            "w": jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / 8, jnp.float32),
            "b": jnp.zeros(WIDTH),
        }
        for n in range(LAYERS)
    }
    return {
        "params": params,
        "opt_state": chain.init(params),
        "step": jnp.int32(0),
        "loss_scale": rt.DynamicLossScale.create(16.0, growth_interval=3),
    }


def make_batch(weight=FINE, row=5):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, ROWS, WIDTH)).astype(np.float32)
    weights = np.full(ROWS, FINE if np.isinf(weight) else weight, np.float32)
    weights[row] = weight
    return {"x": x, "y": y, "weight": weights, "count": np.arange(ROWS) % 3 + np.float32(0.1)}


@functools.cache
def trained(
    validation, optimizer="adamw", tied=False, dtype="float32", reduction="mean", **options
):
    step, chain = make_step(optimizer, tied, jnp.dtype(dtype), reduction)
    return rt.train_step(validation=validation, **options)(step), chain


def run(validation, weights, **options):
    """The state after each step, with what it returned beside it."""
    train, chain = trained(validation, **options)
    state, after = make_state(chain), []
    for weight in weights:
        state, metrics = train(state, make_batch(weight))
        after.append(jax.tree.map(np.asarray, (state, metrics)))
    return after


def program_of(**options):
    train, chain = trained("deferred", **options)
    return train.lower(make_state(chain), make_batch()).program


TEN = (FINE, FINE, CLIPPED, BAD, FINE, CLIPPED, BAD, BAD, FINE, FINE)


def assert_as_immediate(weights=TEN, **options):
    ours, theirs = run("deferred", weights, **options), run("immediate", weights, **options)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert not differing(one, other), f"step {number}"
    assert [bool(m["finite"]) for _, m in ours] == [np.isfinite(w) for w in weights]
    return ours


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("data_parallel", [1, 2])
def test_ten_steps_give_what_they_give_without_it_to_the_last_bit(
    data_parallel, stages, zero, microbatches
):
    how = {"data_parallel": data_parallel, "stages": stages, "zero": zero}
    assert all(layer.deferred for layer in program_of(microbatches=microbatches, **how).layers)
    after = assert_as_immediate(microbatches=microbatches, **how)
    norms = [float(metrics["norm"]) for _, metrics in after]
    assert [norm < 0.05 for norm in norms] == [weight == FINE for weight in TEN]
    # A skipped step leaves the state as it was.
    for number in (3, 6, 7):
        before, skipped = after[number - 1][0], after[number][0]
        kept = [name for name in before if name != "loss_scale"]
        assert not differing({n: before[n] for n in kept}, {n: skipped[n] for n in kept})
    assert [int(state["step"]) for state, _ in after] == [1, 2, 3, 3, 4, 5, 5, 5, 6, 7]
    assert [float(state["loss_scale"].scale) for state, _ in after] == [
        *(16, 16, 32, 16, 16, 16, 8, 4, 4, 4)
    ]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("data_parallel", [1, 2])
def test_other_optimizers(optimizer, data_parallel):
    assert_as_immediate(optimizer=optimizer, data_parallel=data_parallel, stages=2, microbatches=2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("data_parallel", [1, 2])
def test_views_in_half_precision_are_restored_too(dtype, data_parallel):
    assert_as_immediate(dtype=dtype, data_parallel=data_parallel, stages=2, microbatches=2)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "ratrain"])
def test_other_schedules_validate_at_once_and_agree(schedule):
    how = {"stages": 2, "data_parallel": 2, "microbatches": 4}
    after = run("deferred", TEN, schedule=schedule, **how)
    assert not differing(after, run("immediate", TEN, schedule="gpipe", **how))
    validates = [
        op for op in program_of(schedule=schedule, **how).ops() if isinstance(op, Validate)
    ]
    assert len(validates) == (LAYERS if schedule == "ratrain" else 0)


def index_of(program, stage, kind, **fields):
    return next(
        n
        for n, op in enumerate(program.order[stage])
        if isinstance(op, kind) and all(getattr(op, k) == v for k, v in fields.items())
    )


def test_views_are_gathered_before_the_reduction_and_validated_behind_it():
    program = program_of(stages=2, data_parallel=2, microbatches=4)
    for number, layer in enumerate(program.layers):
        reduced = index_of(program, layer.stage, GlobalReduce)
        gathered = index_of(program, layer.stage, PrefetchView, layer=number)
        validated = index_of(program, layer.stage, Validate, layer=number)
        assert gathered < reduced < validated


def test_only_layers_that_others_borrow_from_wait():
    how = {"stages": 2, "data_parallel": 2, "microbatches": 2, "tied": True}
    program = program_of(**how)
    assert [layer.deferred for layer in program.layers] == [False, True, True, True]
    reduced = index_of(program, 0, GlobalReduce)
    assert index_of(program, 0, UpdateShard, layer=0, phase=1) > reduced
    assert index_of(program, 0, UpdateShard, layer=1, phase=1) < reduced
    assert_as_immediate(**how)


@pytest.mark.parametrize("data_parallel", [1, 2])
def test_a_weighted_loss_is_waited_for_and_the_norm_of_its_gradients_is_not(data_parallel):
    how = {"stages": 2, "data_parallel": data_parallel, "microbatches": 2, "reduction": "weighted"}
    assert {(layer.early, layer.update_phase) for layer in program_of(**how).layers} == {(1, 2)}
    assert_as_immediate(**how)


@pytest.mark.parametrize("validation", ["immediate", "deferred"])
def test_states_that_are_handed_back_are_used_up(validation):
    train, chain = trained(validation, stages=2, data_parallel=2, microbatches=2)
    state, _ = train(make_state(chain), make_batch())
    train(state, make_batch())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state["params"]))


@pytest.mark.parametrize("data_parallel", [1, 2])
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("weight", [FINE, BAD])
def test_memory_is_as_predicted(data_parallel, zero, weight):
    train, chain = trained(
        "deferred", data_parallel=data_parallel, stages=2, microbatches=2, zero=zero
    )
    compiled = train.lower(make_state(chain), make_batch()).compile()
    state, _ = compiled(make_state(chain), make_batch())
    _, census = compiled.census(state, make_batch(weight))
    assert census.largest_difference <= 0.02, census
