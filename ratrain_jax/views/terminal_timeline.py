"""A simulated step in a terminal: the line that sums it up, what lanes do, and the critical path.

`to_json` writes an object with `format` (`ratrain-timeline`) and `version` (1), then the fields of `TimelineSummary`; those of
the rows are fields of objects. Within a version, fields are added and none is changed or removed. All times are seconds.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from rich.console import RenderableType

from ratrain_jax.errors import SimulationError
from ratrain_jax.lowering.program import Settings
from ratrain_jax.lowering.records import Form
from ratrain_jax.simulation.reliability import Expected
from ratrain_jax.views.terminal import settings_line, step_view, table
from ratrain_jax.views.terminal_inspection import StepLine, step_line

if TYPE_CHECKING:
    from ratrain_jax.simulation.timeline import Timeline

FORM: Final = Form("ratrain-timeline", 1, "timeline", SimulationError)
_MOST_STAGES: Final = 12


@dataclasses.dataclass(frozen=True, slots=True)
class StageUse:
    """What a stage does with its time.

    Attributes:
        stage: its number.
        busy: seconds in which each port is held, by its name.
        idle: the rest until the step's last op ends, likewise.
        exposed: seconds in which its link is busy and its compute lane waits.
        hidden: seconds in which its link is busy while it computes.
        tail: seconds from its last Backward to its first Forward of the next step.
        period: seconds from its first Forward to that of the next step.
    """

    stage: int
    busy: Mapping[str, float]
    idle: Mapping[str, float]
    exposed: float
    hidden: float
    tail: float
    period: float


@dataclasses.dataclass(frozen=True, slots=True)
class TimelineSummary:
    """A simulated step.

    Attributes:
        settings: the choices that its program was made with.
        step: where the time of the pacing stage goes.
        stages: one row a stage.
        critical_path: seconds of the critical path, by kind of op; they add up to the step.
        recovery_on_path: seconds of recovery on the critical path.
        recovery_off_path: seconds of recovery of all stages beside it.
        expected: what a step takes in the long run; None if that was not asked for.
    """

    settings: Settings
    step: StepLine
    stages: tuple[StageUse, ...]
    critical_path: Mapping[str, float]
    recovery_on_path: float
    recovery_off_path: float
    expected: Expected | None = None

    def to_json(self) -> str:
        """The summary as JSON, in the form that this module describes."""
        return json.dumps({**FORM.head, **dataclasses.asdict(self)}, indent=1) + "\n"


def summary(timeline: Timeline, expected: Expected | None = None) -> TimelineSummary:
    """Reads off a timeline what is shown of it.

    Args:
        timeline: the simulated step.
        expected: what it takes in the long run, if that is to be shown.
    """
    on, off = timeline.recovery
    return TimelineSummary(
        settings=timeline.program.settings,
        step=step_line(timeline),
        stages=_stages(timeline),
        critical_path=_path(timeline),
        recovery_on_path=on,
        recovery_off_path=off,
        expected=expected,
    )


def _stages(timeline: Timeline) -> tuple[StageUse, ...]:
    busy: list[dict[str, float]] = [{} for _ in timeline.program.order]
    idle: list[dict[str, float]] = [{} for _ in timeline.program.order]
    for use in timeline.ports:
        busy[use.stage][use.port], idle[use.stage][use.port] = use.busy, use.idle
    return tuple(
        StageUse(stage, busy[stage], idle[stage], exposed, hidden, tail, period)
        for stage, ((exposed, hidden), tail, period) in enumerate(
            zip(timeline.communication, timeline.tails, timeline.periods, strict=True)
        )
    )


def _path(timeline: Timeline) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for event in timeline.critical_path:
        kind = type(event.op).__name__
        seconds[kind] = seconds.get(kind, 0.0) + event.end - event.start
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def timeline_view(shown: TimelineSummary) -> Iterator[RenderableType]:
    """All that is shown of a simulated step.

    Args:
        shown: the step.

    Yields:
        The parts, one below the other.
    """
    step = shown.step
    yield settings_line(shown.settings)
    yield ""
    yield from step_view(step.text, step.stage, len(shown.stages), step.machine)
    yield ""
    yield _lanes(shown.stages)
    yield "busy: share of the time until the last op ends; the rest in seconds"
    yield ""
    yield _path_view(shown)
    if shown.expected is not None:
        yield ""
        yield str(shown.expected)


def _lanes(stages: Sequence[StageUse]) -> RenderableType:
    ports = list(dict.fromkeys(port for stage in stages for port in stage.busy))
    columns = [*ports, "idle", "exposed", "hidden", "tail"]
    made = table("stage", *columns, left=())
    rows = [_figures(stage, ports) for stage in stages]
    if len(rows) <= _MOST_STAGES:
        named = {str(stage.stage): row for stage, row in zip(stages, rows, strict=True)}
    else:
        across = list(zip(*rows, strict=True))
        named = {
            "min": [min(column) for column in across],
            "mean": [statistics.fmean(column) for column in across],
            "max": [max(column) for column in across],
        }
    for name, row in named.items():
        shares = [f"{share:.1%}" for share in row[: len(ports)]]
        made.add_row(name, *shares, *(f"{seconds:.4g}" for seconds in row[len(ports) :]))
    return made


def _figures(stage: StageUse, ports: Sequence[str]) -> list[float]:
    """A stage's row: the busy share of each port, then seconds."""
    shares = []
    for port in ports:
        busy, idle = stage.busy.get(port, 0.0), stage.idle.get(port, 0.0)
        shares.append(busy / (busy + idle) if busy else 0.0)
    return [*shares, stage.idle.get("compute", 0.0), stage.exposed, stage.hidden, stage.tail]


def _path_view(shown: TimelineSummary) -> RenderableType:
    made = table("critical path", "s", "share", left=("critical path",))
    for kind, seconds in shown.critical_path.items():
        made.add_row(kind, f"{seconds:.4g}", f"{seconds / shown.step.step:.1%}")
    return made
