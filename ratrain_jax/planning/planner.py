"""`plan`: the fastest way to run a step on a machine, of those that fit its memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from ratrain_jax.errors import InfeasibleError, OptionError
from ratrain_jax.kernels import Arithmetic, Machine, machine_of
from ratrain_jax.lowered import Lowered
from ratrain_jax.lowering.collector import collector_paused
from ratrain_jax.lowering.lower import lower_step
from ratrain_jax.lowering.text import readable_bytes
from ratrain_jax.planning.configuration import RUNNABLE, Configuration
from ratrain_jax.planning.fewest import fewest_devices
from ratrain_jax.planning.leaves import shard_bytes
from ratrain_jax.planning.memory_parts import memory_parts
from ratrain_jax.planning.plan import Plan, PlannedStage, fingerprint_of
from ratrain_jax.planning.search import Found, search
from ratrain_jax.planning.simulated import SIMULATED_SCHEDULES, TENSORS, costs_of
from ratrain_jax.planning.space import Space
from ratrain_jax.planning.why_not import why_not
from ratrain_jax.planning.workload import Workload
from ratrain_jax.step import Step
from ratrain_jax.tracing import abstract, resized, trace_step

MARGIN = 0.02
"""The part of the usable memory that is left free, for what is not counted: allocators, code, the runtime itself."""


IDLE = 0.125
"""The share of the devices that may stay idle where no way to use all of them is found."""


@collector_paused()
def plan(
    train_step: Callable[..., Any],
    *args: Any,
    machine: str | Machine,
    global_batch: int,
    devices: int | None = None,
    memory_limit: int | None = None,
    margin: float = MARGIN,
    backend: str | None = None,
    batch_argnums: Sequence[int] | None = None,
    include_simulated: bool = False,
    idle: float | None = None,
    **space: Sequence[Any],
) -> Plan:
    """Searches for the fastest way to run a step on a machine.

    The step is traced abstractly; nothing is computed, and no devices are needed. Depth, data parallelism, ZeRO stage,
    size of microbatch, schedule, split of the layers and recovery are searched; what a step takes comes from simulating
    it with costs counted from its own layers.

    Args:
        train_step: the step, decorated or not.
        *args: its arguments or their types; the first is the state. The batch may have any number of examples.
        machine: a `ratrain_jax.kernels.Machine`, the name of a built-in one, or the path of its file.
        global_batch: examples of a step.
        devices: how many devices; the machine's own number unless given.
        memory_limit: bytes a device; the machine's usable ones unless given.
        margin: the part of the limit that is left free.
        backend: what computes products, as in `train_step`; the machine's own kernels where it has some, unless given.
        batch_argnums: which arguments are cut along axis 0; all but the first unless given.
        include_simulated: whether to search what the runtime does not run as well: tensor parallelism, ZeRO-3, and the
            schedules `interleaved` and `zb-h1`.
        idle: the share of the devices that may stay idle. Unless given, all are used; where nothing that uses all of
            them fits, up to an eighth stays idle, and the plan says how many.
        **space: choices to search instead of all: `stages`, `rows`, `schedules`, `zeros`, `recoveries`,
            `chunks`, each a sequence (see `ratrain_jax.planning.space.Space`).

    Returns:
        The plan. `print` it; `rt.train_step(plan=plan)` runs it.

    Raises:
        InfeasibleError: nothing fits; the message has the smallest shortfall, its term, and how many devices would do.
        OptionError: an option out of range, or the number of devices is not said.
        BatchError, StepError, MachineError: see `train_step` and `load_machine`.

    Example:
        >>> import jax, jax.numpy as jnp, ratrain_jax as rt
        >>> def step(w, x):
        ...     loss, grad = rt.value_and_grad(lambda w: ((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2).mean())(w)
        ...     return jax.tree.map(lambda p, g: p - g, w, grad), loss
        >>> state = {"a": jnp.ones((64, 64)), "b": jnp.ones((64, 64))}
        >>> found = rt.plan(step, state, jnp.ones((1, 64)), machine="generic", devices=2, global_batch=64)
        >>> found.configuration.devices
        2
    """
    chosen = machine_of(machine)
    count = devices or chosen.devices
    if not count:
        raise OptionError(
            "how many devices to plan for is not said; give devices=, or load the machine with clusters=."
        )
    step = train_step.__wrapped__ if isinstance(train_step, Step) else train_step
    if batch_argnums is None and isinstance(train_step, Step):
        batch_argnums = train_step.options.batch_argnums
    work = workload(step, args, chosen, global_batch, backend, batch_argnums)
    limit = int((memory_limit or chosen.usable_bytes) * (1 - margin))
    whole = work.table(1)
    choices = _choices(include_simulated, space)
    for share in (0.0, IDLE) if idle is None else (idle,):
        looked_at = Space(
            devices=count, global_batch=global_batch, layers=len(whole.rows), idle=share, **choices
        )
        work.trace_few({configuration.rows for configuration in looked_at.configurations()})
        found = search(looked_at, work.table, chosen, limit)
        if found.best is not None:
            made = _plan(found, work, limit, count)
            return made.bound(functools.partial(_lower, work))
    raise InfeasibleError(_infeasible(found, looked_at, work, limit))


def workload(
    step: Callable[..., Any],
    args: Sequence[Any],
    machine: Machine,
    global_batch: int,
    backend: str | None = None,
    batch_argnums: Sequence[int] | None = None,
) -> Workload:
    """A step to plan for; see `plan`."""
    if backend is None:
        backend = machine.name if machine.accelerator is not None else "xla"
    # How many devices there are is nothing to a kernel, and plans of equal products are kept by machine.
    machine = dataclasses.replace(machine, devices=0)
    kernels = None if backend == "xla" else Arithmetic.of(machine, None, "fast")
    state, *rest = (abstract(arg) for arg in args)
    batch = resized(rest, batch_argnums, lambda rows: global_batch)
    return Workload(step, (state, *batch), machine, kernels, global_batch, batch_argnums)


def _choices(include_simulated: bool, space: dict[str, Sequence[Any]]) -> dict[str, Any]:
    known = {f.name for f in dataclasses.fields(Space)} - {
        "devices",
        "global_batch",
        "layers",
        "idle",
    }
    unknown = sorted(set(space) - known)
    if unknown:
        raise OptionError(
            f"plan has no choice {unknown[0]!r} to search; there are {', '.join(sorted(known))}."
        )
    choices: dict[str, Any] = {name: tuple(values) for name, values in space.items()}
    if include_simulated:
        choices.setdefault("schedules", (*RUNNABLE, *SIMULATED_SCHEDULES))
        choices.setdefault("zeros", (1, 2, 3))
        choices.setdefault("tensors", TENSORS)
    return choices


def _plan(found: Found, work: Workload, limit: int, devices: int) -> Plan:
    best = found.best
    assert best is not None
    assert best.split is not None
    assert best.seconds is not None
    table = work.table(best.configuration.rows, best.configuration.tensor)
    costs = costs_of(table, best.configuration, work.machine)
    stages = tuple(
        PlannedStage(
            table.rows[stage.layers[0]].name,
            stage.layers[1] - stage.layers[0],
            stage.recovered,
            stage.seconds,
            stage.memory,
            memory_parts(costs, number, stage),
        )
        for number, stage in enumerate(best.split.stages)
    )
    return Plan(
        configuration=best.configuration,
        stages=stages,
        step_seconds=best.seconds.step,
        tail_seconds=best.seconds.tail,
        machine=work.machine.name,
        limit=limit,
        global_batch=work.global_batch,
        fingerprint=fingerprint_of(work.args),
        backend="xla" if work.kernels is None else work.machine.name,
        layering=table.layering,
        searched=found.configurations,
        assumed=work.machine.assumed,
        why_not=why_not(found, work.table, work.machine, limit),
        idle=devices - best.configuration.devices,
    )


def _lower(work: Workload, chosen: Plan) -> Lowered:
    """The step, lowered as planned."""
    options = dataclasses.replace(chosen.options(work.kernels), batch_argnums=work.batch_argnums)
    trace, signature = trace_step(work.step, work.args, options)
    code, program = lower_step(
        trace,
        options.settings(),
        work.machine,
        options.boundaries,
        work.kernels,
        layering=options.layering,
    )
    return Lowered(code, program, signature, options, trace)


def _empty(space: Space) -> str:
    """What to say where the space has no configuration."""
    depths = space.stages or ()
    if depths and min(depths) > space.layers:
        return (
            f"the loss has {space.layers} layers, and {min(depths)} stages need one each at least;"
            f" plan with {space.layers} stages or fewer."
        )
    if depths and all(space.devices % stages for stages in depths):
        return (
            f"{space.devices} devices make no equal groups for {depths[0]} stages;"
            " plan for a multiple of the stages."
        )
    return (
        f"no way to lay {space.global_batch} examples over {space.devices} devices divides both;"
        " change either to share more factors."
    )


def _infeasible(found: Found, space: Space, work: Workload, limit: int) -> str:
    """What to say where nothing fits."""
    if not found.seen:
        return _empty(space)
    closest, shortfall = min(
        ((c.configuration, c.shortfall) for c in found.seen if c.shortfall is not None),
        key=lambda pair: pair[1].bytes,
    )
    memory = shortfall.memory
    count = fewest_devices(dataclasses.replace(space, idle=0.0), work.table, work.machine, limit)
    remedy = (
        f"{count} devices would do" if count else "no number of devices that was tried would do"
    )
    return (
        f"nothing fits {readable_bytes(limit)} a device on {space.devices} devices: the closest"
        f" ({closest}) lacks {readable_bytes(shortfall.bytes)} on stage"
        f" {shortfall.stage}, most of it {memory.largest}"
        f" ({readable_bytes(getattr(memory, memory.largest))}); {remedy}.{_unsharded(closest, work)}"
    )


def _unsharded(closest: Configuration, work: Workload) -> str:
    """What to say where a group divides so few arrays that sharding hardly helps."""
    group = closest.data_parallel
    leaves = [
        leaf
        for row in work.table(closest.rows, closest.tensor).rows
        for leaf in row.parameters
        if not leaf.fixed
    ]
    held, whole = shard_bytes(tuple(leaves), group), sum(leaf.bytes for leaf in leaves)
    if group == 1 or held < whole / 2:
        return ""
    return (
        f" Groups of {group} divide no axis of most arrays, which each of their devices holds whole; plan with a"
        " global batch that groups of a power of two divide."
    )
