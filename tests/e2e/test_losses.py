"""Losses of every reduction, auxiliary values of every shape, and losses made in the middle of a network.

What does not depend on how the batch is cut is compared with `jax.jit` of the plain step; the rest with a plain loop
over ranks and microbatches, which this file holds.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ratrain_jax as rt
from ratrain_jax.lowering.jsonform import from_json
from ratrain_jax.lowering.program import GlobalReduce, Kind, UpdateShard
from ratrain_jax.lowering.text import parse
from ratrain_jax.lowering.verify import verify
from tests.training import differing, named_leaves

WIDTH = 6
LENGTH = 3
ROWS = 12
LAYOUTS = [
    {"stages": 1, "microbatches": 3},
    {"stages": 2, "data_parallel": 2, "microbatches": 3},
    {"stages": 3, "data_parallel": 2, "microbatches": 2, "zero": 2},
    {"stages": 1, "data_parallel": 4},
    {"stages": 2, "microbatches": 2, "schedule": "gpipe", "recovery": "forward"},
]


def make_params(layers=4, dtype=np.float32):
    rng = np.random.default_rng(0)
    return {
        f"layer_{n}": {
            "kernel": jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / 2, dtype),
            "bias": jnp.asarray(rng.normal(size=WIDTH) / 4, dtype),
        }
        for n in range(layers)
    }


def make_batch(seed=0, rows=ROWS):
    """Sequences; the mask keeps few positions of the first and nearly all of the last."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, LENGTH, WIDTH)).astype(np.float32)
    kept = rng.random((rows, LENGTH)) < np.linspace(0.1, 0.95, rows)[:, None]
    return {"x": x, "y": np.sin(x[..., ::-1]), "mask": kept}


def predict(params, x):
    for layer in params.values():
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x


def errors(params, batch):
    return ((predict(params, batch["x"]) - batch["y"]) ** 2).mean(axis=-1)


def plain_value_and_grad(fun, has_aux=False, reduction="mean"):
    """What `rt.value_and_grad` means, by JAX's own."""

    def loss(params):
        out = fun(params)
        if reduction != "weighted":
            return out
        (total, weight), aux = out if has_aux else (out, None)
        return (total / weight, aux) if has_aux else total / weight

    return jax.value_and_grad(loss, has_aux=has_aux)


def compiled(function):
    return jax.jit(function)


def plain_of(step, value_and_grad=jax.value_and_grad):
    return compiled(functools.partial(step, value_and_grad=value_and_grad))


def split(batch, options):
    """The batch of each rank and microbatch, in the order of ranks, then microbatches."""
    parts = options.get("data_parallel", 1) * options.get("microbatches", 1)
    leaves, tree = jax.tree.flatten(batch)
    cut = [jnp.split(leaf, parts) for leaf in leaves]
    return [tree.unflatten(part) for part in zip(*cut, strict=True)]


def assert_close(ours, theirs, rtol=1e-5, atol=1e-6):
    ours, theirs = named_leaves(ours), named_leaves(theirs)
    assert ours.keys() == theirs.keys()
    for name, leaf in ours.items():
        assert (leaf.shape, leaf.dtype) == (theirs[name].shape, theirs[name].dtype), name
        np.testing.assert_allclose(leaf, theirs[name], rtol=rtol, atol=atol, err_msg=name)


# Reductions.


def mean(params, batch):
    return errors(params, batch).mean()


def total(params, batch):
    return errors(params, batch).sum() / 50


def weighted(params, batch):
    kept = errors(params, batch) * batch["mask"]
    return kept.sum(), batch["mask"].sum()


LOSSES = {"mean": mean, "sum": total, "weighted": weighted}


