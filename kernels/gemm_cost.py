"""Time and traffic of a planned product, counted from its loop nest in closed form.

All blocks along one dimension are alike but the last, so that the nest has at most eight kinds of
inner tile: full or edge along M, K and N. Each kind is costed once and multiplied by its number.
A *tile* is one turn of the column loop. Its time is the largest of what its cores compute and what
each memory moves, because buffers overlap them; a buffer of depth 1 overlaps nothing and adds its
transfer. Before the first tile and after the last one, and while A blocks are loaded into a single
GSM buffer, nothing overlaps. Starting a transfer is paid once an A strip and is not hidden.

The functions take one `TilePlan`, or an object with arrays in the same fields: then they cost all
the plans at once.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from ratrain_jax.kernels.machine import Accelerator, Machine
from ratrain_jax.kernels.microkernel import fill_cycles, step_cycles, transpose_cycles
from ratrain_jax.kernels.tiles import Gemm, TilePlan, accelerator_of, ceil_div, micro_width

Transfer = tuple[str, str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Equal blocks along one dimension.

    Attributes:
      size: Elements of one block.
      count: How many there are; 0 for an edge that does not exist.
      last: Whether the last block of the dimension is among them.
    """

    size: Any
    count: Any
    last: Any


def parts(total: int, block: Any) -> tuple[Part, Part]:
    """Returns the full blocks and the edge block of `total` elements cut by `block`."""
    whole, rest = total // block, total % block
    edge = np.minimum(rest, 1)
    return Part(block + 0 * whole, whole, 1 - edge), Part(rest, edge, edge)


def core_rows(rows: Any, plan: Any, cores: int) -> Any:
    """Returns the rows of the busiest core, in whole micro-kernels, for a block of `rows` rows."""
    dealt = ceil_div(ceil_div(rows, cores), plan.m) * plan.m
    return np.minimum(np.where(plan.split_n, rows, dealt), rows)


def core_cols(cols: Any, plan: Any, width: Any, cores: int) -> Any:
    """Returns the columns of the busiest core, in whole micro-kernels, of `cols` columns."""
    dealt = ceil_div(ceil_div(cols, cores), width) * width
    return np.minimum(np.where(plan.split_n, dealt, cols), cols)


def column_block(plan: Any, cores: int) -> Any:
    """Returns the columns that all cores handle in one turn of the column loop."""
    return plan.n_a * (1 + plan.split_n * (cores - 1))


def panel_loads(rows: Any, depth: Any, plan: Any, cores: int) -> Any:
    """Returns how often a B panel is loaded for one block: once where it can stay in AM."""
    row_tiles = ceil_div(core_rows(rows, plan, cores), plan.m_a)
    return np.where(depth > plan.k_a, row_tiles, 1)


def transfers(gemm: Gemm, plan: Any, machine: Machine) -> dict[Transfer, Any]:
    """Returns the bytes of each kind of transfer: (from, to, mode) → bytes.

    A broadcast counts once, as what leaves its source.
    """
    cores = accelerator_of(machine).cores
    size, out, acc = gemm.bytes, gemm.out_bytes, gemm.acc_bytes
    turns = ceil_div(gemm.cols, column_block(plan, cores))
    k_blocks = ceil_div(gemm.depth, plan.k_g)
    loads: Any = 0
    for i, k in itertools.product(parts(gemm.rows, plan.m_g), parts(gemm.depth, plan.k_g)):
        loads = loads + i.count * k.count * k.size * panel_loads(i.size, k.size, plan, cores)
    panels = loads * gemm.cols * size
    operand = gemm.rows * gemm.depth * size
    strips = operand * turns
    c_size = gemm.rows * gemm.cols
    strip_to = "AM" if isinstance(plan, TilePlan) and plan.dot else "SM"
    return {
        ("DDR", "GSM", "point"): operand + 0 * turns,
        ("GSM", strip_to, "point"): strips * (1 - plan.split_n),
        ("GSM", strip_to, "broadcast"): strips * plan.split_n,
        ("DDR", "AM", "broadcast"): panels * (1 - plan.split_n),
        ("DDR", "AM", "point"): panels * plan.split_n
        + c_size * ((k_blocks - 1) * acc + out * gemm.accumulate),
        ("AM", "DDR", "point"): c_size * ((k_blocks - 1) * acc + out),
    }


def ddr_bytes(gemm: Gemm, plan: Any, machine: Machine) -> Any:
    """Returns the bytes that cross between DDR and the chip."""
    moved = transfers(gemm, plan, machine)
    return sum(count for (source, to, _), count in moved.items() if "DDR" in (source, to))


