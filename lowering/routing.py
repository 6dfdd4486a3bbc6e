"""Sends the products of a loss through the kernels of an accelerator.

It runs before the loss is cut into layers and differentiated, so that the kernels' own rules give the backward kernels,
and casts of parameters to float16 can move before the gather (`precision`).

Attention that is written out (`attention_match`) becomes one call; every other product one of its own.

Terms.
    A product is **taken** if it becomes a call of the kernel layer. What is not taken stays as it is, with a **reason**:
    it is not of a short float, adds nothing up, reads no parameter's influence (positions, masks), or asks for a precision
    that float16 has not.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ratrain_jax import compat
from ratrain_jax.errors import MachineError
from ratrain_jax.kernels import Arithmetic, gemm_of, vmac_dot_general
from ratrain_jax.kernels.gemm_plan import plan_for
from ratrain_jax.lowering.attention_call import Call, attention_call
from ratrain_jax.lowering.attention_match import Finder
from ratrain_jax.lowering.cost import equation_costs
from ratrain_jax.lowering.graph import Atom, Eqn, Graph, Var, is_var
from ratrain_jax.lowering.rewrite import Rewriter

PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"})
"""Primitives that a report lists where no kernel takes them."""

_MOVES = frozenset({"reshape", "transpose", "squeeze", "expand_dims", "slice", "broadcast_in_dim"})
_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """What became of one product or attention of the loss.

    Attributes:
        kind: its primitive, or "attention".
        shapes: of its operands.
        flops: of its forward pass, for one microbatch.
        reason: why it stays in XLA; empty if a kernel takes it.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    flops: int
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Routing:
    """What a backend's kernels take of a loss.

    Attributes:
        arithmetic: how the kernels compute.
        parts: products and attentions, in order.
        flops: of the whole forward pass, for one microbatch.
    """

    arithmetic: Arithmetic
    parts: tuple[Part, ...]
    flops: int

    @property
    def share(self) -> float:
        """Share of the forward pass's FLOPs that the kernels take."""
        return sum(part.flops for part in self.parts if not part.reason) / max(1, self.flops)

    def left(self) -> list[tuple[str, str, int, float]]:
        """What stays in XLA: primitive, reason, how many, share of FLOPs; then all that is no product."""
        rows: dict[tuple[str, str], list[int]] = {}
        for part in self.parts:
            if part.reason:
                rows.setdefault((part.kind, part.reason), []).append(part.flops)
        total = max(1, self.flops)
        found = [(*key, len(flops), sum(flops) / total) for key, flops in rows.items()]
        rest = 1.0 - sum(part.flops for part in self.parts) / total
        return [*found, ("other", "no product", 0, rest)]


def route(loss: Graph, params: int, arithmetic: Arithmetic) -> tuple[Graph, Routing]:
    """Gives a loss its kernels.

    Args:
        loss: a loss whose first inputs are the parameters.
        params: how many they are.
        arithmetic: how to plan and compute.

    Returns:
        The loss with kernels in it, and what became of each product.
    """
    moving = dependent(loss, loss.invars[:params])
    writer = Rewriter(loss)
    halves = _Halves(loss, writer)
    calls = _attention_calls(loss, moving, arithmetic)
    needless = {id(call.scores) for call in calls.values()}
    parts: list[Part] = []
    for eqn in loss.eqns:
        call = calls.get(id(eqn))
        if call is not None:
            operands = [halves.of(atom, eqn) for atom in call.operands]
            (made,) = writer.call(call.run, [*operands, *call.extras], eqn)
            writer.replace(eqn.outvars[0], made)
            shapes = tuple(tuple(atom.aval.shape) for atom in call.operands)
            parts.append(Part("attention", shapes, call.shape.flops("forward")))
            continue
        if eqn.primitive.name not in PRODUCTS or id(eqn) in needless:
            parts.extend(_inner_parts(eqn, "inside a {name}"))
            writer.keep(eqn)
            continue
        part = _part(eqn, refusal(eqn, moving, arithmetic))
        parts.append(part)
        if part.reason:
            writer.keep(eqn)
            continue
        operands = [halves.of(atom, eqn) for atom in eqn.invars]
        (made,) = writer.call(_product(eqn, arithmetic), operands, eqn)
        writer.replace(eqn.outvars[0], made)
    routed = writer.finish()
    costs = equation_costs(routed.eqns, routed.outvars)
    return routed, Routing(arithmetic, tuple(parts), sum(cost.flops for cost in costs))


