"""What a layer costs on one of t tensor-parallel ranks, found in its programs alone: no shape is rewritten.

Layers are divided as Megatron-LM divides a transformer (M. Shoeybi et al., 2019): columns of a weight matrix first, then
rows, so that each pair of products ends in one all-reduce. An abstract interpretation finds the parts of any layer.

Terms.
    Each value has a **mark**:

    SIDE       made of constants, scalars and random bits: every rank makes of it what it reads
    PARAMETER  made of parameters alone
    WHOLE      every rank holds all of it
    DIVIDED    each rank holds 1/t of it

    The inputs of a layer are whole, for layers hand on whole values. Products decide the rest:

    whole × parameter      **column-parallel**: divided. The gradient of the whole operand is all-reduced in backward, once
                           for each distinct value, however many such products read it (or casts and reshapes of it).
    divided × parameter    **row-parallel**: whole, after an all-reduce in forward.
    without parameters     divided if an operand is (attention, whose heads are divided).

    A parameter of rank 2 or more is **split** (1/t on each rank) where it meets a product; a table that is looked up by
    the batch (an embedding) is split by rows, and what was found is all-reduced. Other code is divided if an operand is.
    Norms and residual additions thereby stay whole. Loops that hold products stay whole unless they are given a divided
    value. A scatter into zeros (the gradient of a look-up) is divided, for each rank adds what falls on its rows.

    With **sequence parallelism** (V. Korthikanti et al., 2022) code on whole values is divided, too, and whole values rest
    at 1/t between products. An all-reduce becomes a reduce-scatter and an all-gather, which move the same bytes over a ring.

Which axis a value is divided along is not tracked. So it goes unnoticed that a reduction over a divided axis needs a small
all-reduce (a loss over a divided vocabulary: three numbers a token), and t is not checked against heads or widths.

The backward program is interpreted by the same rules, from the marks of the residuals; what is all-reduced in it follows
from forward, because partial gradients of one value are added before they are reduced.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax.extend import core as jex

from ratrain_jax.kernels import Machine
from ratrain_jax.kernels.collectives import all_gather_seconds, all_reduce_seconds
from ratrain_jax.lowering.autodiff import LayerCode
from ratrain_jax.lowering.cost import (
    aval_bytes,
    bytes_moved,
    equation_costs,
    holds_code,
)
from ratrain_jax.lowering.graph import Atom, Eqn, Var, is_var
from ratrain_jax.lowering.layers import Layer
from ratrain_jax.lowering.op_costs import Work, equation_work
from ratrain_jax.lowering.products import is_product, product_count


class Mark(enum.IntEnum):
    """Which part of a value a rank holds. Of what is made elementwise of several values, the greatest mark counts."""

    SIDE = 0
    PARAMETER = 1
    WHOLE = 2
    DIVIDED = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Division:
    """How a program is divided.

    Attributes:
        closed: the program.
        marks: of all its variables.
        split: the parameters that ranks hold 1/t of, and what is made of them on the way to a product.
        reduced: results that are all-reduced: of row-parallel products and of look-ups.
        entered: the distinct whole values that column-parallel products read.
    """

    closed: jex.ClosedJaxpr
    marks: Mapping[Var, Mark]
    split: frozenset[Var]
    reduced: tuple[Var, ...]
    entered: tuple[Var, ...]

    def mark(self, atom: Atom) -> Mark:
        """The mark of a variable; a literal is a side value."""
        return self.marks[atom] if is_var(atom) else Mark.SIDE

    def held(self, atom: Atom, ranks: int, *, sequence_parallel: bool = False) -> float:
        """Which share of a value a rank holds between equations."""
        mark = self.mark(atom)
        resting = sequence_parallel and mark == Mark.WHOLE
        divided = mark == Mark.DIVIDED or (is_var(atom) and atom in self.split)
        return 1 / ranks if divided or resting else 1.0

    def touched(
        self, eqn: Eqn, atom: Atom, ranks: int, *, sequence_parallel: bool = False
    ) -> float:
        """Which share of a value an equation on a rank reads or writes."""
        # Products and look-ups read whole values gathered, and write partial sums of full size.
        spread = sequence_parallel and not (is_product(eqn) or eqn.outvars[0] in self.reduced)
        return self.held(atom, ranks, sequence_parallel=spread)

    def computed(self, eqn: Eqn, ranks: int, *, sequence_parallel: bool = False) -> float:
        """Which share of an equation's operations a rank does."""
        if product_count(eqn):
            divided = any(self.held(atom, ranks) < 1 for atom in [*eqn.invars, *eqn.outvars])
            return 1 / ranks if divided else 1.0
        return min(
            self.touched(eqn, var, ranks, sequence_parallel=sequence_parallel)
            for var in eqn.outvars
        )


