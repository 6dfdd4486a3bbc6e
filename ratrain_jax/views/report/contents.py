"""What a report tells in words and tables, as the page's template reads it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from ratrain_jax.kernels import Machine
from ratrain_jax.lowering.mnemonics import op_label
from ratrain_jax.lowering.program import Kind, Program
from ratrain_jax.lowering.text import readable_bytes
from ratrain_jax.views.chart import KINDS
from ratrain_jax.views.comparison import Comparison
from ratrain_jax.views.memory_curve import MemoryCurve
from ratrain_jax.views.palette import COLOURS
from ratrain_jax.views.report.bars import layers_of, name_of

if TYPE_CHECKING:
    from ratrain_jax.planning.plan import Plan
    from ratrain_jax.simulation.timeline import Timeline

MOST_ROWS: Final = 2000
"""Ops of a critical path that are listed; a longer one is listed up to there."""


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """A table of a page.

    Attributes:
        heads: names of the columns; one that begins with `<` is of words, others are of numbers.
        rows: its cells.
    """

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def columns(self) -> list[tuple[str, str]]:
        """Each column's name and class."""
        return [(head.lstrip("<"), "words" if head[:1] == "<" else "") for head in self.heads]


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
    """One term of the step's line.

    Attributes:
        name: its name.
        text: its seconds.
        share: of the step, in per cent.
        colour: its colour in the bar.
    """

    name: str
    text: str
    share: float
    colour: str


