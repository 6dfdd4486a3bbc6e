"""Puts new equations into a graph in the place of old ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from ratrain_jax.lowering.graph import (
    Atom,
    Eqn,
    Graph,
    Var,
    as_function,
    cut,
    inline,
    is_var,
    needed,
)

LARGEST_CONSTANT = 1 << 24
"""Elements beyond which a constant is not worked out."""


class Rewriter:
    """A graph that is being written anew: equations go in one by one, and new atoms may stand for old variables."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._eqns: list[Eqn] = []
        self._renamed: dict[Var, Atom] = {}
        self._consts: dict[Var, Any] = {}
        self._checkpointed: set[Var] = set(graph.checkpointed)

    def read(self, atom: Atom) -> Atom:
        """What stands for an old atom."""
        return self._renamed.get(atom, atom) if is_var(atom) else atom

    def keep(self, eqn: Eqn) -> None:
        """Adds an old equation."""
        self._eqns.append(eqn.replace(invars=[self.read(atom) for atom in eqn.invars]))

    def call(self, fun: Callable[..., Any], atoms: Iterable[Atom], like: Eqn) -> list[Atom]:
        """Adds the equations of a function, traced on the types of some atoms.

        Args:
            fun: a function of arrays.
            atoms: old or new atoms that it is called with.
            like: the old equation in whose place it stands.

        Returns:
            The atoms of its results.
        """
        atoms = [self.read(atom) for atom in atoms]
        avals = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in atoms]
        inner = inline(jax.make_jaxpr(fun)(*avals))
        given = dict(zip(inner.invars, atoms, strict=True))

        def read(atom: Atom) -> Atom:
            return given.get(atom, atom) if is_var(atom) else atom

        for eqn in inner.eqns:
            self._eqns.append(eqn.replace(invars=[read(atom) for atom in eqn.invars]))
            if like.outvars[0] in self._graph.checkpointed:
                self._checkpointed.update(eqn.outvars)
        self._consts.update(inner.consts)
        return [read(atom) for atom in inner.outvars]

    def replace(self, old: Var, new: Atom) -> None:
        """Lets a new atom stand for an old variable from here on."""
        self._renamed[old] = new

    def finish(self) -> Graph:
        """The graph as written, without what nothing reads any more."""
        outvars = tuple(self.read(atom) for atom in self._graph.outvars)
        eqns, _ = needed(self._eqns, outvars)
        return dataclasses.replace(
            self._graph,
            outvars=outvars,
            eqns=tuple(eqns),
            consts={**self._graph.consts, **self._consts},
            checkpointed=frozenset(self._checkpointed),
        )


def constant(graph: Graph, atom: Atom) -> np.ndarray | None:
    """The value of an atom that depends on no input of a graph, or None if it does or is too large to work out."""
    if not is_var(atom):
        return np.asarray(atom.val)
    eqns, free = needed(graph.eqns, [atom])
    known = all(var in graph.consts for var in free)
    if not known or any(var.aval.size > LARGEST_CONSTANT for e in eqns for var in e.outvars):
        return None
    with jax.ensure_compile_time_eval():
        return np.asarray(as_function(cut(graph, [], [atom], eqns))()[0])
