"""What each process saw of a measured step, and what all have seen together."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from ratrain_jax.lowering.program import Op, Program
from ratrain_jax.runtime.merge import launch_order
from ratrain_jax.runtime.processes import exchange_text, several
from ratrain_jax.runtime.turns import in_turn

Place = tuple[int, int]
"""A stage and a rank."""


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One launch: the op, the thread that launched it and when, and when each device had made what it writes."""

    op: Op
    thread: int
    launched: float
    ends: dict[Place, float]


def joined_records(program: Program, records: Sequence[Record]) -> Sequence[Record]:
    """The records of all processes, one an op, in launch order; in a run of one process those that it has.

    An op between processes cannot start before all of them have launched it.

    Args:
        program: what ran.
        records: of this process.
    """
    if not several():
        return records
    order = launch_order(program)
    numbers = {id(op): number for number, op in enumerate(order)}
    told = [_told(numbers[id(record.op)], record) for record in records]
    joined: dict[int, Record] = {}
    for text in in_turn(lambda: exchange_text(json.dumps(told))):
        for number, thread, launched, ends in json.loads(text):
            known = joined.get(number)
            latest = launched if known is None else max(known.launched, launched)
            seen = {} if known is None else known.ends
            seen.update({(stage, rank): end for stage, rank, end in ends})
            joined[number] = Record(order[number], thread, latest, seen)
    return [joined[number] for number in sorted(joined)]


def _told(number: int, record: Record) -> list[Any]:
    ends = [[stage, rank, end] for (stage, rank), end in record.ends.items()]
    return [number, record.thread, record.launched, ends]