def compute_cycles(
    rows: Any, cols: Any, depth: Any, gemm: Gemm, plan: Any, machine: Machine
) -> tuple[Any, Any]:
    """Returns cycles of arithmetic, and cycles of starting transfers, of the busiest core."""
    accelerator = accelerator_of(machine)
    width = micro_width(plan, gemm, accelerator)
    own_rows = core_rows(rows, plan, accelerator.cores)
    own_cols = core_cols(cols, plan, width, accelerator.cores)
    panels = ceil_div(depth, plan.k_a)
    vectors = depth_vectors(depth, plan, gemm, accelerator)
    steps = np.where(plan.dot, vectors, depth)
    step, fill = column_cycles(own_cols, gemm, plan, accelerator)
    cycles = ceil_div(own_rows, plan.m) * (steps * step + panels * fill)
    if gemm.form == "nt":
        loads = panel_loads(rows, depth, plan, accelerator.cores)
        depth = accelerator.lanes(gemm.bytes) * vectors
        turned = transpose_cycles(depth, own_cols, gemm, accelerator)
        cycles = cycles + (1 - plan.dot) * loads * turned
    return cycles, strip_count(own_rows, plan) * panels * accelerator.dma_start_cycles


def depth_vectors(depth: Any, plan: Any, gemm: Gemm, accelerator: Accelerator) -> Any:
    """Returns the vectors along K that the "dot" flow and a transposition take: each panel rounds up."""
    lanes = accelerator.lanes(gemm.bytes)
    return depth // plan.k_a * ceil_div(plan.k_a, lanes) + ceil_div(depth % plan.k_a, lanes)


def column_cycles(
    own_cols: Any, gemm: Gemm, plan: Any, accelerator: Accelerator
) -> tuple[Any, Any]:
    """Returns the cycles a step, and those a panel, of one row of micro-kernels with its edge."""
    width = micro_width(plan, gemm, accelerator)
    whole, rest = own_cols // width, own_cols % width
    edge_n = np.maximum(ceil_div(rest, ceil_div(width, plan.n)), 1)

    def all_of(cycles: Callable[..., Any]) -> Any:
        edge = np.minimum(rest, 1) * cycles(plan.m, edge_n, gemm, accelerator, plan.dot)
        return whole * cycles(plan.m, plan.n, gemm, accelerator, plan.dot) + edge

    return all_of(step_cycles), all_of(fill_cycles)


