"""Auxiliary values of every shape, and batch statistics, against a plain loop over ranks and microbatches."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ratrain_jax as rt
from ratrain_jax.lowering.jsonform import from_json
from ratrain_jax.lowering.program import GlobalReduce, Kind
from ratrain_jax.lowering.text import parse
from ratrain_jax.lowering.verify import verify
from tests.dense import predict
from tests.sequences import (
    LAYOUTS,
    LENGTH,
    ROWS,
    WIDTH,
    compiled,
    halves,
    make_batch,
    make_params,
    plain_of,
    split,
)
from tests.training import assert_close, differing, named_leaves


def loss_and_aux(params, batch):
    first, second = halves(params)
    hidden = predict(first, batch["x"])
    early = {
        "early": (hidden.max(axis=-1), None),
        "statistics": [hidden.mean((0, 1)), jnp.asarray(hidden.var(0), jnp.bfloat16)],
    }
    logits = predict(second, hidden)
    key = jax.random.key(7)
    return ((logits - batch["y"]) ** 2).mean(), {
        "scalar": logits.mean(),
        "count": (logits > 0).sum(),
        "rows": logits,
        **early,
        "flat": logits.argmax(-1).reshape(-1),
        "kept": batch["mask"] & (logits[..., 0] > 0),
        "histogram": jnp.zeros(4, jnp.int32).at[logits.argmax(-1) % 4].add(1),
        "given": batch["y"],
        "constant": 3.0,
        "key": jax.random.split(key)[1],
    }


ROWWISE = {"rows", "early", "flat", "kept", "given"}


def aux_in_parts(params, batch, layout):
    """What each auxiliary value becomes, by a loop over ranks and microbatches."""
    each = [loss_and_aux(params, part)[1] for part in split(batch, layout)]
    joined = {}
    for name in each[0]:
        values = [aux[name] for aux in each]
        if name == "key":
            joined[name] = values[0]
        elif name in ROWWISE:
            joined[name] = jax.tree.map(lambda *a: jnp.concatenate(a), *values)
        elif name in ("count", "histogram"):
            joined[name] = jax.tree.map(lambda *a: sum(a), *values)
        else:
            joined[name] = jax.tree.map(
                lambda *a: (sum(jnp.float32(x) for x in a) / len(a)).astype(
                    jnp.asarray(a[0]).dtype
                ),
                *values,
            )
    return joined


def aux_step(state, batch, value_and_grad=rt.value_and_grad):
    (_, aux), grads = value_and_grad(lambda p: loss_and_aux(p, batch), has_aux=True)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), aux


def without_key(aux):
    return {**aux, "key": jax.random.key_data(aux["key"])}


@pytest.mark.parametrize("layout", LAYOUTS[1:4], ids=str)
def test_auxiliary_values_of_any_tree(layout):
    batch = make_batch()
    _, found = rt.train_step(**layout)(aux_step)(make_params(), batch)
    wanted = compiled(lambda p: aux_in_parts(p, batch, layout))(make_params())
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    found, wanted = without_key(found), without_key(wanted)
    rough = found["statistics"].pop(), wanted["statistics"].pop()
    assert rough[0].dtype == rough[1].dtype == jnp.bfloat16
    np.testing.assert_allclose(*(np.float32(r) for r in rough), rtol=2e-2, atol=1e-4)
    assert_close(found, wanted)


def test_rows_are_those_of_the_whole_batch_in_its_order():
    batch = make_batch()
    layout = {"stages": 2, "data_parallel": 2, "microbatches": 3}
    _, found = rt.train_step(**layout)(aux_step)(make_params(), batch)
    _, whole = loss_and_aux(make_params(), batch)
    for name in ROWWISE - {"given"}:
        assert_close(found[name], whole[name])
    assert differing(found["given"], batch["y"]) == []


def test_without_a_cut_every_auxiliary_value_is_that_of_the_plain_step():
    def step(state, batch, value_and_grad=rt.value_and_grad):
        def loss(params):
            value, aux = loss_and_aux(params, batch)
            return value, {**aux, "finite": jnp.isfinite(aux["rows"]).all()}

        (_, aux), _ = value_and_grad(loss, has_aux=True)(state)
        return aux

    found = rt.train_step(stages=2)(step)(make_params(), make_batch())
    wanted = plain_of(step)(make_params(), make_batch())
    assert bool(found["finite"])
    assert_close(without_key(found), without_key(wanted))


def test_the_program_knows_auxiliary_arrays():
    lowered = rt.train_step(stages=2, data_parallel=2, microbatches=3)(aux_step).lower(
        make_params(), make_batch()
    )
    program = lowered.program
    verify(program)
    assert parse(lowered.as_text()) == program
    assert from_json(lowered.as_json()) == program
    joins = {v.join for v in program.variables if v.role == "aux"}
    assert joins == {"mean", "sum", "rows"}
    rows = ROWS // 6
    logits = [
        v
        for v in program.values
        if v.kind is Kind.LOSS and v.arrays[0].shape == (rows, LENGTH, WIDTH)
    ]
    assert {v.microbatch for v in logits} == {0, 1, 2}
    assert all(v.bytes == rows * LENGTH * WIDTH * 4 for v in logits)
    # At the reduction all parts are alive, and what it makes of them.
    for stage, memory in enumerate(lowered.memory_analysis().stages):
        at = next(i for i, op in enumerate(program.order[stage]) if isinstance(op, GlobalReduce))
        alive = sum(v.bytes for v in program.values if v.kind is Kind.LOSS and v.stage == stage)
        assert memory.series.at[Kind.LOSS][at] == alive > 0
        made = [v for v in program.values if v.kind is Kind.SCALARS and v.stage == stage]
        if made:
            assert memory.series.at[Kind.SCALARS][at] == sum(v.bytes for v in made)
    whole = ROWS * LENGTH * WIDTH * 4
    assert any(v.kind is Kind.SCALARS and v.bytes > whole for v in program.values)


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.tanh(nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.Dense(WIDTH)(x)))
        return nn.Dense(WIDTH)(x)


NET = Normalized()


def normalized_loss(params, stats, batch):
    variables = {"params": params, "batch_stats": stats}
    out, new = NET.apply(variables, batch["x"], mutable=["batch_stats"])
    return ((out - batch["y"]) ** 2).mean(), new["batch_stats"]


def normalized_step(state, batch):
    def loss(params):
        return normalized_loss(params, state["batch_stats"], batch)

    (value, stats), grads = rt.value_and_grad(loss, has_aux=True)(state["params"])
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return {"params": params, "batch_stats": stats}, {"loss": value}


def normalized_in_parts(state, batch, layout):
    """The reference: statistics are those of a microbatch, and their running means are averaged."""
    call = jax.value_and_grad(normalized_loss, has_aux=True)
    each = [call(state["params"], state["batch_stats"], part) for part in split(batch, layout)]
    ((value, stats), grads) = jax.tree.map(lambda *a: sum(a) / len(a), *each)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return {"params": params, "batch_stats": stats}, {"loss": value}


@pytest.mark.parametrize("layout", LAYOUTS[2:3], ids=str)
def test_batch_statistics_are_averaged_over_ranks_and_microbatches(layout):
    variables = NET.init(jax.random.key(0), make_batch()["x"])
    state = {"params": variables["params"], "batch_stats": variables["batch_stats"]}
    piped = rt.train_step(**layout)(normalized_step)
    reference = compiled(lambda s, b: normalized_in_parts(s, b, layout))
    ours = theirs = state
    for seed in range(2):
        ours, found = piped(ours, make_batch(seed))
        theirs, wanted = reference(theirs, make_batch(seed))
        assert_close(found, wanted)
    assert_close(ours, theirs, rtol=2e-5, atol=5e-6)
    before, after = named_leaves(state["batch_stats"]), named_leaves(ours["batch_stats"])
    assert all(np.abs(after[name] - before[name]).max() > 1e-3 for name in before)
