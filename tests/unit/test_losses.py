"""`value_and_grad` and `grad` as drop-ins, and the primitive that they leave in a trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import LossError, OptionError
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


# Reductions outside a step.


MASK = jnp.array([1.0, 0.0])


def _rows(w, x):
    return jnp.tanh(x @ w).sum(axis=-1) ** 2


def _ratio(fun, has_aux):
    def loss(*args):
        (total, weight), aux = fun(*args) if has_aux else (fun(*args), None)
        return (total / weight, aux) if has_aux else total / weight

    return loss


WEIGHTED = {
    "float weight": lambda w, x: ((_rows(w, x) * MASK).sum(), MASK.sum()),
    "integer weight": lambda w, x: (_rows(w, x).sum(), jnp.int32(x.shape[0])),
    "number": lambda w, x: (_rows(w, x).sum(), 4),
    "weight of the shape": lambda w, x: (_rows(w, x).sum(), jnp.ones_like(_rows(w, x)).sum()),
    "stopped": lambda w, x: (_rows(w, x).sum(), jax.lax.stop_gradient(_rows(w, x)).sum()),
    "moving": lambda w, x: (_rows(w, x).sum(), 1 + (w**2).sum()),
}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("which", WEIGHTED)
def test_outside_a_step_a_weighted_loss_is_its_sum_over_its_weight(which, has_aux, wrap):
    def fun(w, x):
        out = WEIGHTED[which](w, x)
        return (out, {"rows": x.sum(0)}) if has_aux else out

    options = {"has_aux": has_aux, "argnums": (0, 1) if which == "float weight" else 0}
    theirs = jax.value_and_grad(_ratio(fun, has_aux), **options)(W, X)
    _equal(wrap(rt.value_and_grad(fun, reduction="weighted", **options))(W, X), theirs)
    ((value, *aux), grads) = theirs if has_aux else ((theirs[0],), theirs[1])
    del value
    ours = wrap(rt.grad(fun, reduction="weighted", **options))(W, X)
    _equal(ours, (grads, *aux) if has_aux else grads)


def test_a_weight_is_of_the_batch_if_no_gradient_flows_to_it():
    def refusals(which):
        step = rt.grad(WEIGHTED[which], reduction="weighted")
        graph = inline(jax.make_jaxpr(step)(W, X))
        return [eqn for eqn in graph.eqns if eqn.primitive.name == "ratrain_refused_loss"]

    assert {which: bool(refusals(which)) for which in WEIGHTED} == {
        which: which == "moving" for which in WEIGHTED
    }


def test_a_weight_in_a_loop_beside_what_moves():
    """Dependence is that of the derivative: a loop's carry mixes nothing that does not flow."""

    def loss(w, x):
        def body(carry, row):
            total, weight = carry
            return (total + jnp.tanh(row @ w).sum(), weight + jnp.abs(row).sum()), None

        return jax.lax.scan(body, (0.0, 0.0), x)[0]

    graph = inline(jax.make_jaxpr(rt.grad(loss, reduction="weighted"))(W, X))
    assert find_loss(graph).params["reduction"] == "weighted"


def test_outside_a_step_a_sum_is_jax_s_own():
    _equal(
        jax.jit(rt.value_and_grad(_loss, reduction="sum"))(W, X), jax.value_and_grad(_loss)(W, X)
    )


def test_a_weighted_loss_keeps_the_type_of_its_sum():
    def loss(w):
        return (w * jnp.float16(60000)).sum(), jnp.int32(100000)

    for call in (rt.value_and_grad(loss, reduction="weighted"), None):
        call = call or jax.jit(rt.value_and_grad(loss, reduction="weighted"))
        value, grad = call(jnp.ones(1, jnp.float16))
        assert value.dtype == grad.dtype == jnp.float16
        np.testing.assert_allclose([value, grad[0]], 0.6, rtol=1e-3)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda w: w.sum(), r"must return \(sum, weight\)"),
        (lambda w: (w.sum(), 1.0, 2.0), r"must return \(sum, weight\)"),
        (lambda w: (w.sum(), w[0]), r"weight of the loss is float32\[3\]"),
        (lambda w: (w.sum(), w.sum() > 0), r"weight of the loss is bool\[\]"),
        (lambda w: (w[0], 1.0), "only a scalar"),
        (lambda w: (3, 1.0), "dtype int32"),
    ],
)
def test_what_a_weighted_loss_must_return(loss, words):
    for call in (rt.grad(loss, reduction="weighted"), jax.jit(rt.grad(loss, reduction="weighted"))):
        with pytest.raises(LossError, match=words):
            call(W)


def test_an_auxiliary_value_in_the_wrong_place():
    with pytest.raises(LossError, match=r"\(\(sum, weight\), aux\)"):
        rt.grad(lambda w: (w.sum(), 1.0), has_aux=True, reduction="weighted")(W)


def test_an_unknown_reduction():
    with pytest.raises(OptionError, match=r"'median' is not known.*'mean', 'sum', 'weighted'"):
        rt.value_and_grad(_loss, reduction="median")
