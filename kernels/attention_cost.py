"""Time and traffic of attention: forward, and backward in its two forms.

The forward pass and the memory-resident backward are counted from their tile loops. The DDR-staged
backward is what one gets without a fused kernel: seven steps, each reading from and writing to DDR,

    S = Q·Kᵀ → P = softmax(S) → dV = Pᵀ·dO → dP = dO·Vᵀ → dS = P∘(dP−D) → dQ = dS·K → dK = dSᵀ·Q

with S and dP in float32 and P and dS in float16, so that both forms give the same results. Its five
products are planned and costed as products; its two elementwise steps are bound by DDR or by vector
arithmetic. A plain product knows no mask: causality saves the staged form nothing.
"""

import dataclasses
import functools

import numpy as np

from ratrain_jax.kernels.attention_plan import (
    HALF,
    WIDE,
    Attention,
    AttentionPlan,
    check_attention_plan,
)
from ratrain_jax.kernels.cost import KernelCost, assumptions, cost_gemm
from ratrain_jax.kernels.gemm_cost import Transfer
from ratrain_jax.kernels.gemm_space import micro_kernels
from ratrain_jax.kernels.machine import Machine
from ratrain_jax.kernels.microkernel import fill_cycles, step_cycles
from ratrain_jax.kernels.tiles import Gemm, accelerator_of, ceil_div

# Vector operations on one score beside the exponential: scale, mask, maximum, subtract, sum, cast
# (forward); scale, mask, subtract, cast and dP − D, times P, times scale, cast (backward).
_FORWARD_OPS = 6
_BACKWARD_OPS = 8
_STARTS = {"forward": 3, "backward": 4}  # DMA starts a tile


@functools.lru_cache(maxsize=65536)
def tile_cycles(rows: int, cols: int, depth: int, accumulator: str, machine: Machine) -> int:
    """Returns the cycles of one on-chip product of a core, with its best micro-kernel."""
    accelerator = accelerator_of(machine)
    gemm = Gemm(rows, cols, depth, accumulator=accumulator)
    lanes = accelerator.lanes(gemm.bytes)
    best = None
    for m, n, _ in micro_kernels(Gemm(1, 1, 1, accumulator=accumulator), machine, "outer"):
        whole, rest = divmod(cols, n * lanes)
        cycles = 0
        for count, vectors in ((whole, n), (int(rest > 0), ceil_div(rest, lanes))):
            if count:
                step = step_cycles(m, vectors, gemm, accelerator)
                cycles += count * int(depth * step + fill_cycles(m, vectors, gemm, accelerator))
        cycles *= ceil_div(rows, m)
        best = cycles if best is None else min(best, cycles)
    assert best is not None  # every accelerator that plans products has a micro-kernel
    return best


def _vector_cycles(elements: int, operations: int, machine: Machine) -> int:
    """Cycles of float32 vector arithmetic on one core."""
    accelerator = accelerator_of(machine)
    return ceil_div(elements * operations, accelerator.lanes(WIDE) * accelerator.fma_units)


@dataclasses.dataclass(frozen=True, slots=True)
class Steps:
    """What one head costs under a plan.

    Attributes:
      tiles: Tiles of the busiest core.
      slices: Registers of keys, or tiles' shares of them, that the busiest core computes.
      passes: How often streamed operands pass by.
    """

    tiles: int
    slices: int
    passes: int


