"""An encoder-decoder transformer: cross attention and a padding mask that every layer reads.

The encoder's output and the mask are used by all decoder blocks, so they cross several layers. In
the first case one embedding table serves the source, the target and the head.
"""

import flax.linen as nn
import jax
import numpy as np

from .case import Apply, Batch, cross_entropy, linen_case, tokens

VOCABULARY = 64
SOURCE = 12
TARGET = 8


class Mlp(nn.Module):
    """Widens, activates and narrows."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(x.shape[-1], name="down")(nn.gelu(nn.Dense(48, name="up")(x)))


class EncoderBlock(nn.Module):
    """Self-attention over the source and an MLP."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        attention = nn.MultiHeadDotProductAttention(self.heads, use_bias=False, name="attention")
        x = x + attention(nn.LayerNorm(name="norm_1")(x), mask=mask)
        return x + Mlp(name="mlp")(nn.LayerNorm(name="norm_2")(x))


class DecoderBlock(nn.Module):
    """Causal self-attention, attention to the encoder's output and an MLP."""

    heads: int

    @nn.compact
    def __call__(
        self, x: jax.Array, encoded: jax.Array, causal: jax.Array, mask: jax.Array
    ) -> jax.Array:
        own = nn.MultiHeadDotProductAttention(self.heads, use_bias=False, name="attention")
        cross = nn.MultiHeadDotProductAttention(self.heads, use_bias=False, name="cross")
        x = x + own(nn.LayerNorm(name="norm_1")(x), mask=causal)
        x = x + cross(nn.LayerNorm(name="norm_2")(x), encoded, mask=mask)
        return x + Mlp(name="mlp")(nn.LayerNorm(name="norm_3")(x))


class EncoderDecoder(nn.Module):
    """Source and target tokens to logits (batch, target length, vocabulary)."""

    share_embedding: bool
    width: int = 16
    heads: int = 2
    layers: int = 2

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        init = nn.initializers.normal(0.1)
        embed_source = nn.Embed(VOCABULARY, self.width, name="embedding")
        embed_target = embed_source
        if not self.share_embedding:
            embed_target = nn.Embed(VOCABULARY, self.width, name="target_embedding")

        x = embed_source(source) + self.param("positions", init, (SOURCE, self.width))
        mask = nn.make_attention_mask(source > 0, source > 0)
        for index in range(self.layers):
            x = EncoderBlock(self.heads, name=f"encoder_{index}")(x, mask)
        encoded = nn.LayerNorm(name="encoder_norm")(x)

        x = embed_target(target) + self.param("target_positions", init, (TARGET, self.width))
        causal = nn.make_causal_mask(target)
        mask = nn.make_attention_mask(target > 0, source > 0)
        for index in range(self.layers):
            x = DecoderBlock(self.heads, name=f"decoder_{index}")(x, encoded, causal, mask)
        x = nn.LayerNorm(name="norm")(x)
        if self.share_embedding:
            return embed_source.attend(x)
        return nn.Dense(VOCABULARY, use_bias=False, name="head")(x)


def make_batch(seed: int, batch_size: int) -> Batch:
    """Sources padded with zeros to one length, and targets as long as each other."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(SOURCE // 2, SOURCE + 1, batch_size)
    source = tokens(rng, batch_size, SOURCE, VOCABULARY)
    source = np.where(np.arange(SOURCE) < lengths[:, None], source, 0).astype(np.int32)
    target = tokens(rng, batch_size, TARGET + 1, VOCABULARY)
    return {"source": source, "inputs": target[:, :-1], "targets": target[:, 1:]}


def loss(apply: Apply, params: object, batch: Batch) -> jax.Array:
    """Next-token cross entropy of the target."""
    logits = apply({"params": params}, batch["source"], batch["inputs"])
    return cross_entropy(logits, batch["targets"])


ENCODER_DECODER_CASE = linen_case(
    "encoder_decoder",
    EncoderDecoder(share_embedding=True),
    inputs=("source", "inputs"),
    loss=loss,
    make_batch=make_batch,
)
ENCODER_DECODER_UNTIED_CASE = linen_case(
    "encoder_decoder_untied",
    EncoderDecoder(share_embedding=False),
    inputs=("source", "inputs"),
    loss=loss,
    make_batch=make_batch,
)
