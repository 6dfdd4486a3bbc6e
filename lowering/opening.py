"""Opens what stands closed in the update region, so that dependence can be seen through it.

The update is not differentiated again, so custom differentiation rules are dropped for the code
they wrap. A `cond` becomes all of its branches and a `select_n` on each result: a branch around the
whole update (`MultiSteps`, `apply_if_finite`) then falls apart by layer. Where that would run heavy
work (`HEAVY`) in vain, see `branches`. Equal equations are merged last, so that a scalar that optax
computes once a leaf is one value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from ratrain_jax import compat
from ratrain_jax.lowering.graph import Atom, Eqn, Var, is_var

HEAVY = frozenset(
    {"scan", "while", "dot_general", "conv_general_dilated", "sort", "fft", "top_k"}
    | {"cholesky", "eigh", "svd", "lu", "qr", "householder_product", "triangular_solve", "eig"}
)
"""Primitives that a branch not taken should not pay for."""


def emit(fun: Callable[..., Any], atoms: Sequence[Atom]) -> tuple[list[Eqn], list[Atom]]:
    """Equations that compute `fun` of some atoms, and its results."""
    shapes = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in atoms]
    closed = jax.make_jaxpr(fun)(*shapes)
    return rename(closed, atoms, {})


def rename(
    closed: jex.ClosedJaxpr, atoms: Sequence[Atom], consts: dict[Var, Any]
) -> tuple[list[Eqn], list[Atom]]:
    """The equations of a jaxpr over other inputs and fresh variables, and its results.

    Args:
        closed: the jaxpr.
        atoms: what stands for its inputs.
        consts: takes the arrays that it closed over, by fresh variable.
    """
    jaxpr = closed.jaxpr
    env: dict[Var, Atom] = dict(zip(jaxpr.invars, atoms, strict=True))
    for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
        env[var] = compat.new_var(var.aval)
        consts[env[var]] = value
    eqns = []
    for eqn in jaxpr.eqns:
        outputs = [compat.new_var(var.aval) for var in eqn.outvars]
        eqns.append(eqn.replace(invars=[_read(env, a) for a in eqn.invars], outvars=outputs))
        env.update(zip(eqn.outvars, outputs, strict=True))
    return eqns, [_read(env, atom) for atom in jaxpr.outvars]


def _read(env: dict[Var, Atom], atom: Atom) -> Atom:
    return env.get(atom, atom) if is_var(atom) else atom


def is_heavy(closed: jex.ClosedJaxpr) -> bool:
    """Whether a branch holds work that must not be done in vain."""
    return any(
        eqn.primitive.name in HEAVY or any(is_heavy(sub) for _, sub in compat.sub_jaxprs(eqn))
        for eqn in closed.jaxpr.eqns
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    """Equations, opened.

    Attributes:
        eqns: what they are now.
        consts: the arrays that opened code closed over.
        read: gives the atom that stands for one that the equations had before.
    """

    eqns: list[Eqn]
    consts: dict[Var, Any]
    read: Callable[[Atom], Atom]


def open_calls(eqns: Sequence[Eqn], keep: Callable[[Eqn], bool] = lambda eqn: False) -> Opened:
    """Opens calls, custom rules and branches, and merges equal equations.

    Args:
        eqns: equations, in order.
        keep: which `cond`s stay as they are.
    """
    opener = _Opener(keep)
    opener.visit(eqns)
    merged, same = merge_equal(opener.eqns)
    return Opened(merged, opener.consts, lambda atom: _read(same, opener.read(atom)))


class _Opener:
    """Collects opened equations; `env` holds what stands for each variable that is gone."""

    def __init__(self, keep: Callable[[Eqn], bool]) -> None:
        self.keep = keep
        self.eqns: list[Eqn] = []
        self.consts: dict[Var, Any] = {}
        self.env: dict[Var, Atom] = {}

    def read(self, atom: Atom) -> Atom:
        return _read(self.env, atom)

    def visit(self, eqns: Sequence[Eqn]) -> None:
        for eqn in eqns:
            eqn = eqn.replace(invars=[self.read(atom) for atom in eqn.invars])
            results = self.open(eqn)
            if results is None:
                self.eqns.append(eqn)
            else:
                self.env.update(zip(eqn.outvars, results, strict=True))

    def open(self, eqn: Eqn) -> list[Atom] | None:
        """The results of an equation that was opened, or None if it stays."""
        if eqn.primitive.name == "cond":
            return None if self.keep(eqn) else self.open_branches(eqn)
        key = compat.CUSTOM_CALLS.get(eqn.primitive.name)
        called = compat.called_jaxpr(eqn) if key is None else compat.as_closed(eqn.params[key])
        return None if called is None else self.run(called, eqn.invars)

    def run(self, closed: jex.ClosedJaxpr, atoms: Sequence[Atom]) -> list[Atom]:
        inner, results = rename(closed, atoms, self.consts)
        self.visit(inner)
        return [self.read(atom) for atom in results]

    def open_branches(self, eqn: Eqn) -> list[Atom]:
        index, *atoms = eqn.invars
        branches = [compat.as_closed(branch) for branch in eqn.params["branches"]]
        if not is_var(index):
            branches = [branches[int(np.clip(index.val, 0, len(branches) - 1))]]
        results = [self.run(branch, atoms) for branch in branches]
        return [self.select(index, cases) for cases in zip(*results, strict=True)]

    def select(self, index: Atom, cases: Sequence[Atom]) -> Atom:
        if all(case is cases[0] for case in cases):
            return cases[0]
        selected, (output,) = emit(lax.select_n, [index, *cases])
        self.eqns.extend(selected)
        return output


def merge_equal(eqns: Sequence[Eqn]) -> tuple[list[Eqn], dict[Var, Atom]]:
    """Drops equations that compute what an earlier one did.

    Returns:
        The equations left, and what stands for each variable that is gone.
    """
    same: dict[Var, Atom] = {}
    seen: dict[Any, Eqn] = {}
    kept = []
    for eqn in eqns:
        eqn = eqn.replace(invars=[_read(same, atom) for atom in eqn.invars])
        key = _key(eqn)
        first = seen.setdefault(key, eqn) if key is not None else eqn
        if first is eqn:
            kept.append(eqn)
        else:
            same.update(zip(eqn.outvars, first.outvars, strict=True))
    return kept, same


def _key(eqn: Eqn) -> Any:
    """What equal equations have in common; None if they cannot be compared, or must all run."""
    if eqn.effects or any(True for _ in compat.sub_jaxprs(eqn)):
        return None
    reads = tuple(
        atom if is_var(atom) else (atom.aval, np.asarray(atom.val).tobytes()) for atom in eqn.invars
    )
    writes = tuple(var.aval for var in eqn.outvars)
    key = (eqn.primitive, reads, writes, tuple(sorted(eqn.params.items(), key=lambda i: i[0])))
    try:
        hash(key)
    except TypeError:
        return None
    return key