def divide(closed: jex.ClosedJaxpr, marks: Sequence[Mark]) -> Division:
    """Finds how a program is divided.

    Args:
        closed: a program.
        marks: of its inputs.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> mlp = jax.make_jaxpr(lambda a, b, x: jnp.tanh(x @ a) @ b)(jnp.ones((8, 32)), jnp.ones((32, 8)), jnp.ones((4, 8)))
        >>> found = divide(mlp, [Mark.PARAMETER, Mark.PARAMETER, Mark.WHOLE])
        >>> [found.marks[var].name for eqn in mlp.eqns for var in eqn.outvars]
        ['DIVIDED', 'DIVIDED', 'WHOLE']
        >>> len(found.reduced), len(found.entered)
        (1, 1)
    """
    return _Interpreter(closed, marks).run()


def rank_work(
    division: Division, machine: Machine, ranks: int, *, sequence_parallel: bool = False
) -> Work:
    """What one rank does of a program, without communication.

    Products of one rank are smaller, and so are the shares of the peak that they reach (`Machine.compute_seconds`); for one
    rank the result is that of `op_costs.code_work`.

    Args:
        division: how the program is divided.
        machine: what it is to run on.
        ranks: t, how many tensor-parallel ranks there are.
        sequence_parallel: whether code on whole values is divided, too.
    """
    jaxpr = division.closed.jaxpr

    def size(eqn: Eqn, var: Var) -> float:
        share = division.touched(eqn, var, ranks, sequence_parallel=sequence_parallel)
        return aval_bytes(var.aval) * share

    total = Work()
    costs = equation_costs(jaxpr.eqns, jaxpr.outvars)
    moved = bytes_moved(jaxpr.eqns, jaxpr.outvars, size)
    for eqn, cost, count in zip(jaxpr.eqns, costs, moved, strict=True):
        share = division.computed(eqn, ranks, sequence_parallel=sequence_parallel)
        count *= share if holds_code(eqn) else 1
        total += equation_work(eqn, cost.flops * share, count, machine, share=share)
    return total


@dataclasses.dataclass(frozen=True, slots=True)
class RankLayer:
    """What one tensor-parallel rank has of a layer, for one microbatch.

    Attributes:
        ranks: t, how many there are.
        forward: its work in forward, without communication.
        backward: likewise.
        forward_reduced: bytes of each value that forward all-reduces.
        backward_reduced: likewise in backward.
        gathered: bytes of each result that is divided and has to be handed on whole.
        residual_bytes: bytes of residuals that it keeps.
        parameters: which share it holds of each parameter that the layer reads.
    """

    ranks: int
    forward: Work
    backward: Work
    forward_reduced: tuple[int, ...]
    backward_reduced: tuple[int, ...]
    gathered: tuple[int, ...]
    residual_bytes: float
    parameters: tuple[float, ...]

    def communication(self, machine: Machine) -> tuple[float, float]:
        """Seconds that forward and backward spend on collectives of `ranks` neighbouring devices."""
        forward, backward = (
            sum(all_reduce_seconds(machine, count, self.ranks) for count in counts)
            for counts in (self.forward_reduced, self.backward_reduced)
        )
        gathers = sum(all_gather_seconds(machine, count, self.ranks) for count in self.gathered)
        return forward + gathers, backward


