"""Choosing the best plan of a product: exhaustive search of a declared space, vectorised.

The space, before what does not fit is thrown out:

* micro-kernels: every m × n that the register rules allow, with the unrolling that they ask for;
* depth blocks and panels (k_g, k_a): K cut into equal parts, numbers of parts out of `_counts`;
* row blocks and tiles (m_g, m_a): M cut likewise, rounded up to whole micro-kernels a core;
* columns a core (n_a): small multiples of the micro-kernel's width;
* A strips (m_s): m_a cut into equal strips, likewise, that fit;
* one or two A blocks in GSM; both splits; for "nt" both flows.

Nothing in the space depends on the sizes of the memories, so that a larger memory only adds plans.
Plans are compared by an admissible bound first and costed in full only where it does not rule
them out: the answer is that of costing them all.
"""

import dataclasses
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final, NoReturn

import numpy as np

from ratrain_jax.errors import MachineError
from ratrain_jax.kernels.gemm_cost import (
    column_block,
    ddr_bytes,
    times,
)
from ratrain_jax.kernels.machine import Accelerator, Machine
from ratrain_jax.kernels.microkernel import fill_cycles, step_cycles, transpose_cycles
from ratrain_jax.kernels.tiles import (
    Gemm,
    TilePlan,
    accelerator_of,
    buffer_bytes,
    ceil_div,
    check_plan,
    micro_kernel_fault,
    micro_width,
)

OBJECTIVES: Final = ("time", "traffic")
_WIDTHS: Final = {"outer": (1, 2, 3, 4, 6, 8), "dot": (1, 2, 4, 8)}
_ROW_TILES: Final = (1, 2, 4)
_PANELS: Final = {"outer": (1, 2, 3, 4, 6, 8), "dot": (1, 2)}
_LONGEST: Final = 16  # rows or vectors of a micro-kernel
_SHORTEST: Final = 4  # rows and columns of a "dot" micro-kernel, which is best near square
_UNROLLS: Final = (1, 2, 3, 4)
_LEAST_DEPTH: Final = 32  # shorter panels are all fill
_LEAST_ROWS: Final = 6  # rows of a block, a core; fewer are all B traffic
_TRIAL: Final = 64  # plans costed to get the limit under which the bound must be
_FIELDS: Final = tuple(
    field.name for field in dataclasses.fields(TilePlan) if field.name not in ("split", "flow")
)


def plan_gemm(
    rows: int,
    cols: int,
    depth: int,
    dtype: str,
    machine: Machine,
    *,
    form: str = "nn",
    accumulator: str | None = None,
    out_dtype: str = "",
    accumulate: bool = False,
    objective: str = "time",
) -> TilePlan:
    """Returns the best plan of a product on a machine. Repeated calls cost nothing.

    Args:
      rows: M.
      cols: N.
      depth: K.
      dtype: Name of the operands' dtype.
      machine: A machine with an accelerator.
      form: "nn", "nt" (C = A·Bᵀ) or "tn" (C = Aᵀ·B).
      accumulator: "fp32", "fp16" or "promote"; the machine's own unless given.
      out_dtype: Name of the dtype of C; the operands' unless given.
      accumulate: Whether C is added to.
      objective: "time", or "traffic" for the fewest bytes to and from DDR.

    Returns:
      The plan.

    Raises:
      MachineError: If the machine has no accelerator, or no plan fits its memories.

    Example:
      >>> from ratrain_jax.kernels import load_machine
      >>> plan_gemm(2048, 4096, 4096, "float16", load_machine("mt3000")).split
      'm'
    """
    accumulator = accumulator or accelerator_of(machine).accumulator
    gemm = Gemm(rows, cols, depth, dtype, form, accumulator, out_dtype, accumulate)
    return plan_for(gemm, machine, objective)


@functools.lru_cache(maxsize=4096)
def plan_for(gemm: Gemm, machine: Machine, objective: str = "time") -> TilePlan:
    """Returns the best plan of a product; see `plan_gemm`."""
    if objective not in OBJECTIVES:
        raise MachineError(f"objective is {objective!r}; use 'time' or 'traffic'.")
    best: tuple[tuple[float, ...], TilePlan] | None = None
    # The second flow is costed no further than the first one's time.
    flows = ("dot", "outer") if gemm.form == "nt" else ("outer",)
    for flow in flows:
        limit = best[0][0] if best else np.inf
        found = _best_of(candidates(gemm, machine, flow), gemm, machine, objective, limit)
        if found and (best is None or found[0] < best[0]):
            best = found
    if best is None:
        _refuse(gemm, machine)
    return best[1]