def strip_count(own_rows: Any, plan: Any) -> Any:
    """Returns the A strips of one B panel for the rows of a core."""
    whole_tiles, rest_rows = own_rows // plan.m_a, own_rows % plan.m_a
    return whole_tiles * ceil_div(plan.m_a, plan.m_s) + ceil_div(rest_rows, plan.m_s)


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a planned product, or arrays of them.

    Attributes:
      total: From the first byte to the last.
      compute: Arithmetic of the busiest core.
      starts: Starting transfers.
      fill: Before the first tile, after the last, and loads into a single GSM buffer.
    """

    total: Any
    compute: Any
    starts: Any
    fill: Any


def times(gemm: Gemm, plan: Any, machine: Machine) -> Times:
    """Returns the seconds of a planned product."""
    accelerator = accelerator_of(machine)
    ddr = machine.memory("DDR").bandwidth
    operand = gemm.rows * gemm.depth * gemm.bytes
    first = np.minimum(plan.m_g, gemm.rows) * np.minimum(plan.k_g, gemm.depth) * gemm.bytes
    blocks = ceil_div(gemm.rows, plan.m_g) * ceil_div(gemm.depth, plan.k_g)
    hidden = plan.gsm_depth > 1
    exposed_a = np.where(hidden, first, operand) / ddr
    ahead = np.where(hidden, (operand - first) / blocks, 0.0)
    total, compute, starts = exposed_a + ends(gemm, plan, plan.m_s, machine), 0.0, 0.0
    fill = total
    for i, k, first_k in _blocks(gemm, plan):
        block: Any = 0.0
        moved: Any = ahead
        for j in parts(gemm.cols, column_block(plan, accelerator.cores)):
            if not np.any(j.count):
                continue
            tile = _tile(i.size, k.size, j.size, first_k, k.last, gemm, plan, machine)
            block = block + j.count * tile.seconds
            moved = moved + j.count * tile.ddr
            number = i.count * k.count * j.count
            compute = compute + number * tile.cycles / accelerator.clock
            starts = starts + number * tile.starts / accelerator.clock
        total = total + i.count * k.count * np.maximum(block, moved / ddr)
    return Times(total, compute, starts, fill)


def _blocks(gemm: Gemm, plan: Any) -> Iterator[tuple[Part, Part, Any]]:
    """Yields kinds of A block; the first and last along K are apart, as C moves otherwise."""
    full, edge = parts(gemm.depth, plan.k_g)
    lone = full.count + edge.count == 1
    inner = np.maximum(full.count - 1 - full.last * (1 - lone), 0)
    one = np.minimum(full.count, 1)
    tail = full.last * (1 - lone) * one
    kinds = (
        (Part(full.size, one, full.last * lone), 1),
        (Part(full.size, inner * one, 0), 0),
        (Part(full.size, tail, 1), 0),
        (Part(edge.size, edge.count, 1), 1 - one),
    )
    for i in parts(gemm.rows, plan.m_g):
        for k, first in kinds:
            if np.any(i.count * k.count):
                yield i, k, first


def _tile(
    rows: Any, depth: Any, cols: Any, first: Any, last: Any, gemm: Gemm, plan: Any, machine: Machine
) -> SimpleNamespace:
    """Costs one turn of the column loop."""
    accelerator = accelerator_of(machine)
    cores, size = accelerator.cores, gemm.bytes
    cycles, starts = compute_cycles(rows, cols, depth, gemm, plan, machine)
    own_rows = core_rows(rows, plan, cores)
    own_cols = core_cols(cols, plan, micro_width(plan, gemm, accelerator), cores)
    c_in = np.where(first, gemm.out_bytes * gemm.accumulate, gemm.acc_bytes)
    c_out = np.where(last, gemm.out_bytes, gemm.acc_bytes)
    panel = depth * size * panel_loads(rows, depth, plan, cores)
    strip = rows * depth * size
    bandwidth = {memory.name: memory.bandwidth for memory in machine.memories}
    strip_port = np.where(plan.dot, bandwidth["AM"], bandwidth["SM"])
    a_time = np.maximum(strip / bandwidth["GSM"], own_rows * depth * size / strip_port)
    b_time = np.maximum(panel * cols / bandwidth["DDR"], panel * own_cols / bandwidth["AM"])
    c_bytes, own_c = rows * cols * (c_in + c_out), own_rows * own_cols * (c_in + c_out)
    c_time = np.maximum(c_bytes / bandwidth["DDR"], own_c / bandwidth["AM"])
    am_bytes = panel * own_cols + own_c + plan.dot * own_rows * depth * size
    ddr = panel * cols + c_bytes
    # Depth 1 puts a transfer behind the arithmetic; otherwise they run side by side.
    serial = (
        np.where(plan.sm_depth > 1, 0.0, a_time)
        + np.where(plan.b_depth > 1, 0.0, b_time)
        + np.where(plan.c_depth > 1, 0.0, c_time)
    )
    busy = (cycles + starts) / accelerator.clock + serial
    moved = np.maximum(np.maximum(ddr / bandwidth["DDR"], a_time), am_bytes / bandwidth["AM"])
    # Two C buffers overlap either loading or storing with arithmetic, not both.
    moved = np.where(plan.c_depth == 2, moved + c_time / 2, moved)
    return SimpleNamespace(seconds=np.maximum(busy, moved), ddr=ddr, cycles=cycles, starts=starts)


def ends(gemm: Gemm, plan: Any, strip: Any, machine: Machine) -> Any:
    """Returns the seconds of the first panel, C tile and strip going in, and the last C tile going out.

    The first strip has `strip` rows.
    """
    accelerator = accelerator_of(machine)
    ddr, gsm = machine.memory("DDR").bandwidth, machine.memory("GSM").bandwidth
    rows, depth = np.minimum(plan.m_g, gemm.rows), np.minimum(plan.k_a, gemm.depth)
    cols = np.minimum(column_block(plan, accelerator.cores), gemm.cols)
    tile = np.minimum(core_rows(rows, plan, accelerator.cores), plan.m_a)
    tile = tile * np.where(plan.split_n, 1, accelerator.cores)
    c_tile = np.minimum(tile, rows) * cols * gemm.out_bytes
    strip = np.minimum(strip, rows) * np.where(plan.split_n, 1, accelerator.cores)
    strip_bytes = np.minimum(strip, rows) * depth * gemm.bytes
    filled = depth * cols * gemm.bytes + c_tile * (1 + gemm.accumulate)
    starts = 4 * accelerator.dma_start_cycles / accelerator.clock
    return filled / ddr + strip_bytes / gsm + starts
