"""The benchmark model and its train steps: a decoder-only transformer with Adam in float32."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import ratrain_jax as rt

WIDTH, HEADS, VOCABULARY, SEQUENCE = 256, 4, 1024, 256


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    width: int = WIDTH

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Runs the block on (batch, sequence, width)."""
        width, each = self.width, self.width // HEADS
        h = nn.LayerNorm()(x)
        q, k, v = (
            nn.DenseGeneral((HEADS, each), use_bias=False, name=name)(h)
            for name in ("query", "key", "value")
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(each).astype(np.float32)
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        x = x + nn.DenseGeneral(width, axis=(-2, -1), name="out")(mixed)
        h = nn.Dense(4 * width)(nn.LayerNorm()(x))
        return x + nn.Dense(width)(nn.gelu(h))


class GPT(nn.Module):
    """Embeddings, blocks, norm, head."""

    layers: int
    width: int = WIDTH

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of (batch, sequence) tokens."""
        x = nn.Embed(VOCABULARY, self.width, name="tokens")(tokens)
        x = x + self.param("positions", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
        for i in range(self.layers):
            x = Block(self.width, name=f"block_{i}")(x)
        return nn.Dense(VOCABULARY, name="head")(nn.LayerNorm(name="norm")(x))


def make_state(
    layers: int, width: int = WIDTH, optimizer: optax.GradientTransformation | None = None
) -> TrainState:
    """A fresh state; with Adam unless told otherwise."""
    model = GPT(layers, width)
    tokens = jnp.zeros((1, SEQUENCE), jnp.int32)
    params = model.init(jax.random.key(0), tokens)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer or optax.adam(1e-3))


def make_batch(rows: int) -> dict[str, np.ndarray]:
    """Random tokens."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (rows, SEQUENCE + 1), np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def loss_of(state: TrainState, params: Any, batch: Any) -> jax.Array:
    """Mean cross-entropy."""
    logits = state.apply_fn({"params": params}, batch["inputs"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def pipelined(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
    """The step as a user writes it."""
    loss, grads = rt.value_and_grad(lambda p: loss_of(state, p, batch))(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def accumulated(microbatches: int) -> Any:
    """The plain step with its own accumulation loop."""

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        parts = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)

        def add(sums: Any, part: Any) -> tuple[Any, None]:
            out = jax.value_and_grad(lambda p: loss_of(state, p, part))(state.params)
            return jax.tree.map(jnp.add, sums, out), None

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
        total, _ = jax.lax.scan(add, zero, parts)
        loss, grads = jax.tree.map(lambda x: x / microbatches, total)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return step
