"""The leaves of a batch as arrays on the host, from which each device's rows are cut."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ratrain_jax import compat
from ratrain_jax.errors import BatchError
from ratrain_jax.runtime.groups import Group
from ratrain_jax.runtime.processes import is_here


def host_array(leaf: Any) -> Any:
    """A leaf of the batch as an array that may be cut; typed keys stay JAX arrays.

    Raises:
        BatchError: parts of it lie on devices of other processes.
    """
    if isinstance(leaf, jax.Array):
        if not leaf.is_fully_addressable:
            raise BatchError(
                f"a leaf of the batch, {leaf.dtype}{list(leaf.shape)}, lies on devices of several processes, and this step"
                " needs all of it in each. Give every process the whole global batch."
            )
        if compat.is_extended(leaf.dtype):
            return leaf
    return np.array(leaf, dtype=jax.typeof(leaf).dtype)


def host_rows(leaf: Any, group: Group, name: str) -> Any:
    """A leaf that is cut along axis 0 over the ranks of a group, with at least the rows of those that are here.

    Args:
        leaf: of the batch, host-local and whole, or a global array with these rows on this process's devices.
        group: the devices.
        name: what messages call it.

    Raises:
        BatchError: a row is missing.
    """
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return host_array(leaf)
    whole = np.zeros(leaf.shape, leaf.dtype)
    seen = np.zeros(leaf.shape[0], bool)
    for shard in leaf.addressable_shards:
        whole[shard.index] = shard.data
        if all(part == slice(None) for part in shard.index[1:]):
            seen[shard.index[0]] = True
    each = leaf.shape[0] // group.size
    for rank, device in enumerate(group.devices):
        if is_here(device) and not seen[rank * each : (rank + 1) * each].all():
            raise BatchError(
                f"{name}: rows {rank * each} to {(rank + 1) * each - 1} are read on {device}, but lie in another process."
                " Give every process the whole global batch, or lay it out by data-parallel rank."
            )
    return whole
