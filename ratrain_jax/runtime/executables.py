"""Compiles what ops run: one executable for all equal ops of a group."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ratrain_jax.runtime.groups import Group
from ratrain_jax.runtime.recipes import Recipe


class Library:
    """Executables of one program, each made once a group.

    Args:
        groups: the groups.
        workers: threads that compile.
    """

    def __init__(self, groups: Sequence[Group], workers: int = 2) -> None:
        self._groups = groups
        self._pool = concurrent.futures.ThreadPoolExecutor(workers, "ratrain-compile")
        self._made: dict[Any, concurrent.futures.Future[Any]] = {}

    def get(self, stage: int, recipe: Recipe) -> concurrent.futures.Future[Any]:
        """The executable of a recipe, perhaps still being compiled."""
        key = (stage, recipe.key)
        if key not in self._made:
            group = self._groups[stage]
            types = jax.tree.map(lambda t: group.local_type(t.shape, t.dtype), recipe.types)
            self._made[key] = self._pool.submit(
                group.compile, recipe.function, types, recipe.donate
            )
        return self._made[key]

    def finish(self, progress: Callable[[int, int], None] | None = None) -> int:
        """Waits for all; returns how many there are."""
        futures = list(self._made.values())
        for count, _ in enumerate(concurrent.futures.as_completed(futures), 1):
            if progress is not None:
                progress(count, len(futures))
        self._pool.shutdown()
        for future in futures:
            future.result()
        return len(futures)
