"""What one repetition of a profile gives, and how those of several processes become one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from ratrain_jax.profiling.keys import Key
from ratrain_jax.runtime.processes import exchange_text, several
from ratrain_jax.runtime.serial import Taken


@dataclasses.dataclass(frozen=True, slots=True)
class Repetition:
    """What one repetition gave.

    Attributes:
        ops: what every op took, by key.
        overhead: seconds to launch a program that does nothing, and to wait for it.
        moves: what transfers and collectives took, by kind and bytes.
        slowdowns: by busy devices.
        others: cores that other processes than those of this run used meanwhile.
    """

    ops: dict[Key, list[Taken]]
    overhead: tuple[float, float]
    moves: dict[tuple[str, int], Taken]
    slowdowns: dict[int, float]
    others: float | None


def joined(found: Sequence[Repetition]) -> list[Repetition]:
    """Repetitions as all processes of a run have seen them; in a run of one process as they are.

    Ops and moves come from the processes that have what they make; everything else is that of process 0.

    Args:
        found: those of this process.
    """
    if not several():
        return list(found)
    every = [json.loads(text) for text in exchange_text(json.dumps(list(map(_table, found))))]
    return [_joined([rows[n] for rows in every]) for n in range(len(found))]


def _table(repetition: Repetition) -> dict[str, Any]:
    return {
        "ops": [
            [*dataclasses.astuple(key), [dataclasses.astuple(taken) for taken in samples]]
            for key, samples in repetition.ops.items()
        ],
        "overhead": repetition.overhead,
        "moves": [[*what, dataclasses.astuple(taken)] for what, taken in repetition.moves.items()],
        "slowdowns": list(repetition.slowdowns.items()),
        "others": repetition.others,
    }


def _joined(tables: Sequence[dict[str, Any]]) -> Repetition:
    ops: dict[Key, list[Taken]] = {}
    moves: dict[tuple[str, int], Taken] = {}
    for table in tables:
        for *key, samples in table["ops"]:
            ops.setdefault(Key(*key), []).extend(Taken(*numbers) for numbers in samples)
        for kind, count, numbers in table["moves"]:
            found = Taken(*numbers), moves.get((kind, count), Taken())
            moves[kind, count] = max(found, key=lambda taken: taken.total)
    first = tables[0]
    return Repetition(
        ops,
        (first["overhead"][0], first["overhead"][1]),
        moves,
        dict(first["slowdowns"]),
        first["others"],
    )
