"""Ends the life of every value right after its last reader, and cuts one order into a list a stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ratrain_jax.lowering.program import Free, Op, Value


def insert_frees(
    order: Sequence[Op],
    values: Sequence[Value],
    inputs: Iterable[int],
    outputs: Iterable[int],
    stages: int,
) -> tuple[tuple[Op, ...], ...]:
    """The list of each stage, with a `Free` after the last use of each value that is neither donated nor an output.

    Args:
        order: all ops, each after those that make what it reads.
        values: all values.
        inputs: values that exist at the start.
        outputs: values that outlive the step.
        stages: how many lists.
    """
    last: dict[int, int] = {}
    donated: set[int] = set()
    for place, op in enumerate(order):
        for value in (*op.reads, *op.waits, *op.writes):
            last[value] = place
        donated.update(op.donates)
    kept = donated | set(outputs)
    dying: dict[int, list[int]] = {}
    for value, place in last.items():
        if value not in kept:
            dying.setdefault(place, []).append(value)
    lists: list[list[Op]] = [[] for _ in range(stages)]
    for value in inputs:
        if value not in last and value not in kept:
            lists[values[value].stage].append(Free(values[value].stage, (value,)))
    for place, op in enumerate(order):
        for stage in op.stages:
            lists[stage].append(op)
        for value in sorted(dying.get(place, ())):
            home = values[value].stage
            lists[home].append(Free(home, (value,)))
    return tuple(tuple(ops) for ops in lists)
