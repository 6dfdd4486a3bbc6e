"""Chooses what a layer's backward keeps of its forward: the fewest bytes from which the rest is cheap to make again.

Terms.
    A step is **cheap** if it costs about as much as reading its result from memory: elementwise arithmetic, shape changes,
    broadcasts. What backward wants is **reachable** from a set of values if cheap steps alone lead from them, and from the
    layer's inputs, to it.

    A product that does not contract the last axis of its first operand reads that operand **in another order**. A compiler
    makes what it fuses into that reading in that order too, which is slow where a transcendental function is in it (on
    XLA's CPU backend 6.3 ms against 4.8 for the gradient of a 1024 x 256 weight behind a GELU).

The values kept are a minimum vertex cut, weighted by bytes, between the results of dear steps and what backward wants; among
equal cuts the one nearest to backward, which makes least again. Each value less is one array less to write, hold and read.
What is read in another order is kept as well if a transcendental function would have to make it.

Reference: the cut formulation of rematerialization is that of torch's functorch min-cut partitioner (H. He and others, 2022).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from ratrain_jax.lowering.graph import Graph, Var, is_var

CHEAP = frozenset(
    {
        "abs", "add", "add_any", "and", "broadcast_in_dim", "clamp", "convert_element_type",
        "copy", "div", "eq", "exp", "expand_dims", "ge", "gt", "integer_pow", "iota", "is_finite",
        "le", "log", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or",
        "reduce_precision", "reshape", "rsqrt", "select_n", "sign", "sqrt", "square", "squeeze",
        "stop_gradient", "sub", "tanh", "transpose", "xor",
    }
)  # fmt: skip
"""Primitives that cost about as much as reading their result from memory."""

TRANSCENDENTAL = frozenset({"exp", "log", "logistic", "tanh"})
"""Those of the cheap primitives that cost most to make again."""

_LARGEST = 1 << 30  # scipy's flows count in 32 bits


def choose_residuals(
    forward: Graph, wanted: Iterable[Var], reordered: Iterable[Var] = ()
) -> list[Var]:
    """The values to keep.

    Args:
        forward: the forward graph; its inputs and constants are at hand in backward too.
        wanted: the variables of it that backward uses.
        reordered: those of them that backward reads in another order.

    Returns:
        The residuals, in the order in which forward makes them.
    """
    makers = {var: eqn for eqn in forward.eqns for var in eqn.outvars}
    order = {var: i for i, var in enumerate(makers)}
    targets = sorted((var for var in set(wanted) if var in makers), key=lambda var: order[var])
    reached = _cheap_ancestors(targets, makers)
    if not reached:
        return []
    kept = set(_minimum_cut(reached, set(targets), makers))
    # In forward's order: whether a later value is kept may depend on an earlier one.
    read_anew = set(reordered)
    for var in (target for target in targets if target in read_anew):
        again = _cheap_ancestors([var], makers, stop=kept)
        if any(makers[made].primitive.name in TRANSCENDENTAL for made in again):
            kept.add(var)
    return sorted(kept, key=lambda var: order[var])


def read_in_another_order(eqns: Iterable[Any]) -> set[Var]:
    """The first operands of products that do not contract the operand's last axis."""
    found: set[Var] = set()
    for eqn in eqns:
        if eqn.primitive.name == "dot_general" and is_var(first := eqn.invars[0]):
            (contracted, _), _ = eqn.params["dimension_numbers"]
            if first.aval.ndim - 1 not in contracted:
                found.add(first)
    return found


def _is_cheap(eqn: Any) -> bool:
    return eqn.primitive.name in CHEAP


def _cheap_ancestors(
    targets: Iterable[Var], makers: dict[Var, Any], stop: Container[Var] = ()
) -> list[Var]:
    """The targets, and what cheap steps make them from, back to `stop` and the results of dear steps."""
    found: dict[Var, None] = {}
    stack = list(targets)
    while stack:
        var = stack.pop()
        if var in found or var in stop or var not in makers:
            continue
        found[var] = None
        if _is_cheap(makers[var]):
            stack.extend(atom for atom in makers[var].invars if is_var(atom))
    return list(found)


def _minimum_cut(variables: list[Var], targets: set[Var], makers: dict[Var, Any]) -> list[Var]:
    """The lightest set of variables without which no dear result reaches a target.

    Every variable is an edge, from its entrance 2i to its exit 2i + 1, that carries its bytes.
    """
    place = {var: i for i, var in enumerate(variables)}
    source, sink = 2 * len(variables), 2 * len(variables) + 1
    total = sum(_bytes(var) for var in variables)
    scale = max(1, -(-total // (_LARGEST >> 1)))
    edges: list[tuple[int, int, int]] = []
    for var, i in place.items():
        edges.append((2 * i, 2 * i + 1, max(1, -(-_bytes(var) // scale))))
        if var in targets:
            edges.append((2 * i + 1, sink, _LARGEST))
        if not _is_cheap(makers[var]):
            edges.append((source, 2 * i, _LARGEST))
            continue
        for atom in {a for a in makers[var].invars if is_var(a) and a in place}:
            edges.append((2 * place[atom] + 1, 2 * i, _LARGEST))
    rows, columns, carried = (np.array(column, np.int32) for column in zip(*edges, strict=True))
    shape = (sink + 1, sink + 1)
    capacity = csr_array((carried, (rows, columns)), shape=shape)
    flow = maximum_flow(capacity, source, sink).flow
    open_edges = csr_array((capacity - flow) > 0)
    behind = breadth_first_order(open_edges.T.tocsr(), sink, return_predecessors=False)
    near_sink = np.zeros(sink + 1, bool)
    near_sink[behind] = True
    return [var for var, i in place.items() if near_sink[2 * i + 1] and not near_sink[2 * i]]


def _bytes(var: Var) -> int:
    return var.aval.size * var.aval.dtype.itemsize
