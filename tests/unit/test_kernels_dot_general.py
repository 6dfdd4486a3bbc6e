"""`vmac_dot_general` stands in for `lax.dot_general`, with gradients through the same kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain_jax.errors import MachineError, OptionError
from ratrain_jax.kernels import Gemm, gemm_of, load_machine, vmac_dot_general
from ratrain_jax.kernels.dot_general import Arithmetic, matmul
from ratrain_jax.kernels.gemm_plan import plan_for
from ratrain_jax.kernels.numerics import product

MATMUL = (((1,), (0,)), ((), ()))
EXACT_FP32 = functools.partial(vmac_dot_general, accumulator="fp32", mode="exact")


def _integers(key: int, shape, dtype=jnp.float16) -> jax.Array:
    """Small integers, on which every order and format of summing agrees."""
    return jnp.asarray(np.random.default_rng(key).integers(-2, 3, shape), dtype)


@st.composite
def contractions(draw):
    """Shapes and dimension numbers with 0 to 2 batch, contracting and free axes each."""
    batch, contract, left, right = (draw(st.lists(st.integers(1, 4), max_size=2)) for _ in range(4))
    left_axes = [("b", i) for i in range(len(batch))] + [("c", i) for i in range(len(contract))]
    orders, shapes = [], []
    for name, free in (("l", left), ("r", right)):
        axes = left_axes + [(name, i) for i in range(len(free))]
        order = draw(st.permutations(axes))
        sizes = {"b": batch, "c": contract, name: free}
        orders.append(order)
        shapes.append(tuple(sizes[kind][i] for kind, i in order))
    numbers = tuple(
        tuple(tuple(order.index((kind, i)) for i in range(len(sizes))) for order in orders)
        for kind, sizes in (("c", contract), ("b", batch))
    )
    return shapes, numbers


@settings(max_examples=12, deadline=None)
@given(contractions())
def test_any_axes_give_what_lax_gives_with_its_gradients(case) -> None:
    (left, right), numbers = case
    a, b = _integers(0, left), _integers(1, right)
    ours, pullback = jax.vjp(lambda x, y: vmac_dot_general(x, y, numbers), a, b)
    reference, lax_pullback = jax.vjp(lambda x, y: jax.lax.dot_general(x, y, numbers), a, b)
    assert ours.dtype == reference.dtype
    np.testing.assert_array_equal(ours, reference)
    grad = _integers(2, ours.shape)
    for mine, theirs in zip(pullback(grad), lax_pullback(grad), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("accumulator", ["fp32", "fp16", "promote"])
def test_gradients_run_through_the_planned_nt_and_tn_kernels(accumulator: str) -> None:
    """Bit for bit what the exact kernels give for G·Bᵀ and Aᵀ·G under their own plans."""
    rng = np.random.default_rng(0)
    a, b, g = (
        jnp.asarray(rng.standard_normal(shape), jnp.float16)
        for shape in ((20, 70), (70, 30), (20, 30))
    )
    machine = load_machine("mt3000")
    dot = functools.partial(vmac_dot_general, accumulator=accumulator, mode="exact")
    _, pullback = jax.vjp(lambda x, y: dot(x, y, MATMUL), a, b)
    wanted = (("nt", (20, 70, 30), g, b.T), ("tn", (70, 30, 20), a.T, g))
    for ours, (form, shape, left, right) in zip(pullback(g), wanted, strict=True):
        gemm = Gemm(*shape, "float16", form, accumulator)
        compute = jax.jit(
            functools.partial(
                product, gemm=gemm, plan=plan_for(gemm, machine), mode="exact", lanes=64
            )
        )
        np.testing.assert_array_equal(
            np.asarray(ours).view("u2"), np.asarray(compute(left[None], right[None]))[0].view("u2")
        )


def test_float32_operands_keep_float32_results_and_gradients() -> None:
    rng = np.random.default_rng(0)
    a = jnp.asarray(rng.standard_normal((8, 50)), jnp.float32)
    b = jnp.asarray(rng.standard_normal((50, 9)), jnp.float32)
    out, (da, db) = jax.value_and_grad(
        lambda x, y: 1e-6 * EXACT_FP32(x, y, MATMUL).sum(), argnums=(0, 1)
    )(a, b)
    assert {out.dtype, da.dtype, db.dtype} == {jnp.dtype("float32")}
    half = a.astype(jnp.float16).astype(jnp.float32)
    # 1e-6 is a float16 subnormal: the incoming gradient has been rounded, the sum has not.
    np.testing.assert_allclose(db[:, 0], np.float16(1e-6) * half.sum(0), rtol=1e-4, atol=1e-9)


def test_preferred_element_type_sets_the_result() -> None:
    a, b = jnp.ones((2, 4096), jnp.float16), jnp.full((4096, 2), 32, jnp.float16)
    assert jnp.isinf(EXACT_FP32(a, b, MATMUL)).all()
    wide = EXACT_FP32(a, b, MATMUL, preferred_element_type=jnp.float32)
    assert wide.dtype == jnp.float32 and (wide == 131072).all()
    brain = EXACT_FP32(a, b, MATMUL, preferred_element_type=jnp.bfloat16)
    assert brain.dtype == jnp.bfloat16 and (brain == 131072).all()


def test_vmap_jit_and_checkpoint_work() -> None:
    a, b = _integers(0, (5, 6, 7)), _integers(1, (7, 8))
    one = jax.vmap(lambda x: vmac_dot_general(x, b, MATMUL))
    np.testing.assert_array_equal(jax.jit(one)(a), a @ b)

    def loss(w: jax.Array) -> jax.Array:
        hidden = jax.checkpoint(lambda x: vmac_dot_general(x, w, MATMUL))(a[0])
        return (hidden.astype(jnp.float32) ** 2).sum()

    expected = jax.grad(lambda w: ((a[0] @ w).astype(jnp.float32) ** 2).sum())(b)
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(b), expected)
    batched = jax.vmap(jax.grad(lambda w, x: vmac_dot_general(x, w, MATMUL).sum()), (None, 0))
    np.testing.assert_array_equal(batched(b, a), jnp.broadcast_to(a.sum(1)[:, :, None], (5, 7, 8)))


def test_pmap_works() -> None:
    a, b = _integers(0, (2, 6, 7)), _integers(1, (2, 7, 8))
    out = jax.pmap(lambda x, y: vmac_dot_general(x, y, MATMUL), devices=jax.devices()[:2])(a, b)
    np.testing.assert_array_equal(out, jnp.matmul(a, b))


def test_gradients_can_be_differentiated_again() -> None:
    w = _integers(0, (3, 3), jnp.float32)

    def cubic(x: jax.Array, dot) -> jax.Array:
        return dot(dot(x, w, MATMUL), x, MATMUL).sum()

    x = _integers(1, (3, 3), jnp.float32)
    second = [
        jax.grad(lambda y, dot=dot: (jax.grad(cubic)(y, dot) ** 2).sum())(x)
        for dot in (vmac_dot_general, jax.lax.dot_general)
    ]
    np.testing.assert_array_equal(*second)


def test_a_dense_layer_takes_it_and_trains() -> None:
    model = nn.Dense(16, dot_general=vmac_dot_general)
    x = jax.random.normal(jax.random.key(0), (32, 8))
    target = x @ jax.random.normal(jax.random.key(1), (8, 16))
    params = model.init(jax.random.key(2), x)
    optimizer = optax.adam(0.1)

    @jax.jit
    def step(params, state):
        def loss(params):
            return ((jnp.asarray(model.apply(params, x)) - target) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    state = optimizer.init(params)
    losses = []
    for _ in range(60):
        params, state, value = step(params, state)
        losses.append(float(value))
    assert losses[-1] < 0.05 * losses[0]


def test_empty_operands_give_zeros() -> None:
    out = vmac_dot_general(jnp.ones((2, 0), jnp.float16), jnp.ones((0, 3), jnp.float16), MATMUL)
    np.testing.assert_array_equal(out, jnp.zeros((2, 3)))


def test_dot_generals_are_known_as_products() -> None:
    numbers = (((2,), (2,)), ((0,), (0,)))
    gemm, count = gemm_of((8, 16, 32), (8, 64, 32), numbers, accumulator="promote")
    assert (gemm.rows, gemm.cols, gemm.depth, gemm.form, count) == (16, 64, 32, "nt", 8)
    assert gemm_of((32, 16), (32, 64), (((0,), (0,)), ((), ())))[0].form == "tn"


def test_bad_arguments_are_refused() -> None:
    ints = jnp.ones((2, 2), jnp.int32)
    half = jnp.ones((2, 2), jnp.float16)
    with pytest.raises(OptionError, match="int32"):
        vmac_dot_general(ints, half, MATMUL)
    with pytest.raises(OptionError, match="turbo"):
        vmac_dot_general(half, half, MATMUL, mode="turbo")
    with pytest.raises(MachineError, match="no accelerator"):
        vmac_dot_general(half, half, MATMUL, machine="generic")
    with pytest.raises(OptionError, match="out_sharding"):
        vmac_dot_general(half, half, MATMUL, out_sharding="x")
    with pytest.raises(MachineError, match="fp8"):
        arithmetic = Arithmetic.of("mt3000", "fp8", "fast")
        matmul(half[None], half[None], arithmetic)
