"""Cuts a traced train step into prologue, loss and update.

Terms.
    The **loss region** is the one equation that `value_and_grad` leaves in the trace: the loss captured whole, with what it
    closes over. The **prologue** is what the region's inputs depend on; the **update** is everything that is left.
    A **parameter** is an input that the loss is differentiated by, or one that it holds (see
    `ratrain_jax.lowering.held`); an **operand** is any other input of the loss. An operand is *split* if its axis 0
    scales with the batch: each microbatch then reads its own rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from ratrain_jax import compat
from ratrain_jax.errors import BatchError, StepError, UnsupportedError
from ratrain_jax.lowering.additivity import warn_of_other_losses
from ratrain_jax.lowering.graph import Graph, Var, as_function, inline, is_var, needed, reached
from ratrain_jax.lowering.keys import fold_keys, refuse_folding, warn_of_shared_keys
from ratrain_jax.lowering.results import ratio, take_results

Paths = tuple[tuple[str, ...], ...]

loss_region_p = jex.Primitive("ratrain_value_and_grad")
loss_region_p.multiple_results = True


def _evaluate(
    *args: Any,
    loss: jex.ClosedJaxpr,
    diff: tuple[int, ...],
    held: tuple[int, ...],
    paths: Paths,
    reduction: str,
) -> list[Any]:
    def call(params: Sequence[Any]) -> tuple[Any, list[Any]]:
        full = list(args)
        for index, param in zip(diff, params, strict=True):
            full[index] = param
        value, *aux = as_function(loss)(*full)
        if reduction == "weighted":
            weight, *aux = aux
            value = ratio(value, weight)
        return value, aux

    (value, aux), grads = jax.value_and_grad(call, has_aux=True)([args[i] for i in diff])
    return [value, *aux, *grads]


def _types(
    *avals: Any,
    loss: jex.ClosedJaxpr,
    diff: tuple[int, ...],
    held: tuple[int, ...],
    paths: Paths,
    reduction: str,
) -> list[Any]:
    value, *aux = loss.out_avals
    return [value, *aux[reduction == "weighted" :], *(avals[i] for i in diff)]


refused_loss_p = jex.Primitive("ratrain_refused_loss")
"""Passes its inputs on; tells a step that holds it how the loss came to be where it cannot be captured."""
refused_loss_p.multiple_results = True
refused_loss_p.def_impl(lambda *args, how: list(args))
refused_loss_p.def_abstract_eval(lambda *avals, how: list(avals))
mlir.register_lowering(
    refused_loss_p, mlir.lower_fun(lambda *args, how: list(args), multiple_results=True)
)
ad.primitive_jvps[refused_loss_p] = lambda primals, tangents, how: (
    refused_loss_p.bind(*primals, how=how),
    list(tangents),
)
batching.primitive_batchers[refused_loss_p] = lambda args, dims, how: (
    refused_loss_p.bind(*args, how=how),
    list(dims),
)

_OWN_LOOP = (
    "ratrain_jax.value_and_grad is called inside a `{name}`. Remove your own accumulation loop, branch or map"
    " around it: microbatches are made for you."
)
_AGAIN = (
    "what ratrain_jax.value_and_grad gives is differentiated again. Differentiate once, by ratrain_jax, a loss"
    " that uses jax.grad within."
)


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    primals = refused_loss_p.bind(*primals, how=_AGAIN)
    dense = [ad.instantiate_zeros(tangent) for tangent in tangents]
    return jax.jvp(lambda *args: _evaluate(*args, **params), tuple(primals), tuple(dense))


def _batch(args: Any, dims: Any, **params: Any) -> tuple[Any, Any]:
    args = refused_loss_p.bind(*args, how=_OWN_LOOP.format(name="vmap"))
    results = jax.vmap(lambda *args: _evaluate(*args, **params), in_axes=tuple(dims))(*args)
    return results, [0] * len(results)


loss_region_p.def_impl(_evaluate)
loss_region_p.def_abstract_eval(_types)
mlir.register_lowering(loss_region_p, mlir.lower_fun(_evaluate, multiple_results=True))
ad.primitive_jvps[loss_region_p] = _jvp
batching.primitive_batchers[loss_region_p] = _batch


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """One input of the loss that is not differentiated.

    Attributes:
        name: its path in the step's arguments, or the computation that made it.
        split: whether each microbatch reads its own rows of axis 0.
        argument: the flat number of the leaf of the batch that it is, or None if the prologue computes it.
        aval: its type in the whole step.
        batch: whether it is made from the batch; else from the state alone.
    """

    name: str
    split: bool
    argument: int | None
    aval: Any
    batch: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Regions:
    """A step in three parts.

    Attributes:
        step: the whole step at the size of the global batch; its inputs are the state's leaves, then the batch's.
        states: how many of its inputs are leaves of the state.
        loss: the loss at the size of a microbatch; its inputs are the parameters, then the operands.
        params: the step's variable behind each parameter; those that the loss is differentiated by come first.
        paths: the path of each parameter in what the loss is differentiated by; of a held one, the path that it would have.
        operands: what the loss reads beside.
        sources: the step's variable behind each operand.
        results: the step's variables that take the loss (or its sum and its weight) and the auxiliary values.
        grads: the step's variables that take the gradients, one for each of the first parameters.
        reduction: what the loss is over its examples (see `ratrain_jax.lowering.results`).
        joins: how each of `results` is joined over ranks and microbatches.
        rest: the equations of the update.
    """

    step: Graph
    states: int
    loss: Graph
    params: tuple[Var, ...]
    paths: Paths
    operands: tuple[Operand, ...]
    sources: tuple[Any, ...]
    results: tuple[Var, ...]
    grads: tuple[Var, ...]
    reduction: str
    joins: tuple[str, ...]
    rest: tuple[Any, ...]

    @property
    def trained(self) -> int:
        """How many parameters the loss is differentiated by; the others are held."""
        return len(self.grads)


_HOW_MANY = (
    "the step{where} must call ratrain_jax.value_and_grad (or ratrain_jax.grad) exactly once, but {count}."
    " {remedy}"
)


def find_loss(graph: Graph, where: str = "") -> Any:
    """The one loss region of a step.

    Args:
        graph: the step.
        where: its name, file and line, for messages.

    Raises:
        StepError: there is none, or more than one.
        UnsupportedError: it stands inside a loop, a branch or a mapped function, is differentiated again, has a
            side effect, or its weight depends on the parameters.
    """
    found = [eqn for eqn in graph.eqns if eqn.primitive is loss_region_p]
    for eqn in graph.eqns:
        if eqn.primitive is refused_loss_p:
            raise UnsupportedError(eqn.params["how"])
        if _hides_loss(eqn):
            raise UnsupportedError(_OWN_LOOP.format(name=eqn.primitive.name))
    if not found:
        remedy = "Replace `jax.value_and_grad(loss_fn)` by `rt.value_and_grad(loss_fn)`."
        raise StepError(_HOW_MANY.format(where=where, count="does not call it", remedy=remedy))
    if len(found) > 1:
        remedy = "Join the losses into one function and differentiate their sum."
        count = f"calls it {len(found)} times"
        raise StepError(_HOW_MANY.format(where=where, count=count, remedy=remedy))
    return found[0]


def _hides_loss(eqn: Any) -> bool:
    for _, closed in compat.sub_jaxprs(eqn):
        if eqn.primitive is loss_region_p:
            continue
        for inner in closed.jaxpr.eqns:
            if inner.primitive in (loss_region_p, refused_loss_p) or _hides_loss(inner):
                return True
    return False


def one_region(graph: Graph) -> Any:
    """The loss region, if a step has just one; what else there may be is refused later, by name."""
    found = [eqn for eqn in graph.eqns if eqn.primitive is loss_region_p]
    return found[0] if len(found) == 1 else None


def parameters_of(region: Any) -> tuple[int, ...]:
    """The inputs of a loss that are parameters: those that it is differentiated by, then those that it holds."""
    return (*region.params["diff"], *region.params["held"])


def split_step(
    whole: jex.ClosedJaxpr,
    small: jex.ClosedJaxpr,
    *,
    states: int,
    names: Sequence[str],
    parts: int,
    where: str = "",
) -> Regions:
    """Cuts a step that was traced twice.

    Args:
        whole: the step, traced with the global batch.
        small: the same step, traced with a microbatch on one rank.
        states: how many of the flat inputs are leaves of the state.
        names: the path of each flat input.
        parts: data-parallel ranks × microbatches.
        where: the step's name, file and line, for messages.

    Raises:
        StepError: no loss region, or several.
        UnsupportedError: a value that scales with the batch, or a random key, in a way that is not taken.
    """
    step, micro = inline(whole), inline(small)
    refuse_folding(step, "before the loss")
    small_region = find_loss(micro, where)
    taken = take_results(step, find_loss(step, where), small_region, states, parts)
    step, region = taken.step, taken.region
    params = parameters_of(region)
    micro_loss = inline(small_region.params["loss"])
    loss = dataclasses.replace(micro_loss, outvars=tuple(micro_loss.outvars[n] for n in taken.kept))
    inputs = range(len(region.invars))
    chosen = [i for i in inputs if i not in set(params)]
    argument = {var: i for i, var in enumerate(step.invars) if i >= states}
    _refuse_batch(region, argument, names)
    from_batch = made_from_batch(step, states)
    operands = tuple(
        dataclasses.replace(
            _operand(region, small_region, i, step, argument, names, parts),
            batch=region.invars[i] in from_batch if is_var(region.invars[i]) else False,
        )
        for i in chosen
    )
    if parts > 1:
        whole_loss = inline(region.params["loss"])
        varied = [i for i, operand in zip(chosen, operands, strict=True) if operand.split]
        warn_of_other_losses(whole_loss, micro_loss, varied, parts, region.params["reduction"])
    # The order of the loss's own inputs follows: parameters first.
    loss = dataclasses.replace(loss, invars=tuple(loss.invars[i] for i in [*params, *chosen]))
    sources = [region.invars[i] for i in chosen]
    loss, numbered = fold_keys(loss, parts)
    if numbered is not None:
        step = dataclasses.replace(step, eqns=(numbered, *step.eqns))
        sources += numbered.outvars
        operands += (Operand("microbatch numbers", True, None, numbered.outvars[0].aval),)
    split = [i for i, operand in enumerate(operands, len(params)) if operand.split]
    warn_of_shared_keys(loss, [loss.invars[i] for i in split], parts)
    made = {var for eqn in _prologue_eqns(step, region) for var in eqn.outvars}
    rest = tuple(eqn for eqn in step.eqns if eqn is not region and not made.issuperset(eqn.outvars))
    return Regions(
        step=step,
        states=states,
        loss=loss,
        params=tuple(region.invars[i] for i in params),
        paths=region.params["paths"],
        operands=operands,
        sources=tuple(sources),
        results=taken.results,
        grads=taken.grads,
        reduction=region.params["reduction"],
        joins=taken.joins,
        rest=rest,
    )


def _refuse_batch(region: Any, argument: dict[Var, int], names: Sequence[str]) -> None:
    for i in region.params["diff"]:
        number = argument.get(region.invars[i])
        if number is not None:
            raise UnsupportedError(
                f"the loss is differentiated by {names[number]}, which is part of the batch. Differentiate by leaves of the"
                " state, and take gradients by the input inside the loss, with jax.grad."
            )


def made_from_batch(step: Graph, states: int) -> set[Var]:
    """The variables of a step that depend on the batch.

    Args:
        step: the step.
        states: how many of its inputs are leaves of the state; the others are the batch.
    """
    return reached(step.eqns, step.invars[states:])


def _prologue_eqns(step: Graph, region: Any) -> list[Any]:
    return needed(step.eqns, region.invars, step.invars)[0]


def _operand(
    region: Any,
    small_region: Any,
    index: int,
    step: Graph,
    argument: dict[Var, int],
    names: Sequence[str],
    parts: int,
) -> Operand:
    atom, small = region.invars[index], small_region.invars[index]
    number = argument.get(atom) if is_var(atom) else None
    leaf = step.invars.index(atom) if is_var(atom) and atom in step.invars else None
    name = names[leaf] if leaf is not None else _origin(step, atom)
    large_shape, small_shape = tuple(atom.aval.shape), tuple(small.aval.shape)
    if large_shape == small_shape:
        return Operand(name, False, number, atom.aval)
    scaled = (small_shape[0] * parts, *small_shape[1:]) if small_shape else ()
    if large_shape != scaled:
        raise UnsupportedError(
            f"the loss reads {name}, of shape {large_shape} with the whole batch and {small_shape} with one"
            " microbatch. Only axis 0 may grow with the batch: move the batch axis to the front."
        )
    return Operand(name, True, number, atom.aval)


def _origin(step: Graph, atom: Any) -> str:
    if not is_var(atom):
        return "a constant"
    for eqn in step.eqns:
        if atom in eqn.outvars:
            return f"the result of `{eqn.primitive.name}`"
    return "an array that the step closes over"


def rows_per_microbatch(batch: int, data_parallel: int, microbatches: int) -> int:
    """Rows of axis 0 that one rank reads for one microbatch.

    Raises:
        BatchError: the batch does not divide.
    """
    parts = data_parallel * microbatches
    if batch % parts or not batch:
        nearest = max(parts, round(batch / parts) * parts)
        raise BatchError(
            f"a batch of {batch} does not divide into data_parallel={data_parallel} ×"
            f" microbatches={microbatches} = {parts} parts. The nearest batch that does is {nearest}."
        )
    return batch // parts
