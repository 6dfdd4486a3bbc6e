"""Masked sequences, parameters for them, layouts to train in, and plain steps, for tests of losses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

WIDTH = 6
LENGTH = 3
ROWS = 12
LAYOUTS = [
    {"stages": 1, "microbatches": 3},
    {"stages": 2, "data_parallel": 2, "microbatches": 3},
    {"stages": 3, "data_parallel": 2, "microbatches": 2, "zero": 2},
    {"stages": 1, "data_parallel": 4},
    {"stages": 2, "microbatches": 2, "schedule": "gpipe", "recovery": "forward"},
]


def make_params(layers=4, dtype=np.float32):
    rng = np.random.default_rng(0)
    return {
        f"layer_{n}": {
            "kernel": jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / 2, dtype),
            "bias": jnp.asarray(rng.normal(size=WIDTH) / 4, dtype),
        }
        for n in range(layers)
    }


def make_batch(seed=0, rows=ROWS):
    """Sequences; the mask keeps few positions of the first and nearly all of the last."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, LENGTH, WIDTH)).astype(np.float32)
    kept = rng.random((rows, LENGTH)) < np.linspace(0.1, 0.95, rows)[:, None]
    return {"x": x, "y": np.sin(x[..., ::-1]), "mask": kept}


def compiled(function):
    return jax.jit(function)


def plain_of(step, value_and_grad=jax.value_and_grad):
    return compiled(functools.partial(step, value_and_grad=value_and_grad))


def split(batch, options):
    """The batch of each rank and microbatch, in the order of ranks, then microbatches."""
    parts = options.get("data_parallel", 1) * options.get("microbatches", 1)
    leaves, tree = jax.tree.flatten(batch)
    cut = [jnp.split(leaf, parts) for leaf in leaves]
    return [tree.unflatten(part) for part in zip(*cut, strict=True)]


def halves(params):
    """The first two layers, and the others."""
    layers = list(params.items())
    return dict(layers[:2]), dict(layers[2:])
