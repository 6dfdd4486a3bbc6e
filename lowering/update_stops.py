"""What a program of the update computes by itself, and where values come from elsewhere.

What comes from elsewhere is brought by the reduction that is its *arrival*. A value that is made
of fewer elements than it has (a scalar broadcast to an array, noise from a key) is not sent: each
program that wants it makes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from ratrain_jax.lowering.graph import Atom, Eqn, Var, is_var
from ratrain_jax.lowering.labels import Kind, Labels, is_small

Stop = Callable[[Var], bool]


def walk(
    makers: Mapping[Var, Eqn], outvars: Iterable[Atom], stop: Stop
) -> tuple[list[Eqn], list[Var]]:
    """The equations that `outvars` need, in the order of need, and where the walk ended.

    Args:
        makers: the equation that makes each variable.
        outvars: what is wanted.
        stop: which variables come from elsewhere.
    """
    eqns: list[Eqn] = []
    ends: list[Var] = []
    seen: set[Var] = set()
    for out in outvars:
        stack: list[tuple[Atom | None, Eqn | None]] = [(out, None)]
        while stack:
            atom, ready = stack.pop()
            if ready is not None:
                eqns.append(ready)
                continue
            if not is_var(atom) or atom in seen:
                continue
            eqn = None if stop(atom) else makers.get(atom)
            if eqn is None:
                seen.add(atom)
                ends.append(atom)
                continue
            seen.update(eqn.outvars)
            stack.append((None, eqn))
            stack.extend((read, None) for read in reversed(eqn.invars))
    return eqns, ends


class Stops:
    """Where the programs of each sort stop.

    Attributes:
        labels: the labels of the update.
        made_of: how many elements to send if a value is made where it is wanted.
    """

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.made_of = self._made_of()

    def layer(self, number: int) -> Stop:
        """For a layer: at what belongs to another layer, and at what is global."""

        def stop(var: Var) -> bool:
            mark = self.labels.mark(var)
            if mark.kind is Kind.REPLICATED or (mark.owned and mark.layer == number):
                return False
            return not self.grows(var)

        return stop

    def shared(self, var: Var) -> bool:
        """For replicated state: at everything but other replicated values."""
        return self.labels.mark(var).kind is not Kind.REPLICATED and not self.grows(var)

    def metrics(self, var: Var) -> bool:
        """For the metrics: as for replicated state, but the batch is at hand."""
        return not self.labels.mark(var).batch and self.shared(var)

    def reduction(self, number: int) -> Stop:
        """For a reduction: at what layers compute with arrays, and at what an earlier reduction gives."""

        def stop(var: Var) -> bool:
            mark = self.labels.mark(var)
            if mark.kind is Kind.REPLICATED:
                return False
            if mark.kind is Kind.LAYER or self.is_reduced(var):
                return True
            return mark.arrival < number and not self.grows(var)

        return stop

    def is_reduced(self, var: Var) -> bool:
        """Whether a SCALAR is made from the layer's own arrays, not from scalars alone."""
        mark, eqn = self.labels.mark(var), self.labels.makers.get(var)
        return (
            mark.kind is Kind.SCALAR
            and eqn is not None
            and any(
                read.kind is Kind.LAYER and read.layer == mark.layer
                for read in map(self.labels.mark, eqn.invars)
            )
        )

    def grows(self, var: Var) -> bool:
        """Whether sending what a value is made of costs less than sending the value."""
        return self.made_of.get(var, math.inf) < math.prod(var.aval.shape)

    def _made_of(self) -> dict[Var, float]:
        """The elements to send for each value that is not of a layer's arrays, if it is made where it is wanted."""
        made_of: dict[Var, float] = {}

        def cost(atom: Atom) -> float:
            kind, size = self.labels.mark(atom).kind, math.prod(atom.aval.shape)
            if kind is Kind.REPLICATED or not is_var(atom):
                return 0
            if kind is Kind.LAYER:
                return size if is_small(atom) else math.inf
            return min(size, made_of.get(atom, math.inf))

        for var, eqn in self.labels.makers.items():
            if self.labels.mark(var).kind in (Kind.GLOBAL, Kind.SCALAR):
                made_of[var] = sum(map(cost, eqn.invars))
        return made_of
