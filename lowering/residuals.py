"""Chooses what a layer's backward keeps of its forward.

Starting from what JAX's own differentiation would keep, a value is dropped, and made again in backward, where that
costs next to nothing: it comes from parameters or constants alone, or by one cheap elementwise step from values that
backward has anyway. Each dropped value is one array less to write, to hold and to read back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ratrain_jax.lowering.graph import Graph, Var, is_var

CHEAP = frozenset(
    {
        "abs", "add", "add_any", "and", "broadcast_in_dim", "clamp", "convert_element_type", "copy", "div", "eq",
        "expand_dims", "ge", "gt", "integer_pow", "iota", "is_finite", "le", "lt", "max", "min", "mul", "ne",
        "neg", "not", "or", "reshape", "select_n", "sign", "squeeze", "square", "stop_gradient", "sub", "transpose", "xor",
        "exp", "log", "logistic", "rsqrt", "sqrt", "tanh",
    }
)  # fmt: skip
"""Primitives that cost about as much as reading their result from memory."""

RANDOM = frozenset(
    {"random_bits", "threefry2x32", "random_wrap", "random_unwrap", "random_fold_in"}
)


def choose_residuals(
    forward: Graph, wanted: Iterable[Var], parameters: Sequence[Var]
) -> tuple[list[Var], set[Var]]:
    """Splits what backward wants into what is kept and what is read or made again.

    Args:
        forward: the forward graph, all of whose variables backward could use.
        wanted: the variables of it that backward uses.
        parameters: those of its inputs that are parameters.

    Returns:
        The residuals, in the order in which forward makes them, and the inputs of forward that backward reads.
    """
    inputs = set(forward.invars)
    makers = {var: eqn for eqn in forward.eqns for var in eqn.outvars}
    depth = {var: i for i, eqn in enumerate(forward.eqns) for var in eqn.outvars}
    fixed = _fixed(forward, parameters)
    have = {var for var in wanted if var not in forward.consts}
    pending = sorted((v for v in have if v in makers), key=lambda v: -depth[v])
    for var in pending:
        if var not in have:
            continue
        if var in fixed:
            have.discard(var)
            have.update(_inputs_of(var, makers, inputs))
            continue
        sources = _sources(var, makers, forward, fixed)
        if sources is None:
            continue
        extra = sources - have
        if _bytes(v for v in extra if v not in inputs) == 0:
            have.discard(var)
            have.update(extra)
    residuals = sorted((v for v in have if v in makers), key=lambda v: depth[v])
    return residuals, have & inputs


def _fixed(forward: Graph, parameters: Sequence[Var]) -> set[Var]:
    """Variables that depend on parameters and constants alone, and on no random bits."""
    known: set[Var] = {*parameters, *forward.consts}
    for eqn in forward.eqns:
        cheap = eqn.primitive.name in CHEAP
        if cheap and all(not is_var(a) or a in known for a in eqn.invars):
            known.update(eqn.outvars)
    return known - set(parameters) - set(forward.consts)


def _inputs_of(var: Var, makers: dict[Var, Any], inputs: set[Var]) -> set[Var]:
    found: set[Var] = set()
    stack = [var]
    while stack:
        atom = stack.pop()
        if atom in inputs:
            found.add(atom)
        elif atom in makers:
            stack.extend(a for a in makers[atom].invars if is_var(a))
    return found


def _sources(var: Var, makers: dict[Var, Any], forward: Graph, fixed: set[Var]) -> set[Var] | None:
    """What `var` is made from by one cheap step, or None if the step is not cheap."""
    eqn = makers[var]
    if eqn.primitive.name not in CHEAP:
        return None
    sources: set[Var] = set()
    for atom in eqn.invars:
        if not is_var(atom) or atom in forward.consts:
            continue
        if atom in fixed:
            sources |= _inputs_of(atom, makers, set(forward.invars))
        else:
            sources.add(atom)
    return sources


def _bytes(variables: Iterable[Var]) -> int:
    return sum(var.aval.size * var.aval.dtype.itemsize for var in variables)
