"""Casts of parameters leave the loss where nothing else reads the parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ratrain_jax.lowering.graph import as_function, cut, inline
from ratrain_jax.lowering.precision import hoist_casts
from tests.layering import count

X = jnp.arange(6.0).reshape(2, 3)
W = jnp.linspace(-1, 1, 12).reshape(3, 4)
BF16 = jnp.bfloat16


def hoisted(loss, *params):
    graph = inline(jax.make_jaxpr(loss)(*params, X))
    return hoist_casts(graph, len(params))


def test_a_cast_that_is_the_only_use_moves_out():
    def loss(w, x):
        return (x.astype(BF16) @ w.astype(BF16)).astype(jnp.float32).sum()

    graph, dtypes = hoisted(loss, W)
    assert dtypes == (BF16,)
    assert graph.invars[0].aval.dtype == BF16
    assert not any(graph.invars[0] in eqn.invars for eqn in graph.eqns if casts(eqn))
    run = as_function(cut(graph, graph.invars, graph.outvars))
    np.testing.assert_array_equal(run(W.astype(BF16), X)[0], loss(W, X))


def casts(eqn):
    return eqn.primitive.name == "convert_element_type"


def test_several_casts_to_one_dtype_move_out_together():
    def loss(w, x):
        first = x.astype(BF16) @ w.astype(BF16)
        return (first @ w.astype(BF16).T).sum().astype(jnp.float32)

    graph, dtypes = hoisted(loss, W)
    assert dtypes == (BF16,)
    assert not any(graph.invars[0] in eqn.invars for eqn in graph.eqns if casts(eqn))
    run = as_function(cut(graph, graph.invars, graph.outvars))
    np.testing.assert_array_equal(run(W.astype(BF16), X)[0], loss(W, X))


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: (x.astype(BF16) @ w.astype(BF16)).astype(jnp.float32).sum() + (w**2).sum(),
        lambda w, x: (x.astype(BF16) @ w.astype(BF16)).sum() + w.astype(jnp.float16).sum(),
        lambda w, x: ((x.astype(BF16) @ w.astype(BF16)).sum(), w),
        lambda w, x: x.sum() + w.astype(jnp.int32).sum(),
        lambda w, x: (x @ w).sum(),
        lambda w, x: x.sum(),
    ],
    ids=["read besides", "two dtypes", "a result", "to integers", "no cast", "not read"],
)
def test_any_other_use_keeps_the_parameter_as_it_is(loss):
    graph, dtypes = hoisted(loss, W)
    assert dtypes == (jnp.float32,)
    run = as_function(cut(graph, graph.invars, graph.outvars))
    np.testing.assert_array_equal(run(W, X)[0], jax.tree.leaves(loss(W, X))[0])


def test_a_cast_to_more_bytes_stays():
    graph, dtypes = hoisted(lambda w, x: (x @ w.astype(jnp.float32)).sum(), W.astype(BF16))
    assert dtypes == (BF16,)
    assert count(graph.eqns, "convert_element_type") == 1


def test_each_parameter_is_judged_by_itself():
    def loss(w, b, x):
        return ((x.astype(BF16) @ w.astype(BF16)).astype(jnp.float32) + b).sum()

    assert hoisted(loss, W, jnp.ones(4))[1] == (BF16, jnp.float32)


def test_a_cast_under_checkpoint_moves_out_and_is_forgotten():
    @jax.checkpoint
    def block(w, x):
        return x.astype(BF16) @ w.astype(BF16)

    graph, dtypes = hoisted(lambda w, x: block(w, x).sum(), W)
    assert dtypes == (BF16,)
    assert graph.invars[0] not in graph.checkpointed and graph.checkpointed
