"""The passes in a row: a traced step in, a verified program out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend import core as jex

from ratrain_jax import compat
from ratrain_jax.errors import UnsupportedError
from ratrain_jax.kernels import Arithmetic, Machine
from ratrain_jax.lowering.autodiff import differentiate_all
from ratrain_jax.lowering.blocks import group_blocks
from ratrain_jax.lowering.code import StepCode
from ratrain_jax.lowering.collector import collector_paused
from ratrain_jax.lowering.evaluation import (
    Homes,
    forward_code,
    opened_homes,
    opened_leaves,
    stages_at_home,
)
from ratrain_jax.lowering.graph import cut, needed
from ratrain_jax.lowering.half_residuals import narrow_residuals
from ratrain_jax.lowering.held import hold
from ratrain_jax.lowering.layers import find_layers
from ratrain_jax.lowering.precision import hoist_casts
from ratrain_jax.lowering.program import Program, Settings
from ratrain_jax.lowering.recovery import program_within_limit
from ratrain_jax.lowering.regions import Regions, split_step
from ratrain_jax.lowering.routing import route
from ratrain_jax.lowering.stacks import StackMap, open_stacks
from ratrain_jax.lowering.stages import split_stages
from ratrain_jax.lowering.trace import Trace as Trace
from ratrain_jax.lowering.update import UpdatePlan, split_update
from ratrain_jax.lowering.verify import verify


@collector_paused()
@compat.without_mesh()
def lower_step(
    trace: Trace,
    settings: Settings,
    machine: Machine,
    boundaries: Sequence[str] | None = None,
    kernels: Arithmetic | None = None,
    homes: Homes | None = None,
    layering: float | None = None,
) -> tuple[StepCode, Program]:
    """Lowers a traced step.

    Args:
        trace: the step.
        settings: stages, schedule and switches.
        machine: what costs are counted for.
        boundaries: the first layer of each stage but stage 0; chosen unless given.
        kernels: how kernels compute the products that they take; XLA takes all unless given.
        homes: of a step that evaluates, where the leaves of the state lie; layers then go where their parameters are, if
            that gives stages in a row.
        layering: for how many stages layers are found; for those of the settings unless given.

    Raises:
        StepError, LayoutError, MemoryLimitError: see each pass.
        VerificationError: the program made is wrong; a fault of this package.
    """
    code = compile_code(trace, settings, machine, boundaries, kernels, homes, layering)
    program = program_within_limit(code, settings, machine)
    verify(program)
    return code, program


def compile_code(
    trace: Trace,
    settings: Settings,
    machine: Machine,
    boundaries: Sequence[str] | None = None,
    kernels: Arithmetic | None = None,
    homes: Homes | None = None,
    layering: float | None = None,
) -> StepCode:
    """All passes that come before ops and their order."""
    trace = hold(trace)
    opened, stacks = open_stacks(trace)
    rest = (settings, machine, boundaries, kernels, homes, layering or settings.stages)
    try:
        return _compile_opened(opened, stacks, *rest)
    except UnsupportedError:
        # An update that joins the layers of a stacked leaf can still run where all are on one stage.
        if stacks is None or settings.stages > 1:
            raise
        return _compile_opened(trace, None, *rest)


def _compile_opened(
    trace: Trace,
    stacks: StackMap | None,
    settings: Settings,
    machine: Machine,
    boundaries: Sequence[str] | None,
    kernels: Arithmetic | None,
    homes: Homes | None,
    layering: float,
) -> StepCode:
    parts = settings.data_parallel * settings.microbatches
    regions = split_step(
        trace.whole,
        trace.small,
        states=trace.states,
        names=trace.names,
        parts=parts,
        where=trace.where,
    )
    loss, routing = regions.loss, None
    if kernels is not None:
        loss, routing = route(loss, len(regions.params), kernels)
    loss, view_dtypes = hoist_casts(loss, len(regions.params))
    layered = find_layers(
        loss,
        regions.paths,
        operands=len(regions.operands),
        trained=regions.trained,
        batch=[i for i, operand in enumerate(regions.operands) if operand.batch],
        stages=layering,
        machine=machine,
    )
    stage_of = None
    fixed = _fixed(regions, trace.state_out, view_dtypes)
    if homes is not None:
        leaves = [regions.step.invars.index(var) for var in regions.params]
        at_home = opened_homes(homes.stages, stacks, leaves)
        stage_of = stages_at_home(layered, settings.stages, at_home)
        fixed = opened_leaves(homes.fixed, stacks)
    if stage_of is None:
        stage_of = split_stages(layered, settings.stages, machine=machine, boundaries=boundaries)
    if settings.trains:
        codes = differentiate_all(layered.layers, layered.variables)
        if kernels is not None:
            codes = tuple(map(narrow_residuals, codes))
    else:
        layered, codes = forward_code(layered)
    owners = {p: n for n, layer in enumerate(layered.layers) for p in layer.owned}
    layer_names = [layer.name for layer in layered.layers]
    update = split_update(
        regions,
        owner=[owners[p] for p in range(len(regions.params))],
        layers=len(layered.layers),
        state_out=trace.state_out,
        metrics_out=trace.metrics_out,
        names=trace.names,
        layer_names=layer_names,
    )
    prologue, computed, arguments = _prologue(regions, update, trace.names, layer_names)
    return StepCode(
        regions=regions,
        layered=layered,
        codes=codes,
        stage_of=stage_of,
        block_of=group_blocks(stage_of),
        update=update,
        names=trace.names,
        paths=_shown(regions, trace.names),
        master=tuple(var.aval for var in regions.params),
        view_dtypes=view_dtypes,
        fixed=fixed,
        data_parallel=settings.data_parallel,
        microbatches=settings.microbatches,
        zero=settings.zero,
        prologue=prologue,
        prologue_operands=computed,
        prologue_arguments=arguments,
        routing=routing,
        stacks=stacks,
    )


def _shown(regions: Regions, names: Sequence[str]) -> tuple[str, ...]:
    """The name of each parameter: its path, or for a held one its path in the state."""
    number = {var: leaf for leaf, var in enumerate(regions.step.invars)}
    held = regions.params[regions.trained :]
    trained = ("/".join(path) for path in regions.paths[: regions.trained])
    return (*trained, *(names[number[var]] for var in held))


def _fixed(
    regions: Regions, state_out: Sequence[int | None], view_dtypes: Sequence[Any]
) -> frozenset[int]:
    """Leaves of held parameters that never change and are read as they are: every device of a group has them whole.

    In shards they would take more memory, for each has the whole view, and be gathered in every step.
    """
    step = regions.step
    number = {var: leaf for leaf, var in enumerate(step.invars)}
    held = range(regions.trained, len(regions.params))
    found = {number[regions.params[p]]: p for p in held}
    return frozenset(
        leaf
        for leaf, p in found.items()
        if view_dtypes[p] == step.invars[leaf].aval.dtype
        and ((out := state_out[leaf]) is None or step.outvars[out] is step.invars[leaf])
    )


def _prologue(
    regions: Regions, update: UpdatePlan, names: Sequence[str], layer_names: Sequence[str]
) -> tuple[jex.ClosedJaxpr, tuple[int, ...], tuple[int, ...]]:
    """What computes the operands that are no plain leaf of the batch: its code, what it makes, the leaves it reads."""
    computed = tuple(i for i, operand in enumerate(regions.operands) if operand.argument is None)
    wanted = [regions.sources[i] for i in computed]
    step = regions.step
    _, free = needed(step.eqns, wanted, step.invars)
    number: dict[Any, int] = {var: i for i, var in enumerate(step.invars)}
    read = sorted(number[var] for var in free if var in number)
    arguments = tuple(i for i in read if i >= regions.states)
    _check_read_state(read, regions, update, names, layer_names)
    invars = [step.invars[i] for i in (*update.replicated, *arguments)]
    return cut(step, invars, wanted), computed, arguments


def _check_read_state(
    read: Sequence[int],
    regions: Regions,
    update: UpdatePlan,
    names: Sequence[str],
    layer_names: Sequence[str],
) -> None:
    """Refuses state that the loss reads beside its parameters and that belongs to a layer."""
    for number, layer in enumerate(update.layers):
        for leaf in (*layer.parameters, *layer.optimizer):
            if leaf not in read:
                continue
            where = f"the loss reads {names[leaf]}, or what the step makes from it before the loss."
            if leaf in layer.parameters:
                raise UnsupportedError(
                    f"{where} It is also differentiated by it: read it through the differentiated argument only."
                )
            raise UnsupportedError(
                f"{where} It is not differentiated by it, but its new value is made from arrays of the layer"
                f" `{layer_names[number]}`, so it lives with that layer. Read it inside the loss, as it is, and make it from"
                " one parameter's arrays alone (a moving average, a copy)."
            )
