"""Checks that no stage needs more memory than its limit."""

from __future__ import annotations

from ratrain_jax.lowering.liveness import memory_series
from ratrain_jax.lowering.program import Program

from .fault import refuse


def check_limit(program: Program) -> None:
    """Refuses a program with a stage above its memory limit."""
    limits = program.settings.memory_limit
    for series in memory_series(program) if limits else ():
        limit = limits[series.stage]
        needed = max(series.total_at, default=sum(series.start.values()))
        if needed <= limit:
            continue
        index = series.total_at.index(needed) if series.total_at else None
        what = (
            f"Stage {series.stage} needs {needed:,} bytes a device, above its limit of {limit:,}."
        )
        remedy = "Recover or shard more, or raise the limit."
        refuse(program, what, remedy, None if index is None else (series.stage, index))
