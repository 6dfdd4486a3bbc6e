"""How the results of a loss are joined, and what of a weighted loss the step takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import UnsupportedError
from ratrain_jax.lowering.graph import as_function, cut
from ratrain_jax.lowering.regions import split_step
from ratrain_jax.runtime.joins import join


def types(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def regions_of(loss, rows=12, parts=4, **options):
    """The regions of a step that descends by `loss(w, x)` and returns all that it gives."""

    def step(w, x):
        out, grads = rt.value_and_grad(lambda w: loss(w, x), **options)(w)
        return w - grads, out

    whole, small = (
        jax.make_jaxpr(step)(types(3, 2), types(count, 3)) for count in (rows, rows // parts)
    )
    return split_step(whole, small, states=1, names=["w", "x"], parts=parts)


def mean_of(w, x):
    return jnp.mean((x @ w) ** 2)


AUX = {
    "mean": [lambda w, x: x.mean(), lambda w, x: (x @ w).var(0)],
    "sum": [lambda w, x: (x > 0).sum(), lambda w, x: (x > 0).astype(jnp.int8).sum(0)],
    "rows": [
        lambda w, x: x @ w,
        lambda w, x: x > 0,
        lambda w, x: (x @ w).reshape(-1),
        lambda w, x: jax.random.split(rt.microbatch_key(jax.random.key(0)), x.shape[0]),
    ],
    "first": [
        lambda w, x: rt.microbatch_key(jax.random.key(0)),
        lambda w, x: (w > 0).sum(),
        lambda w, x: w.max(),
    ],
}


@pytest.mark.parametrize(("how", "aux"), [(how, aux) for how in AUX for aux in AUX[how]])
def test_the_join_of_an_auxiliary_value(how, aux):
    regions = regions_of(lambda w, x: (mean_of(w, x), aux(w, x)), has_aux=True)
    assert regions.joins == ("mean", how)
    whole = regions_of(lambda w, x: (mean_of(w, x), aux(w, x)), has_aux=True, parts=1)
    assert whole.joins == ("mean", "first")


@pytest.mark.parametrize(
    "aux",
    [
        lambda w, x: x.T,
        lambda w, x: x @ x.T,
        lambda w, x: x.sum() * jnp.zeros(x.shape[0] + 1),
        lambda w, x: jnp.isnan(x).any(),
    ],
)
def test_an_auxiliary_value_that_cannot_be_joined(aux):
    with pytest.raises(UnsupportedError, match="auxiliary"):
        regions_of(lambda w, x: (mean_of(w, x), aux(w, x)), has_aux=True)


@pytest.mark.parametrize(
    "aux",
    [
        lambda w, x: x.shape[0],
        lambda w, x: jnp.zeros(x.shape[0] + 1),
        lambda w, x: jax.random.uniform(jax.random.key(0), x.shape[:1]),
        lambda w, x: np.arange(5.0) + x.shape[0],
    ],
)
def test_what_depends_on_neither_parameters_nor_batch_is_that_of_the_whole_batch(aux):
    """A size that the loss of a microbatch returns is the size of the microbatch."""
    regions = regions_of(lambda w, x: (mean_of(w, x), aux(w, x)), has_aux=True)
    w, x = np.ones((3, 2), np.float32), np.ones((12, 3), np.float32)
    run = as_function(cut(regions.step, regions.step.invars, regions.step.outvars[-1:]))
    np.testing.assert_array_equal(run(w, x)[0], aux(w, x))


def test_a_weight_that_is_a_constant_stays_with_its_sum():
    regions = regions_of(
        lambda w, x: (mean_of(w, x), jnp.float32(x.shape[0])), reduction="weighted"
    )
    assert regions.joins == ("sum", "sum")
    assert len(regions.loss.outvars) == 2


def test_a_weighted_loss_is_divided_in_the_update():
    def loss(w, x):
        return (jnp.bfloat16(1) * (x @ w) ** 2).sum().astype(jnp.bfloat16), (x > 0).sum()

    regions = regions_of(loss, reduction="weighted")
    assert regions.joins == ("sum", "sum")
    assert [var.aval.dtype for var in regions.results] == [jnp.float32, jnp.int32]
    (grad,) = regions.grads
    given = [*regions.step.invars, *regions.results, grad]
    run = as_function(cut(regions.step, given, regions.step.outvars))
    w = jnp.ones((3, 2))
    new, value = run(w, jnp.ones((12, 3)), jnp.float32(7), jnp.int32(4), 8 * w)
    assert value.dtype == jnp.bfloat16 and float(value) == 1.75
    np.testing.assert_array_equal(new, w - 2)


def test_a_sum_is_added():
    regions = regions_of(lambda w, x: ((x @ w) ** 2).sum(), reduction="sum")
    assert (regions.reduction, regions.joins) == ("sum", ("sum",))


def test_joins_on_one_rank():
    parts = [jnp.full((2, 3), n, jnp.float16) for n in (1, 2, 6)]
    assert join(parts, "mean", jnp.float16, 1).dtype == jnp.float16
    assert float(join(parts, "mean", jnp.float16, 1)[0, 0]) == 3
    assert float(join(parts, "first", jnp.float16, 1)[0, 0]) == 1
    np.testing.assert_array_equal(join(parts, "rows", jnp.float16, 1), np.concatenate(parts))
    large = [jnp.float16(60000)] * 3
    assert float(join(large, "mean", jnp.float16, 1)) == 60000  # added in float32
    counts = [jnp.int8(n) for n in (1, 2, 3)]
    assert join(counts, "sum", jnp.int8, 1).dtype == jnp.int8
    keys = list(jax.random.split(jax.random.key(1), 2))
    assert bool(join(keys, "first", keys[0].dtype, 1) == keys[0])


@pytest.mark.parametrize("how", ["mean", "sum", "rows", "first"])
def test_joins_over_ranks_give_every_rank_the_same(how):
    """Rank r holds microbatches 2r and 2r + 1."""
    parts = np.arange(24.0, dtype=np.float32).reshape(4, 2, 3)
    run = jax.pmap(
        lambda a, b: join([a, b], how, jnp.float32, 2), axis_name="data", devices=jax.devices()[:2]
    )
    wanted = {"mean": parts.mean(0), "sum": parts.sum(0), "first": parts[0]}
    wanted["rows"] = parts.reshape(8, 3)
    for found in run(parts[::2], parts[1::2]):
        np.testing.assert_allclose(found, wanted[how])


def test_keys_over_ranks():
    keys = jax.random.split(jax.random.key(1), 4)
    run = jax.pmap(
        lambda a, b: jax.random.key_data(join([a, b], "first", keys.dtype, 2)),
        axis_name="data",
        devices=jax.devices()[:2],
    )
    for found in run(keys[::2], keys[1::2]):
        np.testing.assert_array_equal(found, jax.random.key_data(keys[0]))
