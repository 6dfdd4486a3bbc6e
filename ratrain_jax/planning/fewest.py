"""The fewest devices on which a step fits at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from ratrain_jax.kernels import Machine
from ratrain_jax.planning.layer_table import LayerTable
from ratrain_jax.planning.search import candidates
from ratrain_jax.planning.simulated import costs_of
from ratrain_jax.planning.space import Space
from ratrain_jax.planning.splits import Split, best_split

_MOST = 4096  # times the devices asked for


def fewest_devices(
    space: Space,
    tables: Callable[[int, int], LayerTable],
    machine: Machine,
    limit: int,
    counts: Iterable[int] | None = None,
) -> int | None:
    """The first number of devices with a configuration that fits.

    Args:
        space: the choices; of its number of devices only what is larger is tried.
        tables: gives the layers at a size of microbatch, on one of so many tensor-parallel ranks.
        machine: what the step is to run on.
        limit: bytes a device.
        counts: numbers to try, ascending; all larger ones, in steps that grow, unless given.

    Returns:
        The number, or None if none was found.
    """
    for count in counts if counts is not None else _growing(space.devices):
        if fits(dataclasses.replace(space, devices=count), tables, machine, limit):
            return count
    return None


def _growing(count: int) -> Iterable[int]:
    most = _MOST * count
    while count < most:
        count += max(1, count // 16)
        yield count


def fits(
    space: Space, tables: Callable[[int, int], LayerTable], machine: Machine, limit: int
) -> bool:
    """Whether any configuration of a space fits."""
    # Least memory: the smallest microbatch, the highest ZeRO stage, and recovery where it helps.
    least = dataclasses.replace(space, rows=space.rows[:1], zeros=space.zeros[-1:])
    return any(
        isinstance(best_split(costs_of(tables(c.rows, c.tensor), c, machine), limit), Split)
        for c in candidates(least, tables)
    )
