"""Merges the lists of all stages into the one order in which a process launches ops."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from ratrain_jax.lowering.program import Backward, Forward, Op, Program, Recover

_SLOTS: dict[type[Op], float] = {Forward: 1.0, Recover: 1.0, Backward: 2.0}


def launch_order(program: Program) -> list[Op]:
    """All ops once, each stage's in list order, ops of different stages by the time at which they could start.

    Raises:
        RuntimeError: the lists wait for each other; the verifier refuses such programs.
    """
    lists = program.order
    heads = [0] * len(lists)
    clocks = [0.0] * len(lists)
    born: dict[int, float] = {}
    order: list[Op] = []
    candidates: list[tuple[float, int, int]] = []

    def offer(stage: int) -> None:
        if heads[stage] < len(lists[stage]):
            op = lists[stage][heads[stage]]
            heapq.heappush(candidates, (_start(op, clocks, born), stage, heads[stage]))

    for stage in range(len(lists)):
        offer(stage)
    parked: set[int] = set()
    while candidates:
        _, stage, place = heapq.heappop(candidates)
        if place != heads[stage]:
            continue
        op = lists[stage][place]
        if not _at_all_heads(op, lists, heads):
            parked.add(stage)
            continue
        end = _start(op, clocks, born) + _SLOTS.get(type(op), 0.0)
        order.append(op)
        for value in op.writes:
            born[value] = end
        for member in op.stages:
            heads[member] += 1
            if type(op) in _SLOTS:
                clocks[member] = end
        parked -= set(op.stages)
        for member in {*op.stages, *parked}:
            offer(member)
    if any(head < len(ops) for head, ops in zip(heads, lists, strict=True)):
        raise RuntimeError("the stages' lists wait for each other")
    return order


def _start(op: Op, clocks: Sequence[float], born: dict[int, float]) -> float:
    ready = max((born.get(v, 0.0) for v in (*op.reads, *op.waits)), default=0.0)
    return max(ready, clocks[op.stage]) if type(op) in _SLOTS else ready


def _at_all_heads(op: Op, lists: Sequence[Sequence[Op]], heads: Sequence[int]) -> bool:
    def head(stage: int) -> Iterator[Op]:
        yield from lists[stage][heads[stage] : heads[stage] + 1]

    return all(any(op is other or op == other for other in head(s)) for s in op.stages)
