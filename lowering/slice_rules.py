"""What each primitive does to a stacked array that is known by its slices along axis 0: one line a primitive.

A rule is given an equation and, for each operand, whether it is known by its slices. It answers with
a `PerSlice`, or with None if the equation needs the stacked array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax.core

from ratrain_jax.lowering.graph import Atom, Eqn
from ratrain_jax.lowering.shard_rules import ELEMENTWISE, REDUCTIONS


@dataclasses.dataclass(frozen=True, slots=True)
class Sliced:
    """A stacked array that is known by its slices."""

    slices: tuple[Atom, ...]


Value = Any  # Atom or Sliced


def slice_type(aval: Any) -> Any:
    """The type of one slice of a stacked array."""
    return jax.core.ShapedArray(aval.shape[1:], aval.dtype, weak_type=aval.weak_type)


SLICES: Final = "slices"
"""Said of a result: its slices are what the equation gives for each slice."""


@dataclasses.dataclass(frozen=True, slots=True)
class PerSlice:
    """What an equation does to each slice.

    Attributes:
        takes: which operands it takes slice by slice; the others it takes as they are, every time.
        params: parameters that replace its own.
        gives: for each result `SLICES`, or how what it gives for each slice joins (`sum`, `max`, ...).
    """

    takes: tuple[bool, ...]
    params: Mapping[str, Any]
    gives: tuple[str, ...]


Rule = Callable[[Eqn, Sequence[bool]], PerSlice | None]

RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


@_rule(*ELEMENTWISE)
def _elementwise(eqn: Eqn, sliced: Sequence[bool]) -> PerSlice | None:
    """Operands are scalars, or of the result's rank."""
    rank = len(eqn.outvars[0].aval.shape)
    ranks = [len(atom.aval.shape) for atom in eqn.invars]
    if any(n not in (0, rank) for n in ranks):
        return None
    return PerSlice(tuple(n > 0 for n in ranks), {}, (SLICES,))


@_rule("broadcast_in_dim")
def _broadcast(eqn: Eqn, sliced: Sequence[bool]) -> PerSlice | None:
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    operand = eqn.invars[0].aval.shape
    if len(sliced) > 1 or dims[:1] != (0,) or operand[0] != shape[0]:
        return None
    params = {"shape": shape[1:], "broadcast_dimensions": tuple(n - 1 for n in dims[1:])}
    return PerSlice((True,), params, (SLICES,))


@_rule("reshape")
def _reshape(eqn: Eqn, sliced: Sequence[bool]) -> PerSlice | None:
    shape, sizes = eqn.invars[0].aval.shape, tuple(eqn.params["new_sizes"])
    moved = eqn.params.get("dimensions") is not None or len(sliced) > 1
    if moved or sizes[:1] != shape[:1]:
        return None
    return PerSlice((True,), {"new_sizes": sizes[1:]}, (SLICES,))


@_rule("squeeze")
def _squeeze(eqn: Eqn, sliced: Sequence[bool]) -> PerSlice | None:
    dims = eqn.params["dimensions"]
    if 0 in dims:
        return None
    return PerSlice((True,), {"dimensions": _down(dims)}, (SLICES,))


@_rule("transpose")
def _transpose(eqn: Eqn, sliced: Sequence[bool]) -> PerSlice | None:
    order = tuple(eqn.params["permutation"])
    if order[0] != 0:
        return None
    return PerSlice((True,), {"permutation": _down(order[1:])}, (SLICES,))


@_rule("rev")
def _rev(eqn: Eqn, sliced: Sequence[bool]) -> PerSlice | None:
    dims = eqn.params["dimensions"]
    if 0 in dims:
        return None
    return PerSlice((True,), {"dimensions": _down(dims)}, (SLICES,))


@_rule("slice")
def _slice(eqn: Eqn, sliced: Sequence[bool]) -> PerSlice | None:
    starts, stops, strides = (
        eqn.params[key] for key in ("start_indices", "limit_indices", "strides")
    )
    if eqn.outvars[0].aval.shape[0] != eqn.invars[0].aval.shape[0]:
        return None
    params = {
        "start_indices": starts[1:],
        "limit_indices": stops[1:],
        "strides": strides and strides[1:],
    }
    return PerSlice((True,), params, (SLICES,))


@_rule("pad")
def _pad(eqn: Eqn, sliced: Sequence[bool]) -> PerSlice | None:
    config = eqn.params["padding_config"]
    if tuple(config[0]) != (0, 0, 0) or not sliced[0]:
        return None
    return PerSlice((True, False), {"padding_config": config[1:]}, (SLICES,))


@_rule("concatenate")
def _concatenate(eqn: Eqn, sliced: Sequence[bool]) -> PerSlice | None:
    dimension = eqn.params["dimension"]
    if dimension == 0:
        return None
    return PerSlice((True,) * len(sliced), {"dimension": dimension - 1}, (SLICES,))


@_rule(*REDUCTIONS)
def _reduce(eqn: Eqn, sliced: Sequence[bool]) -> PerSlice | None:
    axes = eqn.params["axes"]
    if 0 not in axes:
        return PerSlice((True,), {"axes": _down(axes)}, (SLICES,))
    others = _down(n for n in axes if n)
    return PerSlice((True,), {"axes": others}, (REDUCTIONS[eqn.primitive.name],))


@_rule("argmax", "argmin")
def _arg_reduce(eqn: Eqn, sliced: Sequence[bool]) -> PerSlice | None:
    axes = eqn.params["axes"]
    return None if 0 in axes else PerSlice((True,), {"axes": _down(axes)}, (SLICES,))


@_rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumulative(eqn: Eqn, sliced: Sequence[bool]) -> PerSlice | None:
    axis = eqn.params["axis"]
    return None if axis == 0 else PerSlice((True,), {"axis": axis - 1}, (SLICES,))


@_rule("sort")
def _sort(eqn: Eqn, sliced: Sequence[bool]) -> PerSlice | None:
    dimension = eqn.params["dimension"]
    if dimension == 0:
        return None
    count = len(sliced)
    return PerSlice((True,) * count, {"dimension": dimension - 1}, (SLICES,) * count)


@_rule("dot_general")
def _dot(eqn: Eqn, sliced: Sequence[bool]) -> PerSlice | None:
    """Axis 0 counts products side by side, or is contracted with the other's, or is free in one of the two."""
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    pairs, batch = (
        list(zip(left, right, strict=True)),
        list(zip(left_batch, right_batch, strict=True)),
    )
    if batch[:1] == [(0, 0)]:
        return PerSlice((True, True), _numbers(pairs, batch[1:], (True, True)), (SLICES,))
    if (0, 0) in pairs:
        rest = [pair for pair in pairs if pair != (0, 0)]
        return PerSlice((True, True), _numbers(rest, batch, (True, True)), ("sum",))
    if sliced == [True, False] and 0 not in left and not batch:
        return PerSlice((True, False), _numbers(pairs, batch, (True, False)), (SLICES,))
    return None


def _numbers(
    pairs: Sequence[tuple[int, int]], batch: Sequence[tuple[int, int]], cut: tuple[bool, bool]
) -> dict[str, Any]:
    """Dimension numbers after axis 0 has gone from some operands."""

    def side(which: int) -> list[tuple[int, ...]]:
        return [tuple(pair[which] - cut[which] for pair in part) for part in (pairs, batch)]

    (left, left_batch), (right, right_batch) = side(0), side(1)
    return {"dimension_numbers": ((left, right), (left_batch, right_batch))}


def _down(axes: Any) -> tuple[int, ...]:
    """Axes after axis 0 has gone."""
    return tuple(axis - 1 for axis in axes)
