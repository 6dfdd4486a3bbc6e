"""Times that no plan of a product can be under, worked out far faster than its cost.

The cost (`gemm_cost.times`) adds up, over the tiles, the longest of what each unit and each memory
takes. A sum of the longest is no shorter than the longest of the sums, and the sums can be had in
closed form, with whole and edge micro-kernels, transfers and strips counted as the cost counts them.
`close_bound` sums over the columns of a block, and over blocks that are alike. `coarse_bound` sums
over the whole product, most of it before rows are chosen, so that it suits hundreds of thousands of
plans. Both take a B panel to be loaded once for a block: the least, and what plans of the space do.
"""

from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from ratrain_jax.kernels.gemm_cost import (
    Part,
    column_block,
    column_cycles,
    core_cols,
    core_rows,
    depth_vectors,
    ends,
    parts,
    strip_count,
)
from ratrain_jax.kernels.gemm_space import Grid, take
from ratrain_jax.kernels.machine import Machine
from ratrain_jax.kernels.microkernel import transpose_cycles
from ratrain_jax.kernels.tiles import Gemm, accelerator_of, ceil_div, micro_width

# How far a bound may be over the cost: they add in different orders, some dozens of roundings apart.
SLACK: Final = 1 + 1e-12


def with_sums(plan: SimpleNamespace, gemm: Gemm, machine: Machine) -> SimpleNamespace:
    """Returns the plans with what their rows and depth have no part in, summed over all columns.

    The added fields:

    * step_cycles: cycles of one step of K of one row of micro-kernels;
    * fill_cycles: cycles of one panel in which it waits;
    * turn_cycles: cycles to transpose a vector of K of each column;
    * turns: turns of the column loop;
    * own_cols: columns of the busiest core.
    """
    accelerator = accelerator_of(machine)
    lanes = accelerator.lanes(gemm.bytes)
    width = micro_width(plan, gemm, accelerator)
    block = column_block(plan, accelerator.cores)
    # Not integers: sums over a whole product may exceed 64 bits.
    steps: Any = 0.0
    fills: Any = 0.0
    turned: Any = 0.0
    own_cols: Any = 0.0
    for j in parts(gemm.cols, block):
        own = core_cols(j.size, plan, width, accelerator.cores)
        step, fill = column_cycles(own, gemm, plan, accelerator)
        steps, fills = steps + 1.0 * j.count * step, fills + 1.0 * j.count * fill
        own_cols = own_cols + 1.0 * j.count * own
        if gemm.form == "nt":
            turn = (1 - plan.dot) * transpose_cycles(lanes, own, gemm, accelerator)
            turned = turned + 1.0 * j.count * turn
    sums = {
        "step_cycles": steps,
        "fill_cycles": fills,
        "turn_cycles": turned,
        "turns": ceil_div(gemm.cols, block),
        "own_cols": own_cols,
    }
    return SimpleNamespace(**vars(plan), **sums)


def close_bound(plan: SimpleNamespace, strip: Any, gemm: Gemm, machine: Machine) -> Any:
    """Returns seconds below which no plan can be, nor any with shorter strips.

    Args:
      plan: Plans with their sums; see `with_sums`.
      strip: Rows of the first strip: `plan.m_s`, or `plan.m` for all numbers of strips at once.
      gemm: The product.
      machine: The machine.

    Returns:
      An array of seconds, in the order of the plans.
    """
    cores = accelerator_of(machine).cores
    ddr = machine.memory("DDR").bandwidth
    block = np.minimum(plan.m_g, gemm.rows) * (np.minimum(plan.k_g, gemm.depth) * gemm.bytes)
    operand = float(gemm.rows * gemm.depth * gemm.bytes)
    exposed = np.where(plan.gsm_depth > 1, block, operand)
    blocks = ceil_div(gemm.rows, plan.m_g) * ceil_div(gemm.depth, plan.k_g)
    ahead = (operand - exposed) / blocks
    seconds = exposed / ddr + ends(gemm, plan, strip, machine)
    for count, k in _depth_parts(plan, gemm, machine):
        for i in parts(gemm.rows, plan.m_g):
            own = core_rows(i.size, plan, cores)
            busy = _busy(plan, ceil_div(own, plan.m), strip_count(own, plan), 1, k, machine)
            near = _near(plan, i.size, own, k, gemm, machine)
            moved = ahead + gemm.cols * (k.depth * gemm.bytes + i.size * k.c_bytes)
            longest = np.maximum(np.maximum(busy, near), moved / ddr)
            seconds = seconds + i.count * count * longest
    return seconds


