"""A language model's step and state: their types, their lowering at any size, loss scales, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import OptionError
from ratrain_jax.models import ModelConfig, language_model, load_config

TINY = ModelConfig("tiny", layers=2, hidden=16, ffn=24, heads=4, kv_heads=2, vocab=32)
SGD = optax.sgd(0.1)


def make_batch(lm, rows=4, seed=0):
    tokens = np.random.default_rng(seed).integers(
        0, lm.config.vocab, (rows, lm.sequence + 1), np.int32
    )
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def test_the_types_are_those_of_real_states_and_batches():
    lm = language_model(TINY, sequence=8)
    state, batch = lm.init(jax.random.key(0)), make_batch(lm)
    assert types(lm.abstract_state()) == types(state)
    assert types(lm.abstract_batch(4)) == types(batch)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_loss_is_the_mean_cross_entropy_of_the_next_tokens(dtype):
    """In float32, whatever the dtype of the logits."""
    lm = language_model(TINY, sequence=8, dtype=dtype, optimizer=SGD)
    state, batch = lm.init(jax.random.key(0)), make_batch(lm)
    logits = jax.jit(lm.model.apply)({"params": state.params}, batch["inputs"])
    powers = np.exp(np.asarray(logits, np.float64))
    shares = powers / powers.sum(-1, keepdims=True)
    chosen = np.take_along_axis(shares, batch["targets"][..., None], -1)
    _, metrics = jax.jit(lm.step)(state, batch)
    assert {name: metric.dtype for name, metric in metrics.items()} == {"loss": "float32"}
    np.testing.assert_allclose(metrics["loss"], -np.log(chosen).mean(), rtol=1e-5)


def test_a_loss_scale_changes_neither_the_loss_nor_the_update():
    plain, scaled = (
        language_model(TINY, sequence=8, dtype="float32", optimizer=SGD, loss_scale=scale)
        for scale in (1.0, 2.0**10)
    )
    state, batch = plain.init(jax.random.key(0)), make_batch(plain)
    one, other = jax.jit(plain.step)(state, batch), jax.jit(scaled.step)(state, batch)
    for ours, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-8)


def test_only_float16_has_a_loss_scale_of_its_own():
    scales = {
        dtype: language_model(TINY, sequence=8, dtype=dtype).loss_scale
        for dtype in ("float16", "bfloat16", "float32")
    }
    assert scales == {"float16": 1024.0, "bfloat16": 1.0, "float32": 1.0}


def test_float16_gradients_below_its_range_survive():
    """The gradients of rare tokens' rows in the head are far below 6e-8, the least that float16 holds."""
    config = ModelConfig("wide", layers=1, hidden=16, ffn=24, heads=2, kv_heads=2, vocab=4096)
    lost = []
    for scale in (1.0, 1024.0):
        lm = language_model(config, sequence=64, optimizer=SGD, loss_scale=scale)
        state = lm.init(jax.random.key(0))
        new, _ = jax.jit(lm.step)(state, make_batch(lm, rows=16))
        lost.append(float((new.params["head"]["kernel"] == state.params["head"]["kernel"]).mean()))
    assert lost[1] < lost[0] / 2


@pytest.mark.parametrize("backend", ["xla", "mt3000"])
def test_a_step_is_lowered_from_types_alone(backend):
    lm = language_model(TINY, sequence=8)
    lower = rt.train_step(stages=2, microbatches=2, backend=backend)(lm.step).lower
    lowered = lower(lm.abstract_state(), lm.abstract_batch(4))
    names = [layer.name for layer in lowered.program.layers]
    assert {name[:8] for name in names if name.startswith("blocks/")} == {"blocks/0", "blocks/1"}
    # The casts of matrices to the compute dtype go before the gather.
    dtypes = {
        str(dtype)
        for path, dtype in zip(lowered.code.paths, lowered.code.view_dtypes, strict=True)
        if path.endswith("kernel")
    }
    assert dtypes == {"float16"}


def test_seventy_billion_parameters_are_lowered_without_holding_them():
    lm = language_model(load_config("llama2-70b"), sequence=4096)
    step = rt.train_step(stages=2, microbatches=2)(lm.step)
    lowered = step.lower(lm.abstract_state(), lm.abstract_batch(4))
    parts = [layer.name for layer in lowered.program.layers if layer.name.startswith("blocks/")]
    assert len(parts) >= 79  # the first may be one with the embedding
    assert {layer.stage for layer in lowered.program.layers} == {0, 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sequence": 0}, "sequence must be a whole number of at least 1, got 0"),
        ({"sequence": 8.0}, "sequence must be a whole number of at least 1, got 8.0"),
        ({"sequence": 4097}, r"sequence=4097 is longer than tiny is for \(max_positions=4096\)"),
        ({"sequence": 8, "dtype": "float64"}, "dtype='float64' is not known; choose one of 'float16'"),
        ({"sequence": 8, "dtype": jnp.float16}, "is not known"),
        ({"sequence": 8, "loss_scale": 0}, "loss_scale=0 must be a finite number above 0"),
        ({"sequence": 8, "loss_scale": float("nan")}, "loss_scale=nan"),
    ],
    ids=str,
)  # fmt: skip
def test_an_argument_out_of_range_is_refused(arguments, message):
    with pytest.raises(OptionError, match=message):
        language_model(TINY, **arguments)


def test_an_empty_batch_is_refused():
    with pytest.raises(OptionError, match="global_batch must be a whole number"):
        language_model(TINY, sequence=8).abstract_batch(0)
