"""A GPT layer, embedding and head as Megatron-LM ran them in 2022, traced kernel by kernel.

Every function under `kernel` is one kernel of the GPU, as Megatron-LM had them (fused LayerNorm, causal softmax, bias–GELU
and bias–dropout–add; separate dropout of the attention): one call in the traced program, which reads its operands and
writes its results, and keeps for backward no more than its operands. Between them stand matrix products, one kernel
each, and changes of shape, which cost nothing. Attention scores are materialised. The loss is computed in float32.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ratrain_jax.lowering.tensor_parallel import Division, Mark, divide

HALF = jnp.float16
KEEP = 0.9
"""One less the dropout rate."""

VIEWS = frozenset({"broadcast_in_dim", "reshape", "slice", "squeeze", "transpose"})
"""Equations that are no kernel: they name another view of an array, or make zeros of nothing."""

Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Shape:
    """What fixes the shapes of a traced GPT.

    Attributes:
        hidden: h.
        heads: a.
        sequence: s.
        rows: b, sequences of a microbatch.
        vocabulary: V, as padded.
    """

    hidden: int
    heads: int
    sequence: int
    rows: int
    vocabulary: int


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A part of the model, divided over ranks.

    Attributes:
        forward: [parameters, input, given] -> [output, residuals].
        backward: [residuals, gradient of the output] -> [gradients of the parameters and of the input].
        parameters: types of the parameters.
        residuals: variables of `forward` that backward reads, but for parameters; of two views of an array, one.
    """

    forward: Division
    backward: Division
    parameters: tuple[Any, ...]
    residuals: tuple[Any, ...]


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function one kernel, forward and backward."""
    return jax.jit(jax.checkpoint(function))


@kernel
def layer_norm(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    """LayerNorm, in float32 inside."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    normed = centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return (normed * scale + shift).astype(HALF)


@kernel
def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """The bias of the queries, keys and values."""
    return x + bias


@kernel
def split_heads(qkv: jax.Array) -> tuple[jax.Array, ...]:
    """Queries, keys and values: views of one array in forward, put together in backward."""
    *axes, width = qkv.shape
    threefold = qkv.reshape(*axes, 3, width // 3)
    return tuple(threefold[..., i, :] for i in range(3))


def _masked(scores: jax.Array) -> jax.Array:
    return jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e4)


@kernel
def causal_softmax(scores: jax.Array) -> jax.Array:
    """Scale, mask and softmax."""
    return jax.nn.softmax(_masked(scores.astype(jnp.float32) * 0.125)).astype(HALF)


def unfused_softmax(scores: jax.Array) -> jax.Array:
    """The same, kernel by kernel in float32."""
    scaled = kernel(lambda x: x * 0.125)(widen(scores))
    return narrow(kernel(jax.nn.softmax)(kernel(_masked)(scaled)))


@kernel
def dropout(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Dropout; its mask is given, a byte an element."""
    return jnp.where(mask, x * HALF(1 / KEEP), HALF(0))


@kernel
def merge_heads(context: jax.Array) -> jax.Array:
    """The heads of each position side by side: a copy."""
    rows, heads, count, width = context.shape
    return context.transpose(2, 0, 1, 3).reshape(count, rows, heads * width)


@kernel
def bias_gelu(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Bias and GELU."""
    return jax.nn.gelu(x + bias)


@kernel
def bias_dropout_add(x: jax.Array, bias: jax.Array, base: jax.Array, mask: jax.Array) -> jax.Array:
    """Bias, dropout and the residual addition."""
    return base + jnp.where(mask, (x + bias) * HALF(1 / KEEP), HALF(0))


@kernel
def widen(x: jax.Array) -> jax.Array:
    """To float32."""
    return x.astype(jnp.float32)


@kernel
def narrow(x: jax.Array) -> jax.Array:
    """To float16."""
    return x.astype(HALF)


def core_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, *, fused: bool = True
) -> jax.Array:
    """Scores, softmax, dropout and context, with everything between them in memory."""
    scores = jnp.einsum("qbad,kbad->baqk", q, k)
    weights = causal_softmax(scores) if fused else unfused_softmax(scores)
    return merge_heads(jnp.einsum("baqk,kbad->baqd", dropout(weights, mask), v))


def layer(
    p: Arrays, x: jax.Array, *masks: jax.Array, fused: bool = True, selective: bool = False
) -> jax.Array:
    """A layer on [s, b, h].

    Args:
        p: its parameters.
        x: what the layer before made.
        masks: of the dropouts of the attention, of its output and of the MLP.
        fused: whether the softmax is one kernel.
        selective: whether backward computes the core of the attention again.
    """
    heads = masks[0].shape[1]
    qkv = add_bias(layer_norm(x, p["scale1"], p["shift1"]) @ p["qkv"], p["qkv_bias"])
    q, k, v = split_heads(qkv.reshape(*x.shape[:2], heads, -1))
    core = functools.partial(core_attention, fused=fused)
    core = jax.checkpoint(core) if selective else core
    mixed = core(q, k, v, masks[0]) @ p["dense"]
    x = bias_dropout_add(mixed, p["dense_bias"], x, masks[1])
    wide = layer_norm(x, p["scale2"], p["shift2"]) @ p["up"]
    narrow = bias_gelu(wide, p["up_bias"]) @ p["down"]
    return bias_dropout_add(narrow, p["down_bias"], x, masks[2])


