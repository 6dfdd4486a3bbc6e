"""What each primitive does on shards: one line a primitive.

A rule is given an equation, the layouts of its operands, the axis along which its result is wanted
cut (or None) and D. It answers with a `Local`, or with None if the equation must run whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ratrain_jax.lowering.graph import Eqn
from ratrain_jax.lowering.layouts import UNIFORM, Axis, Flat, Layout, Pending, is_cut, local_shape


@dataclasses.dataclass(frozen=True, slots=True)
class Local:
    """What an equation does on one device.

    Attributes:
        takes: the layout that it takes each operand in.
        params: parameters that replace its own.
        gives: the layout of each result.
        passes: whether its result is its first operand as it is held.
        whole: whether it runs on whole operands for want of a rule.
    """

    takes: tuple[Layout, ...]
    params: Mapping[str, Any]
    gives: tuple[Layout, ...]
    passes: bool = False
    whole: bool = False


Rule = Callable[[Eqn, Sequence[Layout], Axis, int], Local | None]

RULES: dict[str, Rule] = {}

REDUCTIONS: dict[str, str] = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "and",
    "reduce_or": "or",
}
"""Reductions, and how the contributions of shards join."""


def combine_of(eqn: Eqn) -> str:
    """How the devices' results of an equation join if each computes it from its own shards; `same` if they do not."""
    if eqn.primitive.name == "dot_general":
        return "sum"
    return REDUCTIONS.get(eqn.primitive.name, "same")


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


# fmt: off
ELEMENTWISE = (
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bessel_i0e", "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex",
    "conj", "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq",
    "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma",
    "igamma_grad_a", "igammac", "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p",
    "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "polygamma",
    "population_count", "pow", "real", "reduce_precision", "regularized_incomplete_beta", "rem",
    "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical",
    "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
)
# fmt: on
"""Primitives that work element by element."""


@_rule(*ELEMENTWISE)
def _elementwise(eqn: Eqn, layouts: Sequence[Layout], want: Axis, devices: int) -> Local | None:
    shape = eqn.outvars[0].aval.shape
    shapes = [atom.aval.shape for atom in eqn.invars]
    if not all(_fits(operand, shape) for operand in shapes):
        return None
    if all(lay is UNIFORM or not dims for lay, dims in zip(layouts, shapes, strict=True)):
        uniform = any(lay is UNIFORM for lay in layouts)
        takes = tuple(UNIFORM if lay is UNIFORM else None for lay in layouts)
        return Local(takes, {}, (UNIFORM if uniform else None,))
    target = _commonest(
        [lay for lay, dims in zip(layouts, shapes, strict=True) if dims == shape], want
    )
    if isinstance(target, Flat):
        takes = tuple(target if dims == shape else None for dims in shapes)
    else:
        takes = tuple(
            target if dims and target is not None and dims[target] == shape[target] else None
            for dims in shapes
        )
    return Local(takes, {}, (target,))


