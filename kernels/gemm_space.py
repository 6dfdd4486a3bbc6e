"""The plans of a product that are searched, vectorised.

The space, before what does not fit is thrown out:

* micro-kernels: every m × n that the register rules allow, with the unrolling that they ask for;
* depth blocks and panels (k_g, k_a): K cut into equal parts, numbers of parts out of `_counts`;
* row blocks and tiles (m_g, m_a): M cut likewise, rounded up to whole micro-kernels a core;
* columns a core (n_a): small multiples of the micro-kernel's width;
* A strips (m_s): m_a cut into equal strips, likewise, that fit;
* one or two A blocks in GSM; both splits; for "nt" both flows.

Nothing in the space depends on the sizes of the memories, so that a larger memory only adds plans.
Plans are made in two steps, since most can be ruled out before they are written down one by one: a
`Grid` has what one core needs to know along one axis and how rows are shared out along the other.
"""

import dataclasses
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from ratrain_jax.kernels.machine import Accelerator, Machine
from ratrain_jax.kernels.microkernel import step_cycles
from ratrain_jax.kernels.tiles import (
    Gemm,
    accelerator_of,
    buffer_bytes,
    ceil_div,
    micro_kernel_fault,
    micro_width,
)

LEAST_DEPTH: Final = 32  # shorter panels are all fill
_WIDTHS: Final = {"outer": (1, 2, 3, 4, 6, 8), "dot": (1, 2, 4, 8)}
_ROW_TILES: Final = (1, 2, 4)
_PANELS: Final = {"outer": (1, 2, 3, 4, 6, 8), "dot": (1, 2)}
_LONGEST: Final = 16  # rows or vectors of a micro-kernel
_SHORTEST: Final = 4  # rows and columns of a "dot" micro-kernel, which is best near square
_UNROLLS: Final = (1, 2, 3, 4)
_LEAST_ROWS: Final = 6  # rows of a block, a core; fewer are all B traffic


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """All plans of one flow, not yet written down one by one.

    Attributes:
      inner: Arrays of micro-kernel, n_a, k_g, k_a and the largest m_s, an entry for each choice.
      outer: Arrays of row_tiles, split_n, gsm_depth and shares (tiles of rows in an A block).
      height: For each inner choice, the row of `m_a` that has its micro-kernel's rows.
      m_a: Rows of a C tile, [heights, outer].
      at: The inner choice of each pair that fits the memories, strips in AM aside.
      of: The outer choice of each such pair.
    """

    inner: SimpleNamespace
    outer: SimpleNamespace
    height: Any
    m_a: Any
    at: Any
    of: Any


def flows(gemm: Gemm) -> tuple[str, ...]:
    """Returns the flows that a product can take."""
    return ("dot", "outer") if gemm.form == "nt" else ("outer",)


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


