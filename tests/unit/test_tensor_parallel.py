"""Tensor parallelism from jaxprs: marks, collectives and costs of hand-made programs and of real models' layers."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct

import ratrain_jax as rt
from ratrain_jax.kernels import load_machine
from ratrain_jax.kernels.collectives import all_reduce_seconds
from ratrain_jax.lowering.cost import aval_bytes, equation_cost, jaxpr_cost
from ratrain_jax.lowering.graph import as_function, cut, inline
from ratrain_jax.lowering.op_costs import code_work
from ratrain_jax.lowering.products import is_product
from ratrain_jax.lowering.tensor_parallel import Mark, divide, layer_on_rank, rank_work

A100, MT3000 = load_machine("a100"), load_machine("mt3000")
ROWS, WIDTH, HEADS = 8, 32, 4
VALUE = 4 * 2 * ROWS * WIDTH  # bytes of what the layers hand on


def norm(x, scale):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale


def block(q, k, v, o, up, up_bias, down, scale, x):
    """A transformer layer on [batch, rows, width], as written by hand."""
    h = norm(x, scale)
    heads = [(h @ w).reshape(*x.shape[:2], HEADS, -1) for w in (q, k, v)]
    scores = jnp.einsum("bqhd,bkhd->bhqk", *heads[:2])
    mask = jnp.tril(jnp.ones((ROWS, ROWS), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, heads[2]).reshape(x.shape) @ o
    return x + jax.nn.gelu(norm(x, scale) @ up + up_bias) @ down


SHAPES = (
    *[(WIDTH, WIDTH)] * 4,
    *((WIDTH, 4 * WIDTH), (4 * WIDTH,), (4 * WIDTH, WIDTH), (WIDTH,)),
)


def traced(function, *shapes, x=(2, ROWS, WIDTH)):
    types = [ShapeDtypeStruct(shape, jnp.float32) for shape in (*shapes, x)]
    made = jax.make_jaxpr(function)(*types)
    inlined = jax.make_jaxpr(lambda *args: flat(made)(*args))(*types)
    return divide(inlined, [Mark.PARAMETER] * len(shapes) + [Mark.WHOLE])


def flat(closed):
    """A function of a jaxpr that makes no plain calls."""
    graph = inline(closed, rules=True)
    return as_function(cut(graph, graph.invars, graph.outvars))


@functools.cache
def a_block():
    return traced(block, *SHAPES)


def test_a_block_has_two_all_reduces_each_way():
    found = a_block()
    assert [aval_bytes(var.aval) for var in found.reduced] == [VALUE, VALUE]
    assert [aval_bytes(var.aval) for var in found.entered] == [VALUE, VALUE]


def test_a_block_divides_its_matrices_and_no_vector():
    found = a_block()
    invars = found.closed.jaxpr.invars
    assert [found.held(var, 4) for var in invars] == [0.25] * 5 + [1.0, 0.25, 1.0, 1.0]


def test_products_of_a_block_cost_a_share_each():
    found = a_block()
    products = [eqn for eqn in found.closed.jaxpr.eqns if is_product(eqn)]
    assert len(products) == 8
    assert all(found.computed(eqn, 4) == 0.25 for eqn in products)


def test_norms_stay_whole_and_what_is_between_products_is_divided():
    found = a_block()
    marks = {
        name: [found.marks[eqn.outvars[0]] for eqn in found.closed.jaxpr.eqns if eqn.primitive.name == name]
        for name in ("rsqrt", "exp", "tanh")
    }  # fmt: skip
    assert marks == {"rsqrt": [Mark.WHOLE] * 2, "exp": [Mark.DIVIDED], "tanh": [Mark.DIVIDED]}


def test_bytes_of_products_by_operand():
    wide = 4 * 2 * ROWS * 64
    column = rank_work(traced(lambda w, x: x @ w, (WIDTH, 64)), A100, 4)
    assert column.ddr_bytes == VALUE + 4 * WIDTH * 64 / 4 + wide / 4
    assert column.flops == 2 * 2 * ROWS * WIDTH * 64 / 4
    both = traced(lambda a, b, x: x @ a @ b, (WIDTH, 64), (64, WIDTH))
    row = rank_work(both, A100, 4).ddr_bytes - column.ddr_bytes
    assert row == wide / 4 + 4 * 64 * WIDTH / 4 + VALUE
    # Whole values rest divided, but products read and write all of them.
    assert rank_work(both, A100, 4, sequence_parallel=True) == rank_work(both, A100, 4)


@pytest.mark.parametrize("machine", [A100, MT3000], ids=lambda machine: machine.name)
def test_one_rank_costs_what_the_program_costs(machine):
    found = a_block()
    for parallel in (False, True):
        assert rank_work(found, machine, 1, sequence_parallel=parallel) == code_work(
            found.closed, machine
        )


def test_ranks_together_do_all_and_whole_code_once_each():
    found = a_block()
    total = jaxpr_cost(found.closed).flops
    eqns = found.closed.jaxpr.eqns
    whole = sum(equation_cost(eqn).flops for eqn in eqns if found.computed(eqn, 4) == 1)
    assert 0 < whole < total / 20
    assert 4 * rank_work(found, A100, 4).flops == pytest.approx(total + 3 * whole)
    together = 4 * rank_work(found, A100, 4, sequence_parallel=True).flops
    assert total <= together < total + 3 * whole


def test_more_ranks_never_cost_more():
    found = a_block()
    for parallel in (False, True):
        works = [
            rank_work(found, A100, ranks, sequence_parallel=parallel) for ranks in (1, 2, 4, 8)
        ]
        for field in ("flops", "ddr_bytes", "seconds"):
            numbers = [getattr(work, field) for work in works]
            assert numbers == sorted(numbers, reverse=True), field
    plain, divided = (rank_work(found, A100, 4, sequence_parallel=on) for on in (False, True))
    assert divided.seconds < plain.seconds
    assert divided.product_flops == plain.product_flops


def test_casts_and_reshapes_of_one_value_are_reduced_once():
    def f(a, b, x):
        one = x.astype(jnp.float16) @ a.astype(jnp.float16)
        other = x.reshape(-1, WIDTH).astype(jnp.float16) @ b.astype(jnp.float16)
        return jnp.tanh(one).reshape(other.shape) + other

    found = traced(f, (WIDTH, 64), (WIDTH, 64))
    assert [aval_bytes(var.aval) for var in found.entered] == [VALUE // 2]
    assert not found.reduced
    assert [found.held(var, 2) for var in found.closed.jaxpr.invars] == [0.5, 0.5, 1.0]


def test_an_embedding_is_split_by_rows_and_its_gradient_too():
    def f(table, tokens):
        return table[tokens]

    table, tokens = ShapeDtypeStruct((64, WIDTH), jnp.float32), ShapeDtypeStruct((ROWS,), jnp.int32)
    forward = jax.make_jaxpr(lambda *args: flat(jax.make_jaxpr(f)(table, tokens))(*args))(
        table, tokens
    )
    found = divide(forward, [Mark.PARAMETER, Mark.WHOLE])
    assert [aval_bytes(var.aval) for var in found.reduced] == [4 * ROWS * WIDTH]
    assert found.held(found.closed.jaxpr.invars[0], 4) == 0.25
    assert found.mark(forward.jaxpr.outvars[0]) == Mark.WHOLE

    def gradient(tokens, g):
        return jnp.zeros((64, WIDTH)).at[tokens].add(g)

    made = jax.make_jaxpr(gradient)(tokens, ShapeDtypeStruct((ROWS, WIDTH), jnp.float32))
    assert divide(made, [Mark.WHOLE] * 2).mark(made.jaxpr.outvars[0]) == Mark.DIVIDED


def test_random_bits_are_drawn_for_the_part_that_is_held():
    def f(w, x):
        divided = x @ w
        keep = jax.random.bernoulli(jax.random.key(0), 0.9, divided.shape)
        return jnp.where(keep, divided, 0)

    found = traced(f, (WIDTH, 64))
    bits = [e for e in found.closed.jaxpr.eqns if e.primitive.name == "random_bits"]
    assert [found.marks[eqn.outvars[0]] for eqn in bits] == [Mark.DIVIDED]


def test_loops_that_hold_products_stay_whole():
    def f(w, x):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=3)[0]

    found = traced(f, (WIDTH, WIDTH))
    assert not found.reduced
    assert rank_work(found, A100, 4) == code_work(found.closed, A100)


@functools.cache
def llama():
    model = rt.models.language_model(rt.models.load_config("llama2-7b"), sequence=64)
    step = rt.train_step(microbatches=2)(model.step)
    return step.lower(model.abstract_state(), model.abstract_batch(4)).code


def test_layers_of_llama_reduce_what_megatron_reduces():
    code = llama()
    value = 2 * 64 * 4096 * 2  # a microbatch of 2 in half precision
    found = [
        layer_on_rank(layer, made, A100, 4)
        for layer, made in zip(code.layered.layers, code.codes, strict=True)
    ]
    for rank in found[1:-1]:
        assert rank.forward_reduced == rank.backward_reduced == (value, value)
        assert not rank.gathered
    assert found[0].forward_reduced == (value,)
    assert found[-1].forward_reduced == () and found[-1].backward_reduced == (value,)
    forward, backward = found[1].communication(A100)
    assert forward == backward == 2 * all_reduce_seconds(A100, value, 4)


def test_layers_of_llama_are_divided_forward_and_backward():
    code = llama()
    layer, made = code.layered.layers[1], code.codes[1]
    one, four, spread = (
        layer_on_rank(layer, made, A100, ranks, sequence_parallel=parallel)
        for ranks, parallel in ((1, False), (4, False), (4, True))
    )
    assert one.forward == code_work(made.forward, A100)
    assert one.backward == code_work(made.backward, A100)
    assert four.forward.product_flops == one.forward.product_flops / 4
    assert four.backward.product_flops == one.backward.product_flops / 4
    assert sum(four.parameters) == 7 / 4 + 2  # seven matrices and two norms
    assert one.residual_bytes / 4 < four.residual_bytes < one.residual_bytes
    assert spread.residual_bytes == one.residual_bytes / 4
    assert four.communication(A100) > one.communication(A100) == (0.0, 0.0)
