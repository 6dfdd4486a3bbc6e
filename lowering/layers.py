"""Cuts a loss into layers.

A layer is a run of main equations (`dependence`) between two cuts (`cuts`) with the side equations
that it needs (`sides`). What it makes for later layers are **variables**, numbered by the layer
that makes them and within it by the order in which they are made. A variable that is read much
later passes over the layers between. The results of the loss are variables, too: they come last, in
the loss's own order, and no layer reads them. A result that a later layer reads is two variables.

Within a layer each side equation stands right before the first equation that reads it, and inputs
stand in the order of their numbers: equal blocks of a model therefore have equal programs, wherever
their side values were computed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jex

from ratrain_jax.kernels import Machine
from ratrain_jax.lowering.cost import (
    Cost,
    aval_bytes,
    aval_size,
    equation_costs,
    equation_seconds,
    jaxpr_cost,
    jaxpr_seconds,
)
from ratrain_jax.lowering.cuts import Costs, Path, Span, automatic_spans, marked_spans
from ratrain_jax.lowering.dependence import Flow, live_bytes, sort_equations, strip_marks
from ratrain_jax.lowering.graph import Atom, Eqn, Graph, Var, cut, is_var, needed
from ratrain_jax.lowering.marked import arranged
from ratrain_jax.lowering.sides import SidePlacement, place_sides

PASSES = 3
"""Forward and backward together take about three times as long as forward."""

ACCUMULATION = 3
"""To add a gradient into its accumulator reads two arrays of its size and writes one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a loss.

    Attributes:
        name: the path of the parameters that it begins with, or the name of its mark.
        owned: numbers of the parameters of which it is the first reader.
        reads: numbers of all parameters that it reads, ascending.
        trained: the first of them, those that the loss is differentiated by.
        operands: numbers of the operands that it reads, ascending.
        inputs: numbers of the variables that it reads, ascending.
        outputs: numbers of the variables that it makes, ascending.
        program: takes the parameters of `reads`, the operands, the inputs; returns the outputs.
        cost: of the program, for one microbatch.
        seconds: roofline seconds of forward, backward and accumulation, for one microbatch.
        checkpointed: whether it holds code that was under `jax.checkpoint`.
    """

    name: str
    owned: tuple[int, ...]
    reads: tuple[int, ...]
    trained: tuple[int, ...]
    operands: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    program: jex.ClosedJaxpr
    cost: Cost
    seconds: float
    checkpointed: bool


@dataclasses.dataclass(frozen=True, slots=True)
class LossVariable:
    """A value that one layer makes and others read, or a result of the loss.

    Attributes:
        aval: its type for one microbatch.
        producer: the layer that makes it.
        readers: the later layers that read it, ascending.
        differentiable: whether gradients flow back through it.
        role: `boundary`, `loss` (the loss) or `aux` (an auxiliary result).
    """

    aval: Any
    producer: int
    readers: tuple[int, ...]
    differentiable: bool
    role: str


@dataclasses.dataclass(frozen=True, slots=True)
class LayeredLoss:
    """A loss in layers.

    Attributes:
        layers: in order; each reads variables of earlier ones only.
        variables: what they make for each other; then the results of the loss, in its own order.
    """

    layers: tuple[Layer, ...]
    variables: tuple[LossVariable, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    """A variable to be.

    Attributes:
        atom: what stands for it in the loss.
        producer: the layer that makes it.
        readers: the later layers that read it.
        role: as in `LossVariable`.
    """

    atom: Atom
    producer: int
    readers: tuple[int, ...]
    role: str


def find_layers(
    loss: Graph,
    paths: Sequence[Path],
    *,
    operands: int,
    stages: float,
    machine: Machine,
    trained: int | None = None,
    batch: Sequence[int] | None = None,
) -> LayeredLoss:
    """Cuts a loss into layers: at its marks, or else by the rule of `cuts`.

    Args:
        loss: its inputs are the parameters, then the operands.
        paths: the path of each parameter in the tree by which the loss is differentiated; parameters of one path
            are owned by one layer.
        operands: how many operands there are.
        stages: how many stages the layers will be balanced into; a plan's may be a fraction.
        machine: what their costs are counted for.
        trained: how many parameters the loss is differentiated by, the first ones; all unless given.
        batch: the operands that are made from the batch; all unless given.

    Returns:
        The layers and the variables between them.

    Raises:
        OptionError: two marks have one name but are no two passes, or nothing is computed between two of them.
        UnsupportedError: a mark stands inside a loop, a branch or a custom rule.
    """
    params = len(loss.invars) - operands
    loss, marks = strip_marks(loss)
    flow = sort_equations(loss, params, trained, batch)
    flow, starts = arranged(flow, paths, trained, marks)
    spans = _spans(loss, flow, _short(paths), starts, stages, machine)
    layers = [number for number, span in enumerate(spans) for _ in range(span.start, span.end)]
    sizes = [aval_bytes(var.aval) for var in loss.invars[:params]]
    placement = place_sides(flow, layers, loss.outvars, sizes, paths, machine)
    entries = _entries(loss, flow, layers, placement)
    found = [
        _layer(number, span, loss, flow, placement, entries, params, machine)
        for number, span in enumerate(spans)
    ]
    variables = [
        LossVariable(
            aval=entry.atom.aval,
            producer=entry.producer,
            readers=entry.readers,
            differentiable=_differentiable(entry.atom, flow),
            role=entry.role,
        )
        for entry in entries
    ]
    return LayeredLoss(_with_owners(found, paths), tuple(variables))


def _short(paths: Sequence[Path]) -> list[Path]:
    """Paths without the key under which Flax keeps all parameters."""
    if all(len(path) > 1 and path[0] == "params" for path in paths):
        return [tuple(path[1:]) for path in paths]
    return [tuple(path) for path in paths]


def _spans(
    loss: Graph,
    flow: Flow,
    paths: Sequence[Path],
    marks: Sequence[tuple[str, int]],
    stages: float,
    machine: Machine,
) -> list[Span]:
    reads: list[list[int]] = [[] for _ in paths]
    for place, numbers in enumerate(flow.reads):
        for number in numbers:
            reads[number].append(place)
    members = [(path, tuple(places)) for path, places in zip(paths, reads, strict=True)]
    sizes = {var: aval_bytes(var.aval) for eqn in flow.main for var in eqn.outvars}
    seconds = _seconds(flow, machine)
    for param, places in zip(loss.invars, reads, strict=False):
        if places and param in flow.moving:
            seconds[places[0]] += _accumulation(param.aval, machine)
    before = list(itertools.accumulate(seconds, initial=0.0))
    codes = [_code(eqn) for eqn in flow.main]
    costs = Costs(before, live_bytes(flow.main, sizes), codes, stages)
    if not marks:
        return automatic_spans(members, costs)
    # What stands before the first mark is named as it would be without marks.
    first = automatic_spans(members, costs)[0].name
    return marked_spans(marks, first, len(flow.main))


def _seconds(flow: Flow, machine: Machine) -> list[float]:
    """Seconds of each main equation and of the side equations that it is the first to need."""
    eqns = [*flow.sides, *flow.main]
    results = [var for eqn in flow.main[-1:] for var in eqn.outvars]
    costs = equation_costs(eqns, results)
    seconds = [
        (PASSES if flow.moves(eqn) else 1) * equation_seconds(eqn, cost, machine)
        for eqn, cost in zip(eqns, costs, strict=True)
    ]
    own = seconds[len(flow.sides) :]
    first: dict[Var, int] = {}
    for place, eqn in enumerate(flow.main):
        for atom in eqn.invars:
            if is_var(atom):
                first.setdefault(atom, place)
    for eqn, cost in reversed(list(zip(flow.sides, seconds, strict=False))):
        place = min(first.get(var, len(own) - 1) for var in eqn.outvars)
        own[place] += cost
        for atom in eqn.invars:
            if is_var(atom):
                first[atom] = min(place, first.get(atom, place))
    return own


def _code(eqn: Eqn) -> tuple[str, ...]:
    """What an equation computes, as far as its name and the types that it takes and gives tell."""
    return (eqn.primitive.name, *(str(atom.aval) for atom in (*eqn.invars, *eqn.outvars)))


def _entries(
    loss: Graph, flow: Flow, layers: Sequence[int], placement: SidePlacement
) -> list[_Entry]:
    """All variables, in the order of their numbers."""
    made = {var: layer for layer, eqn in zip(layers, flow.main, strict=True) for var in eqn.outvars}
    readers: dict[Var, set[int]] = {}
    for layer, eqn in zip(layers, flow.main, strict=True):
        for atom in eqn.invars:
            if is_var(atom) and made.get(atom, layer) < layer:
                readers.setdefault(atom, set()).add(layer)
    boundary = [
        _Entry(var, producer, later, "boundary")
        for var, (producer, later) in reversed(list(placement.passed.items()))
    ]
    boundary += [
        _Entry(var, made[var], tuple(sorted(readers[var])), "boundary")
        for var in made
        if var in readers
    ]
    results = [
        _Entry(
            atom=atom,
            producer=made.get(atom, layers[-1]) if is_var(atom) else layers[-1],
            readers=(),
            role="aux" if number else "loss",
        )
        for number, atom in enumerate(loss.outvars)
    ]
    return sorted(boundary, key=lambda entry: entry.producer) + results


def _differentiable(atom: Atom, flow: Flow) -> bool:
    dependent = is_var(atom) and atom in flow.moving
    return dependent and jnp.issubdtype(atom.aval.dtype, jnp.inexact)


def _layer(
    number: int,
    span: Span,
    loss: Graph,
    flow: Flow,
    placement: SidePlacement,
    entries: Sequence[_Entry],
    params: int,
    machine: Machine,
) -> Layer:
    inputs = [i for i, entry in enumerate(entries) if number in entry.readers]
    outputs = [i for i, entry in enumerate(entries) if entry.producer == number]
    results = [entries[i].atom for i in outputs]
    eqns = _ordered(number, flow.main[span.start : span.end], flow, placement, results)
    free = needed(eqns, results)[1]
    reads = [i for i, var in enumerate(loss.invars[:params]) if var in free]
    trained = tuple(i for i in reads if loss.invars[i] in flow.moving)
    operands = [i for i, var in enumerate(loss.invars[params:]) if var in free]
    invars = [
        *(loss.invars[i] for i in reads),
        *(loss.invars[params + i] for i in operands),
        *(entries[i].atom for i in inputs),
    ]
    program = cut(loss, invars, results, eqns)
    return Layer(
        name=span.name,
        owned=(),
        reads=tuple(reads),
        trained=trained,
        operands=tuple(operands),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        program=program,
        cost=jaxpr_cost(program),
        seconds=_passes(eqns, flow, machine) * jaxpr_seconds(program, machine)
        + sum(_accumulation(loss.invars[i].aval, machine) for i in trained),
        checkpointed=any(
            var in loss.checkpointed
            for eqn in flow.main[span.start : span.end]
            for var in eqn.outvars
        ),
    )


def _passes(eqns: Sequence[Eqn], flow: Flow, machine: Machine) -> float:
    """How many times as long as forward a layer takes in all: what no gradient flows through only goes forward."""
    if all(map(flow.moves, eqns)):
        return PASSES
    costs = equation_costs(eqns, ())
    seconds = [equation_seconds(eqn, cost, machine) for eqn, cost in zip(eqns, costs, strict=True)]
    moving = sum(own for eqn, own in zip(eqns, seconds, strict=True) if flow.moves(eqn))
    return 1 + (PASSES - 1) * moving / sum(seconds) if moving else 1


def _accumulation(param: Any, machine: Machine) -> float:
    """Seconds to add a parameter's gradient into its accumulator, of float32 at least."""
    size = aval_size(param) * max(4, param.dtype.itemsize)
    return machine.roofline_seconds(0, ACCUMULATION * size)


