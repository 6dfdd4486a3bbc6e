"""Float16 training with a dynamic loss scale: all stages take or skip a step together."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ratrain_jax as rt
from ratrain_jax.lowering.program import GlobalReduce, Kind
from tests.training import differing

LAYERS, WIDTH = 4, 16
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def step(state, batch, dtype):
    loss_scale = state["loss_scale"]

    def loss_fn(params):
        x = batch["x"].astype(dtype)
        for n in range(LAYERS):
            x = rt.layer(x, f"layer_{n}")
            x = x * batch["spoil"][:, n : n + 1].astype(dtype)
            x = x + jnp.tanh(x @ params[f"layer_{n}"].astype(dtype))
        return loss_scale.scaled(((x - batch["y"].astype(dtype)) ** 2).astype(jnp.float32).mean())

    loss, grads = rt.value_and_grad(loss_fn)(state["params"])
    loss, grads = loss_scale.unscale((loss, grads))
    finite = rt.all_finite(grads)
    updates, opt_state = OPTIMIZER.update(grads, state["opt_state"], state["params"])
    new = {
        "params": optax.apply_updates(state["params"], updates),
        "opt_state": opt_state,
        "step": state["step"] + 1,
    }
    kept = rt.select_tree(finite, new, {name: state[name] for name in new})
    metrics = {"loss": loss, "finite": finite, "grad_norm": optax.tree.norm(grads)}
    return {**kept, "loss_scale": loss_scale.adjust(finite)}, metrics


def make_state(scale=256.0):
    rng = np.random.default_rng(0)
    params = {
        f"layer_{n}": jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / 8, jnp.float32)
        for n in range(LAYERS)
    }
    return {
        "params": params,
        "opt_state": OPTIMIZER.init(params),
        "step": jnp.int32(0),
        "loss_scale": rt.DynamicLossScale.create(scale, growth_interval=3),
    }


def make_batch(spoiled=None, row=0, rows=16):
    """A batch; in row `row` what layer `spoiled` reads is infinite."""
    rng = np.random.default_rng(1)
    spoil = np.ones((rows, LAYERS), np.float32)
    if spoiled is not None:
        spoil[row, spoiled] = np.inf
    x, y = rng.normal(size=(2, rows, WIDTH)).astype(np.float32)
    return {"x": x, "y": y, "spoil": spoil}


@functools.cache
def trained(dtype="float16", **options):
    options = {"stages": 2, "data_parallel": 2, "microbatches": 4, **options}
    return rt.train_step(**options)(functools.partial(step, dtype=jnp.dtype(dtype)))


def host(tree):
    return jax.tree.map(np.asarray, tree)


@pytest.mark.parametrize("schedule", ["1f1b", "ratrain"])
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("spoiled", range(LAYERS))
def test_one_infinity_in_one_microbatch_makes_every_stage_skip(schedule, zero, spoiled):
    train = trained(schedule=schedule, zero=zero)
    state, metrics = train(make_state(), make_batch())
    assert bool(metrics["finite"])
    before = host(state)
    after, metrics = train(state, make_batch(spoiled, row=5 + spoiled))
    assert not bool(metrics["finite"])
    after = host(after)
    assert not differing(
        {name: after[name] for name in ("params", "opt_state", "step")},
        {name: before[name] for name in ("params", "opt_state", "step")},
    )
    assert float(after["loss_scale"].scale) == float(before["loss_scale"].scale) / 2
    again, metrics = train(after, make_batch())
    assert bool(metrics["finite"])
    assert int(again["step"]) == 2
    assert differing(host(again["params"]), before["params"])


def test_the_scale_halves_once_a_bad_step_and_grows_after_good_ones():
    train, state = trained(), make_state()
    scales = []
    for number in range(12):
        state, metrics = train(state, make_batch(2 if number in (1, 2, 7) else None))
        assert bool(metrics["finite"]) == (number not in (1, 2, 7))
        scales.append(float(state["loss_scale"].scale))
    assert scales == [256, 128, 64, 64, 64, 128, 128, 64, 64, 64, 128, 128]


def test_the_check_and_the_clipped_norm_share_one_reduction():
    program = trained().lower(make_state(), make_batch()).program
    assert len(program.reductions) == 1
    assert len({op for ops in program.order for op in ops if isinstance(op, GlobalReduce)}) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_views_are_half_and_shards_and_accumulators_are_not(dtype):
    program = trained(dtype).lower(make_state(), make_batch()).program
    types = {
        kind: {array.dtype for v in program.values if v.kind == kind for array in v.arrays}
        for kind in (Kind.VIEW, Kind.PARAMETERS, Kind.ACCUMULATOR, Kind.GRADIENT)
    }
    assert types == {
        Kind.VIEW: {dtype},
        Kind.PARAMETERS: {"float32"},
        Kind.ACCUMULATOR: {"float32"},
        Kind.GRADIENT: {"float32"},
    }


def test_schedules_agree_to_the_last_bit_with_skipped_steps_between():
    ends = []
    for schedule in ("gpipe", "1f1b", "ratrain"):
        state = make_state()
        for number in range(6):
            state, _ = trained(schedule=schedule)(state, make_batch(1 if number == 2 else None))
        ends.append(host(state))
    assert not differing(ends[0], ends[1])
    assert not differing(ends[0], ends[2])


def test_losses_are_those_of_the_plain_step():
    plain = jax.jit(functools.partial(step, dtype=jnp.float32))
    ours, theirs = make_state(), make_state()
    for number in range(6):
        batch = make_batch(3 if number == 2 else None)
        ours, metrics = trained("float32")(ours, batch)
        theirs, expected = plain(theirs, batch)
        assert bool(metrics["finite"]) == bool(expected["finite"])
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    assert int(ours["step"]) == int(theirs["step"])
