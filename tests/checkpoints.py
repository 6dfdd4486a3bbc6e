"""A state with leaves of many kinds, saved and restored, and compared to the last bit."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax.training.dynamic_scale import DynamicScale

import ratrain_jax as rt


@flax.struct.dataclass
class State:
    params: object
    scale: DynamicScale
    key: jax.Array


def make_state(seed=0):
    rng = np.random.default_rng(seed)
    params = {
        "w": jnp.asarray(rng.normal(size=(4, 6)), jnp.float32),
        "half": jnp.asarray(rng.normal(size=(3,)), jnp.bfloat16),
        "a.b/c%": (jnp.arange(3, dtype=jnp.uint8), None, [jnp.asarray(True)]),
        "none of it": jnp.zeros((0, 3)),
    }
    return State(params, DynamicScale(scale=jnp.float32(2.0**seed)), jax.random.key(seed))


def bits(tree):
    """The tree with random keys as their data, which compares, and Python numbers as JAX takes them."""
    return jax.tree.map(_comparable, tree)


def _comparable(leaf):
    leaf = jnp.asarray(leaf) if isinstance(leaf, int) else leaf
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def saved(folder, *steps, keep=3, state=make_state):
    with rt.Checkpoints(folder, keep=keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, state(step), {"at": [step, 2**80]})


def restored(folder, like=None, step=None):
    with rt.Checkpoints(folder) as checkpoints:
        return checkpoints.restore(make_state() if like is None else like, step)
