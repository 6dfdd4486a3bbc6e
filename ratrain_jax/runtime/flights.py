"""The steps that are under way: how many, and what is left when one fails.

A step can fail in two ways. In the launching threads, then the call raises, with a note on the error that says whether the
state is still good. Or on a device, after the call has returned; then JAX raises as soon as something that the step made
is read, and a call that is given the state it made raises a `StateError`.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from ratrain_jax.distributed.failures import lost
from ratrain_jax.errors import RATrainError, StateError
from ratrain_jax.stacked_leaf import StackedLeaf, is_stacked_leaf

STEPS_IN_FLIGHT = 2
"""Steps that may be launched before the first of them has ended: more would hold memory and gain nothing."""

LOST = "The step had begun, and the state that it was given is used up: go on from a checkpoint."
KEPT = "The state that the step was given is still good."


class Flights:
    """The steps of one compiled step that were launched and perhaps have not ended."""

    def __init__(self) -> None:
        self._marks: collections.deque[list[Any]] = collections.deque()
        self._failed = False

    def add(self, marks: list[Any]) -> None:
        """Notes a step by arrays that exist once it has ended."""
        self._marks.append(jax.tree.leaves(marks))

    def admit(self, args: Sequence[Any]) -> None:
        """Waits until one more step may be launched.

        Args:
            args: what that step is given.

        Raises:
            StateError: they come from a step that failed.
        """
        while self._marks and (len(self._marks) >= STEPS_IN_FLIGHT or _over(self._marks[0])):
            # One that failed makes nobody wait, and tells of it itself by all that it made.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                _wait(self._marks.popleft())
                continue
            self._failed = True
        if self._failed:
            try:
                _wait(jax.tree.leaves(args))
            except jax.errors.JaxRuntimeError as error:
                raise lost(error) or StateError(
                    "the state or the batch comes from a step that failed; its own error stands above. Go on from a checkpoint."
                ) from error
            self._failed = False


def _over(marks: Sequence[Any]) -> bool:
    return all(mark.is_deleted() or mark.is_ready() for mark in marks)


def _wait(leaves: Sequence[Any]) -> None:
    """Waits for what is still there: a user may have given metrics away."""
    jax.block_until_ready([x for x in leaves if not (isinstance(x, jax.Array) and x.is_deleted())])


@contextlib.contextmanager
def telling(state: Any) -> Iterator[None]:
    """Adds to an error of a step that has begun whether its state is still good.

    Args:
        state: what the step was given.
    """
    try:
        yield
    except RATrainError:  # an argument was refused
        raise
    except BaseException as error:
        leaves = jax.tree.leaves(state, is_leaf=is_stacked_leaf)
        arrays = [leaf for leaf in leaves if isinstance(leaf, (jax.Array, StackedLeaf))]
        error.add_note(LOST if any(array.is_deleted() for array in arrays) else KEPT)
        raise
