"""Options of what goes wrong in the long run: failures and stragglers."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ratrain_jax.cli.target import Target
from ratrain_jax.errors import OptionError

if TYPE_CHECKING:
    from ratrain_jax.simulation.reliability import Expected
    from ratrain_jax.simulation.timeline import Timeline

F = TypeVar("F", bound=Callable[..., Any])

_HOUR = 3600.0
_POSITIVE = click.FloatRange(0, min_open=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Trouble:
    """What was said of failures and stragglers.

    Attributes:
        mtbf: mean hours between failures of one device; None to leave failures out.
        checkpoint: seconds of a checkpoint.
        storage: bytes a second at which one is written, instead.
        restart: seconds from a failure until work goes on.
        interval: seconds between checkpoints; None for the best.
        stragglers: coefficient of variation of compute.
    """

    mtbf: float | None
    checkpoint: float | None
    storage: float | None
    restart: float | None
    interval: float | None
    stragglers: float

    def check(self) -> None:
        """Refuses options that say nothing together, before the work.

        Raises:
            OptionError: which is missing, or too much.
        """
        if self.mtbf is None:
            for name in ("checkpoint", "storage", "restart", "interval"):
                if getattr(self, name) is not None:
                    raise OptionError(f"--{name} says nothing without --mtbf; give both, or none.")
        elif (self.checkpoint is None) == (self.storage is None):
            raise OptionError(
                "--mtbf needs to know what a checkpoint costs; give either --checkpoint seconds or --storage bytes/s."
            )

    def expected(self, timeline: Timeline, target: Target) -> Expected | None:
        """What a step takes in the long run; None if nothing was asked for.

        Args:
            timeline: the simulated step.
            target: whose state a checkpoint holds.
        """
        from ratrain_jax.simulation.reliability import Failures

        if self.mtbf is None:
            return timeline.expected(stragglers=self.stragglers) if self.stragglers else None
        seconds = self.checkpoint
        if seconds is None:
            assert self.storage is not None
            seconds = _state_bytes(target) / self.storage
        failures = Failures(
            mtbf=self.mtbf * _HOUR,
            checkpoint=seconds,
            restart=self.restart or 0.0,
            interval=self.interval,
        )
        return timeline.expected(failures, stragglers=self.stragglers)


def _state_bytes(target: Target) -> int:
    """Bytes of a step's state, each array once."""
    signature = target.need_lowered().signature
    avals = signature.avals[: signature.states]
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)


_OPTIONS = (
    click.option(
        "--mtbf",
        type=_POSITIVE,
        metavar="HOURS",
        help="Mean hours between failures of one device: also tell what failures cost.",
    ),
    click.option(
        "--checkpoint",
        type=_POSITIVE,
        metavar="SECONDS",
        help="For how long training stands still for a checkpoint.",
    ),
    click.option(
        "--storage",
        type=_POSITIVE,
        metavar="BYTES/S",
        help="Instead: at which rate all devices together write the state.",
    ),
    click.option(
        "--restart",
        type=click.FloatRange(0),
        metavar="SECONDS",
        help="From a failure until work goes on; 0 unless given.",
    ),
    click.option(
        "--interval",
        type=_POSITIVE,
        metavar="SECONDS",
        help="Of work between checkpoints; about the best unless given.",
    ),
    click.option(
        "--stragglers",
        type=click.FloatRange(0, 0.3),
        default=0.0,
        metavar="SHARE",
        help="Standard deviation of a rank's compute over its mean: also tell what waiting for the slowest costs.",
    ),
)


def reliability_options(function: F) -> F:
    """The options of failures and stragglers; they come as one argument, `trouble`."""
    names = [field.name for field in dataclasses.fields(Trouble)]

    @functools.wraps(function)
    def gathered(*args: Any, **given: Any) -> Any:
        return function(*args, trouble=Trouble(**{n: given.pop(n) for n in names}), **given)

    found: Any = gathered
    for option in reversed(_OPTIONS):
        found = option(found)
    return found
