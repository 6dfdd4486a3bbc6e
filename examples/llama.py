"""A LLaMA in linen: RMSNorm, rotary positions, grouped heads, SwiGLU; trained as a pipeline.

    python examples/llama.py --stages 2 --data-parallel 2 --microbatches 4

The train step and the command line are those of `train_gpt.py`: nothing depends on the model.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from text_data import VOCABULARY
from train_gpt import parse_arguments, train


def rotate(x: jax.Array, base: float = 10_000.0) -> jax.Array:
    """Rotary positions: turns pairs of features by angles that grow with the position.

    Args:
        x: Queries or keys, shape (batch, length, heads, features), an even number of features.
        base: Ratio of the slowest to the fastest turn.

    Returns:
        The turned features, same shape.
    """
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] * base ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x, 2, axis=-1)
    turned = [first * cos - second * sin, first * sin + second * cos]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class Attention(nn.Module):
    """Causal attention in which `heads` queries share `groups` keys and values."""

    heads: int
    groups: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, length, width) to the same shape."""

        def project(heads: int, name: str) -> jax.Array:
            shape = (heads, x.shape[-1] // self.heads)
            return nn.DenseGeneral(shape, use_bias=False, name=name)(x)

        query = rotate(project(self.heads, "query"))
        key = rotate(project(self.groups, "key"))
        value = project(self.groups, "value")
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), use_bias=False, name="out")(mixed)


class FeedForward(nn.Module):
    """SwiGLU: one projection gates the other."""

    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, length, width) to the same shape."""
        gate = nn.Dense(self.hidden, use_bias=False, name="gate")(x)
        up = nn.Dense(self.hidden, use_bias=False, name="up")(x)
        return nn.Dense(x.shape[-1], use_bias=False, name="down")(nn.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each with its skip."""

    heads: int
    groups: int
    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, length, width) to the same shape."""
        attention = Attention(self.heads, self.groups, name="attention")
        x = x + attention(nn.RMSNorm(name="attention_norm")(x))
        return x + FeedForward(self.hidden, name="mlp")(nn.RMSNorm(name="mlp_norm")(x))


class Llama(nn.Module):
    """A decoder-only transformer with a head of its own."""

    width: int = 64
    hidden: int = 192
    heads: int = 4
    groups: int = 2
    layers: int = 4

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Maps tokens (batch, length) to logits (batch, length, vocabulary)."""
        x = nn.Embed(VOCABULARY, self.width, name="embedding")(inputs)
        for index in range(self.layers):
            x = Block(self.heads, self.groups, self.hidden, name=f"block_{index}")(x)
        return nn.Dense(VOCABULARY, use_bias=False, name="head")(nn.RMSNorm(name="norm")(x))


if __name__ == "__main__":
    train(Llama(), parse_arguments("Trains a byte-level LLaMA as a pipeline."))
