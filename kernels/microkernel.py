"""Cycles of a micro-kernel, from issue slots and latencies.

A micro-kernel keeps m×n accumulators in registers and walks along K. In steady state it is bound by
the busiest of: the multiply-add units; the one vector slot a cycle that spreads scalars over lanes
(m of them a step); scalar loads; vector loads; and the latency of a chain of multiply-adds. Before
the first and after the last multiply-add the units stand idle for the *fill*: the way of the first
operand to the units, the latency of the last multiply-add, and the stores.

In the "dot" flow one step handles as many elements of K as a register has lanes, and at the end a
tree of merges adds the lanes: a merge takes two vectors to one (two permutes in the one free vector
slot, then an addition), so that 48 vectors of 16 lanes become 24, 12, 6 and 3.

All functions take integers or integer arrays.
"""

from typing import Any

import numpy as np

from ratrain_jax.kernels.machine import Accelerator
from ratrain_jax.kernels.tiles import Gemm, ceil_div


def step_cycles(m: Any, n: Any, gemm: Gemm, accelerator: Accelerator, dot: Any = 0) -> Any:
    """Returns the cycles of one step of K (flow "outer") or of one vector of K ("dot").

    Args:
      m: Rows of the micro-kernel.
      n: Vectors, or columns in the "dot" flow, that are in use.
      gemm: The product, for its formats.
      accelerator: The machine's insides.
      dot: 1 for the "dot" flow, else 0.

    Returns:
      Cycles, an integer or an array of them.
    """
    vectors_a_cycle = max(1, accelerator.vector_load_bytes // accelerator.register_bytes)
    arithmetic = ceil_div(
        m * n * _wide_cost(gemm, accelerator), accelerator.fma_units * _RATE_SCALE
    )
    scalars = (1 - dot) * m  # one spread a cycle
    scalar_loads = (1 - dot) * ceil_div(m * gemm.bytes, accelerator.scalar_load_bytes)
    vector_loads = ceil_div(n + dot * m, vectors_a_cycle)
    chain = accelerator.latencies.fma
    bound = np.maximum(np.maximum(arithmetic, scalars), np.maximum(scalar_loads, vector_loads))
    return np.maximum(bound, chain)


_RATE_SCALE = 1000


def _wide_cost(gemm: Gemm, accelerator: Accelerator) -> int:
    """Thousandths of an issue slot for one multiply-add of whole vectors."""
    if gemm.widening == 1:
        return _RATE_SCALE
    return round(_RATE_SCALE / accelerator.wide_rate)


def fill_cycles(m: Any, n: Any, gemm: Gemm, accelerator: Accelerator, dot: Any = 0) -> Any:
    """Returns the cycles of a micro-kernel call in which the multiply-add units wait.

    Args:
      m: Rows of the micro-kernel.
      n: Vectors, or columns in the "dot" flow, that are in use.
      gemm: The product, for its formats.
      accelerator: The machine's insides.
      dot: 1 for the "dot" flow, else 0.

    Returns:
      Cycles, an integer or an array of them.
    """
    wait = accelerator.latencies
    vectors_a_cycle = max(1, accelerator.vector_load_bytes // accelerator.register_bytes)
    accumulators = m * n * gemm.widening
    arrive = (1 - dot) * (wait.scalar_load + wait.broadcast) + dot * wait.vector_load
    stored = accumulators * (1 - dot) + dot * ceil_div(accumulators, accelerator.lanes(gemm.bytes))
    leave = wait.fma + wait.vector_store + ceil_div(stored, vectors_a_cycle)
    merge = dot * _merge_cycles(accumulators, gemm, accelerator)
    return arrive + leave + merge + _promote_cycles(m, n, gemm, accelerator, dot)


def _merge_cycles(vectors: Any, gemm: Gemm, accelerator: Accelerator) -> Any:
    """Cycles to add up the lanes of all accumulators.

    The latency of a level hides behind the issues of the next one as far as that has enough.
    """
    latency = accelerator.latencies.broadcast + accelerator.latencies.fma
    lanes = accelerator.lanes(gemm.bytes)
    total: Any = 0
    level = vectors
    first = True
    while lanes > 1:
        level = ceil_div(level, 2)
        issue = 2 * level
        total = total + (issue if first else np.maximum(issue, latency))
        first = False
        lanes //= 2
    return total + latency


def _promote_cycles(m: Any, n: Any, gemm: Gemm, accelerator: Accelerator, dot: Any) -> Any:
    """Cycles to add the float16 sums of one panel to the float32 sums in AM."""
    if not gemm.promotes:
        return 0
    vectors_a_cycle = max(1, accelerator.vector_load_bytes // accelerator.register_bytes)
    sums = m * n * (1 - dot) + dot * ceil_div(m * n, accelerator.lanes(gemm.bytes))
    adds = ceil_div(2 * sums, accelerator.fma_units)
    return adds + 2 * ceil_div(2 * sums, vectors_a_cycle)


def micro_efficiency(m: int, n: int, k: int, gemm: Gemm, accelerator: Accelerator) -> float:
    """Returns the share of peak that one "outer" micro-kernel call over depth k reaches.

    The peak counts multiply-adds at the plain rate, so that a wide accumulator shows as a loss.
    """
    cycles = k * step_cycles(m, n, gemm, accelerator) + fill_cycles(m, n, gemm, accelerator)
    return m * n * k / accelerator.fma_units / float(cycles)


def transpose_cycles(depth: Any, cols: Any, gemm: Gemm, accelerator: Accelerator) -> Any:
    """Returns the cycles to transpose a panel inside AM.

    A square of L×L elements (L lanes) takes log2(L) rounds of L permutes, one a cycle.
    """
    lanes = accelerator.lanes(gemm.bytes)
    rounds = max(1, (lanes - 1).bit_length())
    return ceil_div(depth, lanes) * ceil_div(cols, lanes) * lanes * rounds
