"""A decoder-only transformer in GPT's manner: learned positions, tied embedding, no key biases."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from .case import Apply, Batch, cross_entropy, linen_case, tokens

VOCABULARY = 64
LENGTH = 16


class CausalAttention(nn.Module):
    """Causal self-attention; only the query, the value and the output have biases."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (self.heads, x.shape[-1] // self.heads)
        query = nn.DenseGeneral(shape, name="query")(x)
        key = nn.DenseGeneral(shape, use_bias=False, name="key")(x)
        value = nn.DenseGeneral(shape, name="value")(x)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / jnp.sqrt(shape[-1])
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), name="out")(mixed)


class Block(nn.Module):
    """Pre-norm attention and MLP, each with its skip."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + CausalAttention(self.heads, name="attention")(nn.LayerNorm(name="norm_1")(x))
        hidden = nn.gelu(nn.Dense(4 * x.shape[-1], name="up")(nn.LayerNorm(name="norm_2")(x)))
        return x + nn.Dense(x.shape[-1], name="down")(hidden)


class GPT(nn.Module):
    """Tokens (batch, length) to logits (batch, length, vocabulary), embedding tied to the head."""

    vocabulary: int = VOCABULARY
    width: int = 16
    heads: int = 2
    layers: int = 4

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        embedding = nn.Embed(self.vocabulary, self.width, name="embedding")
        init = nn.initializers.normal(0.1)
        positions = self.param("positions", init, (inputs.shape[1], self.width))
        x = embedding(inputs) + positions
        for index in range(self.layers):
            x = Block(self.heads, name=f"block_{index}")(x)
        return embedding.attend(nn.LayerNorm(name="norm")(x))


def make_batch(seed: int, batch_size: int) -> Batch:
    """Sequences and the same sequences shifted by one."""
    drawn = tokens(np.random.default_rng(seed), batch_size, LENGTH + 1, VOCABULARY)
    return {"inputs": drawn[:, :-1], "targets": drawn[:, 1:]}


def loss(apply: Apply, params: object, batch: Batch) -> jax.Array:
    """Next-token cross entropy."""
    return cross_entropy(apply({"params": params}, batch["inputs"]), batch["targets"])


GPT_CASE = linen_case("gpt", GPT(), inputs=("inputs",), loss=loss, make_batch=make_batch)
