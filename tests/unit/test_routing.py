"""Routing: what becomes a kernel, what stays, and that the loss stays the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from ratrain_jax.kernels import Arithmetic
from ratrain_jax.lowering.graph import as_function, inline
from ratrain_jax.lowering.precision import hoist_casts
from ratrain_jax.lowering.routing import route
from tests.graphs import closed_of

ARITHMETIC = Arithmetic.of("mt3000", "fp32", "fast")
ROWS, LENGTH, HEADS, SIZE = 2, 12, 4, 8


def routed(fun, *args):
    """The graph of `fun`, all arguments its parameters, with kernels; its routing; both as functions."""
    graph = inline(jax.make_jaxpr(fun)(*args))
    ours, routing = route(graph, len(args), ARITHMETIC)
    return ours, routing, as_function(closed_of(ours))


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def heads(count=HEADS, seed=0):
    return draw(ROWS, LENGTH, count, SIZE, seed=seed)


QUERY, KEY, VALUE = (heads(seed=seed) for seed in range(3))
TRIANGLE = np.tril(np.ones((LENGTH, LENGTH), bool))


def causal():
    return jnp.tril(jnp.ones((LENGTH, LENGTH), bool))


def einsum_softmax(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(SIZE)
    weights = jax.nn.softmax(jnp.where(causal(), scores, jnp.finfo(scores.dtype).min))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def weights_first(q, k, v):
    scores = jnp.einsum("bkhd,bqhd->bhkq", k, q) * 0.3
    weights = jax.nn.softmax(jnp.where(causal().T, scores, -1e9), axis=2)
    return jnp.einsum("bkhd,bhkq->bhqd", v, weights)


def written_out(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bqhk", q, k)
    scores = jnp.where(causal()[:, None], scores, -1e9)
    powers = jnp.exp(scores - scores.max(-1, keepdims=True))
    return jnp.einsum("bqhk,bkhd->bqhd", powers / powers.sum(-1, keepdims=True), v)


def rounded(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", *(x.astype(jnp.bfloat16) for x in (q, k)))
    scores = jnp.where(causal(), scores.astype(jnp.float32), -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(jnp.bfloat16), v)


def folded_heads(q, k, v):
    q, k, v = (jnp.swapaxes(x, 1, 2).reshape(-1, LENGTH, SIZE) for x in (q, k, v))
    scores = jnp.matmul(q, jnp.swapaxes(k, 1, 2)) + jnp.where(causal(), 0, -jnp.inf)
    return jnp.matmul(jax.nn.softmax(scores), v)


def mask_by_rows(q, k, v):
    mask = jnp.arange(LENGTH) < jnp.array([[5], [9]])
    return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None, None, :])


def unmasked(q, k, v):
    return jax.nn.dot_product_attention(q, k, v)


def own(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def flaxs(q, k, v):
    return nn.dot_product_attention(q, k, v, mask=nn.make_causal_mask(q[..., 0, 0]))


SPELLINGS = {
    fun.__name__: fun
    for fun in (
        einsum_softmax, weights_first, written_out, rounded, folded_heads,
        mask_by_rows, unmasked, own, flaxs,
    )
}  # fmt: skip
CAUSAL = {"einsum_softmax", "rounded", "weights_first", "written_out", "own", "flaxs"}
"""Spellings whose mask is a constant that the pass can read; an additive one stays a bias."""


def visible(routing):
    """Share of the scores that the kernel computes."""
    return routing.parts[0].flops / (4 * ROWS * HEADS * LENGTH**2 * SIZE)


@pytest.mark.parametrize("name", SPELLINGS)
def test_attention_however_it_is_written_is_one_kernel(name):
    fun = SPELLINGS[name]
    graph, routing, run = routed(fun, QUERY, KEY, VALUE)
    assert [part.kind for part in routing.parts] == ["attention"]
    assert not any(eqn.primitive.name == "dot_general" for eqn in graph.eqns)
    half = (LENGTH + 1) / LENGTH / 2
    assert visible(routing) == pytest.approx(half if name in CAUSAL else 1)
    weight = draw(*jax.eval_shape(fun, QUERY, KEY, VALUE).shape, seed=9)
    ours = jax.value_and_grad(lambda *x: (run(*x)[0] * weight).sum(), (0, 1, 2))
    theirs = jax.value_and_grad(lambda *x: (fun(*x) * weight).sum(), (0, 1, 2))
    for one, other in zip(
        jax.tree.leaves(ours(QUERY, KEY, VALUE)),
        jax.tree.leaves(theirs(QUERY, KEY, VALUE)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=0.02, atol=0.02)


def grouped(q, k, v, bias):
    return jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=True)


def repeated(q, k, v, bias):
    k, v = (jnp.repeat(x, HEADS // 2, 2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * SIZE**-0.5 + bias
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(causal(), scores, -1e9)), v)


def apart(q, k, v, bias):
    q = q.reshape(ROWS, LENGTH, 2, HEADS // 2, SIZE)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k) * SIZE**-0.5
    scores = scores + bias.reshape(1, 2, HEADS // 2, LENGTH, LENGTH)
    weights = jax.nn.softmax(jnp.where(causal(), scores, -1e9))
    return jnp.einsum("bhgqk,bkhd->bqhgd", weights, v)


@pytest.mark.parametrize("fun", [grouped, repeated, apart])
def test_grouped_heads_and_a_learnt_bias_keep_their_gradients(fun):
    args = (QUERY, heads(2, 1), heads(2, 2), draw(1, HEADS, LENGTH, LENGTH, seed=3))
    _, routing, run = routed(fun, *args)
    assert [part.kind for part in routing.parts] == ["attention"]
    ours = jax.grad(lambda *x: (run(*x)[0] ** 2).sum(), (0, 1, 2, 3))(*args)
    theirs = jax.grad(lambda *x: (fun(*x) ** 2).sum(), (0, 1, 2, 3))(*args)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0.02, atol=0.03)


def test_a_batch_of_one_and_one_head_are_found_too():
    args = tuple(heads(1, seed)[:1] for seed in range(3))
    _, routing, run = routed(own, *args)
    assert [part.kind for part in routing.parts] == ["attention"]
    np.testing.assert_allclose(run(*args)[0], own(*args), rtol=0.01, atol=0.01)


def sowed(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v), weights


def dropped(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    kept = jax.random.bernoulli(jax.random.key(0), 0.9, weights.shape)
    return jnp.einsum("bhqk,bkhd->bqhd", weights * kept, v)


def capped(q, k, v):
    scores = 30 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def over_queries(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), axis=2)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def masked_by_little(q, k, v):
    scores = jnp.where(causal(), jnp.einsum("bqhd,bkhd->bhqk", q, k), -10.0)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


@pytest.mark.parametrize("fun", [sowed, dropped, capped, over_queries, masked_by_little])
def test_what_only_looks_like_attention_is_two_products(fun):
    _, routing, run = routed(fun, QUERY, KEY, VALUE)
    assert [(part.kind, part.reason) for part in routing.parts] == 2 * [("dot_general", "")]
    for one, other in zip(
        jax.tree.leaves(run(QUERY, KEY, VALUE)),
        jax.tree.leaves(fun(QUERY, KEY, VALUE)),
        strict=False,
    ):
        np.testing.assert_allclose(one, other, rtol=0.02, atol=0.02)


def test_what_is_left_has_a_reason_and_a_share_of_the_flops():
    def loss(w, x, wide):
        def body(carry, row):
            return carry + (row @ w).sum(), None

        total, _ = jax.lax.scan(body, 0.0, x)
        total += (jnp.arange(4.0)[:, None] @ jnp.arange(4.0)[None]).sum()
        total += jnp.matmul(x, w, precision="highest").sum()
        total += jax.lax.conv(x[None, None], w[None, None, :2, :2], (1, 1), "SAME").sum()
        return total + (x @ w).sum() + jnp.outer(x[0], w[0]).sum() + (wide @ wide).sum()

    _, routing, _ = routed(loss, draw(6, 6), draw(5, 6), jnp.ones((3, 3), jnp.int32))
    reasons = {part.reason: part.flops for part in routing.parts}
    assert reasons == {
        "inside a scan": 2 * 5 * 6 * 6,
        "depends on no parameter": 2 * 4 * 4,
        "asks for a higher precision": 2 * 5 * 6 * 6,
        "not a matrix product": pytest.approx(2 * 5 * 6 * 4, rel=0.3),
        "": 2 * 5 * 6 * 6,
        "not of float32, bfloat16 or float16": 2 * 3 * 3 * 3,
    }
    left = routing.left()
    assert sum(share for *_, share in left) + routing.share == pytest.approx(1)
    assert routing.share == pytest.approx(2 * 5 * 6 * 6 / routing.flops)


def test_a_parameter_that_only_products_read_is_taken_in_float16():
    def loss(w, bias, table, x):
        hidden = x @ w.reshape(6, 4).T + bias
        return (hidden @ table).sum() + table[0].sum()

    args = draw(4, 6), draw(6), draw(6, 3), draw(5, 4)
    graph, _, _ = routed(loss, *args)
    hoisted, dtypes = hoist_casts(graph, 3)
    assert [str(dtype) for dtype in dtypes] == ["float16", "float32", "float32"]
    run = as_function(closed_of(hoisted))
    np.testing.assert_allclose(
        run(args[0].astype(jnp.float16), *args[1:])[0], loss(*args), rtol=0.01
    )


def test_an_embedding_that_is_read_both_ways_stays_wide():
    def loss(table, tokens):
        return (table[tokens] @ table.T).sum()

    graph, _, _ = routed(loss, draw(7, 4), jnp.array([1, 2]))
    assert [str(dtype) for dtype in hoist_casts(graph, 1)[1]] == ["float32"]


def test_what_was_checkpointed_still_is():
    graph = inline(
        jax.make_jaxpr(jax.checkpoint(lambda w, x: jnp.sin(x @ w)))(draw(4, 4), draw(4, 4))
    )
    ours, _ = route(graph, 1, ARITHMETIC)
    kernel = [eqn for eqn in ours.eqns if eqn.primitive.name.startswith("custom_vjp_call")]
    assert len(kernel) == 1
    assert set(kernel[0].outvars) <= ours.checkpointed
