"""Writes an attention that was found (`attention_match`) as a call of the attention kernel.

The kernel takes (batch, positions, heads, head size). The first of the batch labels becomes its batch, the others its key
heads; the last of the row labels, in the order of the probabilities' axes, its queries, the others the query heads that
share keys.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ratrain_jax.errors import MachineError, OptionError
from ratrain_jax.kernels import Arithmetic, Attention, cost_attention, vmac_attention
from ratrain_jax.lowering.attention_match import Extra, Finder, Labels, Match, is_causal
from ratrain_jax.lowering.graph import Atom, Eqn
from ratrain_jax.lowering.rewrite import constant

HEAD = -1
"""Stands for the axis of the head's elements among labels."""


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A call of the attention kernel in the place of equations.

    Attributes:
        operands: Q, K, V as the loss has them.
        extras: biases and masks.
        run: takes operands and extras, returns what `values` returns.
        values: the equation that it stands for.
        scores: the product that it makes needless.
        shape: the attention.
    """

    operands: tuple[Atom, Atom, Atom]
    extras: tuple[Atom, ...]
    run: Callable[..., jax.Array]
    values: Eqn
    scores: Eqn
    shape: Attention


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """The roles of labels, and their sizes."""

    batch: tuple[int, ...]
    heads: tuple[int, ...]
    groups: tuple[int, ...]
    query: tuple[int, ...]
    keys: int
    sizes: Mapping[int, int]

    def size(self, labels: Sequence[int]) -> int:
        return math.prod(self.sizes[label] for label in labels)

    def full(self, labels: Sequence[int]) -> list[int]:
        return [self.sizes[label] for label in labels]


def attention_call(match: Match, finder: Finder, arithmetic: Arithmetic) -> Call | None:
    """The kernel's call for an attention, or None where no plan of the machine fits it.

    Args:
        match: what was found.
        finder: what found it.
        arithmetic: how to plan and compute.
    """
    layout = _layout(match)
    sides = (match.query, 1 - match.query)
    labels = [*(_operand_labels(match.scores, side, match) for side in sides), _value_labels(match)]
    operands = (
        match.scores.invars[sides[0]],
        match.scores.invars[sides[1]],
        match.values.invars[1 - match.weights],
    )
    if layout is None or not _fits(layout, labels):
        return None
    masks, causal = _masks(match, finder, layout)
    shape = Attention(
        batch=layout.size(layout.batch),
        heads=layout.size((*layout.heads, *layout.groups)),
        kv_heads=layout.size(layout.heads),
        queries=layout.size(layout.query),
        keys=layout.sizes[layout.keys],
        head_size=layout.sizes[HEAD],
        causal=causal,
        bias=bool(match.biases),
        accumulator=arithmetic.accumulator,
    )
    try:
        for which in ("forward", "backward"):
            cost_attention(shape, arithmetic.machine, which)
    except (MachineError, OptionError):
        return None
    run = _runner(match, layout, labels, masks, causal, arithmetic)
    extras = tuple(extra.atom for extra in (*match.biases, *masks))
    return Call(operands, extras, run, match.values, match.scores, shape)


def _layout(match: Match) -> _Layout | None:
    weights = match.values.invars[match.weights].aval
    (left, right), (left_batch, right_batch) = match.values.params["dimension_numbers"]
    contracted = (left, right)[match.weights]
    shared = (left_batch, right_batch)[match.weights]
    named = [axis for axis, size in enumerate(weights.shape) if size > 1]
    (keys,) = (axis for axis in contracted if axis in named)
    batch = [axis for axis in named if axis in shared]
    rows = [axis for axis in named if axis not in shared and axis != keys]
    (q_axes, _), (q_batch, _) = match.scores.params["dimension_numbers"]
    if {match.labels[i] for i in range(len(q_batch))} - {None} != set(batch):
        return None
    head = math.prod(match.scores.invars[0].aval.shape[axis] for axis in q_axes)
    sizes = {axis: weights.shape[axis] for axis in named} | {HEAD: head}
    return _Layout(
        tuple(batch[:1]), tuple(batch[1:]), tuple(rows[:-1]), tuple(rows[-1:]), keys, sizes
    )


def _operand_labels(scores: Eqn, side: int, match: Match) -> list[int | None]:
    """Labels of Q's or K's axes; every contracted axis is None and stands in order."""
    contracted, batch = (pair[side] for pair in scores.params["dimension_numbers"])
    ranks = [atom.aval.ndim for atom in scores.invars]
    first_free = ranks[0] - len(batch) - len(scores.params["dimension_numbers"][0][0])
    at = len(batch) + (first_free if side else 0)
    labels: list[int | None] = [None] * ranks[side]
    for place, axis in enumerate(batch):
        labels[axis] = match.labels[place]
    for axis in range(ranks[side]):
        if axis not in contracted and axis not in batch:
            labels[axis] = match.labels[at]
            at += 1
    return labels


def _value_labels(match: Match) -> list[int | None]:
    """Labels of V's axes: those of the probabilities that it shares, and HEAD for the others."""
    side = 1 - match.weights
    contracted, batch = match.values.params["dimension_numbers"]
    labels: list[int | None] = [HEAD] * match.values.invars[side].aval.ndim
    for pairs in (contracted, batch):
        for here, there in zip(pairs[side], pairs[match.weights], strict=True):
            labels[here] = there
    shape = match.values.invars[side].aval.shape
    return [label if size > 1 else None for label, size in zip(labels, shape, strict=True)]


