"""The checkpoints of `ratrain train`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from ratrain_jax.errors import OptionError

if TYPE_CHECKING:
    from ratrain_jax.checkpoints.checkpoints import Checkpoints
    from ratrain_jax.runtime.compiled import Compiled

_WORDS: Final = {
    "seed": "--seed",
    "rows": "number of passages a step",
    "sequence": "--sequence",
    "text": "text",
}
"""What says which batches a run takes, as messages call it."""


class Saves:
    """When a run is saved, and where it goes on.

    Args:
        checkpoints: None for a run that is not saved.
        every: steps from one checkpoint to the next.
        last: the step that is saved in any case.
        data: what says which batches the run takes.
    """

    def __init__(
        self, checkpoints: Checkpoints | None, every: int, last: int, data: Mapping[str, Any]
    ) -> None:
        self._checkpoints, self._every, self._last = checkpoints, every, last
        self._data = dict(data)

    @property
    def is_begun(self) -> bool:
        """Whether there is a checkpoint."""
        return self._checkpoints is not None and bool(self._checkpoints.steps)

    def restore(self, compiled: Compiled) -> tuple[Any, int]:
        """The newest state, and its step.

        Raises:
            CheckpointError: it cannot be read, or is of another model.
            OptionError: the run took other batches.
        """
        assert self._checkpoints is not None
        state, step, extras = self._checkpoints.restore(compiled)
        apart = [_WORDS[name] for name, value in self._data.items() if extras.get(name) != value]
        if apart:
            raise OptionError(
                f"the checkpoints in {self._checkpoints.path} are of a run with another {' and another '.join(apart)};"
                " give the same, or name another folder."
            )
        return state, step

    def is_due(self, step: int) -> bool:
        """Whether the state behind a step is to be saved."""
        return self._checkpoints is not None and (step % self._every == 0 or step == self._last)

    def save(self, step: int, state: Any) -> None:
        """Saves a state, and goes on while it is written."""
        assert self._checkpoints is not None
        self._checkpoints.save(step, state, self._data)


@contextlib.contextmanager
def saves(folder: str | None, every: int, last: int, data: Mapping[str, Any]) -> Iterator[Saves]:
    """The checkpoints in a folder, while a run holds it.

    Args:
        folder: None for a run that is not saved.
        every: steps from one checkpoint to the next.
        last: the step that is saved in any case.
        data: what says which batches the run takes.
    """
    if folder is None:
        yield Saves(None, every, last, data)
        return
    from ratrain_jax.checkpoints.checkpoints import Checkpoints

    with Checkpoints(folder) as checkpoints:
        yield Saves(checkpoints, every, last, data)
