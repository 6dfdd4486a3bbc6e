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
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from ratrain_jax.errors import OptionError
from ratrain_jax.kernels.attention_backward import attend_backward
from ratrain_jax.kernels.attention_forward import HALF, Extras, Spec, attend_forward
from ratrain_jax.kernels.attention_plan import Attention
from ratrain_jax.kernels.attention_search import cost_attention, plan_attention
from ratrain_jax.kernels.cost import KernelCost
from ratrain_jax.kernels.dot_general import Arithmetic
from ratrain_jax.kernels.machine import Machine
from ratrain_jax.kernels.primitives import Kernel, define

BACKWARDS: Final = ("resident", "staged")


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
    spec = Spec(
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras, spec: Spec) -> jax.Array:
    return _attend_forward(q, k, v, extras, spec)[0]


def _attend_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras, spec: Spec
) -> tuple[jax.Array, Any]:
    q, k, v = (x.astype(HALF) for x in (q, k, v))
    given, names = _listed(extras)
    out, lse = attend_p.bind(q, k, v, *given, spec=AttendSpec(spec, names))
    return out.astype(spec.out), (q, k, v, out.astype(HALF), lse, extras)


def _attend_backward(spec: Spec, kept: Any, grad: jax.Array) -> Any:
    *arrays, extras = kept
    given, names = _listed(extras)
    results = attend_back_p.bind(*arrays, grad.astype(HALF), *given, spec=AttendSpec(spec, names))
    moving = [name for name in names if name != "mask"]
    dextras = dataclasses.replace(
        Extras(None, None, None), **dict(zip(moving, results[3:], strict=True))
    )
    return (*results[:3], dextras)


_attend.defvjp(_attend_forward, _attend_backward)


@dataclasses.dataclass(frozen=True, slots=True)
class AttendSpec:
    """What one pass fixes before its arrays.

    Attributes:
      spec: The attention.
      extras: Names of the extras that follow its arrays.
    """

    spec: Spec
    extras: tuple[str, ...]


def _listed(extras: Extras) -> tuple[list[jax.Array], tuple[str, ...]]:
    """The extras that there are, and their names."""
    pairs = [(name, getattr(extras, name)) for name in ("bias", "mask", "slopes")]
    found = [(name, x) for name, x in pairs if x is not None]
    return [x for _, x in found], tuple(name for name, _ in found)


def _named(given: Sequence[jax.Array], names: tuple[str, ...]) -> Extras:
    return dataclasses.replace(Extras(None, None, None), **dict(zip(names, given, strict=True)))


def _run_forward(*arrays: jax.Array, spec: AttendSpec) -> Sequence[jax.Array]:
    q, k, v, *given = arrays
    return attend_forward(q, k, v, _named(given, spec.extras), spec.spec)


def _run_backward(*arrays: jax.Array, spec: AttendSpec) -> Sequence[jax.Array]:
    *kept, grad = arrays[:6]
    extras = _named(arrays[6:], spec.extras)
    dq, dk, dv, dextras = attend_backward(spec.spec, (*kept, extras), grad)
    return dq, dk, dv, *_listed(dextras)[0]


def _forward_types(avals: Sequence[Any], spec: AttendSpec) -> list[tuple[tuple[int, ...], Any]]:
    shape, wide = spec.spec.shape, jnp.dtype(jnp.float32)
    return [(avals[0].shape, wide), ((shape.batch, shape.kv_heads, shape.rows), wide)]


def _backward_types(avals: Sequence[Any], spec: AttendSpec) -> list[tuple[tuple[int, ...], Any]]:
    dtypes = [jnp.dtype(dtype) for dtype in spec.spec.inputs]
    found = [(aval.shape, dtype) for aval, dtype in zip(avals[:3], dtypes, strict=True)]
    extras = dict(zip(spec.extras, avals[6:], strict=True))
    return found + [(x.shape, x.dtype) for name, x in extras.items() if name != "mask"]


def _problem(
    shapes: Sequence[tuple[int, ...]], spec: AttendSpec, which: str
) -> tuple[Attention, str]:
    """The attention, and which pass of it."""
    del shapes
    staged = which == "backward" and spec.spec.backward == "staged"
    return spec.spec.shape, "staged" if staged else which


def _flops(problem: tuple[Attention, str]) -> int:
    shape, which = problem
    return shape.flops("forward" if which == "forward" else "backward")


def _cost(problem: tuple[Attention, str], machine: Machine) -> KernelCost:
    shape, which = problem
    return cost_attention(shape, machine, which)


def _seconds(problem: tuple[Attention, str], machine: Machine) -> float:
    return _cost(problem, machine).seconds


def _kernel(which: str, types: Callable[..., Any]) -> Kernel:
    problem = functools.partial(_problem, which=which)
    return Kernel("attention", types, problem, _flops, _cost, _seconds)


attend_p = define("vmac_attention", _run_forward, _kernel("forward", _forward_types))
attend_back_p = define(
    "vmac_attention_backward", _run_backward, _kernel("backward", _backward_types)
)
