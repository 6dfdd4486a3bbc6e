"""Runs a program's orders on paper: when each op may start, and what waits for what for ever.

An op starts when the op before it in its lane has ended (in every stage that takes part), when the
values that it reads or waits for exist, and, if it donates a value, when the earlier reads of that
value in the stage's list have ended. `Free` holds nothing up and has no part in the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Final

from .program import Lane, Op, Program

_NEVER: Final = -1


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """When the ops of a program run.

    Attributes:
        starts: slot in which each op of each stage's list starts; -1 for one that never does and
            for `Free`.
        cycle: places (stage, index) of ops each of which waits for the next, and the last for the
            first; empty if all ops run.
    """

    starts: tuple[tuple[int, ...], ...]
    cycle: tuple[tuple[int, int], ...]


@dataclasses.dataclass(slots=True)
class _Node:
    """An op once, however many lists it stands in."""

    op: Op
    places: list[tuple[int, int]]
    before: list[int] = dataclasses.field(default_factory=list)


def run(
    program: Program,
    slots: Callable[[Op], int],
    lane: Callable[[Op], Lane] = lambda op: op.lane,
    force: bool = False,
) -> Run:
    """Runs every op as early as the orders allow.

    Args:
        program: the program; it need not be right.
        slots: how many slots an op takes.
        lane: the lane in which it takes them; `Lane.NONE` for an op that no lane orders.
        force: whether to start ops that wait for ever all the same, first in the lists first.

    Returns:
        The slots and the first cycle found.
    """
    nodes = _nodes(program)
    _add_waits(program, nodes, lane)
    starts, stuck = _earliest(nodes, slots, force)
    table = [[_NEVER] * len(ops) for ops in program.order]
    for node, start in zip(nodes, starts, strict=True):
        for stage, index in node.places:
            table[stage][index] = start
    return Run(tuple(map(tuple, table)), _cycle(nodes, stuck) if stuck else ())


def _nodes(program: Program) -> list[_Node]:
    """One node an op; the copies of an op between stages are one."""
    nodes: list[_Node] = []
    shared: dict[tuple[Op, int], int] = {}
    for stage, ops in enumerate(program.order):
        seen: dict[Op, int] = {}
        for index, op in enumerate(ops):
            if op.lane is Lane.NONE:
                continue
            if len(op.stages) > 1:
                seen[op] = seen.get(op, 0) + 1
                number = shared.setdefault((op, seen[op]), len(nodes))
                if number < len(nodes):
                    nodes[number].places.append((stage, index))
                    continue
            nodes.append(_Node(op, [(stage, index)]))
    return nodes


def _add_waits(program: Program, nodes: list[_Node], lane: Callable[[Op], Lane]) -> None:
    at = {place: number for number, node in enumerate(nodes) for place in node.places}
    writer: dict[int, int] = {}
    for number, node in enumerate(nodes):
        for value in node.op.writes:
            writer.setdefault(value, number)
    for stage, ops in enumerate(program.order):
        last: dict[Lane, int] = {}
        readers: dict[int, list[int]] = {}
        for index, op in enumerate(ops):
            number = at.get((stage, index))
            if number is None:
                continue
            before = nodes[number].before
            kind = lane(op)
            if kind is not Lane.NONE:
                if kind in last:
                    before.append(last[kind])
                last[kind] = number
            before.extend(writer[value] for value in (*op.reads, *op.waits) if value in writer)
            for value in op.donates:
                before.extend(readers.get(value, ()))
            for value in op.reads:
                readers.setdefault(value, []).append(number)


def _earliest(
    nodes: list[_Node], slots: Callable[[Op], int], force: bool
) -> tuple[list[int], set[int]]:
    """The slot in which each node starts, and the nodes that can do so only by force."""
    after: list[list[int]] = [[] for _ in nodes]
    for number, node in enumerate(nodes):
        for earlier in node.before:
            after[earlier].append(number)
    missing = [len(node.before) for node in nodes]
    starts = [0] * len(nodes)
    pending = set(range(len(nodes)))
    stuck: set[int] = set()
    queue = [number for number in pending if not missing[number]]
    forced = _first_pending(nodes, pending)
    while pending:
        if not queue:
            stuck = stuck or set(pending)
            if not force:
                break
            queue.append(next(forced))
        number = queue.pop()
        pending.discard(number)
        end = starts[number] + slots(nodes[number].op)
        for later in after[number]:
            missing[later] -= 1
            if later in pending:
                starts[later] = max(starts[later], end)
                if not missing[later]:
                    queue.append(later)
    for number in pending:
        starts[number] = _NEVER
    return starts, stuck


def _first_pending(nodes: list[_Node], pending: set[int]) -> Iterator[int]:
    """Nodes that still wait, in the order of the lists, across the stages."""
    for number in sorted(range(len(nodes)), key=lambda n: nodes[n].places[0][::-1]):
        if number in pending:
            yield number


def _cycle(nodes: list[_Node], stuck: set[int]) -> tuple[tuple[int, int], ...]:
    """From any stuck node, back along what it waits for, until a node comes again."""
    path: dict[int, int] = {}
    number = min(stuck)
    while number not in path:
        path[number] = len(path)
        number = next(earlier for earlier in nodes[number].before if earlier in stuck)
    ring = list(path)[path[number] :]
    return tuple(nodes[number].places[0] for number in ring)
