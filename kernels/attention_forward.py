"""The forward pass of attention on tiles: scores, and an online softmax over key tiles.

Arrays are (batch · kv heads, rows, …); scores have the two leading axes apart, so that biases and
masks of fewer axes broadcast against them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Final, TypeVar

import jax
import jax.numpy as jnp

from ratrain_jax.kernels.attention_plan import Attention
from ratrain_jax.kernels.dot_general import Arithmetic
from ratrain_jax.kernels.numerics import product
from ratrain_jax.kernels.tiles import Gemm, TilePlan, accelerator_of

HALF: Final = jnp.float16
_UNROLLED: Final = 8  # tiles written out one by one
Carry = TypeVar("Carry")


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """What one call of attention fixes before its arrays.

    Attributes:
      arithmetic: How products are computed.
      shape: The attention.
      scale: Factor of the scores.
      backward: "resident" or "staged".
      block_k: Keys of a tile, forward.
      back_q: Rows of a tile, backward.
      back_k: Keys that a core owns, backward.
      out: Dtype of the output.
      inputs: Dtypes of query, key and value.
    """

    arithmetic: Arithmetic
    shape: Attention
    scale: float
    backward: str
    block_k: int
    back_q: int
    back_k: int
    out: str
    inputs: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Extras:
    """What shapes the scores beside Q and K; each is None or (batch, kv heads, rows, keys)-like.

    Attributes:
      bias: Added to the scores; axes may be 1.
      mask: True where a score counts; axes may be 1.
      slopes: ALiBi slope of each row: (kv heads, rows).
    """

    bias: jax.Array | None
    mask: jax.Array | None
    slopes: jax.Array | None


jax.tree_util.register_dataclass(Extras, ["bias", "mask", "slopes"], [])


def blocks(total: int, block: int, body: Callable[[Any, int, Carry], Carry], carry: Carry) -> Carry:
    """Calls `body(start, size, carry)` for block after block, the last one smaller."""
    whole = total // block
    if whole <= _UNROLLED:
        for index in range(whole):
            carry = body(index * block, block, carry)
    else:
        carry = jax.lax.fori_loop(0, whole, lambda i, c: body(i * block, block, c), carry)
    if total > whole * block:
        carry = body(whole * block, total - whole * block, carry)
    return carry


def tile_dot(a: jax.Array, b: jax.Array, spec: Spec) -> jax.Array:
    """One on-chip product of float16 values, (batch, M, K) by (batch, K, N), to float32."""
    depth = a.shape[2]
    gemm = Gemm(
        a.shape[1], b.shape[2], depth, accumulator=spec.arithmetic.accumulator, out_dtype="float32"
    )
    plan = TilePlan(1, depth, 1, 1, depth, 1, 1, 1)  # a tile is one panel
    lanes = accelerator_of(spec.arithmetic.machine).lanes(gemm.bytes)
    return product(a, b, gemm, plan, spec.arithmetic.mode, lanes)


def _cut(x: jax.Array | None, row: Any, rows: int, key: Any, keys: int) -> jax.Array | None:
    """Cuts a tile out of a bias or mask whose row axis may be 1."""
    if x is None:
        return None
    x = jax.lax.dynamic_slice_in_dim(x, key, keys, 3)
    return x if x.shape[2] == 1 else jax.lax.dynamic_slice_in_dim(x, row, rows, 2)


def distance_of(row: Any, rows: int, key: Any, keys: int, shape: Attention) -> jax.Array:
    """Returns key minus query position for a tile."""
    queries = (row + jnp.arange(rows)) % shape.queries
    return (key + jnp.arange(keys))[None, :] - queries[:, None]


def tile_scores(
    q: jax.Array, k: jax.Array, row: Any, key: Any, extras: Extras, spec: Spec
) -> jax.Array:
    """Returns a tile of scores, -inf where masked: (batch, kv heads, rows, keys)."""
    shape, rows, keys = spec.shape, q.shape[1], k.shape[1]
    scores = tile_dot(q, jnp.swapaxes(k, 1, 2), spec) * jnp.float32(spec.scale)
    scores = scores.reshape(shape.batch, shape.kv_heads, rows, keys)
    bias = _cut(extras.bias, row, rows, key, keys)
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    distance = distance_of(row, rows, key, keys, shape)
    if extras.slopes is not None:
        slopes = jax.lax.dynamic_slice_in_dim(extras.slopes, row, rows, 1)
        scores = scores - slopes[None, :, :, None] * jnp.abs(distance).astype(jnp.float32)
    mask = _cut(extras.mask, row, rows, key, keys)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    if shape.causal:
        scores = jnp.where(distance <= 0, scores, -jnp.inf)
    return scores


def _finite(x: jax.Array) -> jax.Array:
    """Zero in place of -inf, so that nothing is subtracted from itself at infinity."""
    return jnp.where(x == -jnp.inf, jnp.float32(0), x)


def merge_heads(x: jax.Array) -> jax.Array:
    """(batch, kv heads, rows, …) → (batch · kv heads, rows, …)."""
    return x.reshape(-1, *x.shape[2:])


def attend_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras, spec: Spec
) -> tuple[jax.Array, jax.Array]:
    """Returns the float32 output and the log-sum-exp, 0 for rows without a key."""
    shape = spec.shape
    heads = (shape.batch, shape.kv_heads, shape.rows)
    start = (
        jnp.full(heads, -jnp.inf, jnp.float32),
        jnp.zeros(heads, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )

    def tile(key: Any, keys: int, carry: Any) -> Any:
        most, total, out = carry
        kt, vt = (jax.lax.dynamic_slice_in_dim(x, key, keys, 1) for x in (k, v))
        scores = tile_scores(q, kt, 0, key, extras, spec)
        new = jnp.maximum(most, scores.max(-1))
        weights = jnp.exp(scores - _finite(new)[..., None])
        shrink = jnp.exp(most - _finite(new))
        total = total * shrink + weights.sum(-1)
        out = out * merge_heads(shrink)[..., None] + tile_dot(
            merge_heads(weights.astype(HALF)), vt, spec
        )
        return new, total, out

    most, total, out = blocks(shape.keys, spec.block_k, tile, start)
    empty = total == 0
    out = jnp.where(
        merge_heads(empty)[..., None], 0, out / merge_heads(jnp.where(empty, 1, total))[..., None]
    )
    lse = jnp.where(empty, 0, _finite(most) + jnp.log(jnp.where(empty, 1, total)))
    return out, lse
