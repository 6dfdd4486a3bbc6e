"""What notebooks show of a lowered step, a timeline and a plan; `ratrain_jax.lowering.markup` shows a program."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Final

from ratrain_jax.lowering.markup import paragraph, preformatted, table
from ratrain_jax.lowering.memory import MemoryAnalysis
from ratrain_jax.lowering.mnemonics import op_label
from ratrain_jax.lowering.program import Kind, Program
from ratrain_jax.lowering.text import readable_bytes
from ratrain_jax.planning.tables import verdict
from ratrain_jax.words import counted

if TYPE_CHECKING:
    from ratrain_jax.lowered import Lowered
    from ratrain_jax.planning.plan import Plan
    from ratrain_jax.simulation.timeline import Timeline

_DOTS_AN_INCH: Final = 80


def lowered_html(lowered: Lowered) -> str:
    """A lowered step: what it is, its layers, its memory, and what is not on shards."""
    program = lowered.program
    s = program.settings
    told = (
        f"{len(program.layers)} layers in {counted(s.stages, 'stage')} × {s.data_parallel},"
        f" {counted(s.microbatches, 'microbatch')}, {s.schedule}, zero={s.zero}, recovery={s.recovery}"
    )
    parts = [paragraph("Lowered step", told), _layers(program), _memory(lowered.memory_analysis())]
    stacked = lowered.stacked_state() if lowered.options.state_layout == "stacked" else None
    notes = (lowered.unsharded(), stacked)
    parts += [preformatted(str(note)) for note in notes if note is not None]
    return "".join(parts)


def _layers(program: Program) -> str:
    names = ("stage", "layer", "arrays", "MFLOP", "share", "activations")
    total = sum(layer.seconds for layer in program.layers) or 1.0
    rows = (
        (
            str(layer.stage),
            layer.name,
            str(len(layer.parameters)),
            f"{layer.flops / 1e6:,.1f}",
            f"{layer.seconds / total:.1%}",
            "recovered" if layer.recovered else "saved",
        )
        for layer in program.layers
    )
    return table(names, rows, left=("layer", "activations"))


def _memory(analysis: MemoryAnalysis) -> str:
    """Bytes of each stage at its peak; a stage is a row, for there may be many."""
    kinds = [kind for kind in Kind if any(stage.by_kind.get(kind) for stage in analysis.stages)]
    rows = (
        (
            str(number),
            *(readable_bytes(stage.by_kind.get(kind, 0)) for kind in kinds),
            readable_bytes(stage.peak),
            "" if stage.op is None else op_label(stage.op),
        )
        for number, stage in enumerate(analysis.stages)
    )
    return table(("stage", *kinds, "peak", "at"), rows, left=("at",))


def timeline_html(timeline: Timeline) -> str:
    """A simulated step: where its time goes, and a picture of it."""
    line = timeline.breakdown
    terms = {
        "ideal": line.ideal,
        "bubble": line.bubble,
        "exposed communication": line.exposed,
        "recovery": line.recovery,
        "tail": line.tail,
        "step": line.step,
    }
    rows = (
        (name, f"{1e3 * seconds:.4g}", f"{seconds / line.step:.1%}" if line.step else "")
        for name, seconds in terms.items()
    )
    told = (
        f"{line.step:.4g} s, paced by stage {line.stage} of {len(timeline.program.order)},"
        f" on {timeline.machine.name}"
    )
    where = table(("where the time goes", "ms", "share"), rows, left=("where the time goes",))
    return paragraph("Simulated step", told) + where + _picture(timeline)


def _picture(timeline: Timeline) -> str:
    target = io.BytesIO()
    # White behind it, so that its black text is read in a dark notebook too.
    timeline.plot().savefig(target, format="png", dpi=_DOTS_AN_INCH, facecolor="white")
    data = base64.b64encode(target.getvalue()).decode("ascii")
    title = escape(timeline.chart.title)
    return f'<img alt="{title}" style="max-width:100%" src="data:image/png;base64,{data}">'


def plan_html(plan: Plan) -> str:
    """A plan: the choice, its stages, why not the others, and what is assumed."""
    c = plan.configuration
    told = (
        f"{c} on {c.devices} × {plan.machine}: predicted step {plan.step_seconds:.4g} s,"
        f" of it the tail {plan.tail_seconds:.3g} s; best of {plan.searched} configurations;"
        f" {readable_bytes(plan.limit)} a device allowed"
    )
    parts = [paragraph("Plan", told)]
    if not c.runs:
        parts.append(paragraph("Only simulated:", "the runtime does not run it."))
    names = ("stage", "from layer", "layers", "recovered", "ms", "memory", "most of it", "bytes")
    parts.append(table(names, _stages(plan), left=("from layer", "most of it")))
    reasons = [(entry.kind, verdict(entry), entry.term) for entry in plan.why_not]
    if reasons:
        names = ("why not", "best of the kind", "because of")
        parts.append(table(names, reasons, left=("why not", "because of")))
    if plan.assumed:
        parts.append(paragraph("Assumed of the machine:", ", ".join(plan.assumed)))
    return "".join(parts)


def _stages(plan: Plan) -> Iterator[tuple[str, ...]]:
    for number, stage in enumerate(plan.stages):
        largest = stage.memory.largest
        yield (
            str(number),
            stage.first,
            str(stage.layers),
            str(stage.recovered),
            f"{1e3 * stage.seconds:.4g}",
            readable_bytes(stage.memory.total),
            largest,
            readable_bytes(getattr(stage.memory, largest)),
        )
