"""Choosing the best plan of a product: exhaustive search of the space in `gemm_space`.

Plans are compared by admissible bounds (`gemm_bound`) first, coarse and then close, and costed in
full only where these do not rule them out: the answer is that of costing them all.
"""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any, Final, NoReturn

import numpy as np

from ratrain_jax.errors import MachineError
from ratrain_jax.kernels.gemm_bound import SLACK, close_bound, coarse_bound, with_sums
from ratrain_jax.kernels.gemm_cost import ddr_bytes, times
from ratrain_jax.kernels.gemm_space import (
    LEAST_DEPTH,
    candidates,
    fitting,
    flows,
    grid_of,
    join,
    micro_kernels,
    plans,
    take,
    with_shorter_strips,
)
from ratrain_jax.kernels.machine import Machine
from ratrain_jax.kernels.tiles import (
    Gemm,
    TilePlan,
    accelerator_of,
    check_plan,
    micro_width,
)

OBJECTIVES: Final = ("time", "traffic")
_TRIAL: Final = 64  # plans of a flow that are costed to get the first limit
_CHUNK: Final = 256  # plans costed at once, in the order of their bounds, at first
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
    if objective == "traffic":
        return _least_traffic(gemm, machine)
    return _fastest(gemm, machine)


def _least_traffic(gemm: Gemm, machine: Machine) -> TilePlan:
    """Returns the plan that moves the fewest bytes; ties go to the faster one."""
    plan = join([candidates(gemm, machine, flow) for flow in flows(gemm)])
    if plan.m.size == 0:
        _refuse(gemm, machine)
    moved = ddr_bytes(gemm, plan, machine)
    plan = with_shorter_strips(take(plan, np.flatnonzero(moved == moved.min())))
    return _tile_plan(take(plan, times(gemm, plan, machine).total.argmin()))


def _fastest(gemm: Gemm, machine: Machine) -> TilePlan:
    """Returns the plan that takes the least time; ties go to fewer DDR bytes, then to the earlier plan."""
    grids = [grid_of(gemm, machine, flow) for flow in flows(gemm)]
    bounds = [coarse_bound(grid, gemm, machine) for grid in grids]

    def chosen(pairs: list[Any]) -> SimpleNamespace:
        found = join([plans(*each) for each in zip(grids, pairs, strict=True)])
        return fitting(found, gemm, machine)

    plan = chosen([_sample(bound) for bound in bounds])
    limit = times(gemm, plan, machine).total.min(initial=np.inf)
    plan = chosen([np.flatnonzero(bound <= limit * SLACK) for bound in bounds])
    if plan.m.size == 0:
        _refuse(gemm, machine)
    plan = with_sums(plan, gemm, machine)
    bound = close_bound(plan, plan.m, gemm, machine)
    plan = with_shorter_strips(take(plan, np.flatnonzero(bound <= limit * SLACK)))
    bound = close_bound(plan, plan.m_s, gemm, machine)
    plan = take(plan, np.flatnonzero(bound <= limit * SLACK))
    seconds = times(gemm, plan, machine).total
    plan = take(plan, np.flatnonzero(seconds == seconds.min()))
    return _tile_plan(take(plan, ddr_bytes(gemm, plan, machine).argmin()))


def _sample(bound: Any) -> Any:
    """Returns the indices of plans that are costed to get a first limit: dense among the low bounds.

    Not the lowest alone: where one memory bounds thousands of plans alike, the lowest bounds belong
    to plans that fall short of them for one and the same reason.
    """
    ranks = np.geomspace(1, bound.size, _TRIAL).astype(int) - 1 if bound.size else slice(0)
    return np.unique(bound.argsort()[ranks])


def _tile_plan(plan: SimpleNamespace) -> TilePlan:
    fields = {name: int(getattr(plan, name)) for name in _FIELDS}
    return TilePlan(
        **fields, split="n" if plan.split_n else "m", flow="dot" if plan.dot else "outer"
    )


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
    depth = min(gemm.depth, LEAST_DEPTH)
    split, shares = ("m", accelerator.cores) if accelerator.cores > 1 else ("n", 1)
    smallest = TilePlan(m * shares, depth, m, width, depth, m, m, n, ku, split)
    try:
        check_plan(smallest, gemm, machine)
    except MachineError as error:
        raise MachineError(f"no plan fits {machine.name!r}: with small blocks, {error}") from None
    raise MachineError(f"no searched plan fits {machine.name!r}; enlarge its memories.")
