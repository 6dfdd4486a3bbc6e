"""A decoder of the LLaMA family in Flax linen: RMSNorm, grouped heads, rotary positions or ALiBi, SwiGLU.

Parameters are float32. Products run in the compute dtype; norms, the rotation of positions and the softmax in float32.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ratrain_jax.models.attention import attend
from ratrain_jax.models.config import ModelConfig
from ratrain_jax.models.positions import Tables, alibi_bias, rotary_tables, rotate

Positions = Tables | jax.Array
"""What attention needs to know of positions: rotary tables, or a bias of the scores."""

_INIT = nn.initializers.normal(0.02)
_EVERY_LAYER: Any = nn.broadcast  # `nn.scan` says that it takes numbers only


class Attention(nn.Module):
    """Causal attention in which several query heads share one head of keys and values.

    Attributes:
        config: The model.
        dtype: Compute dtype.
    """

    config: ModelConfig
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, positions: Positions) -> jax.Array:
        """Mixes positions.

        Args:
            x: Shape (batch, length, hidden).
            positions: Of `Llama`.

        Returns:
            Same shape and dtype.
        """
        config = self.config

        def project(heads: int, name: str) -> jax.Array:
            return nn.DenseGeneral(
                (heads, config.head_dim),
                use_bias=config.qkv_bias,
                dtype=self.dtype,
                kernel_init=_INIT,
                name=name,
            )(x)

        query, key = project(config.heads, "query"), project(config.kv_heads, "key")
        value = project(config.kv_heads, "value")
        bias = None
        if isinstance(positions, tuple):
            query, key = rotate(query, positions), rotate(key, positions)
        else:
            bias = positions
        return nn.DenseGeneral(
            config.hidden,
            axis=(-2, -1),
            use_bias=False,
            dtype=self.dtype,
            kernel_init=_INIT,
            name="out",
        )(attend(query, key, value, bias))


class SwiGLU(nn.Module):
    """A feed-forward part in which one projection gates the other.

    Attributes:
        config: The model.
        dtype: Compute dtype.
    """

    config: ModelConfig
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, length, hidden) to the same shape and dtype."""

        def project(x: jax.Array, features: int, name: str) -> jax.Array:
            return nn.Dense(
                features, use_bias=False, dtype=self.dtype, kernel_init=_INIT, name=name
            )(x)

        gated = nn.silu(project(x, self.config.ffn, "gate")) * project(x, self.config.ffn, "up")
        return project(gated, self.config.hidden, "down")


class Block(nn.Module):
    """A layer: attention and feed-forward, each behind a norm and with its skip.

    Attributes:
        config: The model.
        dtype: Compute dtype.
    """

    config: ModelConfig
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, positions: Positions) -> tuple[jax.Array, None]:
        """Maps (batch, length, hidden) to the same shape and dtype, and to nothing, as `nn.scan` wants it."""

        def norm(name: str) -> nn.RMSNorm:
            return nn.RMSNorm(epsilon=self.config.norm_eps, dtype=self.dtype, name=name)

        attention = Attention(self.config, self.dtype, name="attention")
        x = x + attention(norm("attention_norm")(x), positions)
        return x + SwiGLU(self.config, self.dtype, name="mlp")(norm("mlp_norm")(x)), None


class Llama(nn.Module):
    """A decoder-only transformer. It has no dropout, and no norm of the head's weights, as Baichuan 2 has one.

    Attributes:
        config: The model.
        dtype: Compute dtype: float16, bfloat16 or float32, also by name.
        scan: Whether the layers are one `nn.scan` over stacked parameters (`blocks`), so that tracing takes as long for
            eighty as for one; otherwise they are `block_0`, `block_1`, ….

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from ratrain_jax.models import Llama, ModelConfig
        >>> config = ModelConfig("tiny", layers=2, hidden=16, ffn=32, heads=4, kv_heads=2, vocab=64)
        >>> model, tokens = Llama(config, "bfloat16"), jnp.zeros((1, 8), jnp.int32)
        >>> params = model.init(jax.random.key(0), tokens)
        >>> logits = model.apply(params, tokens)
        >>> logits.shape, logits.dtype.name
        ((1, 8, 64), 'bfloat16')
    """

    config: ModelConfig
    dtype: Any = "float16"
    scan: bool = True

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Predicts each position's next token.

        Args:
            tokens: Integers, shape (batch, length).

        Returns:
            Logits in the compute dtype, shape (batch, length, vocab).
        """
        config, dtype = self.config, jnp.dtype(self.dtype)
        embedding = nn.Embed(
            config.vocab, config.hidden, dtype=dtype, embedding_init=_INIT, name="embedding"
        )
        x = self._layers(embedding(tokens), self._positions(tokens.shape[1]), dtype)
        x = nn.RMSNorm(epsilon=config.norm_eps, dtype=dtype, name="norm")(x)
        if config.tied_embeddings:
            return embedding.attend(x)
        head = nn.Dense(config.vocab, use_bias=False, dtype=dtype, kernel_init=_INIT, name="head")
        return head(x)

    def _positions(self, length: int) -> Positions:
        config = self.config
        if config.positions == "alibi":
            return alibi_bias(config.heads, length)
        return rotary_tables(length, config.head_dim, config.rope_theta)

    def _layers(self, x: jax.Array, positions: Positions, dtype: Any) -> jax.Array:
        if self.scan:
            blocks = nn.scan(
                Block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=_EVERY_LAYER,
                length=self.config.layers,
            )
            return blocks(self.config, dtype, name="blocks")(x, positions)[0]
        for index in range(self.config.layers):
            x, _ = Block(self.config, dtype, name=f"block_{index}")(x, positions)
        return x
