"""A target, simulated: what `ratrain simulate` and `ratrain report` begin with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ratrain_jax.cli.options import Asked
from ratrain_jax.cli.output import working
from ratrain_jax.cli.target import Target, find
from ratrain_jax.errors import OptionError

if TYPE_CHECKING:
    from ratrain_jax.simulation.timeline import Timeline

profile_option = click.option(
    "--profile",
    type=click.Path(exists=True, dir_okay=False),
    help="What ops were measured to take, by ratrain profile.",
)


def simulated(asked: Asked, machine: str | None, profile: str | None) -> tuple[Target, Timeline]:
    """Finds a target and simulates it.

    Args:
        asked: what the options say.
        machine: on what; None for the plan's own, or for the CPU that a profile is of.
        profile: the path of a profile.

    Raises:
        OptionError: nothing says on what.
        RATrainError: as `find` and `rt.simulate` do.
    """
    from ratrain_jax.profiling.profile import Profile
    from ratrain_jax.simulation.simulate import simulate

    measured = None if profile is None else Profile.load(profile)
    target = find(asked)
    if machine is None and target.plan is not None:
        machine = target.plan.machine
    if machine is None and measured is not None:
        machine = "cpu"
    if machine is None:
        raise OptionError("on what to simulate is not said; name a --machine, or give a --profile.")
    # A profile may know all ops of a program whose code is not here.
    known = target.program if measured is not None and target.lowered is None else None
    program = known if known is not None else target.need_lowered()
    with working("simulating"):
        return target, simulate(program, machine, profile=measured)
