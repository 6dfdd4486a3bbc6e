"""Which layers can be updated before a global reduction says whether that was right.

Clipping, and a check for infinities, make a layer's update wait for values of all layers. Mostly these decide only which
of two results is taken, and nearly always it is the same one. A layer may then be updated at once, as if it were that
one; the reduction shows whether it was.

Terms.
    A scalar's **expected** value is the one that it has for gradients that are zero, as far as that can be told: what a
    layer gives to a reduction is computed from zeros, and so are the reduction's equations. State, loss and batch are
    unknown, but nothing that is computed of them is taken for infinite.
    An expected value is **settled** if gradients a little larger do not change it: what a comparison gives, and what is
    computed of such values alone. A norm is not settled; whether it is below a bound is.
    A layer **assumes** the settled scalars that its last program reads. With these as constants, choices between two
    values are made; what is then read no more need not be waited for. A layer's update is **deferrable** if it can so be
    made some reductions earlier: before the first of all, or behind one whose scalars it needs (the weight of the loss)
    and before the others (norms). It is right if all that was assumed holds.

The early update runs the very program of the layer's last phase, with expected values in place of those scalars, so that what
comes out is the same to the last bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, Final

import numpy as np

from ratrain_jax import compat
from ratrain_jax.lowering.folding import Folding, Known
from ratrain_jax.lowering.graph import Eqn, is_var
from ratrain_jax.lowering.labels import UNKNOWN, origin
from ratrain_jax.lowering.update_plan import LayerUpdate, Partial, UpdatePlan


@dataclasses.dataclass(frozen=True, slots=True)
class Speculation:
    """Whether a layer that waits for reductions can be updated before them.

    Attributes:
        early: how many reductions the early update still waits for.
        assumed: the scalars that must have their expected values, each as its place among those of all reductions that
            the layer waits for, with that value.
        taken: all scalars of later reductions that its last program reads, likewise, with the values that its early update
            takes for them.
        reason: why it has to wait for all; empty if its update is deferrable.
    """

    early: int = 0
    assumed: tuple[tuple[int, Any], ...] = ()
    taken: tuple[tuple[int, Any], ...] = ()
    reason: str = ""

    @property
    def deferrable(self) -> bool:
        """Whether the layer can be updated before the reductions."""
        return not self.reason


def speculate(plan: UpdatePlan) -> tuple[Speculation | None, ...]:
    """Finds which layers of an update can be updated early.

    Args:
        plan: the update, by layer.

    Returns:
        For each layer what it would assume, or why it waits; None for a layer that waits for no reduction.
    """
    scalars: list[Known | None] = []
    ends = [0]
    for number in range(len(plan.reductions)):
        scalars += _expected(plan, number, scalars)
        ends.append(len(scalars))
    return tuple(
        _speculation(layer, scalars, ends[: layer.phase + 1]) if layer.phase else None
        for layer in plan.layers
    )


def _expected(plan: UpdatePlan, number: int, earlier: Sequence[Known | None]) -> list[Known | None]:
    """What a reduction is expected to give, from what earlier ones are expected to."""
    reduction, state = plan.reductions[number], len(plan.replicated)
    partials = [
        value for layer in reduction.layers for value in _given(plan.layers[layer], number, earlier)
    ]
    unknown = len(reduction.program.in_avals) - state - len(partials) - len(earlier)
    inputs = [*[None] * state, *partials, *[None] * unknown, *earlier]
    return list(Folding(reduction.program, inputs, guess=True).outputs)


def _given(layer: LayerUpdate, phase: int, scalars: Sequence[Known | None]) -> list[Known | None]:
    """What a layer is expected to give to the reduction after a phase."""
    program, partials = layer.phases[phase], layer.partials[phase]
    avals = program.in_avals
    zeros = [Known(np.zeros((), aval.dtype), settled=False) for aval in avals[: len(layer.trained)]]
    unknown = len(avals) - len(zeros) - len(scalars)
    made = Folding(program, [*zeros, *[None] * unknown, *scalars], guess=True).outputs
    return [
        value or _of_nothing(partial)
        for value, partial in zip(made[len(made) - len(partials) :], partials, strict=True)
    ]


_OF_NOTHING: Final = {"sum": 0, "max": 0, "min": 0, "and": True, "or": False}


def _of_nothing(partial: Partial) -> Known | None:
    """What a partial is that unknown values were reduced to, if it is for nothing."""
    if partial.combine not in _OF_NOTHING:
        return None
    value = np.asarray(_OF_NOTHING[partial.combine]).astype(partial.aval.dtype)
    return Known(value, settled=partial.combine in ("and", "or"))


def _speculation(
    layer: LayerUpdate, expected: Sequence[Known | None], ends: Sequence[int]
) -> Speculation:
    """The earliest that a layer can be updated, and what it then assumes; `ends[k]` scalars are of reductions 1 to k."""
    found = Speculation()
    for early in range(layer.phase):
        found = _after(layer, expected[: ends[-1]], early, ends[early])
        if found.deferrable:
            break
    return found


def _after(
    layer: LayerUpdate, expected: Sequence[Known | None], early: int, start: int
) -> Speculation:
    """What a layer would assume to be updated behind some reductions, which give the first `start` scalars."""
    jaxpr = layer.phases[layer.phase].jaxpr
    first = len(jaxpr.invars) - len(expected)
    read = {atom for eqn in jaxpr.eqns for atom in eqn.invars if is_var(atom)}
    later = [k if k is not None and k.settled else None for k in expected[start:]]
    live = Folding(layer.phases[layer.phase], [*[None] * (first + start), *later]).live()
    assumed, taken = [], []
    for place in range(start, len(expected)):
        var, known = jaxpr.invars[first + place], later[place - start]
        if var in live or (var in read and compat.is_extended(var.aval.dtype)):
            return Speculation(reason=_reason(live.get(var)))
        if var not in read:
            continue
        value = np.ones((), var.aval.dtype) if known is None else known.value
        taken.append((place, value))
        if known is not None:
            assumed.append((place, value))
    return Speculation(early, tuple(assumed), tuple(taken))


def _reason(reader: Eqn | None) -> str:
    if reader is None:
        return "a value of all layers is among its results"
    where = origin(reader)
    place = "" if where == UNKNOWN else f" ({PurePath(where).name})"
    return f"`{reader.primitive.name}` takes a value of all layers{place}"
