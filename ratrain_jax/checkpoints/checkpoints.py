"""`Checkpoints`: the checkpoints of one training run."""

from __future__ import annotations

import json
import operator
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax

from ratrain_jax.checkpoints.leaves import check_alive, describe
from ratrain_jax.checkpoints.manifest import Manifest, check_extras
from ratrain_jax.checkpoints.places import abstract_state
from ratrain_jax.checkpoints.store import Found, Store, listed
from ratrain_jax.checkpoints.streams import connect
from ratrain_jax.checkpoints.transfers import host_copies, placed
from ratrain_jax.errors import CheckpointError, OptionError, RATrainWarning
from ratrain_jax.runtime.compiled import Compiled
from ratrain_jax.runtime.outcomes import together
from ratrain_jax.runtime.processes import several


class Restored(NamedTuple):
    """Where a run goes on.

    Attributes:
        state: as it was saved, in the layout that was asked for.
        step: how many steps led to it; 0 for a run that begins.
        extras: what was saved beside it.
    """

    state: Any
    step: int
    extras: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, in a folder that no other run can write in meanwhile.

    A checkpoint is there whole or not at all, even if the process is killed while it is written. It holds the arrays
    without the layout that they had: it is restored under any stages, ranks and ZeRO stage, or into a plain Flax state.
    Close it, or use `with`: what is still being written when Python ends may not be there.

    In a run of several processes every one makes the same calls; process 0 alone writes and reads the folder, and what
    goes wrong there is raised in all.

    Args:
        folder: made if it is not there. Checkpoints that were not written to their end are removed.
        keep: how many of the newest to keep; None for all. With more than one, a damaged one costs the steps since the
            one before it.

    Raises:
        CheckpointError: another run holds the folder, or it cannot be written in.
        OptionError: `keep` is less than 1.
        DistributedError: by any method, if the processes do not make the same calls, or one was lost.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> folder = tempfile.mkdtemp()
        >>> state = {"w": jnp.zeros(3)}
        >>> with Checkpoints(folder) as checkpoints:
        ...     state, start, extras = checkpoints.restore(state)
        ...     for step in range(start, 5):
        ...         state = {"w": state["w"] + 1}
        ...         checkpoints.save(step + 1, state, {"shard": 7})
        >>> with Checkpoints(folder) as checkpoints:
        ...     print(checkpoints.steps, checkpoints.restore(state))
        (3, 4, 5) Restored(state={'w': Array([5., 5., 5.], dtype=float32)}, step=5, extras={'shard': 7})
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int | None = 3) -> None:
        if keep is not None and keep < 1:
            raise OptionError(f"keep={keep} must be at least 1, or None to keep all checkpoints.")
        self._path = Path(folder)
        self._store: Store | None = None
        self._steps: tuple[int, ...] = ()
        self._is_writing = self._closed = False
        connect()
        self._together(lambda: self._open(keep))

    def _open(self, keep: int | None) -> None:
        if jax.process_index() == 0:
            self._store = Store(self._path, keep)

    @property
    def path(self) -> Path:
        """The folder."""
        return self._path

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of the checkpoints that are written to their end, ascending; without those found damaged.

        In a run of several processes, as it was at the last `restore`, `save` or `wait`: the same in all.
        """
        return self._steps if self._store is None or several() else self._store.steps

    def restore(self, like: Any, step: int | None = None) -> Restored:
        """Reads a checkpoint: the newest that is whole. Its files are checked against their digests.

        Where a newer one is damaged, a warning says which and why, and steps from here on may write it anew.

        Args:
            like: a state of the same model and optimizer, or its types (`jax.eval_shape`), in any layout. Leaves come back
                as it has them: stacked leaves, numpy arrays, JAX arrays with the shardings that it has. Or a compiled
                train step: then the leaves come where that step wants them, each device with its own part alone. In a run
                of several processes each gets what belongs on its devices, and whole what is on no particular ones.
            step: of which step; the newest unless given.

        Returns:
            The state, its step and its extras. Without any checkpoint: `like`, 0 and no extras.

        Raises:
            CheckpointError: the checkpoint is of another model or optimizer; none is whole; the one of `step` is damaged
                or not there; there is none and `like` has no arrays to begin with.
        """
        self._check_open()
        self.wait()
        like = abstract_state(like) if isinstance(like, Compiled) else like
        found: Found | None = None

        def read() -> Any:
            nonlocal found
            if self._store is None:
                return None
            found = self._store.read(step, lambda: describe(like))
            if found is None:
                self._check_values(like)
            return found and [json.dumps(found.manifest.table()), found.faults]

        told = self._together(read, lambda: {"what is restored": (step, _types(like))})
        if told is None:
            return Restored(like, 0, {})
        text, faults = told
        manifest = Manifest.parse(text)
        if faults:
            back = f"Went back to step {manifest.step}."
            warnings.warn(f"{' '.join(faults)} {back}", RATrainWarning, stacklevel=2)
        arrays = None if found is None else found.arrays
        return Restored(placed(arrays, manifest.leaves, like), manifest.step, manifest.extras)

    def save(self, step: int, state: Any, extras: Mapping[str, Any] | None = None) -> None:
        """Saves a state. Returns once it is copied to the host; writing goes on beside the next steps.

        One checkpoint is written at a time: a call waits for the one before to be written.

        Args:
            step: how many steps led to it; more than the newest checkpoint has.
            state: as the step returned it. Random keys, counters and a loss scale in it are saved with it.
            extras: what else a run needs to go on, such as where it is in its data: what JSON gives back as it was.

        Raises:
            CheckpointError: the checkpoint before this one could not be written, which leaves those before it as they
                were; this call saves nothing, call it again to try. Or the state was used up, a leaf is no array, the
                extras are no JSON, the step is not after the newest one, or the checkpoints were closed.
        """
        self._check_open()
        self.wait()
        step = operator.index(step)
        extras = dict(extras or {})
        self._together(
            lambda: self._check(step, state, extras),
            lambda: {"the step": step, "the state": _types(state), "what the extras hold": extras},
        )
        arrays = host_copies(state)
        if self._store is not None:
            self._store.write(Manifest(step, tuple(describe(state)), extras), arrays)
        self._is_writing = True

    def wait(self) -> None:
        """Waits until what was saved is written.

        Raises:
            CheckpointError: it could not be written; checkpoints of earlier steps are as they were.
        """
        if self._is_writing:
            self._is_writing = False
            self._together(self._wait_here)

    def _wait_here(self) -> None:
        if self._store is not None:
            self._store.wait()

    def close(self) -> None:
        """Waits until what was saved is written, and lets others use the folder.

        Raises:
            CheckpointError: it could not be written.
        """
        self._close(self.wait)

    def _close(self, wait: Callable[[], None]) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            wait()
        finally:
            if self._store is not None:
                self._store.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self._close(self._wait_here)  # what ended this process may not have ended the others
        except CheckpointError as ours:
            error.add_note(str(ours))  # what ended the run comes first

    def __repr__(self) -> str:
        return f"<Checkpoints in {self._path}: {listed(self.steps)}>"

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError(
                f"{self!r} is closed. Save and restore before the end of its `with`, or open the folder again."
            )

    def _together(
        self, call: Callable[[], Any], same: Callable[[], Mapping[str, Any]] = dict
    ) -> Any:
        """Makes a call in every process. What process 0 found is known to all then, and which steps there are."""

        def work() -> Any:
            found = call()
            return [found, () if self._store is None else self._store.steps]

        found, steps = together(work, same)
        self._steps = tuple(steps)
        return found

    def _check(self, step: int, state: Any, extras: Any) -> None:
        """Whether all this can be saved."""
        if step < 0:
            raise CheckpointError(f"step {step} must be at least 0.")
        newest = max(self.steps, default=-1)
        if step <= newest:
            raise CheckpointError(
                f"step {step} is not after step {newest}, the newest checkpoint in {self._path}. Restore that one and go"
                " on from there, remove the later ones, or use another folder."
            )
        check_extras(extras)
        leaves = describe(state)
        check_alive(state, leaves)
        if all(0 in leaf.shape for leaf in leaves):
            raise CheckpointError("the state has no arrays, so there is nothing to save.")

    def _check_values(self, like: Any) -> None:
        """Whether a run can begin."""
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(like)):
            raise CheckpointError(
                f"{self._path} has no checkpoint, and what was given are types alone. Give a state to begin with."
            )


def _types(state: Any) -> list[tuple[Any, ...]]:
    """What must be the same in every process."""
    return [(leaf.path, leaf.type) for leaf in describe(state)]
