"""`StackedLeaf`: a leaf of the state that holds one array a layer, each on its own stage.

A model written with `nn.scan` or `lax.scan` has stacked leaves: axis 0 counts the layers. A compiled step keeps
the layers apart, on the devices of their stages. With `state_layout="layers"` it hands such a leaf back as it
lies, without a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np


@jax.tree_util.register_pytree_with_keys_class
class StackedLeaf:
    """A stacked array, held as one array a layer.

    It is a node of the pytree that it is in: `jax.tree.map`, `jax.block_until_ready` and checkpointers see the
    layers' arrays. It is no operand of `jax.numpy`: take a layer, `leaf[3]`, or bring the whole leaf to the host,
    `numpy.asarray(leaf)`. A decorated step takes it wherever it takes the stacked array.

    Args:
        slices: the layers' arrays, or stacked leaves again where scans were nested.

    Attributes:
        slices: the same.

    Example:
        >>> import jax.numpy as jnp
        >>> leaf = StackedLeaf([jnp.zeros(3), jnp.ones(3)])
        >>> leaf.shape, len(leaf), float(leaf[1].sum()), np.asarray(leaf).sum()
        ((2, 3), 2, 3.0, np.float32(3.0))
    """

    __slots__ = ("slices",)

    def __init__(self, slices: Sequence[Any]) -> None:
        self.slices = tuple(slices)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stacked array."""
        return (len(self.slices), *self.slices[0].shape)

    @property
    def dtype(self) -> Any:
        """The type of its elements."""
        return self.slices[0].dtype

    @property
    def ndim(self) -> int:
        """How many axes it has, the layers' included."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many elements it has."""
        return sum(part.size for part in self.slices)

    @property
    def nbytes(self) -> int:
        """How many bytes its elements take, each counted once."""
        return sum(part.nbytes for part in self.slices)

    def is_deleted(self) -> bool:
        """Whether any of its arrays was used up; numpy's never are."""
        parts = (p for p in self.slices if isinstance(p, (jax.Array, StackedLeaf)))
        return any(part.is_deleted() for part in parts)

    def __len__(self) -> int:
        return len(self.slices)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.slices)

    def __getitem__(self, index: Any) -> Any:
        """A layer; a part of one, with further indices; for a slice of layers, a stacked leaf; else a numpy array."""
        if isinstance(index, slice):
            return StackedLeaf(self.slices[index])
        first, *rest = index if isinstance(index, tuple) and index else (index,)
        if isinstance(first, (int, np.integer)) and not isinstance(first, bool):
            part = self.slices[first]
            return part[tuple(rest)] if rest else part
        return np.asarray(self)[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("a StackedLeaf is an array only by a copy; its layers lie apart.")
        return np.stack([np.asarray(part) for part in self.slices]).astype(dtype or self.dtype)

    def __repr__(self) -> str:
        return (
            f"StackedLeaf({len(self.slices)} × {self.slices[0]!r})"
            if self.slices
            else "StackedLeaf([])"
        )

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], None]:
        """For `jax.tree_util`: the layers' arrays, each with its number."""
        return [(jax.tree_util.SequenceKey(n), part) for n, part in enumerate(self.slices)], None

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        """For `jax.tree_util`: the layers' arrays."""
        return self.slices, None

    @classmethod
    def tree_unflatten(cls, _: None, slices: Sequence[Any]) -> StackedLeaf:
        """For `jax.tree_util`: a stacked leaf of other layers."""
        return cls(slices)


def is_stacked_leaf(node: Any) -> bool:
    """Whether a node of a tree is a stacked leaf."""
    return isinstance(node, StackedLeaf)