def _fits(layout: _Layout, labels: Sequence[Sequence[int | None]]) -> bool:
    """Whether the operands have just the labels that the kernel wants."""
    query, key, value = ({x for x in named if x is not None} for named in labels)
    shared = {*layout.batch, *layout.heads}
    return (
        query == {*shared, *layout.groups, *layout.query}
        and key == {*shared, layout.keys}
        and value == {*shared, layout.keys, HEAD}
        and list(labels[2]).count(HEAD) == 1
        and layout.sizes[HEAD] > 1
    )


def _masks(match: Match, finder: Finder, layout: _Layout) -> tuple[list[Extra], bool]:
    """The masks that the kernel must be given, and whether one of them is the causal one."""
    kept: list[Extra] = []
    causal = False
    stack = list(match.masks)
    while stack:
        extra = stack.pop()
        eqn = finder.maker(extra.atom)
        if extra.factor > 0 and eqn is not None and eqn.primitive.name == "and":
            stack.extend(finder.extra(atom, extra.labels) for atom in eqn.invars)
            continue
        value = constant(finder.graph, extra.atom)
        if value is not None:
            value = value if extra.factor > 0 else ~value
            if value.all():
                continue
            if layout.query and is_causal(value, extra.labels, layout.query[0], layout.keys):
                causal = True
                continue
        kept.append(extra)
    return kept[::-1], causal


def _runner(
    match: Match,
    layout: _Layout,
    labels: Sequence[Sequence[int | None]],
    masks: Sequence[Extra],
    causal: bool,
    arithmetic: Arithmetic,
) -> Callable[..., jax.Array]:
    contracted = match.scores.params["dimension_numbers"][0]
    heads = [contracted[match.query], contracted[1 - match.query], ()]
    out = match.values.outvars[0].aval
    order = _output_labels(match)

    def run(*arrays: jax.Array) -> jax.Array:
        operands = [
            _arranged(x, named, inner, layout)
            for x, named, inner in zip(arrays[:3], labels, heads, strict=True)
        ]
        given = arrays[3:]
        bias = mask = None
        for x, extra in zip(given, match.biases, strict=False):
            x = _spread(x.astype(jnp.float32) * np.float32(extra.factor), extra.labels, layout)
            bias = x if bias is None else bias + x
        for x, extra in zip(given[len(match.biases) :], masks, strict=True):
            x = _spread(x if extra.factor > 0 else ~x, extra.labels, layout)
            mask = x if mask is None else mask & x
        mixed = vmac_attention(
            operands[0],
            operands[1],
            operands[2],
            bias,
            mask,
            scale=match.scale,
            is_causal=causal,
            machine=arithmetic.machine,
            accumulator=arithmetic.accumulator,
            mode=arithmetic.mode,
        )
        return _returned(mixed, order, layout).reshape(out.shape).astype(out.dtype)

    return run


def _arranged(
    x: jax.Array, labels: Sequence[int | None], inner: Sequence[int], layout: _Layout
) -> jax.Array:
    """An operand as (batch, positions, heads, head size)."""
    rows = layout.keys in labels
    groups = () if rows else layout.groups
    positions = (layout.keys,) if rows else layout.query
    wanted = [*layout.batch, *layout.heads, *groups, *positions]
    axes = [labels.index(label) for label in wanted]
    last = list(inner) or [labels.index(HEAD)]
    rest = [axis for axis in range(x.ndim) if axis not in (*axes, *last)]
    x = x.transpose([*axes, *last, *rest])
    heads = layout.size((*layout.heads, *groups))
    shape = (layout.size(layout.batch), heads, layout.size(positions), layout.sizes[HEAD])
    return x.reshape(shape).swapaxes(1, 2)


def _spread(x: jax.Array, labels: Labels, layout: _Layout) -> jax.Array:
    """A bias or mask as (batch, heads, queries, keys), each of them 1 where it does not matter."""
    wanted = [*layout.batch, *layout.heads, *layout.groups, *layout.query, layout.keys]
    axes = [labels.index(label) for label in wanted if label in labels]
    rest = [axis for axis in range(x.ndim) if axis not in axes]
    x = x.transpose([*axes, *rest])
    x = x.reshape([layout.sizes[label] if label in labels else 1 for label in wanted])
    shape: list[int] = []
    spread: list[int] = []
    for group in (layout.batch, (*layout.heads, *layout.groups), layout.query, (layout.keys,)):
        whole = any(label in labels for label in group)
        spread += layout.full(group) if whole else [1] * len(group)
        shape.append(layout.size(group) if whole else 1)
    return jnp.broadcast_to(x, spread).reshape(shape)


def _output_labels(match: Match) -> list[int]:
    """Labels of the axes of the product with V, those of size 1 left out."""
    contracted, batch = match.values.params["dimension_numbers"]
    order: list[int] = list(batch[match.weights])
    for side, atom in enumerate(match.values.invars):
        free = [a for a in range(atom.aval.ndim) if a not in (*contracted[side], *batch[side])]
        order += free if side == match.weights else [HEAD] * len(free)
    shape = match.values.outvars[0].aval.shape
    return [label for label, size in zip(order, shape, strict=True) if size > 1]


def _returned(mixed: jax.Array, order: Sequence[int], layout: _Layout) -> jax.Array:
    """The kernel's output with its axes in the order of the equation that it stands for."""
    made = [*layout.batch, *layout.query, *layout.heads, *layout.groups, HEAD]
    split = mixed.reshape(layout.full(made))
    return split.transpose([made.index(label) for label in order])
