"""Differentiates one layer into a forward program that keeps residuals and a backward program that uses them.

Terms.
    **Residuals** are what backward needs of forward and cannot have otherwise. What is an input of the layer is read again
    instead of being kept; what depends on parameters or constants alone, or is cheap to make from what is at hand
    anyway, is made again in backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core as jex

from ratrain_jax import compat
from ratrain_jax.kernels.primitives import KERNELS
from ratrain_jax.lowering.graph import (
    Eqn,
    Graph,
    as_function,
    cut,
    fingerprint,
    inline,
    is_var,
    needed,
)
from ratrain_jax.lowering.layers import Layer, LossVariable
from ratrain_jax.lowering.residuals import choose_residuals, read_in_another_order
from ratrain_jax.lowering.transposes import absorb_transposes


@dataclasses.dataclass(frozen=True, slots=True)
class LayerCode:
    """The two programs of a layer.

    Attributes:
        forward: [parameters it reads, operands, inputs] -> [outputs, residuals].
        backward: [parameters, operands, inputs and residuals as named below, cotangents of the differentiable
            outputs] -> [gradients of the trained parameters it reads, cotangents of the differentiable inputs].
        residuals: types of the residuals.
        backward_reads: the parameters whose value backward needs.
        backward_operands: the operands whose value backward needs.
        backward_inputs: the variables among its inputs whose value backward needs.
        fingerprint: equal for layers whose two programs are equal.
    """

    forward: jex.ClosedJaxpr
    backward: jex.ClosedJaxpr
    residuals: tuple[Any, ...]
    backward_reads: tuple[int, ...]
    backward_operands: tuple[int, ...]
    backward_inputs: tuple[int, ...]
    fingerprint: str


def differentiate(layer: Layer, variables: Sequence[LossVariable]) -> LayerCode:
    """Makes a layer's forward and backward programs.

    Args:
        layer: the layer.
        variables: all variables of the loss, by number.
    """
    forward, backward = _trace(layer, variables)
    return _link(layer, forward, backward)


def differentiate_all(
    layers: Sequence[Layer], variables: Sequence[LossVariable]
) -> tuple[LayerCode, ...]:
    """As `differentiate` for each layer, but equal layers are traced and linked once.

    Layers that hold custom differentiation rules are always traced: their rules cannot be compared.
    """
    known: dict[Any, tuple[Layer, LayerCode]] = {}
    codes = []
    for layer in layers:
        key = None if _has_functions(layer.program) else _key(layer, variables)
        if key in known:
            codes.append(_renumbered(layer, *known[key]))
            continue
        codes.append(differentiate(layer, variables))
        if key is not None:
            known[key] = (layer, codes[-1])
    return tuple(codes)


def _key(layer: Layer, variables: Sequence[LossVariable]) -> tuple[Any, ...]:
    roles = tuple((variables[n].differentiable, variables[n].role) for n in layer.outputs)
    counts = (len(layer.reads), len(layer.trained), len(layer.operands))
    moving = tuple(_differentiable(layer.inputs, variables))
    return (fingerprint(layer.program), counts, moving, roles)


def _has_functions(closed: jex.ClosedJaxpr) -> bool:
    """Whether an equation holds a Python function; the rules of kernels, which their parameters say, do not count."""

    def among(param: Any) -> bool:
        if isinstance(param, (jex.Jaxpr, jex.ClosedJaxpr)):
            return _has_functions(compat.as_closed(param))
        if isinstance(param, (tuple, list)):
            return any(map(among, param))
        return callable(param) and not isinstance(param, type)

    return any(
        among(param)
        for eqn in closed.jaxpr.eqns
        if not _wraps_kernel(eqn)
        for param in eqn.params.values()
    )


def _wraps_kernel(eqn: Eqn) -> bool:
    """Whether an equation is the custom rule of a kernel."""
    inner = (found for _, part in compat.sub_jaxprs(eqn) for found in part.jaxpr.eqns)
    return eqn.primitive.name in compat.CUSTOM_CALLS and any(
        found.primitive.name in KERNELS for found in inner
    )


def _renumbered(layer: Layer, twin: Layer, code: LayerCode) -> LayerCode:
    """The code of an equal layer, with the numbers of this one."""

    def numbers(theirs: Sequence[int], ours: Sequence[int], chosen: Sequence[int]) -> Any:
        return tuple(ours[theirs.index(n)] for n in chosen)

    return dataclasses.replace(
        code,
        backward_reads=numbers(twin.reads, layer.reads, code.backward_reads),
        backward_operands=numbers(twin.operands, layer.operands, code.backward_operands),
        backward_inputs=numbers(twin.inputs, layer.inputs, code.backward_inputs),
    )


def _differentiable(numbers: Sequence[int], variables: Sequence[LossVariable]) -> list[bool]:
    return [variables[n].differentiable for n in numbers]


def _trace(layer: Layer, variables: Sequence[LossVariable]) -> tuple[Graph, Graph]:
    """Traces forward with all of JAX's residuals as results, and backward from them."""
    run = as_function(layer.program)
    reads, operands = len(layer.reads), len(layer.operands)
    moving_in = _differentiable(layer.inputs, variables)
    moving_out = [variables[n].differentiable and variables[n].role != "aux" for n in layer.outputs]
    moved = list(range(len(layer.trained))) + [
        reads + operands + i for i, moves in enumerate(moving_in) if moves
    ]
    avals = layer.program.in_avals
    structure: list[Any] = []

    def forward(*flat: Any) -> tuple[list[Any], list[Any]]:
        def call(*chosen: Any) -> tuple[list[Any], list[Any]]:
            full = list(flat)
            for index, value in zip(moved, chosen, strict=True):
                full[index] = value
            outputs = run(*full)
            return [o for o, moves in zip(outputs, moving_out, strict=True) if moves], outputs

        _, pullback, outputs = jax.vjp(call, *(flat[i] for i in moved), has_aux=True)
        leaves, tree = jax.tree.flatten(pullback)
        structure.append(tree)
        return outputs, leaves

    made, (_, leaf_shapes) = jax.make_jaxpr(forward, return_shape=True)(*avals)
    cotangents = [
        aval for aval, moves in zip(layer.program.out_avals, moving_out, strict=True) if moves
    ]

    def backward(leaves: list[Any], cotangents: list[Any]) -> list[Any]:
        return list(structure[0].unflatten(leaves)(cotangents))

    leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaf_shapes]
    pulled = jax.make_jaxpr(backward)(leaves, cotangents)
    # Rules have done their part: what they are for is open to whatever comes next.
    first, second = (inline(traced, rules=True) for traced in (made, pulled))
    return absorb_transposes(first), absorb_transposes(second)


