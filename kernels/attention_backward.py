"""The backward pass of attention on row tiles, in its resident and its staged form."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ratrain_jax.kernels.attention_forward import (
    HALF,
    Extras,
    Spec,
    blocks,
    distance_of,
    merge_heads,
    tile_dot,
    tile_scores,
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Tiles:
    """Everything a row tile of the backward pass needs."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    grad: jax.Array
    dots: jax.Array
    lse: jax.Array
    extras: Extras
    spec: Spec

    def rows(self, x: jax.Array, row: Any, rows: int) -> jax.Array:
        """Rows of a (batch, rows, …) array."""
        return jax.lax.dynamic_slice_in_dim(x, row, rows, 1)

    def weights(self, row: Any, rows: int) -> jax.Array:
        """P of a row tile, in float32."""
        scores = tile_scores(self.rows(self.q, row, rows), self.k, row, 0, self.extras, self.spec)
        lse = jax.lax.dynamic_slice_in_dim(self.lse, row, rows, 2)
        return jnp.exp(scores - lse[..., None])

    def score_grads(self, weights: jax.Array, row: Any, rows: int) -> jax.Array:
        """DS of a row tile, before the scale, in float32."""
        grad = self.rows(self.grad, row, rows)
        back = tile_dot(grad, jnp.swapaxes(self.v, 1, 2), self.spec).reshape(weights.shape)
        dots = jax.lax.dynamic_slice_in_dim(self.dots, row, rows, 2)
        return weights * (back - dots[..., None])

    def query_grad(self, score_grad: jax.Array) -> jax.Array:
        """DQ of a row tile: the shares of key blocks, added in order."""

        def block(key: Any, keys: int, total: jax.Array) -> jax.Array:
            left = jax.lax.dynamic_slice_in_dim(score_grad, key, keys, 2)
            right = jax.lax.dynamic_slice_in_dim(self.k, key, keys, 1)
            return total + tile_dot(left, right, self.spec)

        start = jnp.zeros((*score_grad.shape[:2], self.k.shape[2]), jnp.float32)
        return blocks(self.spec.shape.keys, self.spec.back_k, block, start)

    def key_grad(self, total: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
        """DK or dV with one more row tile."""
        return total + tile_dot(jnp.swapaxes(left, 1, 2), right, self.spec)


@functools.partial(jax.jit, static_argnums=0)
def attend_backward(spec: Spec, kept: Any, grad: jax.Array) -> Any:
    """Returns the gradients of Q, K, V and the extras.

    Args:
      spec: The attention, its plans and the backward form.
      kept: What the forward pass kept: Q, K, V, O, the log-sum-exp and the extras.
      grad: The gradient of the output.
    """
    q, k, v, out, lse, extras = kept
    grad = grad.astype(HALF)
    dots = (grad.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1).reshape(lse.shape)
    tiles = _Tiles(q, k, v, grad, dots, lse, extras, spec)
    run = {"resident": _resident, "staged": _staged}[spec.backward]
    dq, dk, dv, dextras = run(tiles)
    scale = jnp.float32(spec.scale)
    grads = zip((dq * scale, dk * scale, dv), spec.inputs, strict=True)
    return (*(x.astype(dtype) for x, dtype in grads), dextras)


def _zeros(tiles: _Tiles) -> tuple[Any, ...]:
    wide = jnp.float32
    extras = jax.tree.map(lambda x: jnp.zeros(x.shape, wide), _differentiable(tiles.extras))
    return (
        jnp.zeros(tiles.q.shape, wide),
        jnp.zeros(tiles.k.shape, wide),
        jnp.zeros(tiles.v.shape, wide),
        extras,
    )


def _differentiable(extras: Extras) -> Extras:
    return dataclasses.replace(extras, mask=None)


def _resident(tiles: _Tiles) -> Any:
    """Tile by tile: scores and probabilities never leave the chip."""

    def tile(row: Any, rows: int, carry: Any) -> Any:
        dq, dk, dv, dextras = carry
        weights = tiles.weights(row, rows)
        dv = tiles.key_grad(
            dv, merge_heads(weights.astype(HALF)), tiles.rows(tiles.grad, row, rows)
        )
        raw = tiles.score_grads(weights, row, rows)
        narrow = merge_heads(raw.astype(HALF))
        dq = jax.lax.dynamic_update_slice_in_dim(dq, tiles.query_grad(narrow), row, 1)
        dk = tiles.key_grad(dk, narrow, tiles.rows(tiles.q, row, rows))
        return dq, dk, dv, _extra_grads(dextras, raw, row, rows, tiles)

    return _with_extras(blocks(tiles.q.shape[1], tiles.spec.back_q, tile, _zeros(tiles)), tiles)


def _staged(tiles: _Tiles) -> Any:
    """Step by step: all of P and dS go out to memory and come back."""
    spec, (dq, dk, dv, dextras) = tiles.spec, _zeros(tiles)
    wide_shape = (tiles.q.shape[0], tiles.q.shape[1], spec.shape.keys)
    total, block = tiles.q.shape[1], spec.back_q
    narrow = jnp.zeros(wide_shape, HALF)

    def first(row: Any, rows: int, carry: Any) -> Any:
        stored, stored_grads, dextras = carry
        weights = tiles.weights(row, rows)
        raw = tiles.score_grads(weights, row, rows)
        put = jax.lax.dynamic_update_slice_in_dim
        stored = put(stored, merge_heads(weights.astype(HALF)), row, 1)
        stored_grads = put(stored_grads, merge_heads(raw.astype(HALF)), row, 1)
        return stored, stored_grads, _extra_grads(dextras, raw, row, rows, tiles)

    weights, score_grads, dextras = blocks(total, block, first, (narrow, narrow, dextras))
    weights, score_grads = jax.lax.optimization_barrier((weights, score_grads))

    def second(row: Any, rows: int, carry: Any) -> Any:
        dq, dk, dv = carry
        dv = tiles.key_grad(dv, tiles.rows(weights, row, rows), tiles.rows(tiles.grad, row, rows))
        part = tiles.rows(score_grads, row, rows)
        dq = jax.lax.dynamic_update_slice_in_dim(dq, tiles.query_grad(part), row, 1)
        return dq, tiles.key_grad(dk, part, tiles.rows(tiles.q, row, rows)), dv

    dq, dk, dv = blocks(total, block, second, (dq, dk, dv))
    return _with_extras((dq, dk, dv, dextras), tiles)


def _extra_grads(extras: Extras, raw: jax.Array, row: Any, rows: int, tiles: _Tiles) -> Extras:
    """Adds a tile's share to the gradients of bias and slopes."""
    bias, slopes = extras.bias, extras.slopes
    if bias is not None:
        axes = tuple(axis for axis in range(3) if bias.shape[axis] == 1)
        share = raw.sum(axes, keepdims=True)
        at = 0 if bias.shape[2] == 1 else row
        bias = _add_at(bias, share, at)
    if slopes is not None:
        far = jnp.abs(distance_of(row, rows, 0, raw.shape[3], tiles.spec.shape))
        share = -(raw * far.astype(jnp.float32)).sum((0, 3))
        slopes = jax.lax.dynamic_update_slice_in_dim(slopes, share, row, 1)
    return dataclasses.replace(extras, bias=bias, slopes=slopes)


def _add_at(total: jax.Array, share: jax.Array, row: Any) -> jax.Array:
    """Adds to some rows of (batch, kv heads, rows, keys)."""
    rows = share.shape[2]
    before = jax.lax.dynamic_slice_in_dim(total, row, rows, 2)
    return jax.lax.dynamic_update_slice_in_dim(total, before + share, row, 2)


def _with_extras(result: Any, tiles: _Tiles) -> Any:
    """Casts the extras' gradients to their own dtypes; a mask has none."""
    dq, dk, dv, dextras = result
    bias = dextras.bias
    if bias is not None and tiles.extras.bias is not None:
        bias = bias.astype(tiles.extras.bias.dtype)
    return dq, dk, dv, dataclasses.replace(dextras, bias=bias)
