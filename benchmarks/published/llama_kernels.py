"""A LLaMA layer and head as Megatron-LM ran them in 2023, traced kernel by kernel (see `gpt_kernels`).

Attention is FlashAttention-2's, which keeps queries, keys, values, its result and a float32 a row. Rotation, RMSNorm and
each of the two steps of SwiGLU are kernels. Residual additions go through the same fused kernel as GPT's: with a dropout
rate of 0 it still keeps its mask, a byte an element.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from gpt_kernels import HALF, KEEP, Arrays, Part, cross_entropy, kernel, split_heads, trace, widen
from jax import ShapeDtypeStruct, lax

from ratrain_jax.lowering.tensor_parallel import Mark


@kernel
def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm, in float32 inside."""
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * scale).astype(HALF)


@kernel
def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions, on [s, b, a, d]."""
    count, half = x.shape[0], x.shape[-1] // 2
    angles = jnp.arange(count)[:, None] / 10000.0 ** (jnp.arange(half) / half)
    cos, sin = (f(angles)[:, None, None].astype(HALF) for f in (jnp.cos, jnp.sin))
    one, other = x[..., :half], x[..., half:]
    return jnp.concatenate([one * cos - other * sin, one * sin + other * cos], axis=-1)


@jax.custom_vjp
def flash_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention on [s, b, a, d], scores never in memory."""
    return _flash(q, k, v)[0]


def _attention(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    scores = jnp.einsum("qbad,kbad->baqk", q, k).astype(jnp.float32)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(causal, scores / math.sqrt(q.shape[-1]), -jnp.inf)
    weights = jax.nn.softmax(scores).astype(HALF)
    return jnp.einsum("baqk,kbad->qbad", weights, v), jax.nn.logsumexp(scores, -1)


_flash = jax.jit(_attention)


def _flash_forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple]:
    mixed, sums = _flash(q, k, v)
    return mixed, (q, k, v, mixed, sums)


@jax.jit
def _flash_backward(kept: tuple, gradient: jax.Array) -> tuple[jax.Array, ...]:
    _, pull = jax.vjp(lambda *qkv: _attention(*qkv)[0], *kept[:3])
    return pull(gradient)


flash_attention.defvjp(_flash_forward, _flash_backward)


@kernel
def silu(x: jax.Array) -> jax.Array:
    """SiLU of the gate."""
    return jax.nn.silu(x)


@kernel
def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
    """The gated half."""
    return x * y


@kernel
def dropout_add(x: jax.Array, base: jax.Array, mask: jax.Array) -> jax.Array:
    """Dropout and the residual addition."""
    return base + jnp.where(mask, x * HALF(1 / KEEP), HALF(0))


def layer(p: Arrays, x: jax.Array, *masks: jax.Array, heads: int) -> jax.Array:
    """A layer on [s, b, h]."""
    qkv = rms_norm(x, p["scale1"]) @ p["qkv"]
    q, k, v = split_heads(qkv.reshape(*x.shape[:2], heads, -1))
    mixed = flash_attention(rotate(q), rotate(k), v).reshape(x.shape)
    x = dropout_add(mixed @ p["dense"], x, masks[0])
    normed = rms_norm(x, p["scale2"])
    gated = multiply(silu(normed @ p["gate"]), normed @ p["up"])
    return dropout_add(gated @ p["down"], x, masks[1])


def head(p: Arrays, x: jax.Array, labels: jax.Array) -> jax.Array:
    """The last norm, the logits, and the loss of each token."""
    return cross_entropy(widen(rms_norm(x, p["scale"]) @ p["head"]), labels)


def layer_parameters(hidden: int, wide: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's parameters."""
    h = hidden
    return {
        "scale1": (h,),
        "qkv": (h, 3 * h),
        "dense": (h, h),
        "scale2": (h,),
        "gate": (h, wide),
        "up": (h, wide),
        "down": (wide, h),
    }


@functools.cache
def trace_layer(hidden: int, wide: int, heads: int, sequence: int, rows: int) -> Part:
    """A layer of a shape."""
    x = (sequence, rows, hidden)
    masks = [ShapeDtypeStruct(x, bool)] * 2
    run = functools.partial(layer, heads=heads)
    shapes = layer_parameters(hidden, wide)
    return trace(run, shapes, ShapeDtypeStruct(x, HALF), masks, [Mark.WHOLE] * 2)


@functools.cache
def trace_head(hidden: int, vocabulary: int, sequence: int, rows: int) -> Part:
    """The head and loss of a shape."""
    labels = [ShapeDtypeStruct((sequence, rows), jnp.int32)]
    shapes = {"scale": (hidden,), "head": (hidden, vocabulary)}
    x = ShapeDtypeStruct((sequence, rows, hidden), HALF)
    return trace(head, shapes, x, labels, [Mark.WHOLE])
