"""How many CPU devices there are, and in how many processes: both must be said before JAX first uses one."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from ratrain_jax.distributed.initialize import (
    PROCESSES,
    Place,
    initialize,
    is_one_of_several,
)
from ratrain_jax.errors import OptionError
from ratrain_jax.words import counted

F = TypeVar("F", bound=Callable[..., Any])

FLAG = "xla_force_host_platform_device_count"

MOST = 1024
"""CPU devices that are asked for at most: each has threads of its own, and a step on more is looked at, not run."""

_COUNTS = (PROCESSES, "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
"""Where `ratrain launch`, Slurm and Open MPI say how many processes there are."""


def ask_for(count: int) -> None:
    """Asks JAX for as many CPU devices.

    Nothing happens for more than `MOST`, where `XLA_FLAGS` says a number, where the CPU is not the platform, and where
    JAX has used a device already; what compiles the step then says how many are missing.

    Args:
        count: how many.
    """
    import jax

    if count <= MOST and FLAG not in os.environ.get("XLA_FLAGS", ""):
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:  # a module that was imported made arrays
            return


def environment(count: int) -> dict[str, str]:
    """The environment of a process with as many CPU devices."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if FLAG not in flag]
    return {**os.environ, "XLA_FLAGS": " ".join([*flags, f"--{FLAG}={count}"])}


def place_options(function: F) -> F:
    """The options that say which process of several this is; they come as one argument, `place`."""

    @click.option("--coordinator", metavar="HOST:PORT", help="Of process 0, in a run of several.")
    @click.option("--processes", type=click.IntRange(1), help="How many there are.")
    @click.option("--process-id", type=click.IntRange(0), help="Which one this is.")
    @functools.wraps(function)
    def gathered(
        *args: Any,
        coordinator: str | None,
        processes: int | None,
        process_id: int | None,
        **given: Any,
    ) -> Any:
        return function(*args, place=Place(coordinator, processes, process_id), **given)

    return gathered  # pyright: ignore[reportReturnType]


def connect(place: Place, count: int) -> None:
    """Asks for CPU devices; in a run of several processes for this one's part, and connects it with the others.

    Args:
        place: what the command line says of this process.
        count: how many devices a step needs, in all processes together.

    Raises:
        DistributedError: as `rt.initialize` does.
        OptionError: a process would have no device of the step.
    """
    if place == Place() and not is_one_of_several(os.environ):
        ask_for(count)
        return
    told = (os.environ[name] for name in _COUNTS if name in os.environ)
    processes = place.processes or next((int(one) for one in told if one.isdecimal()), 1)
    ask_for(-(-count // max(processes, 1)))
    initialize(place.coordinator, place.processes, place.process_id)
    import jax

    busy = {device.process_index for device in jax.devices()[:count]}
    if len(busy) < jax.process_count():
        from ratrain_jax.runtime.processes import meet

        # Else the first to refuse would end the others, while they still learn of each other's devices.
        meet()
        raise OptionError(
            f"the step's {counted(count, 'device')} would lie in {len(busy)} of {counted(jax.process_count(), 'process')};"
            " start fewer processes, or give more --stages or --data-parallel."
        )