def _link(layer: Layer, forward: Graph, backward: Graph) -> LayerCode:
    """Decides what is kept, and gives backward everything else another way."""
    outputs = len(layer.outputs)
    leaves = forward.outvars[outputs:]
    slots = backward.invars[: len(leaves)]
    cotangents = backward.invars[len(leaves) :]
    # Backward in terms of forward's variables: one graph in which both can be cut anew.
    rename = dict(zip(slots, leaves, strict=True))
    eqns = [
        eqn.replace(invars=[rename.get(a, a) if is_var(a) else a for a in eqn.invars])
        for eqn in backward.eqns
    ]
    results = [rename.get(a, a) if is_var(a) else a for a in backward.outvars]
    joint = Graph(
        (*forward.invars, *cotangents),
        tuple(results),
        (*forward.eqns, *eqns),
        {**forward.consts, **backward.consts},
        frozenset(),
    )
    pulling, wanted = needed(eqns, results, cotangents)
    wanted -= {*cotangents, *joint.consts}
    parameters = len(layer.reads) + len(layer.operands)
    residuals = choose_residuals(forward, wanted, read_in_another_order(pulling))
    _, read = needed(joint.eqns, results, [*residuals, *cotangents])
    position = {var: i for i, var in enumerate(forward.invars)}
    order = sorted(position[var] for var in read if var in position)
    invars = [*(forward.invars[i] for i in order), *residuals, *cotangents]
    forward_code = cut(forward, forward.invars, [*forward.outvars[:outputs], *residuals])
    backward_code = cut(joint, invars, results)
    reads = len(layer.reads)
    return LayerCode(
        forward=forward_code,
        backward=backward_code,
        residuals=tuple(var.aval for var in residuals),
        backward_reads=tuple(layer.reads[i] for i in order if i < reads),
        backward_operands=tuple(
            layer.operands[i - reads] for i in order if reads <= i < parameters
        ),
        backward_inputs=tuple(layer.inputs[i - parameters] for i in order if i >= parameters),
        fingerprint=fingerprint(forward_code, backward_code),
    )
