"""A kernel is one equation: seen, costed, batched and differentiated as such."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ratrain_jax.kernels import (
    Arithmetic,
    Attention,
    Gemm,
    cost_attention,
    cost_gemm,
    load_machine,
    vmac_attention,
    vmac_dot_general,
)
from ratrain_jax.kernels.primitives import KERNELS, call_cost, call_flops, call_of
from ratrain_jax.lowering.graph import inline

MT3000 = load_machine("mt3000")
MATMUL = (((1,), (0,)), ((), ()))


def kernels(fun, *args):
    """The kernels of a traced function, calls and rules opened."""
    graph = inline(jax.make_jaxpr(fun)(*args), rules=True)
    return [eqn for eqn in graph.eqns if eqn.primitive.name.startswith("vmac")]


def test_a_product_and_its_gradients_are_three_kernels_of_three_forms():
    a, b = jnp.ones((8, 32), jnp.float16), jnp.ones((32, 16), jnp.float16)
    found = kernels(jax.grad(lambda a, b: vmac_dot_general(a, b, MATMUL).sum(), (0, 1)), a, b)
    forward, left, right = found
    assert [eqn.params["spec"].form for eqn in found] == ["nn", "nt", "tn"]
    expected = {
        "nn": Gemm(8, 16, 32, accumulator="promote"),
        "nt": Gemm(8, 32, 16, form="nt", accumulator="promote"),
        "tn": Gemm(32, 16, 8, form="tn", accumulator="promote"),
    }
    for eqn in (forward, left, right):
        gemm = expected[eqn.params["spec"].form]
        assert call_cost(eqn, MT3000) == cost_gemm(gemm, MT3000)
        assert call_flops(eqn) == gemm.flops


def test_a_batch_of_products_costs_as_many_times_one():
    x = jnp.ones((3, 8, 8), jnp.float16)
    (eqn,) = kernels(lambda x: vmac_dot_general(x, x, (((2,), (1,)), ((0,), (0,)))), x)
    one, all_three = cost_gemm(Gemm(8, 8, 8, accumulator="promote"), MT3000), call_cost(eqn, MT3000)
    assert all_three.flops == 3 * one.flops
    assert all_three.seconds == pytest.approx(3 * one.seconds)
    assert all_three.ddr_bytes == 3 * one.ddr_bytes


@pytest.mark.parametrize("form", ["resident", "staged"])
def test_attention_is_one_kernel_each_way(form):
    q = jnp.ones((1, 16, 2, 8), jnp.float16)

    def loss(q):
        return vmac_attention(q, q, q, is_causal=True, backward=form).sum()

    forward, backward = kernels(jax.grad(loss), q)
    shape = Attention(1, 2, 2, 16, 16, 8, causal=True, accumulator="promote")
    which = "backward" if form == "resident" else "staged"
    assert call_cost(forward, MT3000) == cost_attention(shape, MT3000, "forward")
    assert call_cost(backward, MT3000) == cost_attention(shape, MT3000, which)
    assert call_flops(backward) == shape.flops("backward")


def test_second_derivatives_and_maps_go_through():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 4)), jnp.float32)

    def cube(dot, x):
        return (dot(x, dot(x, x, MATMUL), MATMUL)).sum()

    ours, theirs = (
        jax.grad(lambda x, dot=dot: jax.grad(lambda x: cube(dot, x))(x).sum())(x)
        for dot in (vmac_dot_general, jax.lax.dot_general)
    )
    np.testing.assert_allclose(ours, theirs, rtol=0.02, atol=0.05)
    mapped = jax.vmap(lambda row: vmac_dot_general(row[None], x, MATMUL))(x)
    np.testing.assert_array_equal(mapped[:, 0], vmac_dot_general(x, x, MATMUL))


def test_what_names_an_arithmetic_is_short_and_tells_machines_apart():
    first = Arithmetic.of("mt3000", "fp32", "fast")
    assert len(repr(first)) < 60
    assert repr(first) == repr(Arithmetic.of(load_machine("mt3000"), "fp32", "fast"))
    others = [("fp16", "fast"), ("fp32", "exact")]
    assert len({repr(first), *(repr(Arithmetic.of("mt3000", *how)) for how in others)}) == 3


@pytest.mark.parametrize("form", ["resident", "staged"])
@pytest.mark.parametrize("extras", [{}, {"bias": 4}, {"slopes": 1}, {"bias": 4, "mask": 4}])
def test_results_have_the_types_that_the_emulation_gives(form, extras):
    q, k = jnp.ones((2, 16, 4, 8), jnp.bfloat16), jnp.ones((2, 16, 2, 8), jnp.float32)
    given = {
        "bias": jnp.ones((1, 4, 16, 16), jnp.bfloat16) if "bias" in extras else None,
        "mask": jnp.ones((2, 1, 1, 16), bool) if "mask" in extras else None,
        "alibi_slopes": jnp.ones(4) if "slopes" in extras else None,
    }

    def loss(q, k, bias, slopes):
        extra = {**given, "bias": bias, "alibi_slopes": slopes}
        return vmac_attention(q, k, k, backward=form, **extra).sum()

    moving = [
        n for n, x in enumerate((q, k, given["bias"], given["alibi_slopes"])) if x is not None
    ]
    arrays = (q, k, given["bias"], given["alibi_slopes"])
    found = kernels(jax.grad(loss, moving), *arrays)
    x = jnp.ones((3, 8, 8), jnp.float16)
    batched = (((2,), (1,)), ((0,), (0,)))
    for out in (jnp.float16, jnp.float32):
        found += kernels(lambda x, o=out: vmac_dot_general(x, x, batched, None, o), x)
    assert {eqn.primitive.name for eqn in found} == set(KERNELS)
    for eqn in found:
        args = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        run = functools.partial(eqn.primitive.impl, **eqn.params)
        made = jax.eval_shape(run, *args)
        types = [(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
        assert types == [(one.shape, one.dtype) for one in made]


def test_seconds_alone_are_those_of_the_cost():
    q = jnp.ones((1, 16, 2, 8), jnp.float16)
    found = kernels(jax.grad(lambda q: vmac_attention(q, q, q).sum()), q)
    x = jnp.ones((3, 8, 8), jnp.float16)
    found += kernels(lambda x: vmac_dot_general(x, x, (((2,), (1,)), ((0,), (0,)))), x)
    for eqn in found:
        assert call_of(eqn).seconds(MT3000) == call_cost(eqn, MT3000).seconds
