"""The arithmetic of the micro-kernels, bit for bit, and a fast stand-in with the same blocks.

Specification. Operands are float16. C is summed in *panels* of K, the plan's `k_a` inside its `k_g`
blocks, in order. One step is a fused multiply-add: product and sum are exact and rounded once (to
nearest, ties to even) to the accumulator's format. Every sum starts at +0.

* fp32: one float32 sum runs through all panels.
* fp16: one float16 sum runs through all panels.
* promote: a float16 sum a panel; at its end it is added, with one rounding, to a float32 sum.
* In the "dot" flow, lane l of L sums the panel's elements l, l+L, l+2L, … in the format above
  (float16 for fp16 and promote), then the lanes are added by halves, lane l to lane l+L/2, with
  a rounding each, and the total is added to C's sum (float16 for fp16, else float32).

The finished sum is rounded once to C's dtype. Overflow, NaN, infinities, signed zeros and float16
subnormals are IEEE's; which NaN it is, is open.

Why it is exact on XLA. The product of two float16 numbers fits float32, so that fp32's step is a
plain multiply and add, contracted or not. Every product, and so every sum, is a multiple of 2^-48:
float32 subnormals, which XLA's CPU backend flushes to zero, never appear. fp16's step would
round twice through float32; its sum is first rounded *to odd*, from which the second rounding is
right. XLA folds 0 + x to x, which loses +0 + -0 = +0: first steps are written without the sum.

`mode="fast"` gives each panel to XLA's dot with float32 sums and rounds where the accumulator's
format asks for it between panels.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp

from ratrain_jax.errors import OptionError
from ratrain_jax.kernels.tiles import Gemm, TilePlan

MODES: Final = ("exact", "fast")
_UNROLL: Final = {"fp32": 16, "fp16": 1, "promote": 1}
_DOT_ELEMENTS: Final = 1 << 22  # lane sums held at once in the "dot" flow
_UNROLLED: Final = 4  # panels or blocks written out one by one

Step = Callable[[Any, Any], Any]
Step3 = Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]


def panels(depth: int, plan: TilePlan) -> list[tuple[int, int]]:
    """Returns start and length of the panels of K, in order.

    Example:
      >>> plan = TilePlan(6, 5, 6, 256, 2, 6, 6, 4, 2)
      >>> panels(7, plan)
      [(0, 2), (2, 2), (4, 1), (5, 2)]
    """
    found = []
    for block in range(0, depth, plan.k_g):
        end = min(block + plan.k_g, depth)
        found += [(at, min(plan.k_a, end - at)) for at in range(block, end, plan.k_a)]
    return found


def round_to_odd_sum(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns x + y in float32, rounded to odd: an inexact sum gets an odd last bit."""
    total = x + y
    shadow = total - x
    error = (x - (total - shadow)) + (y - shadow)
    bits = jax.lax.bitcast_convert_type(total, jnp.int32)
    outwards = jnp.where((error > 0) == (bits >= 0), 1, -1)
    inexact = (error != 0) & (bits & 1 == 0) & jnp.isfinite(total)
    return jax.lax.bitcast_convert_type(jnp.where(inexact, bits + outwards, bits), jnp.float32)


def _to_half(x: jax.Array) -> jax.Array:
    """Rounds to float16 and keeps the value in float32."""
    return x.astype(jnp.float16).astype(jnp.float32)


def _narrow_add(total: jax.Array, product: jax.Array) -> jax.Array:
    return _to_half(round_to_odd_sum(total, product))


def _wide_add(total: jax.Array, product: jax.Array) -> jax.Array:
    return total + product


def _from_zero(x: jax.Array) -> jax.Array:
    """Returns +0 + x, which XLA would fold to x."""
    return jnp.where(x == 0, jnp.float32(0), x)


def _adder(gemm: Gemm) -> Step:
    return _wide_add if gemm.widening == 2 else _narrow_add