def coarse_bound(grid: Grid, gemm: Gemm, machine: Machine) -> Any:
    """Returns seconds below which no plan of a grid can be, with any strips, in the order of its pairs.

    Blocks are taken together, but for what each row block has of its own: its B panels, and the first
    A block.
    """
    outer = grid.outer
    inner = 2 * grid.at + outer.split_n[grid.of]
    core = take(_core_bound(grid, gemm, machine), inner)
    block = grid.height[grid.at] * outer.shares.size + grid.of
    m_g = grid.m_a * outer.shares
    row_blocks = ceil_div(gemm.rows, m_g).take(block)
    ddr = machine.memory("DDR").bandwidth
    panels = row_blocks * (gemm.cols * gemm.depth * gemm.bytes / ddr)
    # Of a single A block nothing is hidden, of two only what is not the first.
    rows = np.where(outer.gsm_depth > 1, np.minimum(m_g, gemm.rows), np.inf).take(block)
    exposed = np.minimum(core.block_row * rows, gemm.rows * gemm.depth * gemm.bytes / ddr)
    longest = np.maximum(core.near, core.busy + core.turn * row_blocks)
    return core.ends + np.maximum(longest + exposed, core.ddr + panels)


def _core_bound(grid: Grid, gemm: Gemm, machine: Machine) -> SimpleNamespace:
    """Returns the seconds that follow from inner choices and the split alone, [inner, 2]."""
    accelerator = accelerator_of(machine)
    inner = vars(grid.inner).items()
    least = SimpleNamespace(**{k: v[:, None] if np.ndim(v) else v for k, v in inner})
    least.split_n = np.array([[0, 1]])
    shares = np.where(least.split_n, 1, accelerator.cores)
    # No plan has a smaller block or tile.
    least.m_a, least.m_g = least.m, least.m * shares
    least = with_sums(least, gemm, machine)
    (count, full), (one, edge) = _depth_parts(least, gemm, machine)
    sums = {k: count * v + one * getattr(edge, k) for k, v in vars(full).items()}
    whole = SimpleNamespace(**sums)
    own = ceil_div(gemm.rows, shares)
    calls, strips = ceil_div(own, least.m), ceil_div(own, least.m_s)
    ddr = machine.memory("DDR").bandwidth
    seconds = {
        "busy": _busy(least, calls, strips, 0, whole, machine),
        "turn": _busy(least, 0, 0, 1, whole, machine),
        "near": _near(least, gemm.rows, own, whole, gemm, machine),
        "ddr": gemm.rows * (gemm.depth * gemm.bytes + gemm.cols * whole.c_bytes) / ddr,
        "block_row": np.minimum(least.k_g, gemm.depth) * (gemm.bytes / ddr),
        "ends": ends(gemm, least, least.m, machine),
    }
    shape = (grid.inner.m.size, 2)
    return SimpleNamespace(**{k: np.broadcast_to(v, shape) for k, v in seconds.items()})


def _depth_parts(
    plan: SimpleNamespace, gemm: Gemm, machine: Machine
) -> tuple[tuple[Any, SimpleNamespace], ...]:
    """The full blocks and the edge along K: how many, and what one of them has.

    That is its depth, panels, vectors, steps of a micro-kernel, and bytes in and out for one element
    of C. These are a mean: the first block reads no partial sums and the last one writes none.
    """
    full, edge = parts(gemm.depth, plan.k_g)
    unpaired = gemm.out_bytes * (1 + gemm.accumulate)
    whole_bytes = unpaired + 2 * gemm.acc_bytes * (full.count + edge.count - 1)
    edge_bytes = np.where(full.count > 0, gemm.acc_bytes + gemm.out_bytes, whole_bytes)
    full_bytes = (whole_bytes - edge.count * edge_bytes) / np.maximum(full.count, 1)

    def block(part: Part, c_bytes: Any) -> tuple[Any, SimpleNamespace]:
        vectors = depth_vectors(part.size, plan, gemm, accelerator_of(machine))
        return part.count, SimpleNamespace(
            depth=part.size,
            panels=ceil_div(part.size, plan.k_a),
            vectors=vectors,
            steps=np.where(plan.dot, vectors, part.size),
            c_bytes=c_bytes,
        )

    return block(full, full_bytes), block(edge, edge_bytes)


def _busy(
    plan: SimpleNamespace, calls: Any, strips: Any, loads: Any, k: SimpleNamespace, machine: Machine
) -> Any:
    """Seconds of a core: rows of micro-kernels, A strips and transposed B panels of a block."""
    accelerator = accelerator_of(machine)
    arithmetic = calls * (k.steps * plan.step_cycles + k.panels * plan.fill_cycles)
    starts = strips * (k.panels * plan.turns) * float(accelerator.dma_start_cycles)
    return (arithmetic + starts + loads * k.vectors * plan.turn_cycles) / accelerator.clock


def _near(
    plan: SimpleNamespace,
    rows: Any,
    own_rows: Any,
    k: SimpleNamespace,
    gemm: Gemm,
    machine: Machine,
) -> Any:
    """Seconds of the memories but DDR for one block: strips leave GSM, and all passes through AM."""
    bandwidth = {memory.name: memory.bandwidth for memory in machine.memories}
    row_bytes = plan.turns * k.depth * float(gemm.bytes)
    gsm = rows * row_bytes / bandwidth["GSM"]
    port = own_rows * row_bytes / np.where(plan.dot, bandwidth["AM"], bandwidth["SM"])
    own_c = own_rows * plan.own_cols * k.c_bytes
    through_am = plan.own_cols * k.depth * gemm.bytes + own_c + plan.dot * own_rows * row_bytes
    return np.maximum(np.maximum(gsm, port), through_am / bandwidth["AM"])