def row_tiles(shape: Attention, plan: AttentionPlan) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of each tile of one head, and how many keys its last row sees."""
    starts = np.arange(0, shape.rows, plan.block_q)
    ends = np.minimum(starts + plan.block_q, shape.rows)
    last = np.where(ends % shape.queries == 0, shape.queries, ends % shape.queries)
    # A tile that spans two heads' queries sees as far as the longer of them.
    last = np.where((ends - 1) // shape.queries != starts // shape.queries, shape.queries, last)
    seen = np.minimum(last, shape.keys) if shape.causal else np.full(len(starts), shape.keys)
    return ends - starts, seen


def slices_at_once(plan: AttentionPlan, cores: int, lanes: int) -> int:
    """Returns the registers of keys that all cores of a head own at a time, backward."""
    return cores // plan.groups * ceil_div(plan.block_k, lanes)


@functools.lru_cache(maxsize=65536)
def steps(shape: Attention, plan: AttentionPlan, cores: int, lanes: int) -> Steps:
    """Counts the tiles of one head, skipping what causality masks."""
    team = cores // plan.groups
    _, seen = row_tiles(shape, plan)
    tiles = len(seen)
    if plan.which == "forward":
        blocks = ceil_div(seen, plan.block_k)
        by_core = [int(blocks[core::team].sum()) for core in range(min(team, tiles))]
        return Steps(max(by_core), max(by_core), ceil_div(tiles, team))
    slices = ceil_div(seen, lanes)
    at_once = slices_at_once(plan, cores, lanes)
    passes = ceil_div(ceil_div(shape.keys, lanes), at_once)
    total = count = 0
    for turn in range(passes):
        here = np.clip(slices - turn * at_once, 0, at_once)
        total += int(ceil_div(here, team).sum())
        count += int((here > 0).sum())
    return Steps(count, total, passes)


def cost_attention_plan(shape: Attention, machine: Machine, plan: AttentionPlan) -> KernelCost:
    """Returns the cost of a planned forward or memory-resident backward pass.

    Raises:
      MachineError: If the plan does not fit the machine.
    """
    check_attention_plan(plan, shape, machine)
    accelerator = accelerator_of(machine)
    alone = dataclasses.replace(shape, batch=1)  # one head is what it is in any batch
    count = steps(alone, plan, accelerator.cores, accelerator.lanes(HALF))
    cycles = {"forward": _forward_cycles, "backward": _backward_cycles}[plan.which]
    moved = {"forward": _forward_bytes, "backward": _backward_bytes}[plan.which]
    one = moved(alone, plan, machine)
    transfers = {kind: total * shape.count for kind, total in one.items() if total}
    rounds = ceil_div(shape.count, plan.groups)
    compute = rounds * cycles(shape, plan, count, machine) / accelerator.clock
    starts = rounds * count.tiles * _STARTS[plan.which] * accelerator.dma_start_cycles
    starts = starts / accelerator.clock
    return _assemble(shape, machine, plan, transfers, compute, starts)


def _forward_cycles(shape: Attention, plan: AttentionPlan, count: Steps, machine: Machine) -> int:
    q, k, size = plan.block_q, plan.block_k, shape.head_size
    tile = tile_cycles(q, k, size, shape.accumulator, machine)
    tile += tile_cycles(q, size, k, shape.accumulator, machine)
    exp = accelerator_of(machine).exp_operations
    tile += _vector_cycles(q * k, _FORWARD_OPS + exp, machine)
    tile += _vector_cycles(q * size, 1, machine)
    return count.tiles * tile


def _backward_cycles(shape: Attention, plan: AttentionPlan, count: Steps, machine: Machine) -> int:
    """The tile's products scale with the registers of keys that are not masked."""
    accelerator = accelerator_of(machine)
    q, size, acc = plan.block_q, shape.head_size, shape.accumulator
    lanes = accelerator.lanes(HALF)
    slices = max(1, round(count.slices / max(count.tiles, 1)))
    k = min(slices * lanes, plan.block_k)
    tile = 2 * tile_cycles(q, k, size, acc, machine)
    tile += 2 * tile_cycles(size, k, q, acc, machine)
    tile += tile_cycles(q, size, k, acc, machine)
    tile += _vector_cycles(q * k, _BACKWARD_OPS + accelerator.exp_operations, machine)
    return ceil_div(tile * count.slices, slices)


@functools.lru_cache(maxsize=65536)
def _forward_bytes(shape: Attention, plan: AttentionPlan, machine: Machine) -> dict[Transfer, int]:
    """Bytes of one head. Every round of row tiles has the keys and values that it sees pass by once."""
    team = accelerator_of(machine).cores // plan.groups
    rows, seen = row_tiles(shape, plan)
    seen = np.minimum(ceil_div(seen, plan.block_k) * plan.block_k, shape.keys)
    streamed = int(np.maximum.reduceat(seen, np.arange(0, len(seen), team)).sum())
    scores, size = int((rows * seen).sum()), shape.head_size
    return {
        ("DDR", "SM", "point"): shape.rows * size * HALF,
        ("DDR", "AM", "broadcast"): streamed * 2 * size * HALF,
        ("DDR", "AM", "point"): scores * HALF * shape.bias,
        ("AM", "SM", "point"): scores * HALF,
        ("AM", "DDR", "point"): shape.rows * (size * HALF + WIDE),
    }


@functools.lru_cache(maxsize=65536)
def _backward_bytes(shape: Attention, plan: AttentionPlan, machine: Machine) -> dict[Transfer, int]:
    """Bytes of one head.

    O is read once, for D; Q, dO, the log-sum-exp and D in every pass in which a row tile sees keys. Each core that has
    some of them adds a share of dQ, which waits in DDR between the passes.
    """
    accelerator = accelerator_of(machine)
    lanes = accelerator.lanes(HALF)
    team, at_once = accelerator.cores // plan.groups, slices_at_once(plan, accelerator.cores, lanes)
    rows, seen = row_tiles(shape, plan)
    slices, size = ceil_div(seen, lanes), shape.head_size
    turns = ceil_div(slices, at_once)
    read = int((rows * turns).sum())
    between = (read - shape.rows) * size * WIDE
    here = [np.clip(slices - turn * at_once, 0, at_once) for turn in range(int(turns.max()))]
    shares = sum(int((rows * np.minimum(count, team)).sum()) for count in here)
    scores = int((rows * np.minimum(slices * lanes, shape.keys)).sum())
    return {
        ("DDR", "SM", "broadcast"): read * (2 * size * HALF + 2 * WIDE),
        ("DDR", "AM", "point"): 2 * shape.keys * size * HALF
        + shape.rows * size * HALF
        + between
        + scores * HALF * shape.bias,
        ("AM", "SM", "point"): scores * HALF,
        ("AM", "GSM", "point"): shares * size * WIDE,
        ("GSM", "DDR", "point"): between + shape.rows * size * HALF,
        ("AM", "DDR", "point"): 2 * shape.keys * size * HALF + shape.rows * WIDE,
    }


