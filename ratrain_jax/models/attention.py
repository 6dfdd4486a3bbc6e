"""Causal attention over grouped heads, in the form that backends with an attention kernel know.

`jax.nn.dot_product_attention` has that form, too, but asks in float16 for a precision that a compiled step has not on a
CPU (JAX 0.10 and 0.12).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None = None
) -> jax.Array:
    """Mixes the values of all positions up to each, by softmax(q · k / sqrt(head_dim) + bias).

    Args:
        query: Shape (batch, length, heads, head_dim).
        key: Shape (batch, length, kv_heads, head_dim); heads / kv_heads query heads in a row share each.
        value: Like `key`.
        bias: Added to the scores, float32, shape (1, heads, 1, length): for each key.

    Returns:
        Shape and dtype of `query`. Scores and the softmax are float32.

    Example:
        >>> ones = jnp.ones((1, 3, 4, 8), jnp.float16)
        >>> attend(ones, ones[:, :, :2], ones[:, :, :2]).shape
        (1, 3, 4, 8)
    """
    batch, length, heads, head_dim = query.shape
    groups = key.shape[2]
    shared = query.reshape(batch, length, groups, heads // groups, head_dim)
    scores = jnp.einsum("bqgrd,bkgd->bgrqk", shared, key, preferred_element_type=jnp.float32)
    scores = scores * np.float32(head_dim**-0.5)
    if bias is not None:
        scores = scores + bias.reshape(1, groups, heads // groups, 1, length)
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(jnp.float32).min))
    mixed = jnp.einsum("bgrqk,bkgd->bqgrd", weights.astype(value.dtype), value)
    return mixed.reshape(query.shape)