def _rank_one(a: jax.Array, b: jax.Array, k: Any) -> jax.Array:
    column = jax.lax.dynamic_slice_in_dim(a, k, 1, 2)
    return column * jax.lax.dynamic_slice_in_dim(b, k, 1, 1)


def _outer_sum(a: jax.Array, b: jax.Array, total: jax.Array | None, gemm: Gemm) -> jax.Array:
    """Adds the steps of (batch, M, k) and (batch, k, N), held in float32, to a sum, in order."""
    add, unroll = _adder(gemm), _UNROLL[gemm.accumulator]
    depth, start = a.shape[2], 0
    if total is None:
        total, start = _from_zero(_rank_one(a, b, 0)), 1
        if gemm.widening == 1:
            total = _to_half(total)
    sums: jax.Array = total
    turns = (depth - start) // unroll

    def turn(index: Any, value: jax.Array) -> jax.Array:
        at = start + index * unroll
        columns = jax.lax.dynamic_slice_in_dim(a, at, unroll, 2)
        rows = jax.lax.dynamic_slice_in_dim(b, at, unroll, 1)
        for k in range(unroll):
            value = add(value, columns[:, :, k, None] * rows[:, None, k])
        return value

    if turns:
        sums = jax.lax.fori_loop(0, turns, turn, sums)
    for k in range(start + turns * unroll, depth):
        sums = add(sums, _rank_one(a, b, k))
    return sums


def _lane_sums(a: jax.Array, b: jax.Array, lanes: int, gemm: Gemm) -> jax.Array:
    """Returns the total over all lanes of one panel of the "dot" flow."""
    add, depth = _adder(gemm), a.shape[2]

    def products(at: Any, size: int) -> jax.Array:
        left = jax.lax.dynamic_slice_in_dim(a, at, size, 2)
        right = jax.lax.dynamic_slice_in_dim(b, at, size, 1)
        return left[:, :, None, :] * jnp.swapaxes(right, 1, 2)[:, None]

    head = min(lanes, depth)
    first = _from_zero(products(0, head))
    sums = first if gemm.widening == 2 else _to_half(first)
    whole = depth // lanes
    if whole > 1:
        sums = jax.lax.fori_loop(
            1, whole, lambda i, value: add(value, products(i * lanes, lanes)), sums
        )
    rest = depth - whole * lanes
    if whole and rest:
        tail = add(sums[..., :rest], products(whole * lanes, rest))
        sums = jnp.concatenate([tail, sums[..., rest:]], -1)
    return _halves(sums, lanes, add)


def _halves(sums: jax.Array, lanes: int, add: Step) -> jax.Array:
    """Adds lanes by halves; lanes that had no element hold +0."""
    while lanes > 1:
        lanes //= 2
        upper = sums[..., lanes:]
        paired = upper.shape[-1]
        if paired:
            met = add(sums[..., :paired], upper)
            sums = jnp.concatenate([met, _from_zero(sums[..., paired:lanes])], -1)
        else:
            sums = _from_zero(sums)
    return sums[..., 0]