def embedding(p: Arrays, _: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """Tokens' and positions' vectors, and dropout."""
    numbers = lax.GatherDimensionNumbers((2,), (0,), (0,))
    width = p["tokens"].shape[1]
    found = lax.gather(p["tokens"], tokens[..., None], numbers, (1, width), mode="clip")
    return dropout(add_positions(found, p["positions"]), mask)


@kernel
def add_positions(x: jax.Array, positions: jax.Array) -> jax.Array:
    """A vector for each place in the sequence."""
    return x + positions[:, None]


def head(p: Arrays, x: jax.Array, labels: jax.Array) -> jax.Array:
    """The last norm, the logits, and the loss of each token."""
    logits = layer_norm(x, p["scale"], p["shift"]) @ p["tokens"].T
    return cross_entropy(widen(logits), labels)


@jax.custom_vjp
def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss of each token, by the kernels of Megatron-LM's vocabulary-parallel one."""
    return _cross_entropy(logits, labels)[0]


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
    largest = jax.jit(lambda x: x.max(-1))(logits)
    shifted = jax.jit(lambda x, most: x - most[..., None])(logits, largest)
    raised = jax.jit(jnp.exp)(shifted)
    total = jax.jit(lambda x: x.sum(-1))(raised)
    picked = jax.jit(lambda x, at: x[..., 0] * at)(raised[..., :1], labels)
    weights = jax.jit(lambda x, by: x / by[..., None])(raised, total)
    return jax.jit(lambda by, of: jnp.log(by) - of)(total, picked), weights


def _cross_entropy_back(weights: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None]:
    return jax.jit(lambda x, by: x * by[..., None])(weights, gradient), None


cross_entropy.defvjp(_cross_entropy, _cross_entropy_back)


def layer_parameters(hidden: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's parameters."""
    h = hidden
    return {
        "scale1": (h,),
        "shift1": (h,),
        "qkv": (h, 3 * h),
        "qkv_bias": (3 * h,),
        "dense": (h, h),
        "dense_bias": (h,),
        "scale2": (h,),
        "shift2": (h,),
        "up": (h, 4 * h),
        "up_bias": (4 * h,),
        "down": (4 * h, h),
        "down_bias": (h,),
    }


@functools.cache
def trace_layer(shape: Shape, *, fused: bool = True, selective: bool = False) -> Part:
    """A layer of a shape; its attention mask is divided by heads."""
    s, b, h, a = shape.sequence, shape.rows, shape.hidden, shape.heads
    masks = [_given((b, a, s, s), bool), *[_given((s, b, h), bool)] * 2]
    run = functools.partial(layer, fused=fused, selective=selective)
    marks = [Mark.DIVIDED, Mark.WHOLE, Mark.WHOLE]
    return trace(run, layer_parameters(h), _given((s, b, h)), masks, marks)


@functools.cache
def trace_core(shape: Shape, *, fused: bool = True) -> Part:
    """The core of the attention, which selective recomputation runs again."""
    s, b, h, a = shape.sequence, shape.rows, shape.hidden, shape.heads
    q, mask = _given((s, b, a, h // a)), _given((b, a, s, s), bool)

    def run(_: Arrays, q: Any, k: Any, v: Any, mask: Any) -> Any:
        return core_attention(q, k, v, mask, fused=fused)

    return trace(run, {}, q, [q, q, mask], [Mark.DIVIDED] * 3, Mark.DIVIDED)


@functools.cache
def trace_embedding(shape: Shape) -> Part:
    """The embedding of a shape."""
    s, b, h = shape.sequence, shape.rows, shape.hidden
    given = [_given((s, b), jnp.int32), _given((s, b, h), bool)]
    tables = {"tokens": (shape.vocabulary, h), "positions": (s, h)}
    return trace(embedding, tables, _given(()), given, [Mark.WHOLE] * 2)


@functools.cache
def trace_head(shape: Shape) -> Part:
    """The head and loss of a shape."""
    s, b, h = shape.sequence, shape.rows, shape.hidden
    tables = {"tokens": (shape.vocabulary, h), "scale": (h,), "shift": (h,)}
    return trace(head, tables, _given((s, b, h)), [_given((s, b), jnp.int32)], [Mark.WHOLE])


def trace(
    function: Callable[..., jax.Array],
    parameters: dict[str, tuple[int, ...]],
    x: Any,
    given: Sequence[Any],
    marks: Sequence[Mark],
    mark: Mark = Mark.WHOLE,
) -> Part:
    """Traces a part and its gradient, without values.

    Args:
        function: of the parameters by name, the input, and what is given.
        parameters: their shapes.
        x: type of the input.
        given: types of what has no gradient.
        marks: of `given`.
        mark: of the input.
    """
    types = {name: _given(sizes) for name, sizes in parameters.items()}
    structure: list[Any] = []

    def forward(p: Arrays, x: Any, *given: Any) -> Any:
        output, pull = jax.vjp(lambda p, x: function(p, x, *given), p, x)
        leaves, tree = jax.tree.flatten(pull)
        structure.append(tree)
        return output, leaves

    made, (output, leaves) = jax.make_jaxpr(forward, return_shape=True)(types, x, *given)
    pulled = jax.make_jaxpr(lambda leaves, g: structure[0].unflatten(leaves)(g))(leaves, output)
    divided = divide(made, [*[Mark.PARAMETER] * len(types), mark, *marks])
    kept = made.jaxpr.outvars[1:]
    whence = [divided.mark(atom) for atom in kept]
    whole = {eqn.outvars[0]: eqn.invars[0] for eqn in made.eqns if eqn.primitive.name in VIEWS}
    arrays = {whole.get(v, v): v for v in reversed(kept) if divided.mark(v) != Mark.PARAMETER}
    return Part(
        divided,
        divide(pulled, [*whence, divided.mark(made.jaxpr.outvars[0])]),
        tuple(types.values()),
        tuple(reversed(arrays.values())),
    )


def _given(sizes: tuple[int, ...], dtype: Any = HALF) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)
