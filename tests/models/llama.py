"""A decoder in LLaMA's manner: RMSNorm, rotary positions, SwiGLU, grouped heads, untied head."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from .case import linen_case
from .gpt import VOCABULARY, loss, make_batch


def rotate(x: jax.Array) -> jax.Array:
    """Turns the pairs of features (batch, length, heads, features) by their position's angles."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1])[:, None, None] * rates
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class GroupedAttention(nn.Module):
    """Causal attention in which several query heads share one key and value head.

    Written out, because `jax.nn.dot_product_attention` takes the softmax of float64 in float32.
    """

    heads: int
    groups: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        size = x.shape[-1] // self.heads
        query = nn.DenseGeneral((self.heads, size), use_bias=False, name="query")(x)
        key = nn.DenseGeneral((self.groups, size), use_bias=False, name="key")(x)
        value = nn.DenseGeneral((self.groups, size), use_bias=False, name="value")(x)
        shared = rotate(query).reshape(*query.shape[:2], self.groups, -1, size)
        scores = jnp.einsum("bqgrd,bkgd->bgrqk", shared, rotate(key)) / jnp.sqrt(size)
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min))
        mixed = jnp.einsum("bgrqk,bkgd->bqgrd", weights, value).reshape(query.shape)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), use_bias=False, name="out")(mixed)


class SwiGLU(nn.Module):
    """Gated MLP without biases."""

    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate = nn.Dense(self.hidden, use_bias=False, name="gate")(x)
        up = nn.Dense(self.hidden, use_bias=False, name="up")(x)
        return nn.Dense(x.shape[-1], use_bias=False, name="down")(nn.silu(gate) * up)


class LlamaBlock(nn.Module):
    """Pre-norm grouped attention and SwiGLU, each with its skip."""

    heads: int
    groups: int
    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        attention = GroupedAttention(self.heads, self.groups, name="attention")
        x = x + attention(nn.RMSNorm(name="attention_norm")(x))
        return x + SwiGLU(self.hidden, name="mlp")(nn.RMSNorm(name="mlp_norm")(x))


class Llama(nn.Module):
    """Tokens (batch, length) to logits (batch, length, vocabulary)."""

    vocabulary: int = VOCABULARY
    width: int = 16
    heads: int = 4
    groups: int = 2
    hidden: int = 48
    layers: int = 4

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocabulary, self.width, name="embedding")(inputs)
        for index in range(self.layers):
            x = LlamaBlock(self.heads, self.groups, self.hidden, name=f"block_{index}")(x)
        return nn.Dense(self.vocabulary, use_bias=False, name="head")(nn.RMSNorm(name="norm")(x))


LLAMA_CASE = linen_case("llama", Llama(), inputs=("inputs",), loss=loss, make_batch=make_batch)
