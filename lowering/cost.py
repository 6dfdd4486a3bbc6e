"""Counts the floating-point operations and bytes of equations, from shapes alone.

Terms.
    **FLOPs** are exact for dots and convolutions (a multiply and an add each; taps that fall on
    padding or on the holes of a dilated input are not counted). Elementwise work is one FLOP an
    element, whatever the function; a reduction is one FLOP an element that it reads; what only
    moves or renames data has none. A scan counts its body `length` times, a `cond` its dearest
    branch, a `while` its condition and body once, for its number of turns is not known.

    **Bytes** are what main memory sends and takes. An equation alone reads its inputs and writes
    its outputs. Among others it may be **fused**: an elementwise result that only elementwise
    equations and reductions read is never stored, and a stored value is read once by all the
    elementwise equations that read it. A gather or a slice reads what it picks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend import core as jex

from ratrain_jax import compat
from ratrain_jax.kernels import Machine
from ratrain_jax.kernels.primitives import KERNELS, call_cost, call_flops
from ratrain_jax.lowering.graph import Atom, Eqn, Var, is_var
from ratrain_jax.lowering.products import compute_dtype, kernel_of, product_count


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """What some code asks of a machine.

    Attributes:
        flops: floating-point operations.
        bytes: bytes that main memory sends and takes.
    """

    flops: int = 0
    bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.flops * times, self.bytes * times)


def equation_cost(eqn: Eqn) -> Cost:
    """The cost of one equation by itself: nothing is fused into it.

    Args:
        eqn: an equation of a jaxpr.

    Returns:
        Its FLOPs and bytes.
    """
    return equation_costs([eqn], eqn.outvars)[0]


def equation_costs(eqns: Sequence[Eqn], outvars: Sequence[Atom]) -> list[Cost]:
    """The cost of each of some equations that are compiled together.

    Args:
        eqns: the equations, in order.
        outvars: what of their results is stored in the end.

    Returns:
        One cost an equation. They add up to the cost of the whole.
    """
    moved = bytes_moved(eqns, outvars, lambda eqn, var: aval_bytes(var.aval))
    return [Cost(_flops(eqn), int(count)) for eqn, count in zip(eqns, moved, strict=True)]


def bytes_moved(
    eqns: Sequence[Eqn], outvars: Sequence[Atom], size: Callable[[Eqn, Var], float]
) -> list[float]:
    """The bytes that each of some equations that are compiled together reads and writes.

    Args:
        eqns: the equations, in order.
        outvars: what of their results is stored in the end.
        size: the bytes of a value that an equation reads or writes; an equation that holds code which does not fuse
            (`holds_code`) is not asked, but counted whole.
    """
    stored = stored_variables(eqns, outvars)
    streamed: set[Var] = set()  # stored values that an elementwise equation has read already
    counts: list[float] = []
    for eqn in eqns:
        if holds_code(eqn):
            counts.append(_inner_cost(eqn).bytes)
            continue
        reads = {atom for atom in eqn.invars if is_var(atom) and atom in stored}
        if eqn.primitive.name in _PARTIAL:
            moved = sum(_bytes_picked(eqn, var, size) for var in reads)
        elif _fuses(eqn):
            moved = sum(size(eqn, var) for var in reads - streamed)
            streamed |= reads
        else:
            moved = sum(size(eqn, var) for var in reads)
        counts.append(moved + sum(size(eqn, var) for var in eqn.outvars if var in stored))
    return counts


def holds_code(eqn: Eqn) -> bool:
    """Whether an equation runs code that does not fuse with the equations around it."""
    return _has_inner(eqn) and not _fuses(eqn)


def _bytes_picked(eqn: Eqn, var: Var, size: Callable[[Eqn, Var], float]) -> float:
    """Bytes that an equation that picks some elements of its first input reads of one input."""
    whole = size(eqn, var)
    return min(whole, size(eqn, eqn.outvars[0])) if var is eqn.invars[0] else whole


def jaxpr_cost(closed: jex.ClosedJaxpr) -> Cost:
    """The cost of a whole jaxpr.

    Args:
        closed: any closed jaxpr.

    Returns:
        Its FLOPs and bytes.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jaxpr_cost(jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 4)))).flops
        48
    """
    costs = equation_costs(closed.jaxpr.eqns, closed.jaxpr.outvars)
    return sum(costs, Cost())


def jaxpr_flops(closed: jex.ClosedJaxpr) -> int:
    """The FLOPs of a whole jaxpr, without its bytes, which take longer to count."""
    return sum(map(_flops, closed.jaxpr.eqns))


def equation_seconds(eqn: Eqn, cost: Cost, machine: Machine) -> float:
    """Seconds of an equation of known cost: what its kernel's plan takes, or roofline at the rate of its own dtype."""
    kernel = kernel_of(eqn) if machine.accelerator is not None else None
    if kernel is not None and (planned := call_cost(kernel, machine)) is not None:
        return planned.seconds
    dtype, products = compute_dtype(eqn), product_count(eqn)
    return machine.roofline_seconds(cost.flops, cost.bytes, dtype, products=products)