def layer_on_rank(
    layer: Layer,
    code: LayerCode,
    machine: Machine,
    ranks: int,
    *,
    sequence_parallel: bool = False,
) -> RankLayer:
    """What one of t tensor-parallel ranks has of a layer.

    Args:
        layer: the layer.
        code: its two programs.
        machine: what they are to run on.
        ranks: t.
        sequence_parallel: whether code on whole values is divided, too.
    """
    forward, backward = divide_layer(layer, code)
    results = code.forward.jaxpr.outvars[: len(layer.outputs)]
    residuals = code.forward.jaxpr.outvars[len(layer.outputs) :]
    split = _shares(layer.reads, forward, ranks)
    for number, share in _shares(code.backward_reads, backward, ranks).items():
        split[number] = min(split[number], share)
    return RankLayer(
        ranks=ranks,
        forward=rank_work(forward, machine, ranks, sequence_parallel=sequence_parallel),
        backward=rank_work(backward, machine, ranks, sequence_parallel=sequence_parallel),
        forward_reduced=_bytes(forward.reduced),
        backward_reduced=_bytes(forward.entered),
        gathered=_bytes(
            atom for atom in results if forward.mark(atom) == Mark.DIVIDED and atom.aval.shape
        ),
        residual_bytes=sum(
            aval_bytes(a.aval) * forward.held(a, ranks, sequence_parallel=sequence_parallel)
            for a in residuals
        ),
        parameters=tuple(split[number] for number in layer.reads),
    )


def divide_layer(layer: Layer, code: LayerCode) -> tuple[Division, Division]:
    """How a layer's forward is divided, and its backward, from the marks of forward's residuals.

    Args:
        layer: the layer.
        code: its two programs.
    """
    reads = len(layer.reads)
    given = len(code.forward.jaxpr.invars) - reads
    forward = divide(code.forward, [Mark.PARAMETER] * reads + [Mark.WHOLE] * given)
    residuals = [forward.mark(a) for a in code.forward.jaxpr.outvars[len(layer.outputs) :]]
    inputs = len(code.backward_operands) + len(code.backward_inputs)
    marks = [Mark.PARAMETER] * len(code.backward_reads) + [Mark.WHOLE] * inputs + residuals
    marks += [Mark.WHOLE] * (len(code.backward.jaxpr.invars) - len(marks))
    return forward, divide(code.backward, marks)


def _shares(numbers: Sequence[int], division: Division, ranks: int) -> dict[int, float]:
    """Which share of each parameter a rank holds, by number."""
    held = (division.held(var, ranks) for var in division.closed.jaxpr.invars)
    return dict(zip(numbers, held, strict=False))


def _bytes(atoms: Iterable[Atom]) -> tuple[int, ...]:
    return tuple(aval_bytes(atom.aval) for atom in atoms)


