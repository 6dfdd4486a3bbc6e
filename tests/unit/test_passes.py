"""A second pass through the same layers stands beside the first, and nothing else moves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import io_callback

from ratrain_jax.lowering.dependence import sort_equations
from ratrain_jax.lowering.graph import is_var
from ratrain_jax.lowering.passes import together
from tests.layering import X, check_layers, dense_params, names, trace_loss

DEPTH = 4
PARAMS = dense_params(DEPTH)


def net(params, x):
    for n in range(DEPTH):
        x = jnp.tanh(x @ params[f"l{n}"])
    return x


def moved(loss):
    """The reads of the main equations as traced, and as they are put together."""
    flow = sort_equations(loss.graph, len(loss.params))
    return flow, together(flow, loss.paths)


def test_two_passes_through_one_net_are_one_row_of_layers():
    def loss(params, x, y):
        return jnp.mean((net(params, x) - net(params, y)) ** 2)

    traced = trace_loss(loss, PARAMS, X, X[::-1])
    layered = traced.layers(2)
    check_layers(layered, traced)
    assert names(layered) == [f"l{n}" for n in range(DEPTH)]
    assert all(set(layer.reads) == set(layer.owned) for layer in layered.layers)
    seconds = [layer.seconds for layer in layered.layers]
    assert max(seconds) < 1.2 * min(seconds)


def test_a_recurrent_net_goes_layer_by_layer_not_step_by_step():
    def loss(params, xs):
        states = [jnp.zeros_like(xs[:, 0])] * DEPTH
        for x in jnp.moveaxis(xs, 1, 0):
            for n in range(DEPTH):
                states[n] = x = jnp.tanh((x + states[n]) @ params[f"l{n}"])
        return jnp.mean(x**2)

    traced = trace_loss(loss, PARAMS, np.stack([X, X + 1, X - 1], axis=1))
    layered = traced.layers(2)
    check_layers(layered, traced)
    assert all(set(layer.reads) == set(layer.owned) for layer in layered.layers)


@pytest.mark.parametrize("again", ["its own result", "both"])
def test_a_pass_that_needs_the_first_stays_behind_it(again):
    def loss(params, x):
        once = net(params, x)
        return jnp.mean(net(params, once if again == "its own result" else once + x) ** 2)

    before, after = moved(trace_loss(loss, PARAMS, X))
    assert after is before


def test_what_does_not_multiply_by_parameters_stands_where_it_is_read():
    def loss(params, x, y):
        first = params["table"][x]
        out = net(params, first)
        return jnp.mean((out + first * 2) ** 2) + jnp.mean(out @ params["table"][y].T)

    params = {**PARAMS, "table": np.ones((4, 8), np.float32)}
    rows = np.arange(4) % 3
    before, after = moved(trace_loss(loss, params, rows, rows))
    assert after is before


def test_code_with_effects_is_left_in_its_order():
    def loss(params, x, y):
        x = net(params, x)
        seen = io_callback(lambda value: value, jax.ShapeDtypeStruct((), jnp.float32), x.sum())
        return jnp.mean(net(params, x) - net(params, y)) * seen

    before, after = moved(trace_loss(loss, PARAMS, X, X))
    assert after is before


def test_parameters_of_one_key_have_one_rank():
    """Two nets of equal names go side by side, as two passes through one do."""
    other = jax.tree.map(lambda leaf: leaf + 1, PARAMS)

    def loss(params, x):
        return jnp.mean((net(params["one"], x) - net(params["two"], x)) ** 2)

    traced = trace_loss(loss, {"one": PARAMS, "two": other}, X)
    flow = sort_equations(traced.graph, len(traced.params))
    apart = together(flow, traced.paths)
    assert apart is flow
    paired = together(flow, [path[1:] for path in traced.paths])
    order = [number % DEPTH for reads in paired.reads for number in sorted(reads)]
    assert order == sorted(order)


@st.composite
def programs(draw):
    """Which values and which parameter each step of a loss takes."""
    count = draw(st.integers(2, 12))
    return [
        (draw(st.integers(0, n)), draw(st.integers(0, n)), draw(st.integers(0, 4)))
        for n in range(count)
    ]


@given(programs())
def test_every_value_is_made_before_it_is_read(steps):
    def loss(params, x):
        values = [x]
        for one, other, param in steps:
            made = values[one] + jnp.sin(values[other])
            values.append(made @ params[f"l{param}"] if param < DEPTH else made)
        return sum(jnp.mean(value) for value in values)

    flow, after = moved(trace_loss(loss, PARAMS, X))
    made_by_main = {var for eqn in flow.main for var in eqn.outvars}
    made = set()
    for eqn in after.main:
        assert {a for a in eqn.invars if is_var(a)} & made_by_main <= made
        made.update(eqn.outvars)
    assert sorted(map(id, after.main)) == sorted(map(id, flow.main))
    reads = dict(zip(map(id, flow.main), flow.reads, strict=True))
    assert [reads[id(eqn)] for eqn in after.main] == list(after.reads)
