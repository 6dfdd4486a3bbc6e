"""A plan to read: the choice, its stages, and why not the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from ratrain_jax.errors import OptionError
from ratrain_jax.lowering.text import readable_bytes
from ratrain_jax.planning.stage_costs import TERMS
from ratrain_jax.tables import WIDTH, render, wrapped
from ratrain_jax.words import counted

if TYPE_CHECKING:
    from ratrain_jax.planning.plan import Plan, PlannedStage
    from ratrain_jax.planning.why_not import WhyNot

_MOST_STAGES = 12  # more are told by their extremes


def plan_text(plan: Plan) -> str:
    """The whole of it, in 80 columns."""
    c = plan.configuration
    marked = "" if c.runs else "  (only simulated: the runtime does not run it)"
    tensor = f" × {c.tensor} tensor parallel" if c.tensor > 1 else ""
    idle = f" ({plan.idle} more stay idle)" if plan.idle else ""
    head = [
        f"{c.devices} × {plan.machine}{idle}, {counted(plan.global_batch, 'example')} a step{marked}",
        f"  {counted(c.stages, 'stage')} × {c.data_parallel} data parallel{tensor}",
        f"  {counted(c.microbatches, 'microbatch')} of {counted(c.rows, 'example')} a rank",
        f"  schedule={c.schedule}, zero={c.zero}, recovery={c.recovery}",
        f"  predicted step {plan.step_seconds:.4g} s, of it the tail {plan.tail_seconds:.3g} s",
        f"  best of {plan.searched} configurations; {readable_bytes(plan.limit)} a device allowed",
    ]
    parts = ["\n".join(head), _stages(plan), _why_not(plan.why_not)]
    if plan.assumed:
        parts.append("\n".join(wrapped("assumed of the machine: ", plan.assumed)))
    return "\n\n".join(part for part in parts if part)


def _stages(plan: Plan) -> str:
    shown = _shown(plan.stages)
    names = ("stage", "from layer", "layers", "again", "ms", "memory", "most of it")
    cells = [_cells(number, stage, terms=2) for number, stage in shown]
    if sum(max(map(len, column)) + 1 for column in zip(names, *cells, strict=True)) > WIDTH:
        # A number that is cut would say something else.
        cells = [_cells(number, stage, terms=1) for number, stage in shown]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for name, column in zip(names, zip(*cells, strict=True), strict=True):
        words = name in ("from layer", "most of it")
        table.add_column(
            name,
            justify="left" if words else "right",
            no_wrap=True,
            overflow="ellipsis",
            # Numbers are shown whole; words give way.
            min_width=None if words else max(map(len, (name, *column))),
        )
    for row in cells:
        table.add_row(*row)
    left_out = len(plan.stages) - len(shown)
    note = f"\n({left_out} stages between them left out)" if left_out else ""
    return render(table) + note


def _cells(number: int, stage: PlannedStage, terms: int) -> tuple[str, ...]:
    return (
        str(number),
        stage.first,
        str(stage.layers),
        str(stage.recovered or ""),
        f"{1e3 * stage.seconds:.4g}",
        readable_bytes(stage.memory.total),
        _largest(stage, terms),
    )


def _shown(stages: tuple[PlannedStage, ...]) -> list[tuple[int, PlannedStage]]:
    """All stages, or the first, the last, the slowest and the fullest."""
    numbered = list(enumerate(stages))
    if len(stages) <= _MOST_STAGES:
        return numbered
    fullest = max(numbered, key=lambda item: item[1].memory.total)
    slowest = max(numbered, key=lambda item: item[1].seconds)
    chosen = {0, 1, len(stages) - 1, fullest[0], slowest[0]}
    return [item for item in numbered if item[0] in chosen]


def _largest(stage: PlannedStage, terms: int) -> str:
    """The largest terms of a stage's memory."""
    largest = sorted(TERMS, key=lambda term: -getattr(stage.memory, term))[:terms]
    return ", ".join(f"{term} {readable_bytes(getattr(stage.memory, term))}" for term in largest)


def memory_text(plan: Plan, stage: int | None) -> str:
    """The terms of a stage's memory, each with its parts; of the fullest stage unless one is given."""
    totals = [planned.memory.total for planned in plan.stages]
    number = max(range(len(totals)), key=totals.__getitem__) if stage is None else stage
    if not 0 <= number < len(totals):
        raise OptionError(f"the plan has no stage {number}; choose one of 0 to {len(totals) - 1}.")
    planned = plan.stages[number]
    lines = [f"stage {number} needs {readable_bytes(totals[number])} a device"]
    for term in TERMS:
        parts = [part for part in planned.parts if part.term == term]
        if parts:
            lines.append(f"{term} {readable_bytes(getattr(planned.memory, term))}")
        for place, part in enumerate(parts):
            sign = "-" if part.bytes < 0 else "+" if place else "="
            times = f"{part.times} × " if part.times > 1 else ""
            line = f"    {sign} {times}{readable_bytes(abs(part.bytes))} {part.what}"
            lines.append(line if len(line) <= 80 else line[:79] + "…")
    return "\n".join(lines)


def _why_not(entries: tuple[WhyNot, ...]) -> str:
    if not entries:
        return ""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("why not", no_wrap=True)
    table.add_column("best of the kind", justify="right", no_wrap=True)
    table.add_column("because of", overflow="ellipsis", no_wrap=True)
    for entry in entries:
        table.add_row(entry.kind, verdict(entry), entry.term)
    return render(table)


def verdict(entry: WhyNot) -> str:
    """How the best of a kind stands beside the plan taken, in few words."""
    if entry.short:
        return f"{readable_bytes(entry.short)} too much"
    if entry.slower is None:
        return f"{entry.seconds:.4g} s"
    return "as fast" if f"{entry.slower:.4f}" == "1.0000" else f"{entry.slower - 1:+.2%} time"
