"""`value_and_grad` and `grad` as drop-ins, and the primitive that they leave in a trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ratrain_jax as rt
from ratrain_jax.lowering.graph import inline
from ratrain_jax.lowering.regions import find_loss


def _loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


W, X = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3), jnp.linspace(0.0, 1.0, 8).reshape(2, 4)


def _equal(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("fun", "options"),
    [
        (_loss, {}),
        (_loss, {"argnums": 1}),
        (_loss, {"argnums": (0, 1)}),
        (_loss, {"argnums": (1, 0)}),
        (lambda w, x: (_loss(w, x), {"n": w.sum(), "k": 3}), {"has_aux": True}),
        (lambda w, x: _loss(w, x) + 0 * w.sum(), {}),
    ],
)
def test_outside_a_step_it_is_jax_s_own(wrap, fun, options):
    ours = wrap(rt.value_and_grad(fun, **options))(W, X)
    _equal(ours, jax.value_and_grad(fun, **options)(W, X))
    _equal(wrap(rt.grad(fun, **options))(W, X), jax.grad(fun, **options)(W, X))


def test_it_maps_and_differentiates_under_jit_as_jax_s_own():
    def outer(v):
        return lambda w: v(lambda w: _loss(w, X))(w)[0]

    batched = jnp.stack([W, 2 * W])
    for transform in (jax.vmap, lambda f: jax.vmap(jax.grad(f))):
        ours = jax.jit(transform(outer(rt.value_and_grad)))(batched)
        _equal(ours, jax.jit(transform(outer(jax.value_and_grad)))(batched))


def test_errors_are_jax_s_own():
    for value_and_grad in (rt.value_and_grad, jax.value_and_grad):
        with pytest.raises(TypeError, match="scalar"):
            jax.jit(value_and_grad(lambda w: w * 2))(W)


def test_a_loss_hidden_in_an_inner_jit_traced_before_is_found():
    inner = jax.jit(lambda w: rt.value_and_grad(lambda w: _loss(w, X))(w))
    inner(W)  # traced, compiled and cached outside any step
    graph = inline(jax.make_jaxpr(lambda w: inner(w)[1])(W))
    assert find_loss(graph).params["paths"] == ((),)


def test_paths_name_the_parameters():
    def step(params):
        return rt.grad(lambda p: _loss(p["a"]["w"], X) + p["b"][0].sum())(params)

    graph = inline(jax.make_jaxpr(step)({"a": {"w": W}, "b": [X]}))
    assert find_loss(graph).params["paths"] == (("a", "w"), ("b", "0"))


def test_closed_over_values_become_inputs_of_the_loss():
    def step(w, x):
        scaled = x * 2
        return rt.grad(lambda w: _loss(w, scaled))(w)

    graph = inline(jax.make_jaxpr(step)(W, X))
    region = find_loss(graph)
    assert len(region.invars) == 2
    assert not region.params["loss"].consts