def _assemble(
    shape: Attention,
    machine: Machine,
    plan: AttentionPlan,
    transfers: dict[Transfer, int],
    compute: float,
    starts: float,
) -> KernelCost:
    ports = ("DDR", "GSM")
    loads = {
        port: sum(total for kind, total in transfers.items() if port in kind[:2])
        / machine.memory(port).bandwidth
        for port in ports
    }
    busy = compute + starts
    # The first tiles come in and the last ones go out with nothing to hide behind.
    size, groups = shape.head_size * HALF, plan.groups
    ends = groups * (plan.block_q + 2 * plan.block_k) * size + groups * plan.block_q * size
    fill = ends / machine.memory("DDR").bandwidth
    hidden = tuple(port for port in ports if 2 * loads[port] <= max(busy, *loads.values()))
    if "DDR" in hidden:
        hidden = tuple(port for port in hidden if port != "DDR")  # the ends are never hidden
    return KernelCost(
        seconds=max(busy, *loads.values()) + fill,
        flops=shape.flops(plan.which),
        peak=accelerator_of(machine).peak_flops(HALF),
        compute_seconds=compute,
        start_seconds=starts,
        fill_seconds=fill,
        transfers=tuple(transfers.items()),
        hidden=(*hidden, "SM", "AM"),
        assumed=assumptions(machine, exponentials=True),
    )


def cost_staged(shape: Attention, machine: Machine) -> KernelCost:
    """Returns the cost of the DDR-staged backward pass, whose products get plans of their own."""
    rows, keys, size, acc = shape.rows, shape.keys, shape.head_size, shape.accumulator
    scores = rows * keys
    products = (
        Gemm(rows, keys, size, form="nt", accumulator=acc, out_dtype="float32"),  # S
        Gemm(keys, size, rows, form="tn", accumulator=acc),  # dV
        Gemm(rows, keys, size, form="nt", accumulator=acc, out_dtype="float32"),  # dP
        Gemm(rows, size, keys, form="nn", accumulator=acc),  # dQ
        Gemm(keys, size, rows, form="tn", accumulator=acc),  # dK
    )
    costs = [cost_gemm(gemm, machine) for gemm in products]
    exp = accelerator_of(machine).exp_operations
    elementwise = (
        _stream(
            scores * WIDE + rows * WIDE + scores * HALF * shape.bias,
            scores * HALF,
            scores * (exp + 4),
            machine,
        ),
        _stream(
            scores * (WIDE + HALF) + 2 * rows * size * HALF,
            scores * HALF,
            scores * 4 + 2 * rows * size,
            machine,
        ),
    )
    costs += list(elementwise)
    moved: dict[Transfer, int] = {}
    for cost in costs:
        for kind, total in cost.transfers:
            moved[kind] = moved.get(kind, 0) + total * shape.count
    return KernelCost(
        seconds=shape.count * sum(cost.seconds for cost in costs),
        flops=shape.flops("backward"),
        peak=costs[0].peak,
        compute_seconds=shape.count * sum(cost.compute_seconds for cost in costs),
        start_seconds=shape.count * sum(cost.start_seconds for cost in costs),
        fill_seconds=shape.count * sum(cost.fill_seconds for cost in costs),
        transfers=tuple(moved.items()),
        hidden=tuple(sorted(set.intersection(*(set(cost.hidden) for cost in costs)))),
        assumed=assumptions(machine, exponentials=True),
    )


def _stream(reads: int, writes: int, operations: int, machine: Machine) -> KernelCost:
    """Costs an elementwise step over all cores, from DDR to DDR."""
    accelerator = accelerator_of(machine)
    each = ceil_div(operations, accelerator.cores)
    compute = _vector_cycles(each, 1, machine) / accelerator.clock
    memory = (reads + writes) / machine.memory("DDR").bandwidth
    hidden = ("SM", "AM", "GSM") + (("DDR",) if 2 * memory <= compute else ())
    return KernelCost(
        seconds=max(compute, memory),
        flops=0,
        peak=accelerator.peak_flops(HALF),
        compute_seconds=compute,
        start_seconds=0.0,
        fill_seconds=0.0,
        transfers=((("DDR", "AM", "point"), reads), (("AM", "DDR", "point"), writes)),
        hidden=hidden,
        assumed=(),
    )
