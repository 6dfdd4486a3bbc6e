import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from ratrain_jax.lowering.shards import PARTIAL, on_shards, shard_axis, shard_shape

AXIS = "data"


def cut_up(value, axis, devices):
    parts = [value] * devices if axis is None else np.split(np.asarray(value), devices, axis)
    return np.stack(parts)


def run_on_shards(fun, args, devices, layouts_in=None, layouts_out=None, *, run=jax.vmap):
    """Runs `fun` on shards; gives its whole results, and the program."""
    closed = jax.make_jaxpr(lambda *a: jax.tree.leaves(fun(*a)))(*args)
    if layouts_in is None:
        layouts_in = [shard_axis(aval.shape, devices) for aval in closed.in_avals]
    if layouts_out is None:
        layouts_out = [shard_axis(aval.shape, devices) for aval in closed.out_avals]
    program = on_shards(closed, layouts_in, layouts_out, devices, AXIS)
    parts = [cut_up(x, axis, devices) for x, axis in zip(args, layouts_in, strict=True)]
    made = run(program.run, axis_name=AXIS)(*parts)
    whole = []
    for value, axis in zip(map(np.asarray, made), layouts_out, strict=True):
        if axis == PARTIAL:
            whole.append(value)
        elif axis is None:
            for other in value[1:]:
                np.testing.assert_array_equal(other, value[0])
            whole.append(value[0])
        else:
            whole.append(np.concatenate(list(value), axis))
    return whole, program


def check(fun, *args, devices=2, whole=(), layouts_in=None):
    """Compares a program on shards with the program; `whole` names what may run whole."""
    got, program = run_on_shards(fun, args, devices, layouts_in)
    want = jax.tree.leaves(fun(*args))
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6)
    assert {entry.primitive for entry in program.whole} == set(whole)
    return program


def grid(*shape, dtype=np.float32):
    return (np.sin(np.arange(np.prod(shape))) * 2 + 0.25).reshape(shape).astype(dtype)


def test_the_largest_axis_that_divides_is_cut():
    assert shard_axis((4, 8), 2) == 1
    assert shard_axis((8, 8), 4) == 0
    assert shard_axis((3, 4), 2) == 1
    assert shard_axis((3, 5), 2) is None
    assert shard_axis((), 2) is None
    assert shard_axis((0, 3), 3) is None
    assert shard_axis((8,), 1) is None
    assert shard_shape((3, 4), 2) == (3, 2)
    assert shard_shape((3, 5), 2) == (3, 5)


def test_elementwise_work_stays_on_shards():
    check(lambda x, y, s: jnp.where(x > 0, x * s, y) + 1, grid(4, 8), grid(4, 8), np.float32(3))


def test_an_equation_with_axes_of_size_one_stays_on_shards():
    check(lambda x, r, c: x * r + c, grid(4, 8), grid(1, 8), grid(4, 1))


def test_operands_cut_along_different_axes_meet():
    check(lambda x, y: x + y, grid(4, 8), grid(4, 8), layouts_in=[0, 1])


def test_a_constant_array_is_made_at_its_local_size():
    program = check(lambda x: x + jnp.full((4, 8), 2.0) * jnp.ones((4, 8)), grid(4, 8))
    closed = jax.make_jaxpr(program.run, axis_env=[(AXIS, 2)])(grid(4, 4))
    assert {v.aval.shape for eqn in closed.eqns for v in eqn.outvars} <= {(), (4, 4)}


def test_a_whole_array_is_cut_where_it_meets_shards():
    check(lambda x, y: x * y, grid(4, 8), grid(4, 8), layouts_in=[1, None])


@pytest.mark.parametrize("axis", [0, 1, None])
def test_reductions_are_combined_when_they_are_used(axis):
    def fun(x):
        return x / jnp.sqrt(jnp.sum(x * x, axis=axis, keepdims=True)) + jnp.max(jnp.abs(x))

    check(fun, grid(4, 8))


@pytest.mark.parametrize(
    ("fun", "combine"),
    [
        (lambda x: jnp.sum(x), "sum"),
        (lambda x: jnp.max(x), "max"),
        (lambda x: jnp.min(x), "min"),
        (lambda x: jnp.all(x > 0), "and"),
        (lambda x: jnp.any(x > 0), "or"),
        (lambda x: jnp.vdot(x, x), "sum"),
        (lambda x: jnp.sqrt(jnp.sum(x)), "same"),
        (lambda x: jnp.argmax(x), "same"),
    ],
)
@pytest.mark.parametrize("shape", [(4, 8), (8, 4), (3, 5)])
def test_a_partial_is_left_uncombined_and_says_how_it_joins(fun, combine, shape):
    joins = {"sum": np.sum, "max": np.max, "min": np.min, "and": np.all, "or": np.any}
    x = grid(*shape)
    (parts,), program = run_on_shards(fun, [x], 2, layouts_out=[PARTIAL])
    if shard_axis(shape, 2) is None:
        combine = "same"
    assert program.combine == (combine,)
    got = joins[combine](parts) if combine in joins else parts[0]
    np.testing.assert_allclose(got, fun(x), rtol=1e-6)
    if combine == "sum":
        assert not np.allclose(parts[0], fun(x))


def test_a_partial_that_is_also_used_is_given_uncombined():
    def fun(x):
        total = jnp.sum(x)
        return x * total, total

    (whole, parts), program = run_on_shards(fun, [grid(4, 8)], 2, layouts_out=[1, PARTIAL])
    assert program.combine == ("sum",)
    np.testing.assert_allclose(whole, grid(4, 8) * grid(4, 8).sum(), rtol=1e-6)
    np.testing.assert_allclose(parts.sum(), grid(4, 8).sum(), rtol=1e-6)


