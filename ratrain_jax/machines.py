"""`machines`: descriptions of the machines that steps are planned and costed for.

A description is a `ratrain_jax.kernels.Machine`; `docs/kernels.md` lists the keys of its file.
"""

from __future__ import annotations

import dataclasses
import os

from ratrain_jax.kernels import Machine, builtin_machines, load_machine
from ratrain_jax.kernels.schema import check_number


def names() -> tuple[str, ...]:
    """The names of the machines that come with the package.

    Example:
        >>> import ratrain_jax as rt
        >>> rt.machines.names()
        ('a100', 'cpu', 'ft-m7032', 'generic', 'mt3000')
    """
    return builtin_machines()


def load(name_or_path: str | os.PathLike[str], *, clusters: int | None = None) -> Machine:
    """Loads a machine that comes with the package, or one of your own.

    Args:
        name_or_path: one of `names()`, or the path of a file that ends in ".toml".
        clusters: how many devices the machine has: acceleration clusters of MT-3000, GPUs of an A100 machine. The
            machine's `devices` says it afterwards; as many as its file says unless given, and 0 there means none are said.

    Returns:
        The machine.

    Raises:
        MachineError: there is no such machine, its file is malformed, or its links do not join so many devices; the
            message names the key, its unit and its range.

    Example:
        >>> import ratrain_jax as rt
        >>> rt.machines.load("mt3000", clusters=1024).devices
        1024
    """
    machine = load_machine(name_or_path)
    if clusters is None:
        return machine
    check_number("clusters", clusters, "devices", 1, 1e9, whole=True)
    return dataclasses.replace(machine, devices=int(clusters))