def step_of(loss, optimizer, reduction, has_aux=False):
    def step(state, batch, value_and_grad=rt.value_and_grad):
        def loss_fn(params):
            return (
                (loss(params, batch), {"n": batch["mask"].sum()})
                if has_aux
                else loss(params, batch)
            )

        call = value_and_grad(loss_fn, has_aux=has_aux, reduction=reduction)
        value, grads = call(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": value, "norm": optax.tree.norm(grads)}

    return step


def state_of(optimizer, dtype=np.float32):
    params = make_params(dtype=dtype)
    return {"params": params, "opt": optimizer.init(params)}


@pytest.mark.parametrize(
    ("reduction", "layout"),
    [
        *(("weighted", layout) for layout in LAYOUTS),
        *(("sum", layout) for layout in LAYOUTS[1:3]),
        ("mean", LAYOUTS[1]),
    ],
    ids=str,
)
def test_each_reduction_is_that_of_the_whole_batch(reduction, layout):
    optimizer = optax.sgd(0.1, momentum=0.9)
    step = step_of(LOSSES[reduction], optimizer, reduction, has_aux=layout["stages"] == 2)
    piped = rt.train_step(**layout)(step)
    plain = plain_of(step, plain_value_and_grad)
    ours = theirs = state_of(optimizer)
    for seed in range(2):
        ours, found = piped(ours, make_batch(seed))
        theirs, wanted = plain(theirs, make_batch(seed))
        assert_close(found, wanted)
    assert_close(ours, theirs)


def test_a_weighted_loss_is_not_the_mean_of_its_parts():
    """Else the test above could not tell them apart."""
    batch, params = make_batch(), make_params()
    parts = [weighted(params, part) for part in split(batch, {"microbatches": 3})]
    apart = np.mean([s / w for s, w in parts])
    whole = np.divide(*weighted(params, batch))
    assert abs(apart - whole) > 0.01 * whole


def test_clipping_and_adam_behind_a_weighted_loss():
    optimizer = optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2, eps=1e-4))
    step = step_of(weighted, optimizer, "weighted")
    batch = make_batch()
    layout = {"stages": 3, "data_parallel": 2, "microbatches": 2}
    ours, found = rt.train_step(**layout)(step)(state_of(optimizer), batch)
    plain = plain_of(step, plain_value_and_grad)
    theirs, wanted = plain(state_of(optimizer), batch)
    assert float(wanted["norm"]) > 0.05
    assert_close(found, wanted)
    assert_close(ours, theirs)


def program_of(reduction, **options):
    optimizer = optax.sgd(0.1)
    step = rt.train_step(**options)(step_of(LOSSES[reduction], optimizer, reduction))
    return step.lower(state_of(optimizer), make_batch()).program


def test_steps_that_differ_in_their_reduction_share_no_executables():
    optimizer = optax.sgd(0.1)
    prints = {
        rt.train_step(microbatches=2)(step_of(mean, optimizer, reduction))
        .lower(state_of(optimizer), make_batch())
        .program.fingerprint
        for reduction in ("mean", "sum")
    }
    assert len(prints) == 2


@pytest.mark.parametrize("zero", [1, 2])
def test_the_weights_of_all_parts_are_added_before_the_first_update(zero):
    program = program_of("weighted", stages=3, data_parallel=2, microbatches=2, zero=zero)
    assert [layer.update_phase for layer in program.layers] == [1] * len(program.layers)
    results = [n for n, v in enumerate(program.variables) if v.role != "boundary"]
    assert [program.variables[n].join for n in results] == ["sum", "sum"]
    for ops in program.order:
        (at,) = (i for i, op in enumerate(ops) if isinstance(op, GlobalReduce) and op.phase == 1)
        read = [program.values[v] for v in ops[at].reads if program.values[v].kind is Kind.LOSS]
        weights = [v.microbatch for v in read if v.name == f"x{results[1]}"]
        assert sorted(weights) == [0, 1]
        updates = [i for i, op in enumerate(ops) if isinstance(op, UpdateShard)]
        assert updates and at < min(updates)
    free = program_of("mean", stages=3, data_parallel=2, microbatches=2, zero=zero)
    assert [layer.update_phase for layer in free.layers] == [0] * len(free.layers)


