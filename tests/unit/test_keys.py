"""`microbatch_key` outside a compiled step, and how it is written out in a loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import OptionError
from ratrain_jax.lowering.graph import cut, inline
from ratrain_jax.lowering.keys import fold_keys, microbatch_key_p
from tests.training import differing

KEYS = {
    "typed": jax.random.key(3),
    "raw": jax.random.PRNGKey(3),
    "rbg": jax.random.key(3, impl="rbg"),
}


def bits(keys):
    typed = jax.dtypes.issubdtype(keys.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(keys) if typed else keys)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", KEYS)
def test_outside_a_step_it_folds_in_zero(kind, wrap):
    key = KEYS[kind]
    folded = wrap(rt.microbatch_key)(key)
    assert folded.dtype == key.dtype
    assert differing(bits(folded), bits(jax.random.fold_in(key, 0))) == []


@pytest.mark.parametrize("kind", KEYS)
def test_it_maps_over_keys(kind):
    keys = jax.random.split(KEYS[kind], 6)
    mapped = jax.jit(jax.vmap(rt.microbatch_key))(keys)
    wanted = jnp.stack([jax.random.fold_in(key, 0) for key in keys])
    assert differing(bits(mapped), bits(wanted)) == []
    square = keys.reshape(2, 3, *keys.shape[1:])
    twice = jax.vmap(jax.vmap(rt.microbatch_key), in_axes=1, out_axes=1)(square)
    assert differing(bits(twice.reshape(keys.shape)), bits(wanted)) == []


def test_it_takes_a_tree_of_keys():
    tree = {"dropout": KEYS["typed"], "noise": [KEYS["raw"]]}
    folded = rt.microbatch_key(tree)
    assert jax.tree.structure(folded) == jax.tree.structure(tree)
    assert differing(bits(folded["noise"][0]), bits(jax.random.fold_in(KEYS["raw"], 0))) == []


@pytest.mark.parametrize("key", [3, jnp.ones(2), jnp.zeros((), jnp.uint32), KEYS["typed"][None]])
def test_what_is_no_key_is_refused(key):
    with pytest.raises(OptionError, match=r"jax\.random\.key"):
        rt.microbatch_key(key)


def noisy(x, key):
    return (x * jax.random.normal(rt.microbatch_key(key), x.shape)).sum()


def test_it_may_stand_in_what_is_differentiated():
    x = jnp.arange(3.0)
    wanted = jax.random.normal(jax.random.fold_in(KEYS["typed"], 0), (3,))
    for gradient in (jax.grad(noisy), jax.jit(jax.grad(jax.checkpoint(noisy))), rt.grad(noisy)):
        np.testing.assert_allclose(gradient(x, KEYS["typed"]), wanted, rtol=1e-6)
    hessian = jax.jit(jax.hessian(lambda x: noisy(x**3, KEYS["raw"])))(x)
    np.testing.assert_allclose(jnp.diag(hessian)[1], 6 * noise_of(KEYS["raw"])[1], rtol=1e-5)


def noise_of(key):
    return jax.random.normal(jax.random.fold_in(key, 0), (3,))


@pytest.mark.parametrize("kind", KEYS)
def test_in_a_loss_it_folds_in_the_number_of_the_part(kind):
    key = KEYS[kind]
    graph = inline(jax.make_jaxpr(rt.microbatch_key)(key))
    loss, numbered = fold_keys(graph, 6)
    assert numbered.outvars[0].aval.shape == (6,)
    assert loss.invars[-1].aval.shape == (1,)
    run = jax.jit(jax.extend.core.jaxpr_as_fun(cut(loss, loss.invars, loss.outvars)))
    for part in (0, 1, 5):
        (folded,) = run(key, jnp.full(1, part, jnp.uint32))
        assert differing(bits(folded), bits(jax.random.fold_in(key, part))) == []


def test_a_loss_without_it_stays_as_it_is():
    graph = inline(jax.make_jaxpr(lambda x: x + 1)(1.0))
    assert fold_keys(graph, 4) == (graph, None)


def test_one_part_needs_no_number():
    graph = inline(jax.make_jaxpr(noisy)(jnp.ones(3), KEYS["typed"]))
    loss, numbered = fold_keys(graph, 1)
    assert numbered is None and loss.invars == graph.invars
    assert all(eqn.primitive is not microbatch_key_p for eqn in loss.eqns)
