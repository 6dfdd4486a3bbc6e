"""How many CPU devices there are: it must be said before JAX first uses one."""

from __future__ import annotations

import os

FLAG = "xla_force_host_platform_device_count"

MOST = 1024
"""CPU devices that are asked for at most: each has threads of its own, and a step on more is looked at, not run."""


def ask_for(count: int) -> None:
    """Asks JAX for as many CPU devices.

    Nothing happens for more than `MOST`, where `XLA_FLAGS` says a number, where the CPU is not the platform, and where JAX has used a device
    already; what compiles the step then says how many are missing.

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
