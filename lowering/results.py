"""Says how what the loss returns for each microbatch becomes what it returns for the batch.

Terms.
    The **reduction** of a loss is what it is over its examples: their `mean`, their `sum`, or `weighted`, the quotient of a
    sum and a weight that both add up over microbatches. A weighted loss gives its sum and its weight to the step, which
    divides in its update; so all of the update that reads a gradient waits for the weight of the whole batch.

    The **join** of a result is what is done with the values that it has on each rank for each microbatch:
        mean   they are averaged (floats)
        sum    they are added (the sum and the weight of the loss; integers)
        rows   they are put one behind another along axis 0, in the order of the batch
        first  that of rank 0 and microbatch 0 is taken (typed keys, and a batch that is not cut)
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
from ratrain_jax.lowering.graph import Eqn, Graph, Var, as_function, cut, inline, needed
from ratrain_jax.lowering.opening import emit

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
    """

    step: Graph
    region: Eqn
    results: tuple[Var, ...]
    grads: tuple[Var, ...]
    joins: tuple[str, ...]


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


def take_results(step: Graph, region: Eqn, small: Eqn, parts: int) -> Results:
    """Finds what a step takes of its loss; of a weighted loss it then takes the sum and the weight.

    Args:
        step: the step at the size of the global batch.
        region: the equation of its loss.
        small: the same equation at the size of a microbatch.
        parts: data-parallel ranks × microbatches.

    Raises:
        UnsupportedError: an auxiliary value is a truth value, or has the batch along another axis than 0.
    """
    count = len(region.outvars) - len(region.params["diff"])
    results, grads = list(region.outvars[:count]), list(region.outvars[count:])
    aux = [
        _join(large.aval, part.aval, parts)
        for large, part in zip(results[1:], small.outvars[1:count], strict=True)
    ]
    reduction = region.params["reduction"]
    if reduction != "weighted":
        return Results(step, region, tuple(results), tuple(grads), (reduction, *aux))
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
    )


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
