"""Bytes of a stage over time, read off when ops ran."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from ratrain_jax.lowering.liveness import beyond, bytes_by_kind
from ratrain_jax.lowering.program import Free, Kind, Op, Program


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class MemoryCurve:
    """Bytes on each device of a stage: a step function of time.

    A value is there from the start of the op that writes it to the end of the last op that reads it, where the program
    frees it. Lanes run side by side, while `memory_analysis` follows the list, op after op; so the peaks differ by what
    runs at once.

    Attributes:
        stage: the stage.
        times: when the bytes change, ascending, in seconds; the first is 0.
        by_kind: bytes from each of `times` on, by kind.
        limit: bytes that the stage may hold; None without a limit.
    """

    stage: int
    times: np.ndarray
    by_kind: Mapping[Kind, np.ndarray]
    limit: int | None

    @property
    def total(self) -> np.ndarray:
        """Bytes of all kinds from each of `times` on."""
        return np.sum([*self.by_kind.values(), np.zeros(len(self.times), np.int64)], axis=0)

    @property
    def peak(self) -> int:
        """The place in `times` at which the most bytes are there."""
        return int(np.argmax(self.total))

    def __repr__(self) -> str:
        return f"<MemoryCurve of stage {self.stage}: at most {int(self.total.max())} bytes>"


def memory_curves(
    program: Program, ran: Mapping[Op, tuple[float, float]], limits: Iterable[int | None]
) -> tuple[MemoryCurve, ...]:
    """Finds the bytes of each stage over time.

    Args:
        program: a verified program.
        ran: start and end of each op; frees need none.
        limits: bytes that each stage may hold.

    Returns:
        One curve a stage.
    """
    return tuple(_curve(program, stage, ran, limit) for stage, limit in enumerate(limits))


def _curve(
    program: Program, stage: int, ran: Mapping[Op, tuple[float, float]], limit: int | None
) -> MemoryCurve:
    # Whatever ends at a moment makes room before anything starts at it, hence the 0 and 1.
    changes: list[tuple[float, int, Kind, int]] = []
    for kind, size in bytes_by_kind(program, stage, program.inputs).items():
        changes.append((0.0, 0, kind, size))
    let_go: dict[int, float] = {}
    for op in program.order[stage]:
        if isinstance(op, Free):
            at = let_go.get(op.reads[0], 0.0)
            ended = bytes_by_kind(program, stage, op.reads)
            changes += [(at, 0, kind, -size) for kind, size in ended.items()]
            continue
        start, end = ran[op]
        for value in (*op.reads, *op.writes):
            let_go[value] = max(end, let_go.get(value, 0.0))
        written = bytes_by_kind(program, stage, op.writes)
        donated = bytes_by_kind(program, stage, op.donates)
        extra = beyond(written, donated) if donated else written
        changes += [(start, 1, kind, size) for kind, size in extra.items()]
        for kind in {*written, *donated}:
            later = written.get(kind, 0) - extra.get(kind, 0) - donated.get(kind, 0)
            changes.append((end, 0, kind, later))
    return _summed(stage, changes, limit)


def _summed(
    stage: int, changes: list[tuple[float, int, Kind, int]], limit: int | None
) -> MemoryCurve:
    changes = sorted((c for c in changes if c[3]), key=lambda change: change[:2])
    moments = np.array([at for at, *_ in changes], float)
    last = np.append(moments[1:] != moments[:-1], True) if len(moments) else np.zeros(0, bool)
    by_kind = {}
    for kind in (k for k in Kind if any(k == change[2] for change in changes)):
        steps = np.array([size if k == kind else 0 for _, _, k, size in changes], np.int64)
        by_kind[kind] = np.cumsum(steps)[last]
    times = moments[last]
    if not len(times) or times[0] > 0:
        times = np.append(0.0, times)
        by_kind = {kind: np.append(0, sizes) for kind, sizes in by_kind.items()}
    return MemoryCurve(stage, times, by_kind, limit)
