"""Checks that the orders of lanes and stages let every op run."""

from __future__ import annotations

from ratrain_jax.lowering.mnemonics import op_label
from ratrain_jax.lowering.program import Program
from ratrain_jax.lowering.progress import run

from .fault import refuse

_SHOWN = 6


def check_progress(program: Program) -> None:
    """Refuses a program in which ops wait for each other in a circle."""
    cycle = run(program, lambda op: 0).cycle
    if not cycle:
        return
    steps = [f"{op_label(program.order[stage][n])} (stage {stage}, op {n})" for stage, n in cycle]
    more = "" if len(steps) <= _SHOWN else f" and {len(steps) - _SHOWN} more"
    what = f"A cyclic wait: {', which waits for '.join(steps[:_SHOWN])}{more}, and so on round."
    remedy = "Bring ops between stages into one order on all their stages."
    refuse(program, what, remedy, cycle[0])
