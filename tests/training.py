"""Trains small models for the end-to-end tests, and compares what comes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

TWO_BY_TWO = {"stages": 2, "data_parallel": 2, "microbatches": 2}


@dataclasses.dataclass(frozen=True, slots=True)
class Trained:
    """What a run leaves.

    Attributes:
        state: the last state, as numpy arrays.
        metrics: what each step returned beside it, as numpy arrays.
    """

    state: Any
    metrics: list[Any]

    def losses(self) -> list[float]:
        """The loss of each step."""
        return [float(metrics["loss"]) for metrics in self.metrics]


def train(step: Callable[..., Any], state: Any, batches: Sequence[Any]) -> Trained:
    """Trains over the batches. Steps are waited for at the end alone, so that they may overlap."""
    kept = []
    for batch in batches:
        state, metrics = step(state, batch)
        kept.append(metrics)
    return Trained(jax.tree.map(np.asarray, state), jax.tree.map(np.asarray, kept))


def named_leaves(tree: Any) -> dict[str, np.ndarray]:
    """Every leaf as a numpy array, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def differing(one: Any, other: Any) -> list[str]:
    """Paths of the leaves that are not equal to the last bit."""
    ours, theirs = named_leaves(one), named_leaves(other)
    assert ours.keys() == theirs.keys()
    return [
        name
        for name, leaf in ours.items()
        if leaf.dtype != theirs[name].dtype or leaf.tobytes() != theirs[name].tobytes()
    ]


def assert_close(ours: Any, theirs: Any, atol: float = 1e-6, rtol: float = 1e-5) -> None:
    """Asserts that two trees have the same shapes and dtypes, and values that differ by rounding in float32."""
    ours, theirs = named_leaves(ours), named_leaves(theirs)
    assert ours.keys() == theirs.keys()
    for name, leaf in ours.items():
        assert (leaf.shape, leaf.dtype) == (theirs[name].shape, theirs[name].dtype), name
        np.testing.assert_allclose(leaf, theirs[name], rtol=rtol, atol=atol, err_msg=name)
