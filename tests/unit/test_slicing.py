"""Arithmetic on stacked arrays, done slice by slice, gives what it gave on the whole arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from ratrain_jax import compat
from ratrain_jax.lowering.graph import as_function, inline, needed
from ratrain_jax.lowering.slice_rules import Sliced, slice_type
from ratrain_jax.lowering.slicing import Slicer

L, M, N = 3, 4, 5
RNG = np.random.default_rng(0)
X = RNG.normal(size=(L, M, N)).astype(np.float32)
Y = RNG.normal(size=(L, M, N)).astype(np.float32)
V = RNG.normal(size=(L,)).astype(np.float32)
W = RNG.normal(size=(M, N)).astype(np.float32)


def run_sliced(fun, *args, sliced=(0,)):
    """Slices some arguments; gives the results, put together, and whether each was sliced."""
    graph = inline(jax.make_jaxpr(fun)(*args))
    slicer = Slicer(lambda path, number: path)
    invars, inputs = [], []
    for n, (var, arg) in enumerate(zip(graph.invars, args, strict=True)):
        if n in sliced:
            parts = [compat.new_var(slice_type(var.aval)) for _ in range(arg.shape[0])]
            slicer.bind(var, Sliced(tuple(parts)))
            invars += parts
            inputs += list(arg)
        else:
            invars.append(var)
            inputs.append(arg)
    slicer.run(graph.eqns)
    values = [slicer.read(atom) for atom in graph.outvars]
    outvars = [a for v in values for a in (v.slices if isinstance(v, Sliced) else (v,))]
    consts = {**graph.consts, **slicer.consts}
    closed = compat.closed(invars, outvars, slicer.eqns, list(consts), list(consts.values()))
    made = iter(as_function(closed)(*inputs))
    whole = [
        np.stack([next(made) for _ in v.slices])
        if isinstance(v, Sliced)
        else np.asarray(next(made))
        for v in values
    ]
    return whole, [isinstance(v, Sliced) for v in values], closed


def check(fun, *args, sliced=(0,), kept=True):
    """The results agree; they are sliced if `kept`. Gives the names of the primitives used."""
    found, are_sliced, closed = run_sliced(fun, *args, sliced=sliced)
    wanted = jax.tree.leaves(fun(*args))
    assert are_sliced == [kept] * len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-6)
    return {eqn.primitive.name for eqn in closed.jaxpr.eqns}


PER_SLICE = {
    "elementwise": lambda x: jnp.tanh(x) * 2 + x**2,
    "cast": lambda x: x.astype(jnp.bfloat16),
    "same for all": lambda x: x + W[None],
    "constant": lambda x: x * jnp.arange(L, dtype=jnp.float32)[:, None, None],
    "made of a constant": lambda x: x * (jnp.arange(L, dtype=jnp.float32)[:, None, None] + 1),
    "zeros": lambda x: x + jnp.zeros_like(x),
    "reduce inner": lambda x: x.mean(axis=(1, 2)),
    "keep dims": lambda x: x / jnp.sqrt((x**2).sum(axis=-1, keepdims=True)),
    "reshape": lambda x: x.reshape(L, M * N),
    "transpose": lambda x: x.transpose(0, 2, 1),
    "slice inner": lambda x: x[:, 1:3],
    "pad": lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 2))),
    "reverse": lambda x: x[:, ::-1],
    "sort": lambda x: jnp.sort(x, axis=1),
    "cumulative": lambda x: jnp.cumsum(x, axis=2),
    "argmax": lambda x: jnp.argmax(x, axis=1),
    "batched product": lambda x: jnp.einsum("lmn,lkn->lmk", x, x),
    "shared product": lambda x: jnp.einsum("lmn,mn->l", x, W),
    "condition": lambda x: jnp.where(x > 0, x, 0),
    "branch": lambda x: lax.cond(x.sum() > 0, lambda x: x + 1, lambda x: x * 2, x),
    "some": lambda x: x[1:],
    "barrier": lambda x: lax.optimization_barrier(x) + 1,
    "join": lambda x: jnp.concatenate([x, x]),
    "broadcast": lambda x: jnp.broadcast_to(x[:, :, None], (L, M, 2, N)),
    "loop": lambda x: lax.scan(lambda c, p: (c + p.sum(), p * c), 0.0, x)[1],
    "call": jax.jit(lambda x: jax.nn.silu(x) + 1),
}


@pytest.mark.parametrize("name", PER_SLICE)
def test_stays_in_slices(name):
    used = check(PER_SLICE[name], X)
    assert not used & {"concatenate", "scan"}


WHOLE = {
    "sum": lambda x: x.sum(),
    "max": lambda x: jnp.abs(x).max(),
    "all finite": lambda x: jnp.isfinite(x).all(),
    "some sum": lambda x: x.sum(axis=(0, 1)),
    "one layer": lambda x: x[1] * 2,
    "contraction": lambda x: jnp.einsum("lmn,lmn->", x, x),
    "carry": lambda x: lax.scan(lambda c, p: (jnp.tanh(c + p.sum()), None), 0.0, x)[0],
}


@pytest.mark.parametrize("name", WHOLE)
def test_is_reduced_slice_by_slice(name):
    assert "concatenate" not in check(WHOLE[name], X, kept=False)


STACKED = {
    "sort over layers": lambda x: jnp.sort(x, axis=0),
    "sum over layers so far": lambda x: jnp.cumsum(x, axis=0),
    "other axis first": lambda x: x.transpose(1, 0, 2),
    "product over layers": lambda x: jnp.einsum("lmn,kl->kmn", x, np.ones((2, L), np.float32)),
    "flat": lambda x: x.ravel(),
    "shuffled": lambda x: x[np.array([2, 0, 1])],
}


@pytest.mark.parametrize("name", STACKED)
def test_what_has_no_rule_gets_the_stacked_array(name):
    assert "concatenate" in check(STACKED[name], X, kept=False)


def test_a_stacked_array_is_made_once():
    _, _, closed = run_sliced(lambda x: (jnp.sort(x, 0), jnp.cumsum(x, 0)), X)
    assert [e.primitive.name for e in closed.jaxpr.eqns].count("concatenate") == 1


def test_a_reversed_loop_is_unrolled_backwards():
    def fun(x):
        return lax.scan(lambda c, p: (c * 2 + p, c), np.zeros((M, N), np.float32), x, reverse=True)

    found, are_sliced, closed = run_sliced(fun, X)
    assert are_sliced == [False, True]
    for ours, theirs in zip(found, fun(X), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert "scan" not in {eqn.primitive.name for eqn in closed.jaxpr.eqns}


def test_scalars_a_layer():
    check(lambda v: v * 2 + 1, V)
    check(lambda v: jnp.sqrt((v**2).sum()), V, kept=False)
    check(lambda v: v @ v, V, kept=False)
    check(lambda v: v + jnp.square(jnp.zeros_like(v)) + 1, V)
    check(lambda v, x: x * v[:, None, None], V, X, sliced=(0, 1))


def test_a_branch_that_gives_slices_in_one_case_alone_gives_them_in_all():
    def fun(x, old):
        return lax.cond(x.sum() > 0, lambda x, old: (x * 2, old), lambda x, old: (old, x), x, old)

    check(fun, X, Y)
    slicer_leaves = leaves_cut(fun, X, Y)
    assert slicer_leaves == {1}


def test_what_is_the_same_for_all_layers_is_made_once_without_their_axis():
    shared = lambda x, w: x + jnp.tanh(jnp.broadcast_to(w * 2, x.shape)) + 0 * jnp.ones_like(x)  # noqa: E731
    _, _, closed = run_sliced(shared, X, W)
    live = dce(closed)
    assert not [
        e
        for e in live
        if e.primitive.name in ("slice", "broadcast_in_dim") and e.outvars[0].aval.ndim == 3
    ]
    assert [e.primitive.name for e in live].count("tanh") == 1
    check(shared, X, W)


def dce(closed):
    return needed(closed.jaxpr.eqns, closed.jaxpr.outvars)[0]


def leaves_cut(fun, *args):
    """Which of the arguments after the first meet its slices."""
    graph = inline(jax.make_jaxpr(fun)(*args))
    leaves = {var: frozenset({n}) for n, var in enumerate(graph.invars) if n}
    slicer = Slicer(lambda path, number: path, leaves=leaves)
    first = graph.invars[0]
    parts = [compat.new_var(slice_type(first.aval)) for _ in range(args[0].shape[0])]
    slicer.bind(first, Sliced(tuple(parts)))
    slicer.run(graph.eqns)
    return slicer.cut_leaves


def test_leaves_that_meet_slices_are_known():
    assert leaves_cut(lambda x, y: x + 0.9 * y, X, Y) == {1}
    assert leaves_cut(lambda x, y: x.sum() + y, X, Y) == set()
    assert leaves_cut(lambda x, w: x + w, X, W[None]) == set()
    assert leaves_cut(lambda x, w: x + w[None], X, W) == set()


UNARY = (jnp.tanh, jnp.square, lambda x: x * 0.5, lambda x: -x, lambda x: x.astype(jnp.float32))
BINARY = (jnp.add, jnp.multiply, jnp.maximum, lambda x, y: jnp.where(x > 0, x, y))
SCALARS = (jnp.sum, jnp.max, lambda x: jnp.sqrt(jnp.mean(x * x)), lambda x: jnp.isfinite(x).all())


@given(st.data())
@settings(max_examples=40)
def test_any_update_of_stacked_arrays(data):
    """A random chain of unary and binary arithmetic, scaled by scalars that whole arrays were reduced to."""
    steps = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    choices = [data.draw(st.integers(0, 10)) for _ in steps]

    def fun(x, y):
        for step, choice in zip(steps, choices, strict=True):
            if step == 0:
                x = UNARY[choice % len(UNARY)](x)
            elif step == 1:
                x, y = BINARY[choice % len(BINARY)](x, y), x
            elif step == 2:
                scalar = SCALARS[choice % len(SCALARS)](y)
                x = jnp.where(scalar > 0.5, x, x + y)
            else:
                x = x / (1 + jnp.abs(x).sum(axis=1 + choice % 2, keepdims=True))
        return x, y

    check(fun, X, Y, sliced=(0, 1))