def duration(seconds: float) -> str:
    """Seconds to read.

    Example:
        >>> duration(0.0123456), duration(0)
        ('12.35 ms', '0 s')
    """
    if seconds == 0:
        return "0 s"
    scale, unit = (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    return f"{seconds * scale:.4g} {unit}"


def percent(part: float, whole: float) -> str:
    """A share to read; nothing of nothing is no share."""
    return f"{part / whole:.1%}" if whole else "–"


def terms(timeline: Timeline) -> list[Term]:
    """The terms of the step's line, in order."""
    line = timeline.breakdown
    named = {
        "ideal compute": (line.ideal, COLOURS["backward"]),
        "bubble": (line.bubble, COLOURS["other"]),
        "exposed communication": (line.exposed, COLOURS["sync"]),
        "recovery": (line.recovery, COLOURS["recovery"]),
        "tail": (line.tail, COLOURS["update"]),
    }
    return [
        Term(name, duration(seconds), 100 * seconds / line.step if line.step else 0.0, colour)
        for name, (seconds, colour) in named.items()
    ]


def figures(timeline: Timeline) -> list[tuple[str, str, str]]:
    """The key figures: name, value, and what it means."""
    stages = len(timeline.program.order)
    curve = max(timeline.chart.memory, key=lambda c: c.total[c.peak])
    exposed = max(timeline.communication)
    on, off = timeline.recovery
    found = [
        ("step", duration(timeline.step_seconds), "from step to step"),
        ("bubble rate", f"{timeline.bubble_rate:.1%}", "of the step, the pacing stage waits"),
        ("pacing stage", str(timeline.breakdown.stage), f"of {stages}; it keeps the next step waiting longest"),
        ("tail", duration(max(timeline.tails)), "the longest, to the next step's first forward"),
        ("exposed", duration(exposed[0]), "communication of the stage that has most of it"),
        ("memory", readable_bytes(int(curve.total[curve.peak])), f"the most, on stage {curve.stage}"),
    ]  # fmt: skip
    if on or off:
        text = f"of all stages, on the critical path; {duration(off)} off it"
        found.append(("recovery", duration(on), text))
    return found


def stage_table(timeline: Timeline) -> Table:
    """What each stage does with its step."""
    program, ports = timeline.program, {}
    for use in timeline.ports:
        ports[use.stage, use.port] = use
    rows = []
    for stage, (exposed, hidden) in enumerate(timeline.communication):
        layers = [layer for layer in program.layers if layer.stage == stage]
        busy = [ports.get((stage, port)) for port in ("compute", "send", "receive")]
        shares = [percent(use.busy, use.busy + use.idle) if use else "–" for use in busy]
        again = sum(layer.recovered for layer in layers)
        rows.append(
            (
                str(stage),
                layers[0].name if layers else "–",
                str(len(layers)),
                str(again or "–"),
                *shares,
                duration(exposed),
                duration(hidden),
                duration(timeline.tails[stage]),
            )
        )
    heads = ("stage", "<from layer", "layers", "recovered", "compute busy", "sends", "receives",
             "exposed", "hidden", "tail")  # fmt: skip
    return Table(heads, tuple(rows))


def memory_table(curves: Sequence[MemoryCurve]) -> Table:
    """The peak of each stage."""
    rows = []
    for curve in curves:
        peak = int(curve.total[curve.peak])
        sizes = {kind: int(size[curve.peak]) for kind, size in curve.by_kind.items()}
        largest = sorted(sizes, key=lambda kind: -sizes[kind])[:3]
        told = ", ".join(f"{k} {readable_bytes(sizes[k])}" for k in largest if sizes[k])
        limit = "–" if curve.limit is None else readable_bytes(curve.limit)
        share = "–" if curve.limit is None else percent(peak, curve.limit)
        when = duration(float(curve.times[curve.peak]))
        rows.append((str(curve.stage), readable_bytes(peak), limit, share, when, told))
    return Table(("stage", "peak", "limit", "of the limit", "at", "<most of it"), tuple(rows))


def path_kinds(timeline: Timeline) -> Table:
    """The critical path by kind of op."""
    took: dict[str, list[float]] = {}
    for event in timeline.critical_path:
        took.setdefault(KINDS[type(event.op)], []).append(event.end - event.start)
    whole = sum(map(sum, took.values()))
    rows = [
        (kind, str(len(some)), duration(sum(some)), percent(sum(some), whole))
        for kind, some in sorted(took.items(), key=lambda item: -sum(item[1]))
    ]
    rows.append(("all", str(len(timeline.critical_path)), duration(whole), percent(whole, whole)))
    return Table(("<kind", "ops", "take", "share"), tuple(rows))


def path_ops(timeline: Timeline) -> Table:
    """The ops of the critical path, in order."""
    rows = tuple(
        (
            f"{event.start:.6f}",
            duration(event.end - event.start),
            str(event.op.stage),
            op_label(event.op),
            name_of(event.op),
            layers_of(timeline.program, event.op),
        )
        for event in timeline.critical_path[:MOST_ROWS]
    )
    return Table(("start, s", "takes", "stage", "<op", "<what", "<layers"), rows)


def layer_table(program: Program) -> Table:
    """The layers of a program, with the bytes that each device holds of them."""
    sizes: dict[tuple[int, Kind], int] = {}
    for number in program.inputs:
        value = program.values[number]
        if value.layer is not None:
            key = value.layer, value.kind
            sizes[key] = sizes.get(key, 0) + value.bytes
    whole = sum(layer.seconds for layer in program.layers)
    rows = [
        (
            layer.name,
            str(layer.stage),
            str(layer.block),
            readable_bytes(sizes.get((n, Kind.PARAMETERS), 0)),
            readable_bytes(sizes.get((n, Kind.OPTIMIZER), 0)),
            f"{layer.flops / 1e9:,.4g}",
            percent(layer.seconds, whole),
            "recovered" if layer.recovered else "kept",
        )
        for n, layer in enumerate(program.layers)
    ]
    heads = ("<layer", "stage", "block", "parameters", "optimizer", "forward GFLOP", "of the time",
             "<residuals")  # fmt: skip
    return Table(heads, tuple(rows))


def settings_table(program: Program) -> Table:
    """The choices that the program was made with."""
    rows = []
    for field in dataclasses.fields(program.settings):
        value = getattr(program.settings, field.name)
        if field.name == "memory_limit":
            value = ", ".join(map(readable_bytes, dict.fromkeys(value))) or "none"
        rows.append((field.name, str(value)))
    return Table(("<setting", "<value"), tuple(rows))


def assumed_table(machine: Machine) -> Table:
    """What of the machine has no source, with its value."""
    rows = tuple((key, _shown(value_of(machine, key))) for key in machine.assumed)
    return Table(("<key", "<value"), rows)


def value_of(machine: Machine, key: str) -> Any:
    """What stands under a dotted key of a machine.

    Example:
        >>> from ratrain_jax.kernels import load_machine
        >>> value_of(load_machine("mt3000"), "accelerator.latencies.fma") > 0
        True
    """
    return functools.reduce(_step, key.split("."), machine)


def _step(found: Any, name: str) -> Any:
    if isinstance(found, tuple):  # memories and links by name, peak rates as pairs
        pairs = {item[0]: item[1] for item in found if isinstance(item, tuple)}
        named = {getattr(item, "name", None): item for item in found}
        return pairs.get(name, named.get(name))
    return getattr(found, name, None)


def _shown(value: Any) -> str:
    """A value of a machine in few words."""
    if dataclasses.is_dataclass(value):
        fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return " ".join(
            _shown(v) if k in ("name", "lanes") else f"{k}={_shown(v)}" for k, v in fields
        )
    if isinstance(value, tuple):
        if len(value) == 2 and isinstance(value[0], str) and not isinstance(value[1], str):
            return f"{value[0]} {_shown(value[1])}"
        dense = all(isinstance(item, str | float | int) for item in value)
        return (", " if dense else "; ").join(map(_shown, value))
    return f"{value:.6g}" if isinstance(value, float) else "–" if value is None else str(value)


def plan_tables(plan: Plan) -> dict[str, Table]:
    """A plan's stages and what was not taken."""
    from ratrain_jax.planning.tables import verdict

    stages = [
        (
            str(n),
            stage.first,
            str(stage.layers),
            str(stage.recovered or "–"),
            duration(stage.seconds),
            readable_bytes(stage.memory.total),
        )
        for n, stage in enumerate(plan.stages)
    ]
    why_not = [
        (entry.kind, verdict(entry), entry.term or "–", _differences(entry.configuration, plan))
        for entry in plan.why_not
    ]
    heads = ("stage", "<from layer", "layers", "recovered", "a microbatch takes", "memory")
    return {
        "stages": Table(heads, tuple(stages)),
        "why_not": Table(
            ("<why not", "best of the kind", "<because of", "<which is"), tuple(why_not)
        ),
    }


def _differences(other: Any, plan: Plan) -> str:
    """In what a configuration differs from the plan's."""
    mine = plan.configuration
    names = [field.name for field in dataclasses.fields(mine)]
    return ", ".join(
        f"{n}={getattr(other, n)}" for n in names if getattr(other, n) != getattr(mine, n)
    )


def comparison_table(comparison: Comparison) -> Table:
    """Predicted seconds beside measured ones, by kind of op."""
    rows = [
        (row.kind, str(row.count), *_compared(row.predicted, row.measured))
        for row in comparison.rows
    ]
    rows.append(("step", "", *_compared(comparison.predicted_step, comparison.measured_step)))
    return Table(_HEADS, tuple(rows))


def largest_table(comparison: Comparison) -> Table:
    """The ops whose seconds differ most."""
    rows = [
        (f"stage {row.op.stage} {op_label(row.op)}", *_compared(row.predicted, row.measured))
        for row in comparison.largest
    ]
    return Table(("<op", *_HEADS[2:]), tuple(rows))


_HEADS: Final = ("<kind", "ops", "predicted", "measured", "difference", "relative")


def _compared(predicted: float, measured: float) -> Iterable[str]:
    beyond = measured - predicted
    sign = "−" if beyond < 0 else "+"
    share = f"{beyond / predicted:+.1%}".replace("-", "−") if predicted else "–"
    return duration(predicted), duration(measured), f"{sign}{duration(abs(beyond))}", share
