"""How a decoder tells positions apart: rotary angles, or biases that fall with the distance (ALiBi).

References:
    Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, arXiv 2104.09864.
    Press, Smith, Lewis, Train Short, Test Long: Attention with Linear Biases, arXiv 2108.12409.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

Tables = tuple[jax.Array, jax.Array]


def rotary_tables(length: int, head_dim: int, theta: float) -> Tables:
    """Cosines and sines of the angle of each position and pair of features.

    Args:
        length: Positions.
        head_dim: Features of a head, an even number; feature i turns together with i + head_dim / 2.
        theta: Pair i turns by position * theta ** (-2 * i / head_dim).

    Returns:
        Two float32 arrays, shape (length, 1, head_dim / 2); the axis of size 1 is that of the heads.

    Example:
        >>> cos, sin = rotary_tables(3, 4, 10_000.0)
        >>> cos.shape, float(sin[0].max())
        ((3, 1, 2), 0.0)
    """
    rates = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None, None] * rates.astype(np.float32)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, tables: Tables) -> jax.Array:
    """Turns pairs of features by their position's angles.

    Args:
        x: Queries or keys, shape (batch, length, heads, head_dim).
        tables: Of `rotary_tables`.

    Returns:
        The turned features, same shape and dtype. They are turned in float32.
    """
    cos, sin = tables
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def alibi_slopes(heads: int) -> np.ndarray:
    """How steeply each head's bias falls with the distance.

    Args:
        heads: Query heads.

    Returns:
        Float64, shape (heads,). For n heads, a power of two, they are 2 ** (-8 / n), its square, its third power, …;
        other numbers take those of the power of two below, then every other one of the power of two above.

    Example:
        >>> alibi_slopes(2).tolist(), alibi_slopes(3).tolist()
        ([0.0625, 0.00390625], [0.0625, 0.00390625, 0.25])
    """
    below = 1 << (heads.bit_length() - 1)
    slopes = 2.0 ** (-8.0 / below * np.arange(1, below + 1))
    between = 2.0 ** (-4.0 / below * np.arange(1, 2 * below + 1, 2))
    return np.concatenate([slopes, between[: heads - below]])


def alibi_bias(heads: int, length: int) -> jax.Array:
    """What is added to the scores of each key.

    The bias of query i and key j is slope * (j - i). A softmax over the keys does not see what is added to all of
    them, so slope * (j - last) does the same, and needs no axis of queries.

    Args:
        heads: Query heads.
        length: Keys.

    Returns:
        Float32, shape (1, heads, 1, length): no batch, no queries.

    Example:
        >>> alibi_bias(2, 3)[0, 0, 0].tolist()
        [-0.125, -0.0625, 0.0]
    """
    slopes = alibi_slopes(heads).astype(np.float32)
    distances = jnp.arange(length, dtype=jnp.float32) - (length - 1)
    return distances * slopes[None, :, None, None]
