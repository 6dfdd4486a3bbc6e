"""`simulate`: a program on a described machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ratrain_jax.errors import SimulationError
from ratrain_jax.kernels import Machine, machine_of
from ratrain_jax.lowered import Lowered
from ratrain_jax.lowering.code import known_code
from ratrain_jax.lowering.collector import collector_paused
from ratrain_jax.lowering.mnemonics import op_label
from ratrain_jax.lowering.op_costs import OpCoster
from ratrain_jax.lowering.program import Op, Program
from ratrain_jax.simulation.program_tasks import program_tasks
from ratrain_jax.simulation.steady import settle
from ratrain_jax.simulation.timeline import Timeline
from ratrain_jax.simulation.waiting import CycleError

if TYPE_CHECKING:
    from ratrain_jax.profiling.profile import Profile


@collector_paused()
def simulate(
    program: Program | Lowered,
    machine: str | Machine,
    *,
    seconds: Callable[[Op], float] | None = None,
    profile: Profile | None = None,
) -> Timeline:
    """Simulates a step on a machine: when each op runs, and where the time goes.

    Every op holds its lanes of its stages while it runs: compute ops the compute lane, transfers one direction of the
    links of both stages, collectives both directions. The ops of a lane run in the order of the program; an op starts
    when what it reads is there and the state window has room. Data-parallel ranks do the same, so each stage is simulated
    once. Where the machine lets lanes slow each other down, they do.

    The step is one of many: where ops of a step are still under way when the next one begins, and keep it waiting (views
    that are gathered over a slow link, which later forwards read), more steps are simulated until each is as the one
    before.

    Args:
        program: a lowered step, or its program, whose code must have been lowered in this process.
        machine: a `ratrain_jax.kernels.Machine`, the name of a built-in one, or the path of its file.
        seconds: how long each op takes by itself; costed for the machine (see `Lowered.cost_analysis`) unless given.
        profile: what ops were measured to take, from `ratrain_jax.profile`. Its seconds replace the machine's, and ops slow
            each other down as it says, across stages too, where their devices share a host's cores; then the
            machine's own slowdowns are not heeded.

    Returns:
        The timeline.

    Raises:
        MachineError: there is no such machine.
        SimulationError: the program's code is not known here, or its ops wait for each other; the message lists the cycle.

    Example:
        >>> import jax.numpy as jnp, ratrain_jax as rt
        >>> @rt.train_step(microbatches=2)
        ... def step(w, x):
        ...     loss, grad = rt.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
        ...     return w - grad, loss
        >>> timeline = rt.simulate(step.lower(jnp.ones(3), jnp.ones((4, 3))), "generic")
        >>> line = timeline.breakdown
        >>> line.step == line.ideal + line.bubble + line.exposed + line.recovery + line.tail
        True
    """
    found = machine_of(machine)
    lowered = program if isinstance(program, Lowered) else None
    simulated = lowered.program if lowered is not None else program
    assert isinstance(simulated, Program)
    if seconds is None and profile is not None:
        seconds = profile.seconds(program, found)
    if seconds is None:
        code = lowered.code if lowered is not None else known_code(simulated.fingerprint)
        if code is None:
            raise SimulationError(
                f"the program's code {simulated.fingerprint!r} is not known in this process; lower its step again"
                " and keep what `lower` returns, or say with seconds= how long each op takes."
            )
        seconds = OpCoster(code, simulated, found).seconds
    made = program_tasks(simulated, seconds)
    try:
        if profile is None:
            ran, carried = settle(made, found)
        else:
            share = profile.shares(program)
            made.tasks.shares.update(enumerate(map(share, made.ops)))
            # The threads that launch run ahead, and so keep no op waiting, but they use cores.
            for launching in profile.launches(simulated):
                made.tasks.add(launching)
            ran, carried = settle(made, found, profile.pace(simulated.settings.data_parallel))
        return Timeline(simulated, found, made, ran, carried)
    except CycleError as error:
        waits = " -> ".join(
            f"stage {made.ops[n].stage} {op_label(made.ops[n])}" for n in error.cycle
        )
        raise SimulationError(f"ops wait for each other in a cycle: {waits}.") from None
