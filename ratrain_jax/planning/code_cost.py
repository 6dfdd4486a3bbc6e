"""Seconds of one program of a layer, in a form that can be stretched to other sizes of microbatch.

Shapes are linear in the examples of a microbatch, so each equation's operations and bytes are too: from two sizes every
other follows. Seconds are not, for each equation is bound by its arithmetic or by its bytes, whichever takes longer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from jax.extend import core as jex

from ratrain_jax.kernels import Machine
from ratrain_jax.kernels.primitives import call_cost
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
        bandwidth: bytes a second.
        planned: seconds of kernels, whose tile plans know no other sizes.
        collectives: seconds of what tensor-parallel ranks exchange.
    """

    flops: np.ndarray
    bytes: np.ndarray
    rates: np.ndarray
    extra: np.ndarray
    bandwidth: float
    planned: float = 0.0
    collectives: float = 0.0

    @functools.cached_property
    def seconds(self) -> float:
        """How long it takes, without starting it."""
        compute = self.flops / self.rates + self.extra
        done = float(np.maximum(compute, self.bytes / self.bandwidth).sum())
        return done + self.planned + self.collectives

    def stretched(self, other: CodeCost, times: float) -> CodeCost:
        """This cost plus `times` the difference to that at another size."""
        return dataclasses.replace(
            self,
            flops=self.flops + times * (other.flops - self.flops),
            bytes=self.bytes + times * (other.bytes - self.bytes),
            collectives=self.collectives + times * (other.collectives - self.collectives),
        )

    def stretches(self, other: CodeCost) -> bool:
        """Whether both are of one program at two sizes, and sizes are all that they depend on."""
        same = (self.rates, self.extra), (other.rates, other.extra)
        return not (self.planned or other.planned) and all(map(np.array_equal, *same))


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
    planned = 0.0
    for eqn, (share, operations, count) in zip(closed.jaxpr.eqns, counted, strict=True):
        kernel = call_cost(eqn, machine) if machine.accelerator is not None else None
        if kernel is not None:
            planned += share * kernel.seconds
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
        bandwidth=machine.streaming_bandwidth,
        planned=planned,
    )
