"""What a program needs in memory: peak bytes of each stage by kind, and the op at the peak."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from ratrain_jax.errors import OptionError

from .liveness import StageSeries, memory_series
from .mnemonics import op_label
from .program import Kind, Op, Program
from .resident import formulas
from .text import readable_bytes

_STAGES_A_TABLE: Final = 5


@dataclasses.dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on each device of one stage.

    Attributes:
        peak: the most bytes of values live at once.
        by_kind: bytes of each kind at the peak.
        index: place of the op at the peak in the stage's list; None if there are no ops.
        op: that op.
        series: bytes op by op.
        temporaries: the most scratch bytes of one op's compiled program; None if not given.
        peak_with_temporaries: the most bytes of live values and scratch at once; None if not given.
    """

    peak: int
    by_kind: Mapping[Kind, int]
    index: int | None
    op: Op | None
    series: StageSeries = dataclasses.field(repr=False)
    temporaries: int | None = None
    peak_with_temporaries: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class MemoryAnalysis:
    """The memory that a program needs; its `str` is a table.

    Attributes:
        stages: one report a stage.
        program: whose.
    """

    stages: tuple[StageMemory, ...]
    program: Program = dataclasses.field(repr=False)

    @property
    def peaks(self) -> tuple[int, ...]:
        """Peak bytes of values on each device, one number a stage."""
        return tuple(stage.peak for stage in self.stages)

    @property
    def by_kind(self) -> tuple[Mapping[Kind, int], ...]:
        """Bytes of each kind at the peak, one table a stage."""
        return tuple(stage.by_kind for stage in self.stages)

    def explain(self, stage: int | None = None) -> str:
        """The formula of each figure at a stage's peak: what is resident, how often, and how many bytes each.

        Args:
            stage: the stage; the fullest unless given.

        Raises:
            OptionError: there is no such stage.
        """
        fullest = max(range(len(self.stages)), key=self.peaks.__getitem__)
        number = fullest if stage is None else stage
        if not 0 <= number < len(self.stages):
            raise OptionError(
                f"there is no stage {number}; choose one of 0 to {len(self.stages) - 1}."
            )
        found = self.stages[number]
        if found.index is None or found.op is None:
            return f"stage {number} has no ops and holds {readable_bytes(found.peak)}"
        head = f"stage {number} holds {readable_bytes(found.peak)} a device at op {found.index}: {op_label(found.op)}"
        return "\n".join((head, *formulas(self.program, number, found.index)))

    def __str__(self) -> str:
        numbered = list(enumerate(self.stages))
        bands = (
            numbered[start : start + _STAGES_A_TABLE]
            for start in range(0, len(numbered), _STAGES_A_TABLE)
        )
        return "\n\n".join("\n".join(_table(band)) for band in bands)

    def __repr__(self) -> str:
        most = readable_bytes(max(self.peaks, default=0))
        return f"<MemoryAnalysis of {len(self.stages)} stages: at most {most} a device>"


def memory_analysis(
    program: Program, temporaries: Mapping[Op, int] | None = None
) -> MemoryAnalysis:
    """Finds the peak of each stage.

    Args:
        program: a verified program.
        temporaries: scratch bytes of each op's compiled program; ops that it lacks have none.

    Returns:
        The analysis.
    """
    return MemoryAnalysis(
        tuple(
            _stage_memory(series, program.order[series.stage], temporaries)
            for series in memory_series(program)
        ),
        program,
    )


def _stage_memory(
    series: StageSeries, ops: Sequence[Op], temporaries: Mapping[Op, int] | None
) -> StageMemory:
    if not ops:
        return StageMemory(sum(series.start.values()), series.start, None, None, series)
    index = max(range(len(ops)), key=series.total_at.__getitem__)
    by_kind = {kind: sizes[index] for kind, sizes in series.at.items() if sizes[index]}
    scratch = most = None
    if temporaries is not None:
        each = [temporaries.get(op, 0) for op in ops]
        scratch = max(each)
        most = max(map(sum, zip(each, series.total_at, strict=True)))
    return StageMemory(series.total_at[index], by_kind, index, ops[index], series, scratch, most)


def _table(stages: Sequence[tuple[int, StageMemory]]) -> Iterator[str]:
    yield _row("bytes a device", (f"stage {number}" for number, _ in stages))
    for kind in Kind:
        sizes = [stage.by_kind.get(kind, 0) for _, stage in stages]
        if any(sizes):
            yield _row(kind.value, map(readable_bytes, sizes))
    yield _row("peak", (readable_bytes(stage.peak) for _, stage in stages))
    for name in ("temporaries", "peak_with_temporaries"):
        sizes = [getattr(stage, name) for _, stage in stages]
        if any(size is not None for size in sizes):
            yield _row(_TITLES[name], (readable_bytes(size or 0) for size in sizes))
    for number, stage in stages:
        if stage.op is not None:
            yield f"stage {number} peaks at op {stage.index}: {op_label(stage.op)}"


_TITLES: Final = {"temporaries": "scratch, apart", "peak_with_temporaries": "peak with it"}


def _row(title: str, cells: Iterable[str]) -> str:
    return f"{title:<14}" + "".join(f" {cell:>12}" for cell in cells)
