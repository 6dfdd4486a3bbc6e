"""Seconds of one program of a layer, in a form that can be stretched to other sizes of microbatch.

Shapes are linear in the examples of a microbatch, so each equation's operations and bytes are too: from two sizes every
other follows. Seconds are not, for each equation is bound by its arithmetic or by its bytes, whichever takes longer.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from jax.extend import core as jex

from ratrain_jax.kernels import Machine
from ratrain_jax.kernels.primitives import call_cost
from ratrain_jax.lowering.cost import equation_costs
from ratrain_jax.lowering.products import compute_dtype, product_count


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
    """

    flops: np.ndarray
    bytes: np.ndarray
    rates: np.ndarray
    extra: np.ndarray
    bandwidth: float
    planned: float = 0.0

    @functools.cached_property
    def seconds(self) -> float:
        """How long it takes, without starting it."""
        compute = self.flops / self.rates + self.extra
        return float(np.maximum(compute, self.bytes / self.bandwidth).sum()) + self.planned

    def stretched(self, other: CodeCost, times: float) -> CodeCost:
        """This cost plus `times` the difference to that at another size."""
        return dataclasses.replace(
            self,
            flops=self.flops + times * (other.flops - self.flops),
            bytes=self.bytes + times * (other.bytes - self.bytes),
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
    flops, moved, rates, extra = [], [], [], []
    planned = 0.0
    costs = equation_costs(closed.jaxpr.eqns, closed.jaxpr.outvars)
    for eqn, cost in zip(closed.jaxpr.eqns, costs, strict=True):
        kernel = call_cost(eqn, machine) if machine.accelerator is not None else None
        if kernel is not None:
            planned += kernel.seconds
            continue
        dtype, products = compute_dtype(eqn), product_count(eqn)
        small = machine.compute_seconds(0.0, dtype, products=products)
        one = machine.compute_seconds(1e12, dtype, products=products) - small
        flops.append(cost.flops)
        moved.append(cost.bytes)
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
