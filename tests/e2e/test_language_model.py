"""Language models of the package train as a pipeline as they do under plain `jax.jit`."""

import jax
import numpy as np
import optax
import pytest

import ratrain_jax as rt
from ratrain_jax.models import ModelConfig, language_model
from tests.training import named_leaves, train

STEPS, ROWS, SEQUENCE = 4, 8, 12
# Rounding may turn the sign of a gradient near zero; `eps` keeps what one such turn does below the tolerance.
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, eps=1e-4))
SMALL = {"layers": 3, "hidden": 24, "ffn": 32, "vocab": 40}
CONFIGS = {
    "rotary, grouped, biases": ModelConfig("rotary", **SMALL, heads=4, kv_heads=2, qkv_bias=True),
    "ALiBi, tied": ModelConfig(
        "alibi", **SMALL, heads=6, kv_heads=6, positions="alibi", tied_embeddings=True
    ),
    "ALiBi, grouped": ModelConfig("grouped", **SMALL, heads=6, kv_heads=3, positions="alibi"),
}


def batches(vocab):
    """Counting sequences: each token is the one before, plus a step of the row's own."""
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        first, stride = rng.integers(0, vocab, (2, ROWS, 1))
        tokens = ((first + stride * np.arange(SEQUENCE + 1)) % vocab).astype(np.int32)
        yield {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def both(config, dtype, **options):
    """The losses and states of the pipelined and of the plain step."""
    lm = language_model(config, sequence=SEQUENCE, dtype=dtype, optimizer=OPTIMIZER)
    state, data = lm.init(jax.random.key(0)), list(batches(config.vocab))
    steps = (rt.train_step(**options)(lm.step), jax.jit(lm.step))
    return [train(step, state, data) for step in steps]


@pytest.mark.parametrize("name", ["rotary, grouped, biases", "ALiBi, tied"])
def test_it_trains_as_under_plain_jit(name):
    found, wanted = both(CONFIGS[name], "float32", stages=2, data_parallel=2, microbatches=2)
    np.testing.assert_allclose(found.losses(), wanted.losses(), rtol=1e-5)
    ours, theirs = named_leaves(found.state), named_leaves(wanted.state)
    assert ours.keys() == theirs.keys()
    for leaf_name, leaf in theirs.items():
        assert ours[leaf_name].shape == leaf.shape, leaf_name
        difference = np.linalg.norm((ours[leaf_name].astype(float) - leaf).ravel())
        assert difference <= 1e-5 * np.linalg.norm(leaf.astype(float).ravel()), leaf_name


@pytest.mark.parametrize("name", ["rotary, grouped, biases", "ALiBi, grouped"])
def test_on_emulated_kernels_its_loss_stays_close(name):
    found, wanted = both(CONFIGS[name], "float16", stages=2, microbatches=2, backend="mt3000")
    np.testing.assert_allclose(found.losses(), wanted.losses(), rtol=2e-3)
    assert found.losses()[-1] < found.losses()[0]