def test_flattened_arrays_are_reduced_and_restored_without_a_gather():
    def fun(x, y):
        flat = x.reshape(-1) * 2 + y.reshape(-1)
        return flat.reshape(x.shape) * jnp.vdot(x, y) + jnp.sum(flat)

    check(fun, grid(4, 8), grid(4, 8))


def test_shapes_change_on_shards():
    check(lambda x: (x.T * 2, x[:, None], x.reshape(4, 2, 4), x.reshape(4, 1, 8)[:, 0]), grid(4, 8))


def test_a_broadcast_of_a_reduced_axis_is_made_at_its_local_size():
    check(
        lambda x: (
            x - lax.broadcast_in_dim(jnp.mean(x, 0), (8, 4), (1,)),
            x + lax.broadcast_in_dim(jnp.mean(x, 1), (8, 4), (0,)),
        ),
        grid(8, 4),
    )


def test_integers_and_booleans_run_on_shards():
    check(
        lambda x: (jnp.sum(x > 0), jnp.all(x > -9) & (x > 0), (x * 10).astype(jnp.int32) % 3),
        grid(4, 8),
    )


def test_arrays_of_size_zero_run_on_shards():
    check(lambda x: (x * 2 + jnp.sum(x), jnp.max(x, initial=0.0), x.T), grid(0, 4))


def test_custom_rules_are_opened():
    check(lambda x: jax.nn.relu(x) + jax.jit(jax.nn.silu)(x), grid(4, 8))


def test_what_depends_on_position_runs_whole_and_is_reported():
    program = check(lambda x: jnp.cumsum(x, axis=1) + x, grid(4, 8), whole=["cumsum"])
    assert program.whole[0].bytes == 2 * 4 * 8 * 4


def test_a_product_of_matrices_runs_whole():
    check(lambda x: x @ x.T @ x, grid(4, 8), whole=["dot_general"])


def test_a_scan_and_a_branch_run_whole():
    def fun(x, flag):
        x, _ = lax.scan(lambda c, _: (jnp.tanh(c), None), x, length=3)
        return lax.cond(flag, jnp.sin, jnp.cos, x)

    check(fun, grid(4, 8), np.bool_(True), whole=["scan", "cond"])


def test_random_numbers_are_drawn_whole_and_cut_at_once():
    key = jax.random.key(1)
    fun = lambda x: x + jax.random.normal(key, x.shape)  # noqa: E731
    program = check(fun, grid(4, 8), whole=["random_bits"])
    closed = jax.make_jaxpr(program.run, axis_env=[(AXIS, 2)])(grid(4, 4))
    whole = [e for e in closed.eqns if any(v.aval.shape == (4, 8) for v in e.outvars)]
    assert len(whole) == 1


def test_one_device_runs_the_program_itself():
    x = grid(3, 5)
    (y, _), program = run_on_shards(lambda x: (x * 2, x.sum()), [x], 1, layouts_out=[None, PARTIAL])
    np.testing.assert_array_equal(y, x * 2)
    assert program.combine == ("same",) and not program.whole


@pytest.mark.parametrize("devices", [2, 4])
def test_programs_run_under_pmap(devices):
    def fun(x, y, b):
        x = x / jnp.linalg.norm(x) + jnp.cumsum(y, 0)
        return x * jnp.max(b), jnp.all(jnp.isfinite(x)), b + jnp.mean(x, 1), jnp.any(x > 0)

    args = [grid(8, 12), grid(8, 12), grid(8)]
    run = lambda f, axis_name: jax.pmap(f, axis_name, devices=jax.devices()[:devices])  # noqa: E731
    got, _ = run_on_shards(fun, args, devices, run=run)
    for g, w in zip(got, fun(*args), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6)


UNARY = [
    jnp.sin,
    jnp.abs,
    lambda x: x.T.T,
    lambda x: x * 2,
    lambda x: x.reshape(-1).reshape(x.shape),
    lambda x: jnp.sum(x, -1, keepdims=True) * jnp.ones_like(x),
    lambda x: x - jnp.mean(x),
    lambda x: jnp.broadcast_to(jnp.max(x, 0), x.shape),
    lambda x: jnp.full_like(x, 0.5) + jnp.vdot(x, x) / 100,
    lambda x: jnp.flip(x, 0),
    lambda x: jnp.where(jnp.all(x > -1), x, jnp.zeros_like(x)),
]
BINARY = [
    jnp.add,
    jnp.minimum,
    lambda x, y: x * jnp.sum(y),
    lambda x, y: jnp.where(x > y, x, y * 0.5),
    lambda x, y: jnp.vdot(x, y) / 10 + y,
]


@st.composite
def programs(draw):
    """A random program over arrays of one shape: a list of (function, operands)."""
    steps, known = [], 2
    for _ in range(draw(st.integers(1, 7))):
        fun = draw(st.sampled_from([*UNARY, *BINARY]))
        count = 2 if fun in BINARY else 1
        operands = draw(st.lists(st.integers(0, known - 1), min_size=count, max_size=count))
        steps.append((fun, operands))
        known += 1
    return steps


@settings(max_examples=30)
@given(
    steps=programs(),
    shape=st.sampled_from([(4, 8), (8, 4), (4, 4, 2), (6, 3), (12,), (3, 5)]),
    devices=st.sampled_from([2, 3]),
)
def test_a_random_program_means_the_same_on_shards(steps, shape, devices):
    def fun(x, y):
        known = [x, y]
        for step, operands in steps:
            known.append(jnp.tanh(step(*(known[i] for i in operands))))
        return known[-1], known[-2] + known[-1], jnp.sum(known[-1])

    args = [grid(*shape), grid(*shape)[::-1]]
    got, _ = run_on_shards(fun, args, devices)
    for g, w in zip(got, fun(*args), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)
