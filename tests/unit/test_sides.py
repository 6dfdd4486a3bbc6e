"""Side values: where they are made, what is handed on, and what flows back through it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.layering import (
    FREE_LINK,
    GENERIC,
    X,
    assert_equal_gradients,
    assert_equal_results,
    check_layers,
    count,
    dense_params,
    names,
    run_layers,
    trace_loss,
)


def masked(params, x, mask_source):
    """Layers that read one mask, made from the batch with a dot."""
    mask = jnp.tanh(mask_source @ mask_source.T) @ jnp.ones((4, 8)) > 0
    for name in sorted(params):
        x = jnp.tanh(jnp.where(mask, x, 0) @ params[name])
    return x.sum()


def test_a_cheap_side_value_is_made_again_where_it_is_read():
    traced = trace_loss(masked, dense_params(4), X, X)
    layered = traced.layers(4)
    check_layers(layered, traced)
    assert names(layered) == ["l0", "l1", "l2", "l3"]
    assert all(1 in layer.operands for layer in layered.layers)
    assert [v.aval.shape for v in layered.variables] == [(4, 8), (4, 8), (4, 8), ()]


def test_a_dear_side_value_is_made_once_and_handed_on():
    traced = trace_loss(masked, dense_params(4), X, X)
    layered = traced.layers(4, FREE_LINK)
    check_layers(layered, traced)
    assert [1 in layer.operands for layer in layered.layers] == [True, False, False, False]
    masks = [v for v in layered.variables if len(v.readers) == 3]
    assert masks and all(v.producer == 0 and v.readers == (1, 2, 3) for v in masks)
    assert not any(v.differentiable for v in masks)
    assert_equal_results(traced, layered)


def test_what_is_much_smaller_than_what_it_is_made_of_is_handed_on_instead():
    def loss(params, x, source):
        scale = jnp.sort(source).mean()
        for name in sorted(params):
            x = jnp.tanh((x * scale) @ params[name])
        return x.sum()

    layered = trace_loss(loss, dense_params(3), X, X).layers(3, FREE_LINK)
    passed = [v for v in layered.variables if len(v.readers) == 2]
    assert [(v.aval.shape, v.producer) for v in passed] == [((), 0)]
    assert passed[0].aval.dtype == jnp.float32 and not passed[0].differentiable


def test_what_is_much_larger_than_what_it_is_made_of_is_made_again():
    def loss(params, x, source):
        scale = jnp.sort(source[:, 0])[:, None] * jnp.ones((4, 8))
        for name in sorted(params):
            x = jnp.tanh((x * scale) @ params[name])
        return x.sum()

    traced = trace_loss(loss, dense_params(3), X, X)
    layered = traced.layers(3, FREE_LINK)
    assert [v.aval.size for v in layered.variables if len(v.readers) == 2] == [4]
    assert_equal_results(traced, layered)


def test_a_side_value_of_parameters_is_differentiated_through():
    def loss(params, x):
        shared = jnp.sort(params["a"]["w"])
        x = jnp.tanh(x @ shared + params["a"]["b"])
        return (jnp.tanh(x @ params["b"]) @ shared).sum()

    params = {"a": {"w": dense_params(1)["l0"], "b": np.ones(8, np.float32)}, "b": np.eye(8) + X[0]}
    traced = trace_loss(loss, params, X)
    for machine in (GENERIC, FREE_LINK):
        layered = traced.layers(2, machine)
        check_layers(layered, traced)
        handed_on = any(v.aval.shape == (8, 8) and v.differentiable for v in layered.variables)
        assert handed_on == (machine is FREE_LINK)
        assert_equal_gradients(traced, layered)


def test_a_penalty_on_all_parameters_borrows_none():
    def loss(params, x):
        for name in sorted(params):
            x = jnp.tanh(x @ params[name])
        return x.sum() + 0.1 * sum((w**2).sum() for w in jax.tree.leaves(params))

    traced = trace_loss(loss, dense_params(4, 8), X)
    layered = traced.layers(4)
    check_layers(layered, traced)
    assert [layer.reads for layer in layered.layers] == [(0,), (1,), (2,), (3,)]
    assert_equal_gradients(traced, layered)


def test_dropout_masks_are_those_of_the_whole_loss():
    def loss(params, x, key):
        for i, name in enumerate(sorted(params)):
            keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, x.shape)
            x = jnp.tanh(x @ params[name]) * keep
        return x.sum()

    for machine in (GENERIC, FREE_LINK):
        traced = trace_loss(loss, dense_params(3), X, jax.random.key(3))
        layered = traced.layers(3, machine)
        check_layers(layered, traced)
        assert sum(count(la.program.jaxpr.eqns, "random_bits") for la in layered.layers) == 3
        np.testing.assert_array_equal(
            run_layers(layered, traced.params, traced.operands),
            traced.results(traced.params, traced.operands),
        )


@pytest.mark.parametrize(("implementation", "draws"), [("threefry2x32", 3), ("rbg", 1)])
def test_bits_that_might_differ_are_drawn_once(implementation, draws):
    def loss(params, x, key):
        keep = jax.random.bits(key, (8,), np.uint8) > 100
        for name in sorted(params):
            x = jnp.tanh((x * keep) @ params[name])
        return x.sum()

    key = jax.random.key(3, impl=implementation)
    layered = trace_loss(loss, dense_params(3), X, key).layers(3)
    assert sum(count(la.program.jaxpr.eqns, "random_bits") for la in layered.layers) == draws