def test_a_weighted_loss_is_bitwise_equal_in_every_order():
    optimizer = optax.sgd(0.1)
    step = step_of(weighted, optimizer, "weighted")
    steps = [
        rt.train_step(stages=2, data_parallel=2, microbatches=3, **more)(step)
        for more in (
            {},
            {"schedule": "gpipe"},
            {"schedule": "1f1b", "recovery": "backward"},
            {"recovery": "forward", "update_prefetch": False},
            {"layerwise_state": False},
        )
    ]
    results = [piped(state_of(optimizer), make_batch()) for piped in steps]
    for other in results[1:]:
        assert differing(results[0], other) == []


def test_a_weighted_sum_may_exceed_the_type_of_its_gradient():
    """In float16: 3072 tokens, each with a gradient of 40; their sum is over 65504."""
    state = {"w": jnp.ones(4, jnp.float16), "v": jnp.ones(4, jnp.float16)}
    batch = {"x": np.full((4096, 4), 40.0, np.float16), "kept": np.arange(4096) % 4 != 1}

    def step(state, batch, value_and_grad=rt.value_and_grad):
        def loss(params):
            each = ((batch["x"] * params["w"]) * params["v"]).sum(-1).astype(jnp.float32)
            return (each * batch["kept"]).sum(), batch["kept"].sum()

        value, grads = value_and_grad(loss, reduction="weighted")(state)
        return jax.tree.map(lambda p, g: p - g / 64, state, grads), value

    found = rt.train_step(stages=1, data_parallel=2, microbatches=4)(step)(state, batch)
    np.testing.assert_allclose(found[0]["w"], 1 - 40 / 64, rtol=1e-3)
    assert float(found[1]) == 160.0


# Auxiliary values.


def halves(params):
    """The first two layers, and the others."""
    layers = list(params.items())
    return dict(layers[:2]), dict(layers[2:])


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


# Batch statistics.


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


# Losses from the middle of the network.


def middle_step(loss):
    def step(state, batch, value_and_grad=rt.value_and_grad):
        (value, aux), grads = value_and_grad(lambda p: loss(p, batch), has_aux=True)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": value, **aux}

    return step


def deep_supervision(params, batch):
    """Each layer's output is compared with the goal, also early ones."""
    x, losses = batch["x"], []
    for layer in params.values():
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
        losses.append(((x - batch["y"]) ** 2).mean())
    weights = jnp.arange(1.0, 1 + len(losses))
    return (jnp.stack(losses) * weights).sum(), {f"loss_{n}": v for n, v in enumerate(losses)}


def early_loss(params, batch):
    """The loss is made by the second layer; the others only make an auxiliary value."""
    first, second = halves(params)
    hidden = predict(first, batch["x"])
    rest = predict(second, hidden)
    return ((hidden - batch["y"]) ** 2).mean(), {"later": ((rest - batch["y"]) ** 2).mean()}


def early_penalty(params, batch):
    """A small penalty on an early activation, added to the loss of the last layer."""
    first, second = halves(params)
    hidden = predict(first, batch["x"])
    out = predict(second, hidden)
    penalty = jnp.abs(hidden).mean()
    return ((out - batch["y"]) ** 2).mean() + 0.3 * penalty, {"penalty": penalty}


@pytest.mark.parametrize("loss", [deep_supervision, early_loss, early_penalty])
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(LAYOUTS[1], marks=pytest.mark.slow),
        {**LAYOUTS[2], "recovery": "backward"},
    ],
    ids=str,
)
def test_losses_from_the_middle_of_the_network(loss, layout):
    step = middle_step(loss)
    piped = rt.train_step(**layout)(step)
    plain = plain_of(step)
    ours = theirs = make_params()
    for seed in range(2):
        ours, found = piped(ours, make_batch(seed))
        theirs, wanted = plain(theirs, make_batch(seed))
        assert_close(found, wanted)
    assert_close(ours, theirs)