def grid_of(gemm: Gemm, machine: Machine, flow: str) -> Grid:
    """Returns all plans of the space for one flow."""
    inner = _inner(gemm, machine, flow)
    cores = accelerator_of(machine).cores
    choices = np.array(list(_outer(gemm, cores)), dtype=np.int64).reshape(-1, 4).T
    rows, row_tiles, split_n, gsm_depth = choices
    shares = row_tiles * np.where(split_n, 1, cores)
    heights, height = np.unique(inner.m, return_inverse=True)
    m_a = ceil_div(ceil_div(rows, shares), heights[:, None]) * heights[:, None]
    # Several row tiles need a B panel that stays in AM; GSM must hold the block, and AM the panel and the tiles.
    fits = (row_tiles == 1) | (inner.k_a == inner.k_g)[:, None]
    most = machine.memory("GSM").bytes // (inner.k_g * gemm.bytes)
    fits &= (m_a * (shares * gsm_depth))[height] <= most[:, None]
    panel = inner.b_depth * gemm.bytes * inner.k_a
    most = (machine.memory("AM").bytes // inner.n_a - panel) // (inner.c_depth * gemm.acc_bytes)
    fits &= m_a[height] <= most[:, None]
    outer = SimpleNamespace(
        row_tiles=row_tiles, split_n=split_n, gsm_depth=gsm_depth, shares=shares
    )
    return Grid(inner, outer, height, m_a, *np.nonzero(fits))


def plans(grid: Grid, pairs: Any) -> SimpleNamespace:
    """Returns some pairs of a grid as one object with arrays in a plan's fields, with their longest strips."""
    at, of = grid.at[pairs], grid.of[pairs]
    plan = take(grid.inner, at)
    plan.split_n, plan.gsm_depth = grid.outer.split_n[of], grid.outer.gsm_depth[of]
    plan.m_a = grid.m_a[grid.height[at], of]
    plan.m_g = plan.m_a * grid.outer.shares[of]
    plan.strips = _levels(ceil_div(plan.m_a, np.minimum(plan.m_s, plan.m_a)))
    plan.m_s = _strip(plan)
    return plan


def fitting(plan: SimpleNamespace, gemm: Gemm, machine: Machine) -> SimpleNamespace:
    """Returns the plans of which all buffers fit."""
    fit = np.ones(plan.m.shape, bool)
    for name, count in buffer_bytes(plan, gemm).items():
        fit &= count <= machine.memory(name).bytes
    return plan if fit.all() else take(plan, np.flatnonzero(fit))


def candidates(gemm: Gemm, machine: Machine, flow: str) -> SimpleNamespace:
    """Returns all plans of a flow that fit, each with its longest strips."""
    return fitting(plans(grid_of(gemm, machine, flow), slice(None)), gemm, machine)


def with_shorter_strips(plan: SimpleNamespace) -> SimpleNamespace:
    """Returns the plans, each with all its numbers of strips: more starts, but a shorter first one."""
    found, at = [plan], plan
    while True:
        at = take(at, np.flatnonzero(at.m_s > at.m))
        if at.m.size == 0:
            return join(found)
        at.strips = _levels(at.strips + 1)
        at.m_s = _strip(at)
        found.append(at)


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
            for k_g in _sizes(gemm.depth, LEAST_DEPTH)
            for panels in _PANELS[flow]
            if panels == 1 or ceil_div(k_g, panels) >= LEAST_DEPTH
        },
        reverse=True,
    )
    kernels = np.array(micro_kernels(gemm, machine, flow), dtype=np.int64).reshape(-1, 3)
    choices = (len(kernels), len(_WIDTHS[flow]), len(depths))
    kernel, width, depth = (index.ravel() for index in np.indices(choices))
    (m, n, ku), (k_g, k_a) = kernels[kernel].T, np.array(depths, dtype=np.int64)[depth].T
    plan = SimpleNamespace(m=m, n=n, ku=ku, k_g=k_g, k_a=k_a)
    plan.dot = np.int64(flow == "dot")
    micro = micro_width(plan, gemm, accelerator)
    plan.n_a = micro * np.array(_WIDTHS[flow])[width]
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
    least &= (plan.n_a == micro) | (plan.n_a - micro < gemm.cols)
    return take(plan, np.flatnonzero(least))


def _outer(gemm: Gemm, cores: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields rows of a block, row tiles a core, split and GSM buffers."""
    for rows in _sizes(gemm.rows, _LEAST_ROWS * cores):
        for row_tiles in _ROW_TILES:
            for split_n in (0, 1) if cores > 1 else (1,):
                share = ceil_div(rows, row_tiles * (1 if split_n else cores))
                if row_tiles == 1 or share > 1:
                    yield rows, row_tiles, split_n, 1
                    yield rows, row_tiles, split_n, 2


def take(plan: SimpleNamespace, index: Any) -> SimpleNamespace:
    """Returns some of the plans; what is equal in all of them is one number."""
    fields = vars(plan).items()
    return SimpleNamespace(**{k: v.take(index) if np.ndim(v) else v for k, v in fields})


def join(found: list[SimpleNamespace]) -> SimpleNamespace:
    """Returns the plans one after the other."""
    if len(found) == 1:
        return found[0]
    fields = {}
    for name in vars(found[0]):
        values = [getattr(plan, name) for plan in found]
        if all(np.ndim(value) == 0 and value == values[0] for value in values):
            fields[name] = values[0]
        else:
            sizes = [plan.m.size for plan in found]
            fields[name] = np.concatenate(list(map(np.broadcast_to, values, sizes)))
    return SimpleNamespace(**fields)
