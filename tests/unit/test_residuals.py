"""What a layer keeps for backward is the lightest cut, and backward is right with it."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ratrain_jax.lowering.graph import inline
from ratrain_jax.lowering.residuals import (
    CHEAP,
    choose_residuals,
    read_in_another_order,
)


def _graph(function, *args):
    return inline(jax.make_jaxpr(function)(*args))


def test_an_elementwise_chain_is_kept_by_its_root_alone():
    def forward(x, w):
        h = x @ w
        t = jnp.tanh(h * 2.0)
        return t, t * h

    graph = _graph(forward, jnp.ones((4, 4)), jnp.ones((4, 4)))
    kept = choose_residuals(graph, graph.outvars)
    (dot,) = [e for e in graph.eqns if e.primitive.name == "dot_general"]
    assert kept == list(dot.outvars)


def test_a_small_value_is_kept_rather_than_the_large_one_it_comes_from():
    def forward(x, w):
        return (x @ w).sum(axis=1) * 3.0

    graph = _graph(forward, jnp.ones((8, 8)), jnp.ones((8, 8)))
    (kept,) = choose_residuals(graph, graph.outvars)
    assert kept.aval.shape == (8,)


def test_what_comes_cheaply_from_inputs_is_not_kept():
    graph = _graph(lambda x, w: (jnp.exp(x) + w, x * 2), jnp.ones(3), jnp.ones(3))
    assert choose_residuals(graph, graph.outvars) == []


def test_of_equal_cuts_the_one_nearest_to_backward_is_taken():
    graph = _graph(lambda x: jnp.exp(jnp.cumsum(x) * 2.0), jnp.ones(5))
    (kept,) = choose_residuals(graph, graph.outvars)
    assert kept is graph.outvars[0]


def test_what_a_product_reads_in_another_order_is_kept_behind_a_transcendental_function():
    def forward(x, w):
        h = x @ w
        return jnp.tanh(h), h * 2.0

    graph = _graph(forward, jnp.ones((4, 4)), jnp.ones((4, 4)))
    tanh, double = graph.outvars
    assert len(choose_residuals(graph, graph.outvars)) == 1
    assert tanh in choose_residuals(graph, graph.outvars, [tanh])
    assert double not in choose_residuals(graph, graph.outvars, [double])


def test_a_later_value_is_made_of_an_earlier_one_that_is_kept_anyway():
    def forward(x, w):
        first = jnp.tanh(x @ w)
        return first, first * 2.0

    graph = _graph(forward, jnp.ones((4, 4)), jnp.ones((4, 4)))
    first, second = graph.outvars
    for reordered in ([first, second], [second, first]):
        kept = choose_residuals(graph, graph.outvars, reordered)
        assert first in kept
        assert second not in kept


def test_products_read_their_first_operand_in_another_order_unless_they_contract_its_last_axis():
    def forward(x, y):
        return (
            jax.lax.dot_general(x, y, (((0,), (0,)), ((), ()))),
            jax.lax.dot_general(y, x, (((1,), (1,)), ((), ()))),
        )

    graph = _graph(forward, jnp.ones((4, 3)), jnp.ones((4, 3)))
    assert read_in_another_order(graph.eqns) == {graph.invars[0]}


@given(st.lists(st.sampled_from(["dot", "tanh", "sum", "scale"]), min_size=1, max_size=8))
def test_the_kept_values_always_reach_what_is_wanted(steps):
    def forward(x, w):
        out = []
        for step in steps:
            if step == "dot":
                x = x @ w
            elif step == "tanh":
                x = jnp.tanh(x)
            elif step == "sum":
                x = x + x.sum(axis=1, keepdims=True)
            else:
                x = x * 0.5
            out.append(x)
        return out

    graph = _graph(forward, jnp.ones((3, 3)), jnp.ones((3, 3)))
    kept = set(choose_residuals(graph, graph.outvars))
    known = kept | set(graph.invars)
    for eqn in graph.eqns:
        if eqn.primitive.name in CHEAP and all(
            getattr(a, "val", None) is not None or a in known for a in eqn.invars
        ):
            known.update(eqn.outvars)
    assert known.issuperset(graph.outvars)
    whole = sum(np.prod(v.aval.shape) for v in graph.outvars)
    assert sum(np.prod(v.aval.shape) for v in kept) <= whole
