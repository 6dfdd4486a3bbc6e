"""Losses that are a mean, a sum or a weighted mean train under any layout as `jax.jit` of the plain step does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ratrain_jax as rt
from ratrain_jax.lowering.program import GlobalReduce, Kind, UpdateShard
from tests.dense import predict
from tests.sequences import LAYOUTS, make_batch, make_params, plain_of, split
from tests.training import assert_close, differing


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


@pytest.mark.filterwarnings("ignore:the loss is a mean:ratrain_jax.errors.LossReductionWarning")
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
