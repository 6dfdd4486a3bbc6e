"""Costs: FLOPs against known counts, bytes against what must move, control flow by its rules."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from ratrain_jax.kernels import load_machine
from ratrain_jax.lowering.cost import (
    Cost,
    equation_cost,
    equation_costs,
    jaxpr_cost,
    jaxpr_seconds,
)
from ratrain_jax.lowering.products import product_count

F32 = 4


def cost(fun, *shapes, dtype=jnp.float32):
    return jaxpr_cost(trace(fun, *shapes, dtype=dtype))


def trace(fun, *shapes, dtype=jnp.float32):
    return jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))


@pytest.mark.parametrize(
    ("equation", "shapes", "flops"),
    [
        ("mk,kn->mn", [(3, 5), (5, 7)], 2 * 3 * 5 * 7),
        ("bmk,bkn->bmn", [(2, 3, 5), (2, 5, 7)], 2 * 2 * 3 * 5 * 7),
        ("bqhd,bkhd->bhqk", [(2, 6, 4, 8), (2, 6, 4, 8)], 2 * 2 * 4 * 6 * 6 * 8),
        ("mjk,jkn->mn", [(3, 2, 5), (2, 5, 7)], 2 * 3 * 10 * 7),
    ],
)
def test_dots_are_counted_exactly(equation, shapes, flops):
    found = cost(lambda a, b: jnp.einsum(equation, a, b), *shapes)
    assert found.flops == flops


@pytest.mark.parametrize(
    ("options", "taps"),
    [
        # Eight inputs, a window of three: at each place, the taps that meet an input.
        ({"padding": "VALID"}, 6 * 3),
        ({"padding": "SAME"}, 8 * 3 - 2),
        ({"padding": "VALID", "window_strides": (2,)}, 3 * 3),
        ({"padding": "VALID", "rhs_dilation": (2,)}, 4 * 3),
        # Fifteen places with a hole after each input: every other place meets two or one.
        ({"padding": ((1, 1),), "lhs_dilation": (2,)}, 8 + 7 * 2),
    ],
)
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_are_counted_exactly(options, taps, groups):
    def convolve(x, kernel):
        return lax.conv_general_dilated(
            x,
            kernel,
            **{"window_strides": (1,), **options},
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=groups,
        )

    found = cost(convolve, (5, 8, 4), (3, 4 // groups, 6))
    assert found.flops == 2 * 5 * taps * (4 // groups) * 6


def test_a_convolution_that_covers_its_input_costs_what_the_equal_dot_costs():
    convolved = cost(lambda x, k: lax.conv(x, k, (1, 1), "VALID"), (2, 3, 4, 4), (7, 3, 4, 4))
    multiplied = cost(jnp.dot, (2, 48), (48, 7))
    assert convolved.flops == multiplied.flops


def test_elementwise_work_is_one_flop_an_element_and_moving_none():
    assert cost(lambda x: jnp.tanh(x) * x, (4, 6)).flops == 2 * 24
    assert cost(lambda x: x.T.reshape(3, 8)[:2].astype(jnp.int32), (4, 6)).flops == 0


def test_a_reduction_is_one_flop_an_element_that_it_reads():
    assert cost(lambda x: x.sum(1), (4, 6)).flops == 24
    assert cost(lambda x: lax.cumsum(x, 1), (4, 6)).flops == 24


def test_a_scatter_costs_its_updates():
    assert cost(lambda x, y: x.at[:2].add(y), (100, 6), (2, 6)).flops == 12


def test_an_elementwise_chain_is_charged_once():
    one = cost(jnp.exp, (64, 64))
    chain = cost(lambda x: jnp.tanh(jnp.exp(x) * 2) + 1, (64, 64))
    assert one.bytes == chain.bytes == 2 * 64 * 64 * F32


def test_what_several_elementwise_equations_read_is_charged_once():
    once = cost(lambda x, w: jnp.exp(x @ w), (64, 64), (64, 64))
    twice = cost(lambda x, w: jnp.exp(x @ w) * jnp.tanh(x @ w), (64, 64), (64, 64))
    shared = cost(lambda x, w: (lambda y: jnp.exp(y) * jnp.tanh(y))(x @ w), (64, 64), (64, 64))
    assert shared.bytes == once.bytes < twice.bytes


def test_a_reduction_takes_a_chain_without_storing_it():
    assert cost(lambda x: (x * x).sum(), (64, 64)).bytes == 64 * 64 * F32 + F32


def test_a_dot_stores_what_it_reads():
    found = cost(lambda x, w: jnp.exp(x) @ w, (8, 16), (16, 4))
    # x is read, its exponential written and read, w read, the product written.
    assert found.bytes == (3 * 8 * 16 + 16 * 4 + 8 * 4) * F32


def test_an_equation_alone_reads_its_inputs_and_writes_its_outputs():
    closed = trace(lambda x: (x * x).sum(), (8, 8))
    square, total = closed.jaxpr.eqns
    assert equation_cost(square) == Cost(64, 2 * 64 * F32)
    assert equation_cost(total) == Cost(64, 64 * F32 + F32)


def test_the_costs_of_equations_add_up_to_the_whole():
    closed = trace(lambda x, w: jax.nn.softmax(jnp.tanh(x @ w)), (8, 16), (16, 4))
    parts = equation_costs(closed.jaxpr.eqns, closed.jaxpr.outvars)
    assert sum(parts, Cost()) == jaxpr_cost(closed)


def test_a_gather_reads_what_it_picks():
    table, rows = jax.ShapeDtypeStruct((10_000, 8), jnp.float32), jnp.zeros(4, jnp.int32)
    closed = jax.make_jaxpr(lambda table: table[rows])(table)
    assert jaxpr_cost(closed).bytes < 10 * 4 * 8 * F32


def test_a_scan_costs_its_body_times_its_length():
    def body(x, w):
        return jnp.tanh(x @ w), None

    once = cost(lambda x, w: body(x, w)[0], (4, 4), (4, 4))
    found = cost(lambda x, ws: lax.scan(body, x, ws)[0], (4, 4), (6, 4, 4))
    assert found == once * 6


def test_a_while_costs_one_turn_and_a_cond_its_dearest_branch():
    dot = cost(jnp.dot, (4, 4), (4, 4)).flops

    def turns(x):
        return lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ x, x)

    def branch(x):
        return lax.cond(x[0, 0] < 9, lambda x: x + 1, lambda x: x @ x, x)

    assert dot < cost(turns, (4, 4)).flops < 2 * dot
    assert dot <= cost(branch, (4, 4)).flops < dot + 16


def test_what_calls_and_custom_rules_hold_is_counted_and_fused():
    @jax.custom_jvp
    def custom_jvp(x):
        return jnp.tanh(x) * 2

    @jax.custom_vjp
    def custom_vjp(x):
        return jnp.tanh(x) * 2

    custom_jvp.defjvps(lambda t, y, x: t)
    custom_vjp.defvjp(lambda x: (x, None), lambda _, g: (g,))
    plain = cost(lambda x: jnp.exp(jnp.tanh(x) * 2), (8, 8))
    for rule in (custom_jvp, custom_vjp, jax.jit(custom_jvp), jax.checkpoint(custom_vjp)):
        assert cost(lambda x, rule=rule: jnp.exp(rule(x)), (8, 8)) == plain


def test_a_custom_rule_that_holds_a_dot_is_counted_whole():
    @jax.custom_vjp
    def dot(x):
        return x @ x

    dot.defvjp(lambda x: (x, None), lambda _, g: (g,))
    assert cost(lambda x: jnp.exp(dot(x)), (8, 8)) == cost(lambda x: jnp.exp(x @ x), (8, 8))


def test_a_typed_key_counts_as_its_words():
    closed = jax.make_jaxpr(lambda key: jax.random.split(key, 3))(jax.random.key(0))
    assert jaxpr_cost(closed).bytes == 8 + 3 * 8


def test_seconds_are_bound_by_arithmetic_or_memory_at_the_rate_of_the_dtype():
    machine = load_machine("generic")
    big = trace(jnp.dot, (4096, 4096), (4096, 4096))
    assert jaxpr_seconds(big, machine) == 2 * 4096**3 / machine.peak("float32")
    half = trace(jnp.dot, (4096, 4096), (4096, 4096), dtype=jnp.bfloat16)
    assert jaxpr_seconds(half, machine) == 2 * 4096**3 / machine.peak("float16")
    thin = trace(jnp.exp, (4096,))
    assert jaxpr_seconds(thin, machine) == 2 * 4096 * F32 / machine.ddr_bandwidth
    slow = dataclasses.replace(machine, peak_flops=(("float32", 1e9),))
    assert jaxpr_seconds(thin, slow) == 4096 / 1e9


def test_seconds_of_a_loop_use_the_rate_of_the_dots_inside():
    machine = load_machine("generic")

    def loop(x, ws):
        return lax.scan(lambda x, w: (x @ w, None), x, ws)[0]

    half = trace(loop, (2048, 2048), (4, 2048, 2048), dtype=jnp.bfloat16)
    assert jaxpr_seconds(half, machine) == 4 * 2 * 2048**3 / machine.peak("float16")


def test_products_are_counted_where_they_run():
    def branchy(x, ys, which):
        x = lax.scan(lambda x, y: (jnp.tanh(x @ y) @ y, None), x, ys)[0]
        x = lax.cond(which, lambda x: x @ x @ x, jnp.sin, x)
        x = lax.while_loop(lambda x: jnp.sum(x @ x) > 0, lambda x: x @ x, x)
        return jnp.cos(jax.jit(lambda x: x @ x)(x))

    closed = jax.make_jaxpr(branchy)(jnp.ones((4, 4)), jnp.ones((5, 4, 4)), True)
    counts = {eqn.primitive.name: product_count(eqn) for eqn in closed.jaxpr.eqns}
    assert counts.pop("scan") == 5 * 2
    assert counts.pop("cond") == 2
    assert counts.pop("while") == 2
    assert sum(counts.values()) == 1  # the inner jit


def test_seconds_of_products_depend_on_their_size():
    machine = load_machine("generic")
    half = dataclasses.replace(machine, product_half_flops=1e12, product_efficiency=0.5)
    big, wave = trace(jnp.dot, (512, 512), (512, 512)), trace(jnp.sin, (512, 512))
    flops = 2 * 512**3
    assert jaxpr_seconds(big, half) == (flops + 1e12) / (machine.peak("float32") * 0.5)
    assert jaxpr_seconds(wave, half) == jaxpr_seconds(wave, machine)
