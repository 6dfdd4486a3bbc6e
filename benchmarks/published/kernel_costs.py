"""What the kernels of a traced part cost on one tensor-parallel rank, as arrays, so that a fit is quick."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from gpt_kernels import VIEWS, Part

from ratrain_jax import compat
from ratrain_jax.kernels import Machine
from ratrain_jax.kernels.collectives import all_reduce_seconds
from ratrain_jax.lowering.cost import aval_bytes, equation_cost
from ratrain_jax.lowering.graph import Eqn, is_var
from ratrain_jax.lowering.products import is_product, product_count
from ratrain_jax.lowering.tensor_parallel import Division

VIEWS_FORWARD = frozenset({"split_heads"})
"""Kernels that are only views in forward."""


@dataclasses.dataclass(frozen=True, eq=False)
class Kernels:
    """The kernels of a program on one rank.

    Attributes:
        flops: operations of each product.
        product_bytes: bytes that each product reads and writes.
        other_bytes: likewise, of all other kernels together.
        count: how many kernels there are, collectives included.
        reduced: bytes of each value that is all-reduced.
    """

    flops: np.ndarray
    product_bytes: np.ndarray
    other_bytes: float
    count: int
    reduced: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def gpu_seconds(kernels: Kernels, machine: Machine, ranks: int) -> float:
    """How long the GPU takes, one kernel after the other; each is bound by arithmetic or by memory."""
    products = machine.compute_seconds(kernels.flops, "float16", products=1)  # pyright: ignore[reportArgumentType]
    streamed = kernels.product_bytes / machine.streaming_bandwidth
    alone = float(np.maximum(products, streamed).sum())
    alone += kernels.other_bytes / machine.streaming_bandwidth
    return alone + sum(all_reduce_seconds(machine, count, ranks) for count in kernels.reduced)


@functools.cache
def forward_kernels(part: Part, ranks: int, sequence_parallel: bool = False) -> Kernels:
    """Of a part's forward."""
    reduced = part.forward.reduced if ranks > 1 else ()
    return _kernels(part.forward, ranks, sequence_parallel, VIEWS_FORWARD, reduced)


@functools.cache
def backward_kernels(part: Part, ranks: int, sequence_parallel: bool = False) -> Kernels:
    """Of a part's backward."""
    entered = part.forward.entered if ranks > 1 else ()
    return _kernels(part.backward, ranks, sequence_parallel, frozenset(), entered)


@functools.cache
def accumulation_kernels(part: Part, ranks: int) -> Kernels:
    """Of adding a part's gradients into their accumulators: each reads two arrays of its size and writes one."""
    none = np.zeros(0)
    return Kernels(none, none, 3 * parameter_bytes(part, ranks), len(part.parameters), ())


@functools.cache
def parameter_bytes(part: Part, ranks: int) -> float:
    """Bytes of a part's parameters on one rank."""
    held = part.forward.closed.jaxpr.invars[: len(part.parameters)]
    return sum(aval_bytes(var.aval) * part.forward.held(var, ranks) for var in held)


def _kernels(
    division: Division,
    ranks: int,
    sequence_parallel: bool,
    views: frozenset[str],
    reduced: tuple[Any, ...],
) -> Kernels:
    flops, product_bytes, others = [], [], []
    for eqn in division.closed.jaxpr.eqns:
        if eqn.primitive.name in VIEWS or eqn.params.get("name") in views:
            continue
        moved = sum(
            aval_bytes(var.aval)
            * division.touched(eqn, var, ranks, sequence_parallel=sequence_parallel)
            for var in _moved(eqn, division)
        )
        if is_product(eqn):
            share = division.computed(eqn, ranks, sequence_parallel=sequence_parallel)
            flops.append(equation_cost(eqn).flops * share)
            product_bytes.append(moved)
        elif product_count(eqn):
            raise ValueError(f"{eqn.primitive.name} holds products; trace them one by one.")
        else:
            others.append(moved)
    count = len(flops) + len(others) + len(reduced)
    sizes = tuple(aval_bytes(var.aval) for var in reduced)
    return Kernels(np.array(flops), np.array(product_bytes), sum(others), count, sizes)


def _moved(eqn: Eqn, division: Division) -> Iterator[Any]:
    """What a kernel reads and writes; not the zeros that a scatter starts from, nor a result that is an operand."""
    reads = dict.fromkeys(atom for atom in eqn.invars if is_var(atom))
    yield from (var for var in reads if var.aval.shape)
    inner = next((closed.jaxpr for _, closed in compat.sub_jaxprs(eqn)), None)
    for place, var in enumerate(eqn.outvars):
        if (
            inner is None
            or len(inner.outvars) != len(eqn.outvars)
            or inner.outvars[place] not in inner.invars
        ):
            yield var
