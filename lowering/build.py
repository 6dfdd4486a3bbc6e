"""Builds the program of a step: values, ops, and what each op waits for; then order and frees.

The builder walks the step in the order of data: entry, forwards, backwards, state, results. Each walker only adds
tasks; `ratrain_jax.lowering.order` decides where they go, and `ratrain_jax.lowering.frees` ends lives.
"""

from __future__ import annotations

from collections.abc import Sequence

from ratrain_jax.kernels import Machine
from ratrain_jax.lowering.build_compute import ComputeTasks
from ratrain_jax.lowering.build_state import StateTasks
from ratrain_jax.lowering.code import StepCode, remember
from ratrain_jax.lowering.durations import Durations
from ratrain_jax.lowering.frees import insert_frees
from ratrain_jax.lowering.order import order_tasks
from ratrain_jax.lowering.program import (
    LayerInfo,
    OperandInfo,
    Program,
    Reduction,
    Settings,
    Variable,
)
from ratrain_jax.lowering.sheet import Sheet
from ratrain_jax.lowering.values import array_type


def build_program(
    code: StepCode, settings: Settings, machine: Machine, recovered: Sequence[bool]
) -> Program:
    """Builds and orders a step's program.

    Args:
        code: the step's code.
        settings: the schedule and its switches.
        machine: whose speeds decide the order of state ops and transfers.
        recovered: whether each layer is recovered; the same for all layers of a block.
    """
    remember(code)
    seconds = tuple(layer.seconds for layer in code.layered.layers)
    durations = Durations(machine, seconds, code.data_parallel)
    early = early_phases(code, settings)
    sheet = Sheet(code, settings, durations, tuple(recovered), early, reductions(code))
    state = StateTasks(sheet)
    state.enter()
    compute = ComputeTasks(sheet)
    compute.run()
    state.leave()
    ordered = order_tasks(
        sheet.tasks,
        window_layers=settings.window_layers,
        window_bytes=settings.window_bytes,
    )
    values = sheet.values.made
    lists = insert_frees(ordered, values, sheet.inputs, sheet.outputs, code.stages)
    return Program(
        settings=settings,
        layers=_layers(code, recovered, early),
        variables=_variables(code),
        operands=_operands(code),
        reductions=sheet.reductions,
        values=tuple(values),
        order=lists,
        inputs=tuple(sheet.inputs),
        outputs=tuple(sheet.outputs),
        fingerprint=code.fingerprint,
    )


def reductions(code: StepCode) -> tuple[Reduction, ...]:
    """Who gives and who takes at each global reduction of the update."""
    update = code.update
    found: list[Reduction] = []
    receivers: set[int] = set()
    for phase in range(len(update.reductions), 0, -1):
        reduction = update.reductions[phase - 1]
        receivers |= {
            code.stage_of[n] for n, layer in enumerate(update.layers) if layer.phase >= phase
        }
        if update.replicated and update.replicated_phase >= phase:
            receivers |= set(range(code.stages))
        if update.metrics_outputs:
            receivers.add(code.metrics_stage)
        found.append(
            Reduction(phase, tuple(reduction.layers), reduction.loss, tuple(sorted(receivers)))
        )
    return tuple(reversed(found))


def early_phases(code: StepCode, settings: Settings) -> tuple[int | None, ...]:
    """How many reductions the early update of each layer waits for; None for a layer that waits for all."""
    if settings.validation == "immediate":
        return (None,) * len(code.codes)
    return tuple(
        found.early if found is not None and found.deferrable else None
        for found in code.speculations
    )


def _layers(
    code: StepCode, recovered: Sequence[bool], early: Sequence[int | None]
) -> tuple[LayerInfo, ...]:
    infos = []
    for n, layer in enumerate(code.layered.layers):
        borrowed: dict[int, list[str]] = {}
        for p in layer.reads:
            if code.owner[p] != n:
                borrowed.setdefault(code.owner[p], []).append(code.paths[p])
        infos.append(
            LayerInfo(
                name=layer.name,
                stage=code.stage_of[n],
                block=code.block_of[n],
                parameters=tuple(code.paths[p] for p in layer.owned),
                borrows=tuple((owner, tuple(names)) for owner, names in sorted(borrowed.items())),
                inputs=layer.inputs,
                outputs=layer.outputs,
                operands=layer.operands,
                backward_inputs=code.codes[n].backward_inputs,
                backward_operands=code.codes[n].backward_operands,
                update_phase=code.update.layers[n].phase,
                flops=layer.cost.flops,
                seconds=layer.seconds,
                recovered=recovered[n],
                fingerprint=code.codes[n].fingerprint,
                early=early[n],
            )
        )
    return tuple(infos)


def _variables(code: StepCode) -> tuple[Variable, ...]:
    joins = dict(zip(code.loss_variables, code.regions.joins, strict=True))
    return tuple(
        Variable(
            array=array_type(v.aval),
            producer=v.producer,
            readers=v.readers,
            differentiable=v.differentiable,
            role=v.role,
            join=joins.get(number, "none"),
        )
        for number, v in enumerate(code.layered.variables)
    )


def _operands(code: StepCode) -> tuple[OperandInfo, ...]:
    return tuple(
        OperandInfo(o.name, code.operand_type(i), o.split, o.argument is None)
        for i, o in enumerate(code.regions.operands)
    )