def _fits(operand: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether an operand is a scalar, or has the result's rank and no other sizes than its and 1."""
    same_rank = len(operand) == len(shape)
    return not operand or (
        same_rank and all(a in (b, 1) for a, b in zip(operand, shape, strict=True))
    )


def _commonest(layouts: Sequence[Layout], want: Axis) -> Axis | Flat:
    cut = Counter(layout for layout in layouts if is_cut(layout))
    return cut.most_common(1)[0][0] if cut else want


@_rule("broadcast_in_dim")
def _broadcast(eqn: Eqn, layouts: Sequence[Layout], want: Axis, devices: int) -> Local | None:
    (layout, *others), operand = layouts, eqn.invars[0].aval.shape
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    if others:
        return None
    if not operand or layout is UNIFORM:
        return Local((layout if layout is UNIFORM else None,), {}, (UNIFORM,), passes=True)
    if isinstance(layout, int):
        out = dims[layout]
        return Local((layout,), {"shape": local_shape(shape, out, devices)}, (out,))
    if want is None or isinstance(layout, Flat):
        return None if isinstance(layout, Flat) else Local((None,), {}, (None,))
    takes = None
    if want in dims and operand[dims.index(want)] == shape[want]:
        takes = dims.index(want)
    return Local((takes,), {"shape": local_shape(shape, want, devices)}, (want,))


@_rule("reshape")
def _reshape(eqn: Eqn, layouts: Sequence[Layout], want: Axis, devices: int) -> Local | None:
    layout, operand = layouts[0], eqn.invars[0].aval.shape
    shape = tuple(eqn.params["new_sizes"])
    if eqn.params.get("dimensions") is not None or len(layouts) > 1:
        return None
    if layout is UNIFORM:
        return Local((UNIFORM,), {}, (UNIFORM,), passes=True)
    if isinstance(layout, int):
        out = _same_blocks(operand, layout, shape, devices)
        if out is not None:
            return Local((layout,), {"new_sizes": local_shape(shape, out, devices)}, (out,))
        if len(shape) == 1:
            size = math.prod(operand) // devices
            return Local((layout,), {"new_sizes": (size,)}, (Flat(operand, layout),))
        return None
    if isinstance(layout, Flat):
        if layout.shape != shape:
            return None
        return Local(
            (layout,), {"new_sizes": local_shape(shape, layout.axis, devices)}, (layout.axis,)
        )
    return Local((None,), {}, (None,))


def _same_blocks(operand: tuple[int, ...], axis: int, shape: tuple[int, ...], devices: int) -> Axis:
    """The axis of the new shape whose blocks are the very blocks along the old axis, if there is one."""
    before = math.prod(operand[:axis])
    for out, size in enumerate(shape):
        if math.prod(shape[:out]) == before and size % devices == 0:
            return out
    return None


@_rule("squeeze")
def _squeeze(eqn: Eqn, layouts: Sequence[Layout], want: Axis, devices: int) -> Local | None:
    (layout,) = layouts
    if layout is UNIFORM:
        return Local((UNIFORM,), {}, (UNIFORM,), passes=True)
    if not isinstance(layout, int):
        return Local((None,), {}, (None,)) if not isinstance(layout, Flat) else None
    out = layout - sum(axis < layout for axis in eqn.params["dimensions"])
    return Local((layout,), {}, (out,))


@_rule("transpose")
def _transpose(eqn: Eqn, layouts: Sequence[Layout], want: Axis, devices: int) -> Local | None:
    (layout,) = layouts
    if layout is UNIFORM:
        return Local((UNIFORM,), {}, (UNIFORM,), passes=True)
    if not isinstance(layout, int):
        return Local((None,), {}, (None,)) if not isinstance(layout, Flat) else None
    return Local((layout,), {}, (tuple(eqn.params["permutation"]).index(layout),))


@_rule(*REDUCTIONS)
def _reduce(eqn: Eqn, layouts: Sequence[Layout], want: Axis, devices: int) -> Local | None:
    (layout,) = layouts
    axes, combine = eqn.params["axes"], REDUCTIONS[eqn.primitive.name]
    if isinstance(layout, Flat):
        return Local((layout,), {}, (Pending(combine),))
    if not isinstance(layout, int):
        return Local((None,), {}, (None,))
    if layout in axes:
        return Local((layout,), {}, (Pending(combine),))
    return Local((layout,), {}, (layout - sum(axis < layout for axis in axes),))


@_rule("dot_general")
def _contract(eqn: Eqn, layouts: Sequence[Layout], want: Axis, devices: int) -> Local | None:
    """A contraction of all axes is a sum over elements, so shards contribute to it."""
    (left, right), _ = eqn.params["dimension_numbers"]
    if eqn.outvars[0].aval.shape:
        return None
    target = _commonest(layouts, None)
    if target is None:
        return Local((None, None), {}, (None,))
    if isinstance(target, Flat):
        return Local((target, target), {}, (Pending("sum"),))
    first = layouts[0] == target
    other = right[tuple(left).index(target)] if first else left[tuple(right).index(target)]
    takes = (target, other) if first else (other, target)
    return Local(takes, {}, (Pending("sum"),))
