"""Arrays of a layer's state, and the bytes of them on each device of a group."""

from __future__ import annotations

import dataclasses
import functools
import math

from ratrain_jax.lowering.shards import shard_axis


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a layer's state.

    Attributes:
        shape: its shape.
        itemsize: bytes of an element.
        fixed: whether every device of a group has it whole, because it never changes.
    """

    shape: tuple[int, ...]
    itemsize: int
    fixed: bool = False

    def part(self, share: float) -> Leaf:
        """What a tensor-parallel rank holds of it: a part of the largest axis, or all of it.

        Args:
            share: of its elements.
        """
        if share == 1 or not self.shape:
            return self
        axis = max(range(len(self.shape)), key=self.shape.__getitem__)
        size = math.ceil(self.shape[axis] * share)
        return dataclasses.replace(self, shape=(*self.shape[:axis], size, *self.shape[axis + 1 :]))

    @property
    def bytes(self) -> int:
        """Bytes of the whole."""
        return math.prod(self.shape) * self.itemsize

    def shard_bytes(self, devices: int) -> int:
        """Bytes on each device of a group: a part of the largest axis that they divide, or the whole."""
        whole = self.fixed or shard_axis(self.shape, devices) is None
        return self.bytes if whole else self.bytes // devices


@functools.lru_cache(maxsize=65536)
def shard_bytes(leaves: tuple[Leaf, ...], devices: int) -> int:
    """Bytes of some leaves on each device of a group."""
    return sum(leaf.shard_bytes(devices) for leaf in leaves)
