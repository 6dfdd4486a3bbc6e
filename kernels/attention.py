"""Attention by the planned kernels, forward and backward, on float16 operands.

Rows, tiles and plans are those of `attention_plan`. Forward: an online softmax over key tiles, with
running maximum, sum and output in float32; probabilities are rounded to float16 for P·V; a row with
nothing to attend to gives zeros. Kept for the backward pass: Q, K, V, O in float16 and the
log-sum-exp a row in float32.

Backward, over row tiles, with D = rowsum(dO∘O):

    P = exp(S − lse)   dV += Pᵀ·dO   dP = dO·Vᵀ   dS = P∘(dP − D)   dQ = dS·K   dK += dSᵀ·Q

The *resident* form makes all of it tile by tile. The *staged* form writes all of P, then all of dS,
to memory before the products that read them. Their tiles, roundings and orders of summing are the
same, and so are their bits.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar

import jax
import jax.numpy as jnp

from ratrain_jax.errors import OptionError
from ratrain_jax.kernels.attention_plan import Attention, plan_attention
from ratrain_jax.kernels.dot_general import Arithmetic
from ratrain_jax.kernels.machine import Machine
from ratrain_jax.kernels.numerics import product
from ratrain_jax.kernels.tiles import Gemm, TilePlan, accelerator_of

BACKWARDS: Final = ("resident", "staged")
_UNROLLED: Final = 8
Carry = TypeVar("Carry")
HALF: Final = jnp.float16


@dataclasses.dataclass(frozen=True, slots=True)
class _Spec:
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


def vmac_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    alibi_slopes: jax.Array | None = None,
    machine: str | Machine = "mt3000",
    accumulator: str | None = None,
    mode: str = "fast",
    backward: str = "resident",
) -> jax.Array:
    """Attends like `jax.nn.dot_product_attention`, by the float16 kernels of an accelerator.

    Args:
      query: (batch, queries, heads, head size).
      key: (batch, keys, kv heads, head size); `heads` is a multiple of `kv heads`.
      value: As `key`.
      bias: Added to the scaled scores; broadcasts to (batch, heads, queries, keys).
      mask: True where a score counts; broadcasts likewise. A key-padding mask is
        (batch, 1, 1, keys).
      scale: Factor of the scores; 1/sqrt(head size) unless given.
      is_causal: Whether query t sees keys up to t only.
      alibi_slopes: (heads,): subtracts slope·|t − s| from the score of query t and key s.
      machine: The machine that plans are made for: one, or the name of a built-in one.
      accumulator: Of the products: "fp32", "fp16" or "promote"; the machine's unless given.
        Sums of several tiles are float32 in any case.
      mode: "exact" or "fast" products.
      backward: "resident" or "staged"; the results are the same.

    Returns:
      (batch, queries, heads, head size) in the dtype of `query`. Rows without a key are zeros.

    Raises:
      OptionError: If shapes or options do not fit together.
      MachineError: If no tile of this head size fits the machine.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.ones((1, 4, 2, 8), jnp.float16)
      >>> vmac_attention(x, x, x, is_causal=True).shape
      (1, 4, 2, 8)
    """
    arithmetic = Arithmetic.of(machine, accumulator, mode)
    if backward not in BACKWARDS:
        raise OptionError(f"backward is {backward!r}; use 'resident' or 'staged'.")
    shape = _shape(query, key, value, is_causal, bias is not None, arithmetic.accumulator)
    size = shape.head_size
    forward_plan = plan_attention(shape, arithmetic.machine, "forward")
    backward_plan = plan_attention(shape, arithmetic.machine, "backward")
    spec = _Spec(
        arithmetic,
        shape,
        float(size**-0.5 if scale is None else scale),
        backward,
        forward_plan.block_k,
        backward_plan.block_q,
        backward_plan.block_k,
        str(query.dtype),
        (str(query.dtype), str(key.dtype), str(value.dtype)),
    )
    extras = Extras(_by_row(bias, shape), _by_row(mask, shape), _slopes_by_row(alibi_slopes, shape))
    rows = _fold(query, shape.kv_heads)
    flat = [jnp.swapaxes(x, 1, 2).reshape(shape.count, shape.keys, size) for x in (key, value)]
    return _unfold(jnp.asarray(_attend(rows, *flat, extras, spec)), shape)


def _shape(
    query: jax.Array, key: jax.Array, value: jax.Array, causal: bool, bias: bool, accumulator: str
) -> Attention:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4 or not jnp.issubdtype(x.dtype, jnp.floating):
            raise OptionError(
                f"{name} is {x.dtype}{list(x.shape)}; attention takes floating arrays of "
                "(batch, positions, heads, head size)."
            )
    batch, queries, heads, size = query.shape
    _, keys, kv_heads, _ = key.shape
    if key.shape != value.shape or (batch, size) != (key.shape[0], key.shape[3]):
        raise OptionError(
            f"query {query.shape}, key {key.shape} and value {value.shape} do not fit together; "
            "batch and head size must agree, and key and value must have one shape."
        )
    if heads % kv_heads:
        raise OptionError(f"{heads} query heads are no multiple of {kv_heads} key heads.")
    return Attention(batch, heads, kv_heads, queries, keys, size, causal, bias, accumulator)


def _fold(query: jax.Array, kv_heads: int) -> jax.Array:
    """(batch, queries, heads, size) → (batch·kv heads, rows, size): heads that share keys."""
    batch, queries, heads, size = query.shape
    split = query.reshape(batch, queries, kv_heads, heads // kv_heads, size)
    return split.transpose(0, 2, 3, 1, 4).reshape(batch * kv_heads, -1, size)


def _unfold(rows: jax.Array, shape: Attention) -> jax.Array:
    group = shape.heads // shape.kv_heads
    split = rows.reshape(shape.batch, shape.kv_heads, group, shape.queries, shape.head_size)
    return split.transpose(0, 3, 1, 2, 4).reshape(
        shape.batch, shape.queries, shape.heads, shape.head_size
    )


def _by_row(x: jax.Array | None, shape: Attention) -> jax.Array | None:
    """Brings a bias or mask to (batch or 1, kv heads or 1, rows or 1, keys)."""
    if x is None:
        return None
    full = (shape.batch, shape.heads, shape.queries, shape.keys)
    x = x.reshape((1,) * (4 - x.ndim) + x.shape) if x.ndim < 4 else x
    if x.ndim != 4 or any(have not in (1, want) for have, want in zip(x.shape, full, strict=True)):
        raise OptionError(f"a bias or mask of shape {x.shape} does not broadcast to {full}.")
    batch, heads, queries, _ = x.shape
    x = jnp.broadcast_to(x, (batch, heads, queries, shape.keys))
    if heads == 1 and queries == 1:
        return x
    group = shape.heads // shape.kv_heads
    kv_heads = shape.kv_heads if heads > 1 else 1
    x = x.reshape(batch, kv_heads, heads // kv_heads, queries, shape.keys)
    x = jnp.broadcast_to(x, (batch, kv_heads, group, shape.queries, shape.keys))
    return x.reshape(batch, kv_heads, shape.rows, shape.keys)


def _slopes_by_row(slopes: jax.Array | None, shape: Attention) -> jax.Array | None:
    if slopes is None:
        return None
    if slopes.shape != (shape.heads,):
        raise OptionError(f"alibi_slopes has shape {slopes.shape}; give one a head, {shape.heads}.")
    return jnp.repeat(slopes.astype(jnp.float32), shape.queries).reshape(shape.kv_heads, -1)


def _loop(total: int, block: int, body: Callable[[Any, int, Carry], Carry], carry: Carry) -> Carry:
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


def _dot(a: jax.Array, b: jax.Array, spec: _Spec) -> jax.Array:
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


def _distance(row: Any, rows: int, key: Any, keys: int, shape: Attention) -> jax.Array:
    """Returns key minus query position for a tile."""
    queries = (row + jnp.arange(rows)) % shape.queries
    return (key + jnp.arange(keys))[None, :] - queries[:, None]


def _scores(
    q: jax.Array, k: jax.Array, row: Any, key: Any, extras: Extras, spec: _Spec
) -> jax.Array:
    """Returns a tile of scores, -inf where masked: (batch, kv heads, rows, keys)."""
    shape, rows, keys = spec.shape, q.shape[1], k.shape[1]
    scores = _dot(q, jnp.swapaxes(k, 1, 2), spec) * jnp.float32(spec.scale)
    scores = scores.reshape(shape.batch, shape.kv_heads, rows, keys)
    bias = _cut(extras.bias, row, rows, key, keys)
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    distance = _distance(row, rows, key, keys, shape)
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


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, *x.shape[2:])


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras, spec: _Spec
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
        scores = _scores(q, kt, 0, key, extras, spec)
        new = jnp.maximum(most, scores.max(-1))
        weights = jnp.exp(scores - _finite(new)[..., None])
        shrink = jnp.exp(most - _finite(new))
        total = total * shrink + weights.sum(-1)
        out = out * _flat(shrink)[..., None] + _dot(_flat(weights.astype(HALF)), vt, spec)
        return new, total, out

    most, total, out = _loop(shape.keys, spec.block_k, tile, start)
    empty = total == 0
    out = jnp.where(_flat(empty)[..., None], 0, out / _flat(jnp.where(empty, 1, total))[..., None])
    lse = jnp.where(empty, 0, _finite(most) + jnp.log(jnp.where(empty, 1, total)))
    return out, lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras, spec: _Spec) -> jax.Array:
    return _attend_forward(q, k, v, extras, spec)[0]


@functools.partial(jax.jit, static_argnums=4)
def _attend_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras, spec: _Spec
) -> tuple[jax.Array, Any]:
    q, k, v = (x.astype(HALF) for x in (q, k, v))
    out, lse = _forward(q, k, v, extras, spec)
    return out.astype(spec.out), (q, k, v, out.astype(HALF), lse, extras)


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
    spec: _Spec

    def rows(self, x: jax.Array, row: Any, rows: int) -> jax.Array:
        """Rows of a (batch, rows, …) array."""
        return jax.lax.dynamic_slice_in_dim(x, row, rows, 1)

    def weights(self, row: Any, rows: int) -> jax.Array:
        """P of a row tile, in float32."""
        scores = _scores(self.rows(self.q, row, rows), self.k, row, 0, self.extras, self.spec)
        lse = jax.lax.dynamic_slice_in_dim(self.lse, row, rows, 2)
        return jnp.exp(scores - lse[..., None])

    def score_grads(self, weights: jax.Array, row: Any, rows: int) -> jax.Array:
        """DS of a row tile, before the scale, in float32."""
        grad = self.rows(self.grad, row, rows)
        back = _dot(grad, jnp.swapaxes(self.v, 1, 2), self.spec).reshape(weights.shape)
        dots = jax.lax.dynamic_slice_in_dim(self.dots, row, rows, 2)
        return weights * (back - dots[..., None])

    def query_grad(self, score_grad: jax.Array) -> jax.Array:
        """DQ of a row tile: the shares of key blocks, added in order."""

        def block(key: Any, keys: int, total: jax.Array) -> jax.Array:
            left = jax.lax.dynamic_slice_in_dim(score_grad, key, keys, 2)
            right = jax.lax.dynamic_slice_in_dim(self.k, key, keys, 1)
            return total + _dot(left, right, self.spec)

        start = jnp.zeros((*score_grad.shape[:2], self.k.shape[2]), jnp.float32)
        return _loop(self.spec.shape.keys, self.spec.back_k, block, start)

    def key_grad(self, total: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
        """DK or dV with one more row tile."""
        return total + _dot(jnp.swapaxes(left, 1, 2), right, self.spec)


@functools.partial(jax.jit, static_argnums=0)
def _attend_backward(spec: _Spec, kept: Any, grad: jax.Array) -> Any:
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
        dv = tiles.key_grad(dv, _flat(weights.astype(HALF)), tiles.rows(tiles.grad, row, rows))
        raw = tiles.score_grads(weights, row, rows)
        narrow = _flat(raw.astype(HALF))
        dq = jax.lax.dynamic_update_slice_in_dim(dq, tiles.query_grad(narrow), row, 1)
        dk = tiles.key_grad(dk, narrow, tiles.rows(tiles.q, row, rows))
        return dq, dk, dv, _extra_grads(dextras, raw, row, rows, tiles)

    return _with_extras(_loop(tiles.q.shape[1], tiles.spec.back_q, tile, _zeros(tiles)), tiles)


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
        stored = put(stored, _flat(weights.astype(HALF)), row, 1)
        stored_grads = put(stored_grads, _flat(raw.astype(HALF)), row, 1)
        return stored, stored_grads, _extra_grads(dextras, raw, row, rows, tiles)

    weights, score_grads, dextras = _loop(total, block, first, (narrow, narrow, dextras))
    weights, score_grads = jax.lax.optimization_barrier((weights, score_grads))

    def second(row: Any, rows: int, carry: Any) -> Any:
        dq, dk, dv = carry
        dv = tiles.key_grad(dv, tiles.rows(weights, row, rows), tiles.rows(tiles.grad, row, rows))
        part = tiles.rows(score_grads, row, rows)
        dq = jax.lax.dynamic_update_slice_in_dim(dq, tiles.query_grad(part), row, 1)
        return dq, tiles.key_grad(dk, part, tiles.rows(tiles.q, row, rows)), dv

    dq, dk, dv = _loop(total, block, second, (dq, dk, dv))
    return _with_extras((dq, dk, dv, dextras), tiles)


def _extra_grads(extras: Extras, raw: jax.Array, row: Any, rows: int, tiles: _Tiles) -> Extras:
    """Adds a tile's share to the gradients of bias and slopes."""
    bias, slopes = extras.bias, extras.slopes
    if bias is not None:
        axes = tuple(axis for axis in range(3) if bias.shape[axis] == 1)
        share = raw.sum(axes, keepdims=True)
        if bias.shape[2] == 1:
            bias = bias + share
        else:
            bias = jax.lax.dynamic_update_slice_in_dim(bias, share, row, 2)
    if slopes is not None:
        far = jnp.abs(_distance(row, rows, 0, raw.shape[3], tiles.spec.shape))
        share = -(raw * far.astype(jnp.float32)).sum((0, 3))
        slopes = jax.lax.dynamic_update_slice_in_dim(slopes, share, row, 1)
    return dataclasses.replace(extras, bias=bias, slopes=slopes)


def _with_extras(result: Any, tiles: _Tiles) -> Any:
    """Casts the extras' gradients to their own dtypes; a mask has none."""
    dq, dk, dv, dextras = result
    bias = dextras.bias
    if bias is not None and tiles.extras.bias is not None:
        bias = bias.astype(tiles.extras.bias.dtype)
    return dq, dk, dv, dataclasses.replace(dextras, bias=bias)


def _backward(spec: _Spec, kept: Any, grad: jax.Array) -> Any:
    return _attend_backward(spec, kept, grad)


_attend.defvjp(_attend_forward, _backward)
