"""Finds the scans over stacked layers in a loss.

A `scan` is over **layers** if parameters are among what it scans: arrays whose axis 0 counts the
layers. It is opened if more elements of parameters come in that way than as its constants; a scan
over time (an LSTM) has its parameters as constants and stays whole. What is made of parameters and
of the batch (an embedded sequence) is no parameter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jax.extend import core as jex

from ratrain_jax import compat
from ratrain_jax.lowering.graph import Atom, Eqn, Var, is_var
from ratrain_jax.lowering.slice_rules import RULES, SLICES

_NONE: frozenset[int] = frozenset()


def scans_of_layers(loss: jex.ClosedJaxpr, params: Sequence[int]) -> list[tuple[int, ...]]:
    """The scans that are to be opened.

    Args:
        loss: the loss, captured whole.
        params: its inputs that are parameters.

    Returns:
        For each scan the parameters (by their place in `params`) that are stacked in what it scans.
    """
    jaxpr = loss.jaxpr
    finder = _Finder()
    for number, i in enumerate(params):
        var = jaxpr.invars[i]
        finder.params[var] = True
        if len(var.aval.shape):
            finder.stacks[var] = frozenset({number})
    for i, var in enumerate(jaxpr.invars):
        if i not in params:
            finder.params[var] = False
    finder.walk(jaxpr.eqns)
    return finder.found


@dataclasses.dataclass(slots=True)
class _Finder:
    """Walks over a loss.

    Attributes:
        params: for what depends on an input of the loss: whether only parameters are behind it.
        stacks: the parameters whose axis 0 is a variable's axis 0.
        found: see `scans_of_layers`.
    """

    params: dict[Var, bool] = dataclasses.field(default_factory=dict)
    stacks: dict[Var, frozenset[int]] = dataclasses.field(default_factory=dict)
    found: list[tuple[int, ...]] = dataclasses.field(default_factory=list)

    def walk(self, eqns: Sequence[Eqn]) -> None:
        for eqn in eqns:
            called = compat.called_jaxpr(eqn)
            if called is not None:
                self.call(called, eqn)
                continue
            if eqn.primitive.name == "scan":
                self.scan(eqn)
            behind = [self.params[a] for a in eqn.invars if is_var(a) and a in self.params]
            if behind:
                self.params.update((var, all(behind)) for var in eqn.outvars)
            self.pass_on(eqn)

    def call(self, called: jex.ClosedJaxpr, eqn: Eqn) -> None:
        """Goes through a call; its variables are its own, but for what a cached one shares with other calls."""
        jaxpr = called.jaxpr
        for inner, atom in zip(jaxpr.invars, eqn.invars, strict=True):
            self.copy(atom, inner)
        self.walk(jaxpr.eqns)
        for inner, outer in zip(jaxpr.outvars, eqn.outvars, strict=True):
            self.copy(inner, outer)

    def copy(self, source: Atom, target: Var) -> None:
        _copy(self.params, source, target)
        _copy(self.stacks, source, target)

    def pass_on(self, eqn: Eqn) -> None:
        """Whether the results are stacked as the operands are."""
        for var in eqn.outvars:
            self.stacks.pop(var, None)
        sliced = [bool(self.stack(atom)) for atom in eqn.invars]
        rule = RULES.get(eqn.primitive.name)
        how = rule(eqn, sliced) if rule and any(sliced) else None
        chosen = eqn.primitive.name == "slice" and any(sliced)
        if how is None and not chosen:
            return
        behind = frozenset().union(*map(self.stack, eqn.invars))
        for n, var in enumerate(eqn.outvars):
            if chosen or (how is not None and how.gives[n] == SLICES):
                self.stacks[var] = behind

    def stack(self, atom: Atom) -> frozenset[int]:
        """The parameters that an atom is a stack of; none where the batch is behind it, too."""
        known = is_var(atom) and self.params.get(atom, False)
        return self.stacks.get(atom, _NONE) if known else _NONE

    def scan(self, eqn: Eqn) -> None:
        consts, carried = compat.scan_counts(eqn)
        scanned = [atom for atom in eqn.invars[consts + carried :] if self.stack(atom)]
        shared = [a for a in eqn.invars[:consts] if is_var(a) and self.params.get(a, False)]
        if _elements(scanned) > _elements(shared):
            self.found.append(tuple(sorted(frozenset().union(*map(self.stack, scanned)))))


def _copy(table: dict[Var, Any], source: Atom, target: Var) -> None:
    table.pop(target, None)
    if is_var(source) and source in table:
        table[target] = table[source]


def _elements(atoms: Sequence[Atom]) -> int:
    return sum(math.prod(atom.aval.shape) for atom in atoms)
