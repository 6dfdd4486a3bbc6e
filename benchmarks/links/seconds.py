"""What a step's ops take on links of some rate, if nothing but bytes and computation took time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ratrain_jax.lowering.program import (
    Forward,
    GradSync,
    Lane,
    Op,
    PrefetchView,
    Program,
    Send,
)
from ratrain_jax.profiling.keys import moved_bytes


def moved(program: Program) -> dict[Op, float]:
    """Bytes that each device sends in each op, and receives as many."""
    found = {}
    away = 1 - 1 / program.settings.data_parallel
    for op in program.ops():
        if isinstance(op, Send):
            found[op] = moved_bytes(op, program)
        elif isinstance(op, (GradSync, PrefetchView)) and program.settings.data_parallel > 1:
            found[op] = moved_bytes(op, program) * away
    return found


def once(bytes_of: Mapping[Op, float]) -> float:
    """Of `moved` bytes, those of one synchronisation and one view of each layer."""
    state = {op: n for op, n in bytes_of.items() if isinstance(op, (GradSync, PrefetchView))}
    return sum({(type(op), op.layer): n for op, n in state.items()}.values())


def compute_seconds(program: Program, seconds: Callable[[Op], float]) -> float:
    """Compute seconds of the busiest stage."""
    return max(
        sum(seconds(op) for op in ops if op.lane == Lane.COMPUTE and op.stage == stage)
        for stage, ops in enumerate(program.order)
    )


def forward_seconds(program: Program, seconds: Callable[[Op], float]) -> float:
    """Seconds of the first stage's forward of a microbatch."""
    forwards = (op for op in program.order[0] if isinstance(op, Forward) and op.microbatch == 0)
    return sum(map(seconds, forwards))


def ideal_seconds(
    program: Program, seconds: Callable[[Op], float], rate: float
) -> Callable[[Op], float]:
    """What ops take where links have only a rate.

    Args:
        program: the program.
        seconds: what compute ops take.
        rate: bytes a second, each way.
    """
    bytes_of = moved(program)

    def ideal(op: Op) -> float:
        if op.lane == Lane.COMPUTE:
            return seconds(op)
        return bytes_of.get(op, 0.0) / rate

    return ideal
