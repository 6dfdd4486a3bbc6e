"""What `ratrain inspect` shows of a program, as data; `to_json` is its file.

The JSON object has `format` (`ratrain-inspection`) and `version` (1), then the fields of `Inspection`; those of the rows are
fields of objects. Within a version, fields are added and none is changed or removed. Bytes are those of one device.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ratrain_jax.errors import ProgramFormatError
from ratrain_jax.lowering.memory import memory_analysis
from ratrain_jax.lowering.mnemonics import op_label
from ratrain_jax.lowering.program import Kind, Program, Settings, Value
from ratrain_jax.lowering.records import Form
from ratrain_jax.views.terminal_schedule import fold, schedule_cells

if TYPE_CHECKING:
    from ratrain_jax.simulation.timeline import Timeline

FORM: Final = Form("ratrain-inspection", 1, "inspection", ProgramFormatError)


@dataclasses.dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer.

    Attributes:
        name: a parameter path.
        stage: where it runs.
        block: number of its block within the stage.
        parameters: how many numbers it owns, over all devices.
        flops: floating-point operations of its forward for one microbatch.
        state_bytes: its shards of parameters and optimizer, and its view.
        residual_bytes: what Backward needs of Forward, for one microbatch.
        recovered: whether its residuals are made again rather than kept.
    """

    name: str
    stage: int
    block: int
    parameters: int
    flops: int
    state_bytes: int
    residual_bytes: int
    recovered: bool


@dataclasses.dataclass(frozen=True, slots=True)
class StageRow:
    """One stage.

    Attributes:
        stage: its number.
        schedule: its ops as cells (see `ratrain_jax.views.terminal_schedule`), repeats folded.
        memory: bytes of each kind when the most are there.
        peak: their sum.
        limit: bytes that it may hold; None if nothing says.
        peak_op: the op at which the most bytes are there; None if the stage has none.
    """

    stage: int
    schedule: tuple[str, ...]
    memory: Mapping[str, int]
    peak: int
    limit: int | None
    peak_op: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class StepLine:
    """Where the time of a simulated step goes; the terms add up to `step` (see `simulation/breakdown.py`).

    Attributes:
        machine: what it was simulated on.
        stage: the pacing stage.
        step: seconds from step to step.
        ideal: seconds of compute that every schedule does.
        bubble: seconds of waiting for other stages' compute.
        exposed: seconds of waiting for communication.
        recovery: seconds of running forwards again.
        tail: seconds from the last Backward to the next step's first Forward.
        text: all this in a line.
    """

    machine: str
    stage: int
    step: float
    ideal: float
    bubble: float
    exposed: float
    recovery: float
    tail: float
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Inspection:
    """A program to look at.

    Attributes:
        fingerprint: of the code that its ops name.
        settings: the choices it was made with.
        layers: one row a layer.
        stages: one row a stage.
        step: where the time goes; None without a machine.
    """

    fingerprint: str
    settings: Settings
    layers: tuple[LayerRow, ...]
    stages: tuple[StageRow, ...]
    step: StepLine | None

    def to_json(self) -> str:
        """The inspection as JSON, in the form that this module describes."""
        return json.dumps({**FORM.head, **dataclasses.asdict(self)}, indent=1) + "\n"


def inspection(program: Program, timeline: Timeline | None = None) -> Inspection:
    """Reads off a program what is shown of it.

    Args:
        program: the program.
        timeline: the program simulated, for the line that sums up the step and the machine's memory; None without a machine.

    Returns:
        The inspection.
    """
    return Inspection(
        fingerprint=program.fingerprint,
        settings=program.settings,
        layers=_layers(program),
        stages=_stages(program, timeline),
        step=None if timeline is None else step_line(timeline),
    )


def step_line(timeline: Timeline) -> StepLine:
    """The terms of a simulated step."""
    b = timeline.breakdown
    terms = (b.step, b.ideal, b.bubble, b.exposed, b.recovery, b.tail)
    return StepLine(timeline.machine.name, b.stage, *terms, text=str(b))


def _stages(program: Program, timeline: Timeline | None) -> tuple[StageRow, ...]:
    usable = None if timeline is None else timeline.machine.usable_bytes
    limits: Sequence[Any] = program.settings.memory_limit or [usable] * len(program.order)
    found = memory_analysis(program).stages
    cells = schedule_cells(program)
    return tuple(
        StageRow(
            stage=number,
            schedule=tuple(str(run) for run in fold(cells[number])),
            memory={kind.value: size for kind, size in stage.by_kind.items()},
            peak=stage.peak,
            limit=limits[number],
            peak_op=None if stage.op is None else op_label(stage.op),
        )
        for number, stage in enumerate(found)
    )


_STATE: Final = (Kind.PARAMETERS, Kind.OPTIMIZER, Kind.VIEW)


def _layers(program: Program) -> tuple[LayerRow, ...]:
    first: dict[tuple[Kind, int], Value] = {}
    for value in program.values:
        if value.layer is not None and value.stage == program.layers[value.layer].stage:
            first.setdefault((value.kind, value.layer), value)

    def size(kind: Kind, layer: int) -> int:
        value = first.get((kind, layer))
        return 0 if value is None else value.bytes

    return tuple(
        LayerRow(
            name=layer.name,
            stage=layer.stage,
            block=layer.block,
            parameters=_elements(first.get((Kind.VIEW, n))),
            flops=layer.flops,
            state_bytes=sum(size(kind, n) for kind in _STATE),
            residual_bytes=size(Kind.RESIDUALS, n),
            recovered=layer.recovered,
        )
        for n, layer in enumerate(program.layers)
    )


def _elements(view: Value | None) -> int:
    """Numbers in a layer's view, which holds its parameters whole."""
    return 0 if view is None else sum(math.prod(array.shape) for array in view.arrays)