def jaxpr_seconds(closed: jex.ClosedJaxpr, machine: Machine) -> float:
    """Roofline seconds of a whole jaxpr.

    They are the sum over its equations, each bound by arithmetic or by memory.

    Args:
        closed: any closed jaxpr.
        machine: what it runs on.

    Returns:
        Seconds.
    """
    costs = equation_costs(closed.jaxpr.eqns, closed.jaxpr.outvars)
    pairs = zip(closed.jaxpr.eqns, costs, strict=True)
    return sum(equation_seconds(eqn, cost, machine) for eqn, cost in pairs)


def aval_bytes(aval: Any) -> int:
    """Bytes of one value; a typed key counts as its raw words."""
    return aval_size(aval) * getattr(getattr(aval, "dtype", None), "itemsize", 0)


def aval_size(aval: Any) -> int:
    """Elements of one value."""
    return math.prod(getattr(aval, "shape", ()))


def stored_variables(eqns: Sequence[Eqn], outvars: Sequence[Atom]) -> set[Var]:
    """Variables that stand in memory: inputs, results, and whatever is not fused away."""
    made = {var for eqn in eqns if _fuses(eqn) for var in eqn.outvars}
    stored = {atom for atom in outvars if is_var(atom)}
    for eqn in eqns:
        reads = {atom for atom in eqn.invars if is_var(atom)}
        stored |= reads - made if _absorbs(eqn) else reads
        if not _fuses(eqn):
            stored.update(eqn.outvars)
    return stored


def _fuses(eqn: Eqn) -> bool:
    """Whether the equation's results need not be stored for other equations to read them."""
    if _has_inner(eqn):
        called = _called(eqn)
        return called is not None and all(_fuses(inner) for inner in called.jaxpr.eqns)
    return eqn.primitive.name not in _ANCHORS


def _absorbs(eqn: Eqn) -> bool:
    """Whether the equation can take results that are not stored."""
    return _fuses(eqn) or eqn.primitive.name in _REDUCTIONS


# --- equations that hold code -------------------------------------------------------------------


def _has_inner(eqn: Eqn) -> bool:
    if (
        eqn.primitive.name in _FLOPS
    ):  # a scatter's or reduction's jaxpr says how to join two elements
        return False
    return next(compat.sub_jaxprs(eqn), None) is not None


def _called(eqn: Eqn) -> jex.ClosedJaxpr | None:
    """The one jaxpr that an equation runs once, if that is all it does."""
    inner = [closed for _, closed in compat.sub_jaxprs(eqn)]
    return inner[0] if eqn.primitive.name not in _CONTROL and len(inner) == 1 else None


def _inner_cost(eqn: Eqn) -> Cost:
    parts = [jaxpr_cost(closed) for _, closed in compat.sub_jaxprs(eqn)]
    return _CONTROL.get(eqn.primitive.name, _sequence)(eqn, parts)


def _sequence(eqn: Eqn, parts: Sequence[Cost]) -> Cost:
    return sum(parts, Cost())


def _scan(eqn: Eqn, parts: Sequence[Cost]) -> Cost:
    return _sequence(eqn, parts) * eqn.params["length"]


def _dearest(eqn: Eqn, parts: Sequence[Cost]) -> Cost:
    return max(parts, key=lambda cost: (cost.flops, cost.bytes))


_CONTROL: dict[str, Callable[[Eqn, Sequence[Cost]], Cost]] = {
    "cond": _dearest,
    "scan": _scan,
    "while": _sequence,
}
"""How the costs of its parts make the cost of an equation, by primitive."""


# --- FLOPs by primitive -------------------------------------------------------------------------


def _flops(eqn: Eqn) -> int:
    if _has_inner(eqn):
        return _inner_cost(eqn).flops
    return _FLOPS.get(eqn.primitive.name, _elements_out)(eqn)


def _dot(eqn: Eqn) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    lhs = eqn.invars[0].aval
    return 2 * aval_size(eqn.outvars[0].aval) * math.prod(lhs.shape[axis] for axis in contracted)