class _Interpreter:
    """Goes through a program once and marks what it makes."""

    def __init__(self, closed: jex.ClosedJaxpr, marks: Sequence[Mark]) -> None:
        jaxpr = closed.jaxpr
        self.closed = closed
        self.marks: dict[Var, Mark] = dict.fromkeys(jaxpr.constvars, Mark.SIDE)
        for var, mark in zip(jaxpr.invars, marks, strict=True):
            scalar = mark == Mark.WHOLE and not var.aval.shape
            self.marks[var] = Mark.SIDE if scalar else mark
        self.makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self.split: set[Var] = set()
        self.reduced: list[Var] = []
        self.entered: dict[Var, Var] = {}  # by what it was moved or cast from

    def run(self) -> Division:
        for eqn in self.closed.jaxpr.eqns:
            rule = _product if is_product(eqn) else _RULES.get(eqn.primitive.name, _elementwise)
            self.marks.update(dict.fromkeys(eqn.outvars, rule(self, eqn)))
        self._spread_sides()
        return Division(
            self.closed,
            self.marks,
            frozenset(self.split),
            tuple(self.reduced),
            tuple(self.entered.values()),
        )

    def mark(self, atom: Atom) -> Mark:
        return self.marks[atom] if is_var(atom) else Mark.SIDE

    def split_weight(self, var: Var) -> None:
        """Splits a parameter, back to the input that it was moved or cast from."""
        self.split.update(self._moved_from(var))

    def enter(self, var: Var) -> None:
        """Notes that a column-parallel product reads a whole value."""
        self.entered.setdefault(self._moved_from(var)[-1], var)

    def _moved_from(self, var: Var) -> list[Var]:
        chain = [var]
        while (maker := self.makers.get(chain[-1])) is not None:
            if maker.primitive.name not in _MOVES or not is_var(maker.invars[0]):
                break
            chain.append(maker.invars[0])
        return chain

    def _spread_sides(self) -> None:
        """Marks side values as what is made with them: a rank makes no more of them than it reads."""
        readers: dict[Var, Mark] = {
            atom: Mark.WHOLE for atom in self.closed.jaxpr.outvars if is_var(atom)
        }
        for eqn in reversed(self.closed.jaxpr.eqns):
            if all(self.mark(var) == Mark.SIDE for var in eqn.outvars):
                wanted = min(readers.get(var, Mark.WHOLE) for var in eqn.outvars)
                self.marks.update(dict.fromkeys(eqn.outvars, wanted))
            made = Mark.WHOLE if is_product(eqn) else self.mark(eqn.outvars[0])
            for atom in filter(is_var, eqn.invars):
                readers[atom] = min(readers.get(atom, made), made)


def _elementwise(state: _Interpreter, eqn: Eqn) -> Mark:
    return max(map(state.mark, eqn.invars), default=Mark.SIDE)


def _product(state: _Interpreter, eqn: Eqn) -> Mark:
    highest = _elementwise(state, eqn)
    weights = [
        atom for atom in eqn.invars if state.mark(atom) == Mark.PARAMETER and atom.aval.ndim > 1
    ]
    if not weights or highest < Mark.WHOLE:
        return highest
    for weight in weights:
        state.split_weight(weight)
    if highest == Mark.DIVIDED:
        state.reduced.extend(eqn.outvars)
        return Mark.WHOLE
    for atom in eqn.invars:
        if state.mark(atom) == Mark.WHOLE:
            state.enter(atom)
    return Mark.DIVIDED


def _gather(state: _Interpreter, eqn: Eqn) -> Mark:
    table, places = eqn.invars[:2]
    looked_up = state.mark(table) == Mark.PARAMETER and state.mark(places) == Mark.WHOLE
    if not looked_up or table.aval.ndim < 2:
        return _elementwise(state, eqn)
    state.split_weight(table)
    state.reduced.extend(eqn.outvars)
    return Mark.WHOLE


def _scatter_add(state: _Interpreter, eqn: Eqn) -> Mark:
    return Mark.DIVIDED if state.mark(eqn.invars[0]) == Mark.SIDE else _elementwise(state, eqn)


def _random(state: _Interpreter, eqn: Eqn) -> Mark:
    return Mark.SIDE


_RULES: dict[str, Callable[[Any, Eqn], Mark]] = {
    "gather": _gather,
    "random_bits": _random,
    "rng_bit_generator": _random,
    "scatter-add": _scatter_add,
    "threefry2x32": _random,
}
"""The mark of what an equation makes, by primitive; products have a rule of their own, and the rest is elementwise."""

_MOVES = frozenset(
    {
        "convert_element_type",
        "copy",
        "expand_dims",
        "optimization_barrier",
        "reduce_precision",
        "reshape",
        "squeeze",
        "stop_gradient",
        "transpose",
    }
)
"""Primitives whose result is their first operand in another form."""
