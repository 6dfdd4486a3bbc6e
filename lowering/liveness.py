"""Which bytes are live on each device while a program runs.

A value lives on its home stage from the op that writes it (or from the start, if it is an input) to
its `Free` or to the op that donates it. Memory follows each stage's list in order:

    at an op     everything live before it, and what it writes beyond the bytes it was donated
    after an op  what is live then

A donated buffer counts until the op ends; what the op writes takes over its bytes first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from .program import Free, Kind, Program


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class StageSeries:
    """Bytes live on each device of one stage, op by op.

    Attributes:
        stage: the stage.
        start: bytes of the inputs, by kind.
        at: bytes at each op of the stage's list, by kind.
        after: bytes after each op, by kind.
        total_at: bytes at each op, of all kinds.
        total_after: bytes after each op, of all kinds.
    """

    stage: int
    start: Mapping[Kind, int]
    at: Mapping[Kind, tuple[int, ...]]
    after: Mapping[Kind, tuple[int, ...]]
    total_at: tuple[int, ...]
    total_after: tuple[int, ...]

    def __repr__(self) -> str:
        return f"<StageSeries of stage {self.stage}: {len(self.total_at)} ops>"


def memory_series(program: Program) -> tuple[StageSeries, ...]:
    """Counts live bytes along each stage's list.

    Args:
        program: a verified program.

    Returns:
        One series a stage; only kinds that the stage has appear.
    """
    kinds: list[set[Kind]] = [set() for _ in program.order]
    starts: list[dict[Kind, int]] = [{} for _ in program.order]
    for value in program.values:
        kinds[value.stage].add(value.kind)
    for number in program.inputs:
        value = program.values[number]
        start = starts[value.stage]
        start[value.kind] = start.get(value.kind, 0) + value.bytes
    return tuple(
        _series(program, stage, [kind for kind in Kind if kind in kinds[stage]], starts[stage])
        for stage in range(len(program.order))
    )


def _series(
    program: Program, stage: int, kinds: list[Kind], start: Mapping[Kind, int]
) -> StageSeries:
    live = {**dict.fromkeys(kinds, 0), **start}
    at: dict[Kind, list[int]] = {kind: [] for kind in kinds}
    after: dict[Kind, list[int]] = {kind: [] for kind in kinds}
    for op in program.order[stage]:
        written = bytes_by_kind(program, stage, op.writes)
        donated = bytes_by_kind(program, stage, op.donates)
        extra = beyond(written, donated) if donated else written
        ended = bytes_by_kind(program, stage, op.reads) if isinstance(op, Free) else donated
        for kind in kinds:
            at[kind].append(live[kind] + extra.get(kind, 0))
            live[kind] += written.get(kind, 0) - ended.get(kind, 0)
            after[kind].append(live[kind])
    none = ((0,) * len(program.order[stage]),)
    total_at, total_after = (
        tuple(map(sum, zip(*(table.values() or none), strict=True))) for table in (at, after)
    )
    return StageSeries(stage, start, _frozen(at), _frozen(after), total_at, total_after)


def bytes_by_kind(program: Program, stage: int, values: Iterable[int]) -> dict[Kind, int]:
    """Bytes of those of some values whose home is a stage."""
    count: dict[Kind, int] = {}
    for number in values:
        value = program.values[number]
        if value.stage == stage:
            count[value.kind] = count.get(value.kind, 0) + value.bytes
    return count


def beyond(written: Mapping[Kind, int], donated: Mapping[Kind, int]) -> dict[Kind, int]:
    """Bytes written that no donated buffer holds: first those of the same kind are taken over."""
    extra = {kind: max(0, size - donated.get(kind, 0)) for kind, size in written.items()}
    spare = sum(donated.values()) - sum(
        min(size, donated.get(kind, 0)) for kind, size in written.items()
    )
    for kind, size in extra.items():
        taken = min(size, spare)
        extra[kind] -= taken
        spare -= taken
    return extra


def _frozen(table: Mapping[Kind, list[int]]) -> dict[Kind, tuple[int, ...]]:
    return {kind: tuple(sizes) for kind, sizes in table.items()}