def _convolution(eqn: Eqn) -> int:
    numbers = eqn.params["dimension_numbers"]
    lhs, rhs, out = (atom.aval.shape for atom in [*eqn.invars[:2], *eqn.outvars])
    flops = 2 * out[numbers.out_spec[0]] * out[numbers.out_spec[1]] * rhs[numbers.rhs_spec[1]]
    for axis in range(len(numbers.out_spec) - 2):
        flops *= _taps(
            lhs[numbers.lhs_spec[2 + axis]],
            rhs[numbers.rhs_spec[2 + axis]],
            out[numbers.out_spec[2 + axis]],
            stride=eqn.params["window_strides"][axis],
            before=eqn.params["padding"][axis][0],
            lhs_dilation=eqn.params["lhs_dilation"][axis],
            rhs_dilation=eqn.params["rhs_dilation"][axis],
        )
    return flops


def _taps(
    size: int,
    window: int,
    places: int,
    *,
    stride: int,
    before: int,
    lhs_dilation: int,
    rhs_dilation: int,
) -> int:
    """How often one axis of the window, at all its places, meets an element of the input."""
    where = np.arange(places)[:, None] * stride + np.arange(window) * rhs_dilation - before
    inside = (where >= 0) & (where <= (size - 1) * lhs_dilation) & (where % lhs_dilation == 0)
    return int(inside.sum())


def _ragged_dot(eqn: Eqn) -> int:
    # Every row of the left side meets one group's matrix: (m, k) by (g, k, n) is m dots of k by n.
    rows, inner = eqn.invars[0].aval.shape[-2:]
    return 2 * rows * inner * eqn.outvars[0].aval.shape[-1]


def _elements_out(eqn: Eqn) -> int:
    return sum(aval_size(var.aval) for var in eqn.outvars)


def _elements_in(eqn: Eqn) -> int:
    return aval_size(eqn.invars[0].aval)


def _none(eqn: Eqn) -> int:
    return 0


def _updates(eqn: Eqn) -> int:
    return aval_size(eqn.invars[2].aval)


def _window(eqn: Eqn) -> int:
    return _elements_out(eqn) * math.prod(eqn.params["window_dimensions"])


def _sort(eqn: Eqn) -> int:
    shape = eqn.invars[0].aval.shape
    axis = eqn.params.get("dimension", -1)
    return aval_size(eqn.invars[0].aval) * max(1, math.ceil(math.log2(max(2, shape[axis]))))


_REDUCTIONS = frozenset(
    f"reduce_{name}" for name in ("and", "max", "min", "or", "prod", "sum", "xor")
) | {"argmax", "argmin", "reduce"}

_MOVES = (
    "bitcast_convert_type",
    "broadcast_in_dim",
    "concatenate",
    "convert_element_type",
    "copy",
    "copy_p",
    "device_put",
    "dynamic_slice",
    "dynamic_update_slice",
    "expand_dims",
    "gather",
    "iota",
    "optimization_barrier",
    "pad",
    "random_unwrap",
    "random_wrap",
    "ratrain_layer",
    "reduce_precision",
    "reshape",
    "rev",
    "scatter",
    "select_n",
    "sharding_constraint",
    "slice",
    "split",
    "squeeze",
    "stop_gradient",
    "transpose",
)
_PARTIAL = frozenset({"dynamic_slice", "gather", "slice"})

_FLOPS: dict[str, Callable[[Eqn], int]] = {
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "ragged_dot": _ragged_dot,
    "ragged_dot_general": _ragged_dot,
    "sort": _sort,
    **dict.fromkeys(_REDUCTIONS, _elements_in),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _elements_in),
    **dict.fromkeys(
        ("scatter-add", "scatter-mul", "scatter-sub", "scatter-min", "scatter-max"), _updates
    ),
    **dict.fromkeys(
        ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"), _window
    ),
    **dict.fromkeys(_MOVES, _none),
    **dict.fromkeys(KERNELS, call_flops),
}
"""FLOPs of one equation, by primitive; what is not here counts one an element of its results."""

_ANCHORS = (_FLOPS.keys() - set(_MOVES)) | {
    "cholesky",
    "dynamic_update_slice",
    "eigh",
    "fft",
    "gather",
    "lu",
    "qr",
    "random_bits",
    "rng_bit_generator",
    "scatter",
    "svd",
    "threefry2x32",
    "top_k",
    "triangular_solve",
}
"""Primitives whose results are stored: they are programs of their own."""
