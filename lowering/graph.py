"""A flat list of equations, and the ways to cut it.

A `Graph` is a jaxpr whose plain calls are inlined. Every inlined equation gets fresh variables, because two calls of
one cached function share the very same variables. What `jax.checkpoint` wrapped is inlined too, and remembered.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from ratrain_jax import compat

Var = Any  # jex.Var, whose aval JAX types too loosely for a type checker
Atom = Any  # Var or jex.Literal
Eqn = Any  # jex.JaxprEqn


@dataclasses.dataclass(frozen=True, slots=True)
class Graph:
    """Equations without calls.

    Attributes:
        invars: inputs.
        outvars: results; variables or literals.
        eqns: the equations, in an order that respects their dependencies.
        consts: arrays that the traced function closed over, by the variable that stands for each.
        checkpointed: variables that equations under `jax.checkpoint` made.
    """

    invars: tuple[Var, ...]
    outvars: tuple[Atom, ...]
    eqns: tuple[Eqn, ...]
    consts: Mapping[Var, Any]
    checkpointed: frozenset[Var]


def is_var(atom: Atom) -> bool:
    """Whether an atom is a variable (and not a literal)."""
    return not isinstance(atom, jex.Literal)


def inline(closed: jex.ClosedJaxpr, *, rules: bool = False) -> Graph:
    """Flattens a jaxpr: plain calls and `jax.checkpoint` regions are opened, with fresh variables.

    Args:
        closed: the jaxpr.
        rules: whether to drop custom differentiation rules too, and open what they are for: of code that is
            differentiated already.
    """
    eqns: list[Eqn] = []
    consts: dict[Var, Any] = {}
    checkpointed: set[Var] = set()

    def visit(closed: jex.ClosedJaxpr, args: Sequence[Atom], under_checkpoint: bool) -> list[Atom]:
        jaxpr = closed.jaxpr
        env: dict[Var, Atom] = dict(zip(jaxpr.invars, args, strict=True))
        for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
            env[var] = compat.new_var(var.aval)
            consts[env[var]] = value

        def read(atom: Atom) -> Atom:
            return env[atom] if is_var(atom) else atom

        for eqn in jaxpr.eqns:
            inputs = [read(atom) for atom in eqn.invars]
            called = compat.called_jaxpr(eqn)
            if rules and eqn.primitive.name in compat.CUSTOM_CALLS:
                called = compat.as_closed(eqn.params[compat.CUSTOM_CALLS[eqn.primitive.name]])
            if called is not None:
                below = under_checkpoint or eqn.primitive.name in compat.CHECKPOINT_PRIMITIVES
                env.update(zip(eqn.outvars, visit(called, inputs, below), strict=True))
                continue
            outputs = [compat.new_var(var.aval) for var in eqn.outvars]
            env.update(zip(eqn.outvars, outputs, strict=True))
            eqns.append(eqn.replace(invars=inputs, outvars=outputs))
            if under_checkpoint:
                checkpointed.update(outputs)
        return [read(atom) for atom in jaxpr.outvars]

    invars = [compat.new_var(var.aval) for var in closed.jaxpr.invars]
    outvars = visit(closed, invars, False)
    return Graph(tuple(invars), tuple(outvars), tuple(eqns), consts, frozenset(checkpointed))


def needed(
    eqns: Sequence[Eqn], outvars: Iterable[Atom], stop: Iterable[Var] = ()
) -> tuple[list[Eqn], set[Var]]:
    """Equations that `outvars` depend on, and the variables that they leave free.

    Args:
        eqns: candidates, in order.
        outvars: what is wanted.
        stop: variables taken as given, even where an equation makes them.

    Returns:
        The equations, in order, and the free variables (those of `stop` that are read among them).
    """
    given = set(stop)
    wanted = {atom for atom in outvars if is_var(atom)}
    kept: list[Eqn] = []
    for eqn in reversed(eqns):
        made = [var for var in eqn.outvars if var in wanted and var not in given]
        if made:
            kept.append(eqn)
            wanted.difference_update(made)
            wanted.update(atom for atom in eqn.invars if is_var(atom))
    kept.reverse()
    return kept, wanted


def reached(eqns: Sequence[Eqn], start: Iterable[Var]) -> set[Var]:
    """Some variables, and all that equations make from them.

    Args:
        eqns: the equations, in order.
        start: the variables.
    """
    found = set(start)
    for eqn in eqns:
        if any(is_var(atom) and atom in found for atom in eqn.invars):
            found.update(eqn.outvars)
    return found


def cut(
    graph: Graph,
    invars: Sequence[Var],
    outvars: Sequence[Atom],
    eqns: Sequence[Eqn] | None = None,
) -> jex.ClosedJaxpr:
    """The part of a graph that makes `outvars` from `invars`, without dead code.

    Args:
        graph: where the constants are.
        invars: what is given.
        outvars: what is wanted.
        eqns: the equations to choose from; all of the graph's unless said.

    Returns:
        A closed jaxpr from `invars` to `outvars`.

    Raises:
        KeyError: `outvars` depend on a variable that is neither given nor made; a fault of the calling pass.
    """
    kept, free = needed(graph.eqns if eqns is None else eqns, outvars, invars)
    free -= set(invars)
    missing = [var for var in free if var not in graph.consts]
    if missing:
        raise KeyError(f"cut leaves free {missing}")
    constvars = [var for var in graph.consts if var in free]
    consts = [graph.consts[var] for var in constvars]
    return compat.closed(invars, outvars, kept, constvars, consts)


def as_function(closed: jex.ClosedJaxpr) -> Callable[..., list[Any]]:
    """A closed jaxpr as a function of its inputs that returns a list."""
    return jex.jaxpr_as_fun(closed)


def fingerprint(*closed: jex.ClosedJaxpr) -> str:
    """A digest that is equal for jaxprs that differ only in the names of their variables.

    Functions among an equation's parameters (custom differentiation rules) count by name only: fingerprint the
    differentiated code as well where that matters.
    """
    digest = hashlib.sha256()
    for jaxpr in closed:
        _digest_jaxpr(jaxpr, digest.update)
    return digest.hexdigest()[:16]


def _digest_jaxpr(closed: jex.ClosedJaxpr, update: Callable[[bytes], None]) -> None:
    jaxpr = closed.jaxpr
    numbers: dict[Var, int] = {}

    def name(atom: Atom) -> str:
        if is_var(atom):
            return f"v{numbers.setdefault(atom, len(numbers))}"
        value = np.asarray(atom.val)
        return f"l{_shown(atom.aval)}{value.dtype}{value.tobytes().hex()}"

    for var in [*jaxpr.constvars, *jaxpr.invars]:
        update(f"{name(var)}:{_shown(var.aval)};".encode())
    for const in closed.consts:
        _digest_param(const, update)
    for eqn in jaxpr.eqns:
        reads = ",".join(name(atom) for atom in eqn.invars)
        writes = ",".join(f"{name(var)}:{_shown(var.aval)}" for var in eqn.outvars)
        update(f"{writes}={eqn.primitive.name} {reads}[".encode())
        for key in sorted(eqn.params):
            update(key.encode())
            _digest_param(eqn.params[key], update)
        update(b"]")
    update(",".join(name(atom) for atom in jaxpr.outvars).encode())


_shown = functools.lru_cache(maxsize=4096)(str)  # of types, which JAX writes out slowly


def _digest_param(param: Any, update: Callable[[bytes], None]) -> None:
    if isinstance(param, (jex.Jaxpr, jex.ClosedJaxpr)):
        _digest_jaxpr(compat.as_closed(param), update)
    elif isinstance(param, (tuple, list)):
        update(f"({len(param)}".encode())
        for item in param:
            _digest_param(item, update)
    elif isinstance(param, Mapping):
        for key in param:
            update(repr(key).encode())
            _digest_param(param[key], update)
    elif isinstance(param, jax.Array) and compat.is_extended(param.dtype):
        update(str(param.dtype).encode())
        _digest_param(jax.random.key_data(param), update)
    elif isinstance(param, (np.ndarray, np.generic)) or hasattr(param, "__array__"):
        array = np.asarray(param)
        update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    elif callable(param) and not isinstance(param, type):
        update(getattr(param, "__qualname__", type(param).__qualname__).encode())
    else:
        update(repr(param).encode())