def _dot_panel(a: jax.Array, b: jax.Array, lanes: int, gemm: Gemm) -> jax.Array:
    """The "dot" flow of one panel, a few rows at a time to bound memory."""
    batch, rows, _ = a.shape
    at_once = max(1, _DOT_ELEMENTS // max(1, batch * b.shape[2] * lanes))
    if rows <= at_once:
        return _lane_sums(a, b, lanes, gemm)
    chunks = [_lane_sums(a[:, at : at + at_once], b, lanes, gemm) for at in range(0, rows, at_once)]
    return jnp.concatenate(chunks, 1)


def _exact_panel(
    a: jax.Array, b: jax.Array, total: jax.Array | None, gemm: Gemm, plan: TilePlan, lanes: int
) -> jax.Array:
    if plan.dot:
        panel = _dot_panel(a, b, lanes, gemm)
    elif gemm.promotes:
        panel = _outer_sum(a, b, None, gemm)
    else:
        return _outer_sum(a, b, total, gemm)
    if total is None:
        return _from_zero(panel)
    return _narrow_add(total, panel) if gemm.acc_bytes == 2 else total + panel


def _fast_panel(
    a: jax.Array, b: jax.Array, total: jax.Array | None, gemm: Gemm, plan: TilePlan, lanes: int
) -> jax.Array:
    del plan, lanes
    panel = jnp.matmul(a, b, preferred_element_type=jnp.float32, precision="highest")
    if gemm.promotes:
        panel = _to_half(panel)
    total = panel if total is None else total + panel
    return _to_half(total) if gemm.acc_bytes == 2 else total


def product(
    a: jax.Array, b: jax.Array, gemm: Gemm, plan: TilePlan, mode: str, lanes: int
) -> jax.Array:
    """Returns C for operands (batch, M, K) and (batch, K, N) of float16, in the plan's order.

    Args:
      a: The left operand, not transposed.
      b: The right operand, not transposed.
      gemm: The product, for its formats.
      plan: The plan, for its panels and flow.
      mode: "exact" or "fast".
      lanes: Lanes of a vector register of float16.

    Returns:
      C of `gemm.out_dtype`.

    Raises:
      OptionError: If `mode` is neither.
    """
    if mode not in MODES:
        raise OptionError(f"mode is {mode!r}; use 'exact' or 'fast'.")
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    if mode == "exact" and not plan.dot and not gemm.promotes:
        # One sum runs through all panels, so that their borders do not matter.
        return _outer_sum(a, b, None, gemm).astype(gemm.out_dtype)
    one = _exact_panel if mode == "exact" else _fast_panel
    panel = functools.partial(one, gemm=gemm, plan=plan, lanes=lanes)
    return _all_blocks(a, b, panel, plan).astype(gemm.out_dtype)


def _all_blocks(a: jax.Array, b: jax.Array, panel: Step3, plan: TilePlan) -> jax.Array:
    """Sums block after block of K, and in each block panel after panel."""
    depth = a.shape[2]

    def whole_panels(at: Any, count: int, total: jax.Array | None) -> jax.Array | None:
        def one(index: Any, value: jax.Array | None) -> jax.Array:
            return panel(*_cut(a, b, at + index * plan.k_a, plan.k_a), value)

        return _repeat(one, count, total)

    def block(at: Any, size: int, total: jax.Array | None) -> jax.Array:
        count = size // plan.k_a
        total = whole_panels(at, count, total)
        rest = size - count * plan.k_a
        if rest:
            total = panel(*_cut(a, b, at + count * plan.k_a, rest), total)
        return _some(total)

    blocks = depth // plan.k_g
    total = _repeat(lambda index, value: block(index * plan.k_g, plan.k_g, value), blocks, None)
    if depth > blocks * plan.k_g:
        total = block(blocks * plan.k_g, depth - blocks * plan.k_g, total)
    return _some(total)


def _cut(a: jax.Array, b: jax.Array, at: Any, size: int) -> tuple[jax.Array, jax.Array]:
    left = jax.lax.dynamic_slice_in_dim(a, at, size, 2)
    return left, jax.lax.dynamic_slice_in_dim(b, at, size, 1)


def _repeat(
    one: Callable[[Any, jax.Array | None], jax.Array], count: int, total: jax.Array | None
) -> jax.Array | None:
    """Applies `one` `count` times: in a loop where unrolling would bloat the program."""
    start = 0
    if count > _UNROLLED and total is None:
        total, start = one(0, None), 1
    if count > _UNROLLED:
        return jax.lax.fori_loop(start, count, one, total)
    for index in range(count):
        total = one(index, total)
    return total


def _some(total: jax.Array | None) -> jax.Array:
    """A sum over K >= 1 elements has begun."""
    if total is None:
        raise OptionError("a matrix product over no elements has no panels; K must be at least 1.")
    return total
