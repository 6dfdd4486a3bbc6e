"""Checks that the orders of lanes and stages let every op run."""

from __future__ import annotations

from ratrain_jax.lowering.mnemonics import op_label
from ratrain_jax.lowering.program import Program
from ratrain_jax.lowering.progress import run

from .fault import refuse

_SHOWN = 6


def check_progress(program: Program) -> None:
    """Refuses a program in which ops wait for each other in a circle.

    The program must have passed `check_life`, so that each list is an order in which its own ops
    can run.
    """
    if _runs_list_by_list(program):
        return
    cycle = run(program, lambda op: 0).cycle
    if not cycle:
        return
    steps = [f"{op_label(program.order[stage][n])} (stage {stage}, op {n})" for stage, n in cycle]
    more = "" if len(steps) <= _SHOWN else f" and {len(steps) - _SHOWN} more"
    what = f"A cyclic wait: {', which waits for '.join(steps[:_SHOWN])}{more}, and so on round."
    remedy = "Bring ops between stages into one order on all their stages."
    refuse(program, what, remedy, cycle[0])


def _runs_list_by_list(program: Program) -> bool:
    """Whether all runs even if each stage does one op at a time, lanes aside.

    That is more than is asked for, but quickly seen, and true of a list cut from one order.
    """
    at = [0] * len(program.order)
    ready = set(range(len(program.order)))
    while ready:
        stage = ready.pop()
        ops = program.order[stage]
        while at[stage] < len(ops):
            op = ops[at[stage]]
            group = op.stages
            if len(group) > 1:
                if any(
                    at[other] == len(program.order[other]) or program.order[other][at[other]] != op
                    for other in group
                ):
                    break
                for other in group:
                    at[other] += other != stage
                ready.update(group)
            at[stage] += 1
    return all(index == len(ops) for index, ops in zip(at, program.order, strict=True))
