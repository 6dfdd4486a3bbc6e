"""Compiles what ops run: one executable for all equal ops of a group.

Executables depend on the step's code and the devices alone, so steps that differ only in schedule, switches or recovery share
one `Library`: they run the very same executables.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ratrain_jax.runtime.groups import Group
from ratrain_jax.runtime.launches import turn_type, with_token, with_turn
from ratrain_jax.runtime.recipes import Recipe
from ratrain_jax.runtime.workers import Task, Workers

WORKERS = 2


class Library:
    """Executables of one step's code, each made once a group.

    Args:
        groups: the groups.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._made: dict[Any, Task] = {}

    def get(self, stage: int, recipe: Recipe) -> Task:
        """The executable of a recipe, perhaps still being compiled."""
        key = (stage, recipe.key)
        if key not in self._made:
            group = self._groups[stage]
            self._made[key] = _pool().submit(functools.partial(_compile, group, recipe))
        return self._made[key]

    def finish(self, progress: Callable[[int, int], None]) -> int:
        """Waits for all that was asked for, and tells how far it is; returns how many there are."""
        tasks = list(self._made.values())
        for count, task in enumerate(tasks, 1):
            task.result()
            progress(count, len(tasks))
        return len(tasks)

    def give_up(self) -> None:
        """Forgets what failed or is not being compiled yet, so that it is tried again when it is next asked for."""
        for key, task in list(self._made.items()):
            if task.failed or task.cancel():
                self._made.pop(key, None)


def _compile(group: Group, recipe: Recipe) -> Any:
    function, types, donate = recipe.function, recipe.types, recipe.donate
    if chained(group, recipe):
        function, types = with_turn(function), (turn_type(group), *types)
        donate = tuple(1 + number for number in donate)
    elif group.size > 1:
        function = with_token(function)
    local = jax.tree.map(lambda t: group.local_type(t.shape, t.dtype), types)
    return group.compile(function, local, donate)


def chained(group: Group, recipe: Recipe) -> bool:
    """Whether a recipe's executable takes and gives a turn (see `ratrain_jax.runtime.launches`).

    Collectives do; and what takes arrays without elements, for JAX compiles nothing for several devices that uses no others.
    """
    if group.size == 1:
        return False
    return recipe.collective or any(0 in kind.shape for kind in jax.tree.leaves(recipe.types))


_libraries: weakref.WeakValueDictionary[Any, Library] = weakref.WeakValueDictionary()
_lock = threading.Lock()
_pools: list[Workers] = []


def _pool() -> Workers:
    """The threads that compile; XLA compiles outside Python's lock."""
    with _lock:
        if not _pools:
            _pools.append(Workers(WORKERS, "ratrain-compile"))
        return _pools[0]


def shared_library(fingerprint: str, groups: Sequence[Group]) -> Library:
    """The library of a step's code on these groups: the one that a living compiled step has, or a new one."""
    devices = tuple(device.id for group in groups for device in group.devices)
    options = tuple(sorted((name, str(value)) for name, value in groups[0].options.items()))
    key = (fingerprint, devices, options, jax.numpy.result_type(float).name)
    library = _libraries.get(key)
    if library is None:
        library = Library(groups)
        _libraries[key] = library
    return library