def _ordered(
    number: int,
    main: Sequence[Eqn],
    flow: Flow,
    placement: SidePlacement,
    results: Sequence[Atom],
) -> list[Eqn]:
    """The equations of a layer, each side equation right before what reads it first."""
    here = {
        var
        for eqn, makers in zip(flow.sides, placement.makers, strict=True)
        if number in makers
        for var in eqn.outvars
    }
    eqns: list[Eqn] = []
    done: set[Var] = set()

    def bring(atoms: Sequence[Atom]) -> None:
        stack = [(atom, False) for atom in reversed(atoms) if is_var(atom)]
        while stack:
            var, ready = stack.pop()
            if var in done or var not in here:
                continue
            maker = flow.maker[var]
            if ready:
                eqns.append(maker)
                done.update(maker.outvars)
                continue
            stack.append((var, True))
            stack.extend((atom, False) for atom in reversed(maker.invars) if is_var(atom))

    for eqn in main:
        bring(eqn.invars)
        eqns.append(eqn)
    bring(results)
    return eqns


def _with_owners(layers: Sequence[Layer], paths: Sequence[Path]) -> tuple[Layer, ...]:
    owner: dict[Path, int] = {}
    for number, layer in enumerate(layers):
        for param in layer.reads:
            owner.setdefault(paths[param], number)
    owned: list[list[int]] = [[] for _ in layers]
    for param, path in enumerate(paths):
        owned[owner.get(path, 0)].append(param)
    return tuple(
        dataclasses.replace(layer, owned=tuple(numbers))
        for layer, numbers in zip(layers, owned, strict=True)
    )
