"""Warns of losses that are not what their reduction says: means, or sums, over the examples of a batch.

Terms.
    A value has **rows** if its shape grows with the batch. A **total** is a value without rows that depends on the batch.

The loss is computed for a microbatch at a time, and the results are averaged (or added). That gives the loss of the whole batch
only if it is linear in what it has summed over the batch, with factors that shrink as the batch grows (or that do not). The
equations between the last sums over rows and the loss tell: here they are followed backwards from the loss. What is met
beside elementary arithmetic is taken to be as it should be; so some losses pass that are no means.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ratrain_jax.errors import LossReductionWarning
from ratrain_jax.lowering.graph import Atom, Eqn, Graph, Var, is_var, needed
from ratrain_jax.lowering.labels import origin

_SUMS = frozenset({"reduce_sum", "dot_general"})
_SAME = frozenset(
    [
        "reduce_sum",
        "reshape",
        "squeeze",
        "broadcast_in_dim",
        "convert_element_type",
        "transpose",
        "neg",
        "copy",
        "expand_dims",
        "add",
        "sub",
        "add_any",
        "concatenate",
        "slice",
        "stop_gradient",
    ]
)
_CURVED = frozenset(
    [
        "sqrt",
        "rsqrt",
        "square",
        "integer_pow",
        "pow",
        "log",
        "log1p",
        "exp",
        "expm1",
        "tanh",
        "logistic",
        "abs",
        "max",
        "min",
    ]
)


class _Unknown(Exception):
    """The loss is computed in a way that is not looked into."""


class _Found(Exception):
    """What makes the loss no mean; says how, and by which equation."""


def warn_of_other_losses(
    whole: Graph, small: Graph, split: Sequence[int], parts: int, reduction: str
) -> None:
    """Warns once if a loss is no mean, sum or weighted mean over examples, as its reduction says.

    Args:
        whole: the loss of the whole batch.
        small: the same of a microbatch.
        split: numbers of its inputs that differ between parts.
        parts: how many parts there are.
        reduction: of the loss.
    """
    if parts == 1 or reduction == "none" or not _alike(whole, small):
        return
    told = _Totals(whole, small, split, parts)
    results = whole.outvars[: 2 if reduction == "weighted" else 1]
    try:
        told.refuse_pairs(needed(whole.eqns, results)[0])
        factors = [told.factors(result) for result in results]
    except _Unknown:
        return
    except _Found as found:
        _warn(f"the loss is no {_NAMES[reduction]} over examples: {found}. {_REMEDY}")
        return
    if reduction == "mean" and _any_near(factors[0], 1.0):
        _warn(_OTHER.format("sum", reduction, "averages", "mean"))
    if reduction == "sum" and _any_near(factors[0], parts):
        _warn(_OTHER.format("mean", reduction, "adds", "sum"))


_OTHER = (
    "the loss is a {0} over examples, and reduction={1!r} {2} the microbatches' losses."
    " Say `reduction={0!r}`, or make it a {3}."
)
_NAMES = {"mean": "mean", "sum": "sum", "weighted": "weighted mean"}
_REMEDY = (
    "Each microbatch's own is taken, which is not that of the whole batch. For a mean over unevenly many terms (masked tokens)"
    ' let the loss return (sum, weight), with reduction="weighted".'
)


def _warn(message: str) -> None:
    warnings.warn(message, LossReductionWarning, stacklevel=2)


def _any_near(factors: Iterable[float], other: float) -> bool:
    return any(abs(factor - other) < 1e-3 * other for factor in factors)


def _alike(whole: Graph, small: Graph) -> bool:
    """Whether the same equations compute both."""
    pairs = zip(whole.eqns, small.eqns, strict=False)
    return len(whole.eqns) == len(small.eqns) and all(a.primitive is b.primitive for a, b in pairs)


class _Totals:
    """Follows totals back to sums over rows."""

    def __init__(self, whole: Graph, small: Graph, split: Sequence[int], parts: int) -> None:
        self._parts = parts
        self._twin: dict[Var, Any] = dict(zip(whole.invars, small.invars, strict=True))
        self._makers: dict[Var, tuple[Eqn, Eqn]] = {}
        self._varies = {whole.invars[n] for n in split}
        for eqn, twin in zip(whole.eqns, small.eqns, strict=True):
            self._twin.update(zip(eqn.outvars, twin.outvars, strict=True))
            self._makers.update((var, (eqn, twin)) for var in eqn.outvars)
            if self._varying(eqn.invars):
                self._varies.update(eqn.outvars)
        self._known: dict[Var, frozenset[float]] = {}

    def refuse_pairs(self, eqns: Iterable[Eqn]) -> None:
        """Refuses what has a value for every two examples."""
        for eqn in eqns:
            if any(len(self._grown(var)) > 1 for var in self._varying(eqn.outvars)):
                raise _Found(f"it compares examples with each other ({origin(eqn)})")

    def _grown(self, var: Var) -> list[int]:
        """The axes along which a value grows with the batch."""
        shapes = zip(var.aval.shape, self._twin[var].aval.shape, strict=False)
        return [n for n, (a, b) in enumerate(shapes) if a == b * self._parts != b]

    def _varying(self, atoms: Sequence[Atom]) -> list[Var]:
        return [atom for atom in atoms if is_var(atom) and atom in self._varies]

    def _has_rows(self, var: Var) -> bool:
        return var.aval.shape != self._twin[var].aval.shape

    def factors(self, atom: Atom) -> frozenset[float]:
        """How many times larger, with a microbatch, are the factors of the sums in a total."""
        if not self._varying([atom]):
            return frozenset()
        if atom not in self._known:
            self._known[atom] = self._found(atom)
        return self._known[atom]

    def _found(self, total: Var) -> frozenset[float]:
        if self._has_rows(total) or total not in self._makers:
            raise _Unknown
        eqn, twin = self._makers[total]
        name, inputs = eqn.primitive.name, self._varying(eqn.invars)
        if any(map(self._has_rows, inputs)):
            if name not in _SUMS:
                raise _Unknown
            return frozenset({1.0})
        if name in _SAME:
            return frozenset().union(*map(self.factors, inputs))
        if name in ("mul", "div"):
            return self._scaled(eqn, twin, inputs)
        if name in _CURVED:
            raise _Found(f"it takes a `{name}` of what is summed over the batch ({origin(eqn)})")
        raise _Unknown

    def _scaled(self, eqn: Eqn, twin: Eqn, inputs: Sequence[Var]) -> frozenset[float]:
        if len(inputs) > 1 or (eqn.primitive.name == "div" and eqn.invars[1] in inputs):
            how = "divides by" if eqn.primitive.name == "div" else "multiplies"
            raise _Found(f"it {how} what is summed over the batch ({origin(eqn)})")
        place = 1 - eqn.invars.index(inputs[0])
        large, small = (_number(each.invars[place]) for each in (eqn, twin))
        ratio = small / large if large and small else 1.0
        if eqn.primitive.name == "div":
            ratio = 1 / ratio
        return frozenset(ratio * factor for factor in self.factors(inputs[0]))


def _number(atom: Atom) -> float | None:
    """The value of a literal scalar."""
    if is_var(atom) or np.ndim(atom.val):
        return None
    return float(atom.val)
