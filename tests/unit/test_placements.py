"""Sharding constraints of a step are dropped, wherever they stand; code that is mapped over devices is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ratrain_jax.errors import UnsupportedError
from ratrain_jax.lowering.graph import as_function
from ratrain_jax.lowering.placements import without_placements

MESH = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def laid(x):
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, PartitionSpec("data")))


def in_scan(x):
    return jax.lax.scan(lambda carry, _: (laid(jnp.sin(carry)), carry.sum()), x, length=3)


def in_cond(x):
    return jax.lax.cond(x[0] > 0, lambda x: laid(x), lambda x: x + 1, x)


WHERE = {
    "result": lambda x: (laid(x), laid(laid(x))),
    "between": lambda x: jnp.tanh(laid(jnp.sin(x))) + laid(x),
    "jit": jax.jit(lambda x: laid(x) * 2),
    "checkpoint": jax.checkpoint(lambda x: laid(jnp.sin(x)) * 2),
    "scan": in_scan,
    "cond": in_cond,
    "gradient": jax.grad(lambda x: (laid(x) ** 2).sum()),
}


@pytest.mark.parametrize("where", WHERE)
def test_a_constraint_is_dropped_and_what_is_computed_stays(where):
    x = jnp.arange(4.0)
    closed = jax.make_jaxpr(WHERE[where])(x)
    assert "sharding_constraint" in str(closed)
    made = without_placements(closed)
    assert "sharding_constraint" not in str(made)
    wanted = jax.tree.leaves(WHERE[where](x))
    for ours, theirs in zip(as_function(made)(x), wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_code_without_constraints_is_the_very_same():
    closed = jax.make_jaxpr(jax.jit(jnp.sin))(1.0)
    assert without_placements(closed) is closed


def mapped(x):
    spec = PartitionSpec("data")
    return jax.shard_map(jnp.sin, mesh=MESH, in_specs=spec, out_specs=spec)(x)


@pytest.mark.parametrize(
    "function",
    [mapped, jax.jit(mapped), lambda x: jax.pmap(jnp.sin)(x.reshape(2, 2))],
    ids=["shard_map", "jit", "pmap"],
)
def test_mapped_code_is_refused(function):
    closed = jax.make_jaxpr(function)(jnp.arange(4.0))
    with pytest.raises(UnsupportedError, match=r"the step here maps .* Take the map away"):
        without_placements(closed, " here")
