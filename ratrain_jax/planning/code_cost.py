"""Seconds of one program of a layer, in a form that can be stretched to other sizes of microbatch.

Shapes are linear in the examples of a microbatch, so each equation's operations and bytes are too: from two sizes every
other follows. Seconds are not, for each equation is bound by its arithmetic or by its bytes, whichever takes longer; and
kernels have a tile plan at each size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core as jex

from ratrain_jax.kernels import Machine
from ratrain_jax.kernels.primitives import Call, call_of
from ratrain_jax.lowering.cost import aval_bytes, bytes_moved, equation_costs, holds_code
from ratrain_jax.lowering.products import compute_dtype, product_count
from ratrain_jax.lowering.tensor_parallel import Division


@dataclasses.dataclass(frozen=True, eq=False)
class CodeCost:
    """What a program asks of a machine, equation by equation.

    Attributes:
        flops: operations.
        bytes: bytes to and from main memory.
        rates: FLOP/s that each is done at, were it large.
        extra: seconds of arithmetic that its products lose for being small.
        machine: what it runs on.
        calls: kernels, each with the share of it that is done.
        collectives: seconds of what tensor-parallel ranks exchange.
    """

    flops: np.ndarray
    bytes: np.ndarray
    rates: np.ndarray
    extra: np.ndarray
    machine: Machine
    calls: tuple[tuple[float, Call], ...] = ()
    collectives: float = 0.0

    @functools.cached_property
    def seconds(self) -> float:
        """How long it takes, without starting it."""
        compute = self.flops / self.rates + self.extra
        done = float(np.maximum(compute, self.bytes / self.machine.streaming_bandwidth).sum())
        planned = sum(share * call.seconds(self.machine) for share, call in self.calls)
        return done + planned + self.collectives

    def stretched(self, other: CodeCost, times: float) -> CodeCost | None:
        """This cost plus `times` the difference to that at another size; None if the two are not of one program."""
        same = (self.rates, self.extra), (other.rates, other.extra)
        if not all(map(np.array_equal, *same)) or len(self.calls) != len(other.calls):
            return None
        calls = tuple(between(*pair, times) for pair in zip(self.calls, other.calls, strict=True))
        if None in calls:
            return None
        return dataclasses.replace(
            self,
            flops=self.flops + times * (other.flops - self.flops),
            bytes=self.bytes + times * (other.bytes - self.bytes),
            calls=calls,
            collectives=self.collectives + times * (other.collectives - self.collectives),
        )


def between(one: Any, other: Any, times: float) -> Any:
    """`one` plus `times` the difference to `other`, number by number of equal trees; None if they are not equal trees.

    Args:
        one: a whole number, or a tuple or a dataclass of such; anything else in it must be equal in both.
        other: likewise.
        times: how often the difference is added; all results must be whole.

    Example:
        >>> between((1, "a", 20), (2, "a", 30), 3)
        (4, 'a', 50)
    """
    if one == other:
        return one
    if type(one) is not type(other):
        return None
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        found = [between(getattr(one, name), getattr(other, name), times) for name in names]
        return None if None in found else type(one)(*found)  # pyright: ignore[reportCallIssue]
    if isinstance(one, tuple) and len(one) == len(other):
        found = [between(*pair, times) for pair in zip(one, other, strict=True)]
        return None if None in found else tuple(found)
    if isinstance(one, int):
        made = one + times * (other - one)
        return int(made) if made == int(made) else None
    return None


def code_cost(closed: jex.ClosedJaxpr, machine: Machine) -> CodeCost:
    """Counts a program; its seconds are those of `ratrain_jax.lowering.op_costs.code_work`.

    Args:
        closed: a program without calls.
        machine: what it is to run on.
    """
    costs = equation_costs(closed.jaxpr.eqns, closed.jaxpr.outvars)
    counted = [(1.0, cost.flops, cost.bytes) for cost in costs]
    return _counted(closed, machine, counted)


def rank_cost(
    division: Division, machine: Machine, ranks: int, collectives: float = 0.0
) -> CodeCost:
    """Counts what a tensor-parallel rank does of a program, as `ratrain_jax.lowering.tensor_parallel.rank_work` does.

    Args:
        division: how the program is divided.
        machine: what it is to run on.
        ranks: t, how many ranks there are.
        collectives: seconds of what they exchange.
    """
    eqns, outvars = division.closed.jaxpr.eqns, division.closed.jaxpr.outvars
    costs = equation_costs(eqns, outvars)
    moved = bytes_moved(
        eqns, outvars, lambda eqn, var: aval_bytes(var.aval) * division.touched(eqn, var, ranks)
    )
    counted = []
    for eqn, cost, count in zip(eqns, costs, moved, strict=True):
        share = division.computed(eqn, ranks)
        counted.append((share, cost.flops * share, count * (share if holds_code(eqn) else 1)))
    found = _counted(division.closed, machine, counted)
    return dataclasses.replace(found, collectives=collectives)


def _counted(
    closed: jex.ClosedJaxpr, machine: Machine, counted: Sequence[tuple[float, float, float]]
) -> CodeCost:
    """The cost of a program from what is done of each equation: which share, operations, bytes."""
    flops, moved, rates, extra = [], [], [], []
    calls: list[tuple[float, Call]] = []
    for eqn, (share, operations, count) in zip(closed.jaxpr.eqns, counted, strict=True):
        call = call_of(eqn) if machine.accelerator is not None else None
        if call is not None:
            calls.append((share, call))
            continue
        dtype, products = compute_dtype(eqn), product_count(eqn)
        small = machine.compute_seconds(0.0, dtype, products=products)
        one = machine.compute_seconds(1e12, dtype, products=products) - small
        flops.append(operations)
        moved.append(count)
        rates.append(1e12 / one)
        extra.append(small)
    return CodeCost(
        flops=np.array(flops, float),
        bytes=np.array(moved, float),
        rates=np.array(rates, float),
        extra=np.array(extra, float),
        machine=machine,
        calls=tuple(calls),
    )
