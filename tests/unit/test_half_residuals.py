"""Residuals in float16: which, how they round, and that backward is right with them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ratrain_jax.kernels import load_machine
from ratrain_jax.lowering.autodiff import differentiate
from ratrain_jax.lowering.graph import as_function, inline
from ratrain_jax.lowering.half_residuals import narrow_residuals
from ratrain_jax.lowering.layers import find_layers

ROWS, WIDTH = 16, 32


def coded(loss, params, x):
    """The code of a loss that is one layer."""
    graph = inline(jax.make_jaxpr(loss)(*params, x))
    paths = [(f"p{n}",) for n in range(len(params))]
    found = find_layers(graph, paths, operands=1, stages=1, machine=load_machine("generic"))
    assert len(found.layers) == 1
    return differentiate(found.layers[0], found.variables)


def normed(w, x):
    h = x @ w
    h = (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-3)
    return (jnp.sin(jnp.exp(0.1 * h)) @ jnp.cos(h).T).mean()


W = jnp.asarray(np.random.default_rng(0).standard_normal((WIDTH, WIDTH)), jnp.float32) / 6
X = jnp.asarray(np.random.default_rng(1).standard_normal((ROWS, WIDTH)), jnp.float32)


def gradient(code, w, x):
    loss, *residuals = as_function(code.forward)(w, x)
    chosen = [w] * len(code.backward_reads) + [x] * len(code.backward_operands)
    return loss, as_function(code.backward)(*chosen, *residuals, jnp.ones(()))[0]


def test_large_residuals_are_halved_and_statistics_are_not():
    code = coded(normed, [W], X)
    narrow = narrow_residuals(code)
    assert {str(aval.dtype) for aval in code.residuals} == {"float32"}
    for before, after in zip(code.residuals, narrow.residuals, strict=True):
        large = before.size * 8 > max(aval.size for aval in code.residuals)
        assert str(after.dtype) == ("float16" if large else "float32")
    assert {str(aval.dtype) for aval in narrow.residuals} == {"float16", "float32"}
    assert narrow.fingerprint != code.fingerprint


def test_the_loss_is_the_same_and_the_gradient_within_float16s_rounding():
    code = coded(normed, [W], X)
    (loss, grad), (narrow_loss, narrow_grad) = (
        gradient(each, W, X) for each in (code, narrow_residuals(code))
    )
    assert loss == narrow_loss
    np.testing.assert_allclose(narrow_grad, grad, atol=4e-3 * float(jnp.abs(grad).max()))
    assert (narrow_grad != grad).any()
    np.testing.assert_allclose(grad, jax.grad(normed)(W, X), rtol=1e-4, atol=1e-5)


def test_what_float16_cannot_hold_becomes_its_largest_and_no_nan():
    def far(w, x):
        h = x @ w * 1e6
        return jnp.where(jnp.abs(h) < 1e5, h * h, 0.0).sum()

    code = coded(far, [W], X)
    narrow = narrow_residuals(code)
    _, grad = gradient(narrow, W, X)
    assert np.isfinite(grad).all()


def test_code_without_large_float32_residuals_is_left_alone():
    code = coded(lambda w, x: (x.astype(jnp.float16) @ w).sum(), [W.astype(jnp.float16)], X)
    assert narrow_residuals(code) is code
    empty = dataclasses.replace(code, residuals=())
    assert narrow_residuals(empty) is empty
