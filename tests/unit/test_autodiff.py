"""A layer's two programs against `jax.vjp`, and what they keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ratrain_jax as rt
from ratrain_jax.kernels import load_machine
from ratrain_jax.lowering import autodiff
from ratrain_jax.lowering.autodiff import differentiate, differentiate_all
from ratrain_jax.lowering.graph import as_function, inline
from ratrain_jax.lowering.layers import find_layers


@jax.custom_vjp
def _clipped(x):
    return x * 2.0


_clipped.defvjp(lambda x: (x * 2.0, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


def _loss(params, tokens, scale):
    x = params["a"]["table"][tokens] * scale
    x = _clipped(jax.nn.gelu(x @ params["a"]["w"]))
    x = x + jax.nn.relu(x @ params["b"]["w"])
    return jnp.mean(jax.nn.softmax(x @ params["b"]["w"]) ** 2)


def _layers():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "a": {"table": jax.random.normal(keys[0], (7, 8)), "w": jax.random.normal(keys[1], (8, 8))},
        "b": {"w": jax.random.normal(keys[2], (8, 8))},
    }
    tokens = jnp.arange(6).reshape(2, 3)
    leaves, tree = jax.tree.flatten(params)
    paths = [("a", "table"), ("a", "w"), ("b", "w")]
    closed = jax.make_jaxpr(lambda *a: _loss(tree.unflatten(a[:3]), *a[3:]))(
        *leaves, tokens, jnp.float32(1.5)
    )
    layered = find_layers(
        inline(closed), paths, operands=2, stages=2, machine=load_machine("generic")
    )
    return layered, leaves, [tokens, jnp.float32(1.5)], params


def test_layers_forward_then_backward_give_the_gradients_of_the_loss():
    layered, leaves, operands, params = _layers()
    assert len(layered.layers) >= 2
    codes = [differentiate(layer, layered.variables) for layer in layered.layers]
    values, kept = {}, []
    for layer, code in zip(layered.layers, codes, strict=True):
        given = [leaves[p] for p in layer.reads] + [operands[o] for o in layer.operands]
        results = as_function(code.forward)(*given, *(values[v] for v in layer.inputs))
        values.update(zip(layer.outputs, results, strict=False))
        kept.append(results[len(layer.outputs) :])
    grads = [jnp.zeros_like(leaf) for leaf in leaves]
    flowing = {}
    for layer, code, residuals in reversed(list(zip(layered.layers, codes, kept, strict=True))):
        coming = [
            jnp.ones(()) if layered.variables[v].role == "loss" else flowing[v]
            for v in layer.outputs
        ]
        results = as_function(code.backward)(
            *(leaves[p] for p in code.backward_reads),
            *(operands[o] for o in code.backward_operands),
            *(values[v] for v in code.backward_inputs),
            *residuals,
            *coming,
        )
        for p, grad in zip(layer.reads, results, strict=False):
            grads[p] += grad
        flowing.update(zip(layer.inputs, results[len(layer.reads) :], strict=True))
    expected = jax.grad(_loss)(params, *operands)
    for ours, theirs in zip(grads, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-8)


def test_neither_parameters_nor_inputs_are_kept_as_residuals():
    layered, _, _, _ = _layers()
    for layer in layered.layers:
        code = differentiate(layer, layered.variables)
        made = {var for eqn in code.forward.jaxpr.eqns for var in eqn.outvars}
        assert made.issuperset(code.forward.jaxpr.outvars[len(layer.outputs) :])
        assert len(code.residuals) == len(set(code.forward.jaxpr.outvars)) - len(layer.outputs)


def test_equal_layers_have_equal_fingerprints_and_others_not():
    def loss(params, x):
        for name in "abc":
            x = jnp.tanh(x @ params[name])
        return jnp.mean(jnp.sin(x @ params["d"]))

    params = {name: jnp.ones((4, 4)) for name in "abcd"}
    closed = jax.make_jaxpr(loss)(params, jnp.ones((2, 4)))
    layered = find_layers(
        inline(closed),
        [(name,) for name in "abcd"],
        operands=1,
        stages=4,
        machine=load_machine("generic"),
    )
    prints = [differentiate(layer, layered.variables).fingerprint for layer in layered.layers]
    assert prints[1] == prints[2]
    assert len(set(prints)) == 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_cotangents_keep_the_compute_dtype(dtype):
    def loss(params, x):
        y = x @ params["a"].astype(dtype)
        return jnp.mean((y @ params["b"].astype(dtype)).astype(jnp.float32) ** 2)

    params = {name: jnp.ones((4, 4)) for name in "ab"}
    closed = jax.make_jaxpr(loss)(params, jnp.ones((2, 4), dtype))
    layered = find_layers(
        inline(closed), [("a",), ("b",)], operands=1, stages=2, machine=load_machine("generic")
    )
    code = differentiate(layered.layers[1], layered.variables)
    assert code.backward.out_avals[-1].dtype == dtype


@pytest.mark.parametrize(("activation", "traced"), [(jnp.tanh, 3), (_clipped, 6)])
def test_equal_layers_are_traced_once_unless_they_hold_custom_rules(
    activation, traced, monkeypatch
):
    def loss(*args):
        *weights, x = args
        for n, w in enumerate(weights):
            x = rt.layer(x, f"layer_{n}")
            x = activation(x @ w) + x
        return jnp.mean(x * x)

    weights = [jnp.eye(4) * n for n in range(6)]
    graph = inline(jax.make_jaxpr(loss)(*weights, jnp.ones((2, 4))))
    paths = [(f"w{n}",) for n in range(6)]
    layered = find_layers(graph, paths, operands=1, stages=6, machine=load_machine("generic"))
    alone = [differentiate(layer, layered.variables) for layer in layered.layers]
    calls, trace = [], autodiff._trace
    monkeypatch.setattr(autodiff, "_trace", lambda *args: calls.append(0) or trace(*args))
    together = differentiate_all(layered.layers, layered.variables)
    assert len(calls) == traced  # the first, those between, and the last differ
    for one, other in zip(alone, together, strict=True):
        for name in ("fingerprint", "backward_reads", "backward_operands", "backward_inputs"):
            assert getattr(one, name) == getattr(other, name)
