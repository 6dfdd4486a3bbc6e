"""Says how what the loss returns for each microbatch becomes what it returns for the batch.

Terms.
    The **reduction** of a loss is what it is over its examples: their `mean`, their `sum`, or `weighted`, the quotient of a
    sum and a weight that both add up over microbatches. A weighted loss gives its sum and its weight to the step, which
    divides in its update; so all of the update that reads a gradient waits for the weight of the whole batch.

    The **join** of a result is what is done with the values that it has on each rank for each microbatch:
        mean   they are averaged (floats)
        sum    they are added (the sum and the weight of the loss; integers)
        rows   they are put one behind another along axis 0, in the order of the batch
        first  that of rank 0 and microbatch 0 is taken (typed keys, what does not depend on the batch, and a batch that is
               not cut)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from ratrain_jax import compat
from ratrain_jax.errors import UnsupportedError
from ratrain_jax.lowering.graph import (
    Eqn,
    Graph,
    Var,
    as_function,
    cut,
    inline,
    is_var,
    needed,
    reached,
)
from ratrain_jax.lowering.keys import microbatch_key_p
from ratrain_jax.lowering.opening import emit, rename

REDUCTIONS = ("mean", "sum", "weighted")


@dataclasses.dataclass(frozen=True, slots=True)
class Results:
    """What a step takes of its loss.

    Attributes:
        step: the step, in which a weighted loss gives its sum and its weight.
        region: the equation of the loss in it.
        results: the variables that take the loss (or its sum and its weight) and the auxiliary values.
        grads: the variables that take the gradients, one a parameter.
        joins: how each of `results` is joined.
        kept: the places of `results` among what the traced loss returns.
    """

    step: Graph
    region: Eqn
    results: tuple[Var, ...]
    grads: tuple[Var, ...]
    joins: tuple[str, ...]
    kept: tuple[int, ...]


def ratio(total: Any, weight: Any) -> Any:
    """A sum over a weight, divided in at least float32, in the type of the sum."""
    total, weight = jnp.asarray(total), jnp.asarray(weight)
    wide = _wide(total.dtype)
    return lax.div(total.astype(wide), weight.astype(wide)).astype(total.dtype)


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.inexact) else dtype


def weight_moves(loss: jex.ClosedJaxpr, diff: Sequence[int]) -> bool:
    """Whether the weight of a loss has a gradient by what the loss is differentiated by.

    Args:
        loss: returns a sum, a weight, and auxiliary values.
        diff: the inputs that it is differentiated by.
    """
    graph = inline(loss)
    weight = cut(graph, graph.invars, graph.outvars[1:2])
    aval = weight.out_avals[0]
    if not jnp.issubdtype(aval.dtype, jnp.inexact):
        return False
    run = as_function(weight)

    def pull(args: Sequence[Any], cotangent: Any) -> Any:
        def call(chosen: Sequence[Any]) -> Any:
            full = list(args)
            for index, value in zip(diff, chosen, strict=True):
                full[index] = value
            return run(*full)[0]

        return jax.vjp(call, [args[index] for index in diff])[1](cotangent)

    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in weight.in_avals]
    pulled = inline(jax.make_jaxpr(pull)(shapes, jax.ShapeDtypeStruct((), aval.dtype)))
    return pulled.invars[-1] in needed(pulled.eqns, pulled.outvars, pulled.invars)[1]


def take_results(step: Graph, region: Eqn, small: Eqn, states: int, parts: int) -> Results:
    """Finds what a step takes of its loss; of a weighted loss it then takes the sum and the weight.

    Args:
        step: the step at the size of the global batch.
        region: the equation of its loss.
        small: the same equation at the size of a microbatch.
        states: how many inputs of the step are leaves of the state; the others are the batch.
        parts: data-parallel ranks × microbatches.

    Raises:
        UnsupportedError: an auxiliary value is a truth value, or has the batch along another axis than 0.
    """
    kept = tuple(range(len(region.params["loss"].out_avals)))
    if len(region.outvars) > 1 + len(region.params["diff"]):
        step, region, kept = _without_constants(step, region, states)
    count = len(region.outvars) - len(region.params["diff"])
    results, grads = list(region.outvars[:count]), list(region.outvars[count:])
    reduction = region.params["reduction"]
    first = len(kept) - count  # the sum of a weighted loss stands before its results
    alone = count == 1 and reduction != "none"
    varies = [True] if alone else _varies(step, region, states)[first:]
    joins = [
        _join(large.aval, part.aval, parts) if varied else "first"
        for large, part, varied in zip(
            results, (small.outvars[n - first] for n in kept if n >= first), varies, strict=True
        )
    ]
    if reduction == "none":  # an evaluation: all its results are joined as auxiliary values are
        return Results(step, region, tuple(results), tuple(grads), tuple(joins), kept)
    aux = joins[1:]
    if reduction != "weighted":
        return Results(step, region, tuple(results), tuple(grads), (reduction, *aux), kept)
    total, weight = (
        compat.new_var(aval.update(dtype=_wide(aval.dtype), weak_type=False))
        for aval in region.params["loss"].out_avals[:2]
    )
    wide = [
        compat.new_var(g.aval.update(dtype=_wide(g.aval.dtype), weak_type=False)) for g in grads
    ]
    taken = region.replace(outvars=[total, weight, *results[1:], *wide])
    divided = _divided([total, *wide], weight, [results[0], *grads])
    eqns = [e for eqn in step.eqns for e in ([taken, *divided] if eqn is region else [eqn])]
    return Results(
        dataclasses.replace(step, eqns=tuple(eqns)),
        taken,
        (total, weight, *results[1:]),
        tuple(wide),
        ("sum", "sum", *aux),
        kept,
    )


def _without_constants(step: Graph, region: Eqn, states: int) -> tuple[Graph, Eqn, tuple[int, ...]]:
    """Lets the step compute what its loss returns but what depends on neither parameters nor batch, such as a batch size.

    The loss of a microbatch would give the size of the microbatch.

    Returns:
        The step, the equation of its loss, which returns the rest, and the places of the rest in what it returned.
    """
    loss = inline(region.params["loss"])
    diff = {loss.invars[i] for i in region.params["diff"]}
    moving = _reached(loss.eqns, _given_batch(step, region, loss, states) | diff)
    first = len(loss.outvars) - (len(region.outvars) - len(diff))
    taken: dict[Var, Any] = {}
    consts: dict[Var, Any] = dict(step.consts)
    before: list[Eqn] = []
    for place, out in enumerate(loss.outvars[first:]):
        is_loss = place == 0 and region.params["reduction"] != "none"  # which stays
        if not is_loss and not (is_var(out) and out in moving):
            program = cut(loss, loss.invars, [out])
            made, (taken[region.outvars[place]],) = rename(program, region.invars, consts)
            before += made
    if not taken:
        return step, region, tuple(range(len(loss.outvars)))
    kept = tuple(
        n for n in range(len(loss.outvars)) if n < first or region.outvars[n - first] not in taken
    )
    again = region.replace(
        outvars=[var for var in region.outvars if var not in taken],
        params={**region.params, "loss": cut(loss, loss.invars, [loss.outvars[n] for n in kept])},
    )

    def read(atom: Any) -> Any:
        return taken.get(atom, atom) if is_var(atom) else atom

    eqns = [
        new
        for eqn in step.eqns
        for new in (
            [*before, again] if eqn is region else [eqn.replace(invars=list(map(read, eqn.invars)))]
        )
    ]
    outvars = tuple(map(read, step.outvars))
    step = dataclasses.replace(step, eqns=tuple(eqns), outvars=outvars, consts=consts)
    return step, again, kept


def _varies(step: Graph, region: Eqn, states: int) -> list[bool]:
    """Whether each result of the loss may differ from part to part: whether it depends on the batch, or on keys of its part."""
    loss = inline(region.params["loss"])
    inside = _reached(loss.eqns, _given_batch(step, region, loss, states))
    return [is_var(out) and out in inside for out in loss.outvars]


def _given_batch(step: Graph, region: Eqn, loss: Graph, states: int) -> set[Var]:
    """The inputs of the loss that depend on the batch."""
    outside = _reached(step.eqns, set(step.invars[states:]))
    return {
        inner
        for inner, outer in zip(loss.invars, region.invars, strict=True)
        if is_var(outer) and outer in outside
    }


def _reached(eqns: Sequence[Eqn], found: set[Var]) -> set[Var]:
    """The variables that depend on those of `found`, or on a random key of each part."""
    keys = (var for eqn in eqns if eqn.primitive is microbatch_key_p for var in eqn.outvars)
    return reached(eqns, found.union(keys))


def _divided(given: Sequence[Var], weight: Var, wanted: Sequence[Var]) -> list[Eqn]:
    """Equations that make each of `wanted` from one of `given`, divided by the weight."""
    eqns: list[Eqn] = []
    for total, out in zip(given, wanted, strict=True):

        def divide(x: Any, w: Any, dtype: Any = out.aval.dtype) -> Any:
            w = lax.convert_element_type(w, x.dtype)
            return lax.convert_element_type(lax.div(x, lax.broadcast(w, x.shape)), dtype)

        made, (result,) = emit(divide, [total, weight])
        eqns += [e.replace(outvars=[out if v is result else v for v in e.outvars]) for e in made]
    return eqns


def _join(large: Any, small: Any, parts: int) -> str:
    """How an auxiliary value is joined, by its types with the whole batch and with one microbatch."""
    if parts == 1:
        return "first"
    if large.shape != small.shape:
        if not small.shape or large.shape != (small.shape[0] * parts, *small.shape[1:]):
            raise UnsupportedError(
                f"the loss returns an auxiliary value of shape {large.shape} with the whole batch and"
                f" {small.shape} with one microbatch. Only axis 0 may grow with the batch: move the batch axis to"
                " the front, or return a mean over it."
            )
        return "rows"
    if compat.is_extended(large.dtype):
        return "first"
    if large.dtype == bool:
        raise UnsupportedError(
            f"the loss returns an auxiliary truth value of shape {large.shape}, one for each microbatch. Return it"
            " as an integer, which is added, or as a float, which is averaged."
        )
    return "mean" if jnp.issubdtype(large.dtype, jnp.inexact) else "sum"
