"""A language model of two LSTM layers, each a scan over time with its weights held constant."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from .case import linen_case
from .mlp import VOCABULARY, make_tokens, token_loss


class LSTM(nn.Module):
    """Tokens (batch, length) to logits (batch, length, vocabulary)."""

    width: int = 16
    layers: int = 2

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        x: Any = nn.Embed(VOCABULARY, self.width, name="embedding")(inputs)
        for index in range(self.layers):
            # The carry takes its type from here, and a scan's carry may not change its type.
            cell = nn.LSTMCell(self.width, param_dtype=jnp.result_type(float), name=f"lstm_{index}")
            x = nn.RNN(cell, name=f"rnn_{index}")(x)
        return nn.Dense(VOCABULARY, name="head")(x)


LSTM_CASE = linen_case("lstm", LSTM(), inputs=("inputs",), loss=token_loss, make_batch=make_tokens)