def _attention_calls(loss: Graph, moving: set[Var], arithmetic: Arithmetic) -> dict[int, Call]:
    """Calls of the attention kernel, by the identity of the product with V that each stands for."""
    finder = Finder(loss)
    calls: dict[int, Call] = {}
    for eqn in loss.eqns:
        match = finder.match(eqn)
        if match is None or any(refusal(e, moving, arithmetic) for e in (match.scores, eqn)):
            continue
        call = attention_call(match, finder, arithmetic)
        if call is not None:
            calls[id(eqn)] = call
    return calls


def dependent(graph: Graph, sources: Iterable[Var]) -> set[Var]:
    """The variables that depend on some inputs."""
    found = set(sources)
    for eqn in graph.eqns:
        if any(is_var(atom) and atom in found for atom in eqn.invars):
            found.update(eqn.outvars)
    return found


def refusal(eqn: Eqn, moving: set[Var], arithmetic: Arithmetic) -> str:
    """Why an equation is no product that the kernels take; empty if they take it."""
    if eqn.primitive.name != "dot_general":
        return "not a matrix product"
    dtypes = [atom.aval.dtype for atom in eqn.invars]
    if any(dtype not in _FLOATS for dtype in (*dtypes, eqn.outvars[0].aval.dtype)):
        return "not of float32, bfloat16 or float16"
    if not any(is_var(atom) and atom in moving for atom in eqn.invars):
        return "depends on no parameter"
    if _asks_for_more(eqn.params.get("precision")):
        return "asks for a higher precision"
    shapes = [atom.aval.shape for atom in eqn.invars]
    if 0 in (*shapes[0], *shapes[1]):
        return "is empty"
    (contracted, _), _ = eqn.params["dimension_numbers"]
    if math.prod(shapes[0][axis] for axis in contracted) == 1:
        return "adds nothing up"
    try:
        numbers = eqn.params["dimension_numbers"]
        gemm, _ = gemm_of(shapes[0], shapes[1], numbers, accumulator=arithmetic.accumulator)
        plan_for(gemm, arithmetic.machine)
    except MachineError:
        return "fits no plan"
    return ""


def _asks_for_more(precision: Any) -> bool:
    each = precision if isinstance(precision, tuple) else (precision,)
    return any(one in (jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST) for one in each)


def _part(eqn: Eqn, reason: str) -> Part:
    (cost,) = equation_costs([eqn], eqn.outvars)
    return Part(
        eqn.primitive.name, tuple(tuple(a.aval.shape) for a in eqn.invars[:2]), cost.flops, reason
    )


def _inner_parts(eqn: Eqn, reason: str) -> Iterator[Part]:
    """The products inside a loop, a branch or a custom rule."""
    for _, closed in compat.sub_jaxprs(eqn):
        times = eqn.params.get("length", 1)
        for inner in closed.jaxpr.eqns:
            if inner.primitive.name in PRODUCTS:
                part = _part(inner, reason.format(name=eqn.primitive.name))
                yield dataclasses.replace(part, flops=part.flops * times)
            else:
                for part in _inner_parts(inner, reason.format(name=eqn.primitive.name)):
                    yield dataclasses.replace(part, flops=part.flops * times)


def _product(eqn: Eqn, arithmetic: Arithmetic) -> Any:
    numbers, out = eqn.params["dimension_numbers"], eqn.outvars[0].aval.dtype

    def run(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return vmac_dot_general(
            lhs,
            rhs,
            numbers,
            preferred_element_type=out,
            machine=arithmetic.machine,
            accumulator=arithmetic.accumulator,
            mode=arithmetic.mode,
        )

    return run


class _Halves:
    """Values cast to float16, each once; a cast goes before what only moves the value."""

    def __init__(self, graph: Graph, writer: Rewriter) -> None:
        self._makers = {var: eqn for eqn in graph.eqns for var in eqn.outvars}
        self._writer = writer
        self._cast: dict[Var, Atom] = {}

    def of(self, atom: Atom, like: Eqn) -> Atom:
        """The atom in float16."""
        if atom.aval.dtype == jnp.float16:
            return atom
        if is_var(atom) and atom in self._cast:
            return self._cast[atom]
        maker = self._makers.get(atom) if is_var(atom) else None
        if maker is not None and maker.primitive.name in _MOVES and len(maker.invars) == 1:
            source = self.of(maker.invars[0], like)
            bind = functools.partial(maker.primitive.bind, **maker.params)
            (half,) = self._writer.call(bind, [source], maker)
        else:
            (half,) = self._writer.call(lambda x: x.astype(jnp.float16), [atom], like)
        if is_var(atom):
            self._cast[atom] = half
        return half
