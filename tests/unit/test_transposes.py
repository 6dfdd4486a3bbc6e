"""Products that are only used transposed are turned around, and mean the same."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain_jax.lowering.graph import as_function, cut, inline
from ratrain_jax.lowering.transposes import absorb_transposes


def _turned(function, *args):
    graph = absorb_transposes(inline(jax.make_jaxpr(function)(*args)))
    return cut(graph, graph.invars, graph.outvars)


def _counts(closed):
    return Counter(eqn.primitive.name for eqn in closed.jaxpr.eqns)


def _normal(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def test_the_gradient_of_a_weight_loses_its_transpose():
    x, w, g = _normal(2, 5, 3), _normal(3, 7), _normal(2, 5, 7)

    def gradient(x, w, g):
        return jax.vjp(lambda w: x @ w, w)[1](g)[0]

    assert _counts(jax.make_jaxpr(gradient)(x, w, g))["transpose"] == 1
    closed = _turned(gradient, x, w, g)
    assert _counts(closed)["transpose"] == 0
    (product,) = [e for e in closed.jaxpr.eqns if e.primitive.name == "dot_general"][-1:]
    assert product.invars[0].aval.shape == x.shape
    np.testing.assert_allclose(
        as_function(closed)(x, w, g)[0], gradient(x, w, g), rtol=1e-5, atol=1e-5
    )


def test_the_smaller_operand_comes_first_where_the_first_must_be_copied():
    scores, keys = _normal(2, 4, 6, 8), _normal(2, 6, 4, 3)

    def gradient(scores, keys):
        product = jax.lax.dot_general(scores, keys, (((2,), (1,)), ((0, 1), (0, 2))))
        return product.transpose(0, 2, 1, 3)

    closed = _turned(gradient, scores, keys)
    (product,) = [e for e in closed.jaxpr.eqns if e.primitive.name == "dot_general"]
    assert product.invars[0].aval.shape == keys.shape
    np.testing.assert_allclose(
        as_function(closed)(scores, keys)[0], gradient(scores, keys), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("extra", ["other reader", "result"])
def test_a_product_with_another_use_stays(extra):
    def both(x, y):
        product = jax.lax.dot_general(x, y, (((0,), (0,)), ((), ())))
        return product.T, product if extra == "result" else product * 2

    before = _counts(jax.make_jaxpr(both)(_normal(4, 3), _normal(4, 2)))
    assert _counts(_turned(both, _normal(4, 3), _normal(4, 2))) == before


def test_a_product_already_in_the_best_order_stays():
    def forward(x, y):
        return jax.lax.dot_general(x, y, (((1,), (0,)), ((), ()))).reshape(2, 2, 5)

    args = _normal(4, 3), _normal(3, 5)
    assert _counts(_turned(forward, *args)) == _counts(jax.make_jaxpr(forward)(*args))


def test_a_precision_of_two_is_swapped_with_the_operands():
    precision = (jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT)

    def gradient(x, g):
        return jax.lax.dot_general(g, x, (((0,), (0,)), ((), ())), precision=precision).T

    (product,) = _turned(gradient, _normal(4, 3), _normal(4, 5)).jaxpr.eqns
    assert product.params["precision"] == precision[::-1]


@settings(max_examples=40)
@given(st.integers(0, 2), st.integers(1, 2), st.integers(0, 2), st.integers(0, 2), st.randoms())
def test_any_product_and_any_transpose_give_the_same_array(batch, contracted, left, right, random):
    sizes = iter([2, 3, 4, 5, 6, 7, 8, 9])
    shared = [next(sizes) for _ in range(batch + contracted)]
    axes = {
        "first": shared + [next(sizes) for _ in range(left)],
        "second": shared + [next(sizes) for _ in range(right)],
    }
    places = {}
    for name, shape in axes.items():
        order = list(range(len(shape)))
        random.shuffle(order)
        axes[name] = [shape[i] for i in order]
        places[name] = [order.index(i) for i in range(batch + contracted)]
    numbers = (
        (tuple(places["first"][batch:]), tuple(places["second"][batch:])),
        (tuple(places["first"][:batch]), tuple(places["second"][:batch])),
    )
    permutation = list(range(batch + left + right))
    random.shuffle(permutation)

    def function(x, y):
        return jnp.transpose(jax.lax.dot_general(x, y, numbers), permutation)

    args = _normal(*axes["first"]), _normal(*axes["second"])
    found = as_function(_turned(function, *args))(*args)[0]
    np.testing.assert_allclose(found, function(*args), rtol=1e-5, atol=1e-5)