def _counts(total: int) -> list[int]:
    """Numbers of parts to cut `total` into: all small ones, then about 40 % apart."""
    counts, value = [], 1
    while value <= total:
        counts.append(value)
        value += max(1, 2 * value // 5)
    return counts


_STRIPS: Final = np.array(_counts(1 << 40))


def _sizes(total: int, least: int) -> list[int]:
    """Distinct part sizes of `total`, no smaller than `least`, or the smallest cut."""
    sizes = {ceil_div(total, count) for count in _counts(total)}
    return sorted({max(size, min(least, total)) for size in sizes}, reverse=True)


def micro_kernels(gemm: Gemm, machine: Machine, flow: str) -> tuple[tuple[int, int, int], ...]:
    """Returns the largest (m, n, ku) that the register rules allow and the units can be fed for.

    A kernel is left out if another is at least as large both ways, or if scalars or loads, not
    arithmetic, bound its steps.
    """
    # The rules know of dtypes and registers, not of the product's size.
    return _micro_kernels(dataclasses.replace(gemm, rows=1, cols=1, depth=1), machine, flow)


@functools.lru_cache(maxsize=256)
def _micro_kernels(gemm: Gemm, machine: Machine, flow: str) -> tuple[tuple[int, int, int], ...]:
    accelerator = accelerator_of(machine)
    dot = int(flow == "dot")
    found = []
    for m in range(1, accelerator.registers):
        for n in range(1, accelerator.registers // m + 1):
            for ku in _UNROLLS:
                plan = SimpleNamespace(m=m, n=n, ku=ku, dot=dot)
                if not micro_kernel_fault(plan, gemm, accelerator):
                    found.append((m, n, ku))
                    break
    fed = [(m, n, ku) for m, n, ku in found if _is_fed(m, n, gemm, accelerator, dot)]
    return tuple(
        (m, n, ku)
        for m, n, ku in fed or found
        if not any((a, b) != (m, n) and a >= m and b >= n for a, b, _ in fed or found)
    )


def _is_fed(m: int, n: int, gemm: Gemm, accelerator: Accelerator, dot: int) -> bool:
    alone = m * n / accelerator.fma_units
    if max(m, n) > _LONGEST or (dot and min(m, n) < _SHORTEST):
        return False
    wide = 1.0 if gemm.widening == 1 else accelerator.wide_rate
    return float(step_cycles(m, n, gemm, accelerator, dot)) <= alone / wide + 1


def candidates(gemm: Gemm, machine: Machine, flow: str) -> SimpleNamespace:
    """Returns all plans of the space that fit, each with its longest strips, as one object with arrays in a plan's fields."""
    inner = _inner(gemm, machine, flow)
    cores = accelerator_of(machine).cores
    outer = np.array(list(_outer(gemm, cores)), dtype=np.int64).reshape(-1, 4).T
    rows, row_tiles, split_n, gsm_depth = outer
    shares = row_tiles * np.where(split_n, 1, cores)
    heights, height = np.unique(inner.m, return_inverse=True)
    tiles = ceil_div(ceil_div(rows, shares), heights[:, None]) * heights[:, None]
    m_a = tiles[height]  # of each inner choice with each outer one
    # Several row tiles need a B panel that stays in AM; GSM must hold the block, and AM the panel and the tiles.
    fits = (row_tiles == 1) | (inner.k_a == inner.k_g)[:, None]
    blocks = inner.k_g[:, None] * (m_a * (shares * gsm_depth))
    fits &= blocks * gemm.bytes <= machine.memory("GSM").bytes
    panel = (inner.b_depth * gemm.bytes * inner.k_a)[:, None]
    columns = (panel + inner.c_depth * gemm.acc_bytes * m_a) * inner.n_a[:, None]
    fits &= columns <= machine.memory("AM").bytes
    at, of = np.nonzero(fits)
    plan = _take(inner, at)
    plan.split_n, plan.gsm_depth = split_n[of], gsm_depth[of]
    plan.m_a = m_a[at, of]
    plan.m_g = plan.m_a * shares[of]
    plan.strips = _levels(ceil_div(plan.m_a, np.minimum(plan.m_s, plan.m_a)))
    plan.m_s = _strip(plan)
    need = buffer_bytes(plan, gemm)
    fit = np.ones(plan.m.shape, bool)
    for name, count in need.items():
        fit &= count <= machine.memory(name).bytes
    return plan if fit.all() else _take(plan, np.flatnonzero(fit))


def with_shorter_strips(plan: SimpleNamespace) -> SimpleNamespace:
    """Returns the plans, each with all its numbers of strips: more starts, but a shorter first one."""
    found, at = [plan], plan
    while True:
        at = _take(at, np.flatnonzero(at.m_s > at.m))
        if at.m.size == 0:
            break
        at.strips = _levels(at.strips + 1)
        at.m_s = _strip(at)
        found.append(at)
    names = vars(plan).items()
    return SimpleNamespace(
        **{
            name: np.concatenate([getattr(part, name) for part in found])
            if np.ndim(value)
            else value
            for name, value in names
        }
    )


def _levels(least: Any) -> Any:
    """The smallest number of strips in the space that is no smaller."""
    return _STRIPS[np.searchsorted(_STRIPS, least)]


def _strip(plan: SimpleNamespace) -> Any:
    return ceil_div(ceil_div(plan.m_a, plan.strips), plan.m) * plan.m


def _inner(gemm: Gemm, machine: Machine, flow: str) -> SimpleNamespace:
    """Returns what a core needs to know: micro-kernel, n_a, k_g, k_a and the largest m_s."""
    accelerator = accelerator_of(machine)
    depths = sorted(
        {
            (k_g, max(1, ceil_div(k_g, panels)))
            for k_g in _sizes(gemm.depth, _LEAST_DEPTH)
            for panels in _PANELS[flow]
            if panels == 1 or ceil_div(k_g, panels) >= _LEAST_DEPTH
        },
        reverse=True,
    )
    kernels = micro_kernels(gemm, machine, flow)
    grid = [
        (*kernel, width, *depth)
        for kernel in kernels
        for width in _WIDTHS[flow]
        for depth in depths
    ]
    m, n, ku, width, k_g, k_a = np.array(grid, dtype=np.int64).reshape(-1, 6).T
    plan = SimpleNamespace(m=m, n=n, ku=ku, k_g=k_g, k_a=k_a)
    plan.dot = np.int64(flow == "dot")
    micro = micro_width(plan, gemm, accelerator)
    plan.n_a = micro * width
    plan.sm_depth, plan.b_depth, plan.c_depth = map(np.int64, (2, 2, 3))
    # Strips take SM, or in the "dot" flow an eighth of AM.
    room = machine.memory("SM").bytes
    if flow == "dot":
        room = machine.memory("AM").bytes // 8
    plan.m_s = room // (plan.sm_depth * k_a * gemm.bytes) // m * m
    least = plan.m_s >= m
    least &= (plan.b_depth * k_a * gemm.bytes + 3 * m * gemm.acc_bytes) * plan.n_a <= (
        machine.memory("AM").bytes
    )
    # Columns beyond the product's own, in whole micro-kernels, would only stand empty.
    least &= (width == 1) | (plan.n_a - micro < gemm.cols)
    # What the bound needs of these alone is worked out here, before rows are chosen too.
    plan.width = micro
    plan.step = step_cycles(m, n, gemm, accelerator, plan.dot)
    plan.fill = fill_cycles(m, n, gemm, accelerator, plan.dot)
    plan.blocks = ceil_div(gemm.depth, k_g)
    plan.panels = (plan.blocks - 1) * ceil_div(k_g, k_a) + 1
    return _take(plan, np.flatnonzero(least))


def _outer(gemm: Gemm, cores: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields rows of a block, row tiles a core, split and GSM buffers."""
    for rows in _sizes(gemm.rows, _LEAST_ROWS * cores):
        for row_tiles in _ROW_TILES:
            for split_n in (0, 1) if cores > 1 else (1,):
                share = ceil_div(rows, row_tiles * (1 if split_n else cores))
                if row_tiles == 1 or share > 1:
                    yield rows, row_tiles, split_n, 1
                    yield rows, row_tiles, split_n, 2


def _take(plan: SimpleNamespace, index: Any) -> SimpleNamespace:
    """Some of the plans; what is equal in all of them is one number."""
    fields = vars(plan).items()
    return SimpleNamespace(**{k: v.take(index) if np.ndim(v) else v for k, v in fields})


def _bound(plan: SimpleNamespace, gemm: Gemm, machine: Machine) -> Any:
    """Returns seconds below which no plan can be: arithmetic, DDR or GSM alone."""
    accelerator = accelerator_of(machine)
    share_m = np.where(plan.split_n, 1, accelerator.cores)
    share_n = np.where(plan.split_n, accelerator.cores, 1)
    lanes = np.where(plan.dot, accelerator.lanes(gemm.bytes), 1)
    calls = ceil_div(ceil_div(gemm.rows, share_m), plan.m) * (gemm.cols / share_n / plan.width)
    cycles = calls * (gemm.depth / lanes * plan.step + plan.panels * plan.fill)
    turns = np.maximum(gemm.cols / column_block(plan, accelerator.cores), 1.0)
    starts = turns * plan.panels * (gemm.rows / share_m / plan.m_s) * accelerator.dma_start_cycles
    row_blocks = ceil_div(gemm.rows, plan.m_g)
    if gemm.form == "nt":
        squares = gemm.depth / accelerator.lanes(gemm.bytes) ** 2 * (gemm.cols / share_n)
        turn = transpose_cycles(accelerator.lanes(gemm.bytes), 1, gemm, accelerator)
        cycles = cycles + (1 - plan.dot) * squares * turn * row_blocks
    busy = (cycles + starts) / accelerator.clock
    operand = gemm.rows * gemm.depth * gemm.bytes
    ddr = machine.memory("DDR").bandwidth
    moved = gemm.cols * gemm.depth * gemm.bytes * row_blocks
    moved = moved + gemm.rows * gemm.cols * (
        2 * (plan.blocks - 1) * gemm.acc_bytes + gemm.out_bytes
    )
    exposed = np.where(plan.gsm_depth > 1, 0.0, operand / ddr)
    gsm = operand * turns / machine.memory("GSM").bandwidth
    return exposed + np.maximum(np.maximum(busy, gsm), (moved + operand) / ddr - exposed)


def _best_of(
    plan: SimpleNamespace, gemm: Gemm, machine: Machine, objective: str, limit: float
) -> tuple[tuple[float, ...], TilePlan] | None:
    if plan.m.size == 0:
        return None
    if objective == "traffic":
        moved = ddr_bytes(gemm, plan, machine)
        least = _take(plan, np.flatnonzero(moved == moved.min()))
        return _first(with_shorter_strips(least), gemm, machine, True)
    bound = _bound(plan, gemm, machine)
    near = np.flatnonzero(bound <= limit)
    if near.size == 0:
        return None
    if near.size <= _TRIAL:
        return _first(with_shorter_strips(_take(plan, near)), gemm, machine, False)
    lowest = np.sort(np.argpartition(bound, min(_TRIAL, bound.size) - 1)[:_TRIAL])
    trial = with_shorter_strips(_take(plan, lowest))
    seconds = times(gemm, trial, machine).total
    limit = min(limit, seconds.min())
    near = np.flatnonzero(bound <= limit * (1 + 1e-9))
    if near.size <= lowest.size:  # none of them is beyond the plans on trial
        return _first(trial, gemm, machine, False, seconds)
    return _first(with_shorter_strips(_take(plan, near)), gemm, machine, False)


def _first(
    plan: SimpleNamespace,
    gemm: Gemm,
    machine: Machine,
    traffic_first: bool,
    seconds: Any = None,
) -> tuple[tuple[float, ...], TilePlan]:
    """Returns the best plan with its key; ties go to fewer DDR bytes, then to the earlier plan."""
    if seconds is None:
        seconds = times(gemm, plan, machine).total
    moved = ddr_bytes(gemm, plan, machine)
    keys = (seconds, moved) if traffic_first else (moved, seconds)
    best = int(np.lexsort(keys)[0])
    plan = _take(plan, best)
    fields = {name: int(getattr(plan, name)) for name in _FIELDS}
    chosen = TilePlan(
        **fields,
        split="n" if plan.split_n else "m",
        flow="dot" if plan.dot else "outer",
    )
    key = (float(moved[best]), float(seconds[best]))
    return (key if traffic_first else key[::-1]), chosen


def _refuse(gemm: Gemm, machine: Machine) -> NoReturn:
    """Raises the error for a product of which not even the smallest blocks fit."""
    accelerator = accelerator_of(machine)
    kernels = micro_kernels(gemm, machine, "outer")
    if not kernels:
        raise MachineError(
            f"no micro-kernel obeys the register rules of {machine.name!r}: "
            f"{accelerator.registers} registers, {accelerator.fma_units} units; correct them."
        )
    m, n, ku = min(kernels, key=lambda kernel: kernel[0] * kernel[1])
    width = int(micro_width(SimpleNamespace(n=n, dot=0), gemm, accelerator))
    depth = min(gemm.depth, _LEAST_DEPTH)
    split, shares = ("m", accelerator.cores) if accelerator.cores > 1 else ("n", 1)
    smallest = TilePlan(m * shares, depth, m, width, depth, m, m, n, ku, split)
    try:
        check_plan(smallest, gemm, machine)
    except MachineError as error:
        raise MachineError(f"no plan fits {machine.name!r}: with small blocks, {error}") from None
    raise MachineError(f"no searched plan fits {machine.name!r}; enlarge its memories.")
