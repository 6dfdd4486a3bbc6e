"""`Checkpoints`: the checkpoints of one training run."""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np

from ratrain_jax.checkpoints.folder import Folder
from ratrain_jax.checkpoints.leaves import compare, describe, host_copy, place
from ratrain_jax.checkpoints.manifest import Leaf, Manifest, check_extras
from ratrain_jax.checkpoints.places import abstract_state
from ratrain_jax.checkpoints.storage import read_arrays, read_manifest, write
from ratrain_jax.errors import CheckpointError, OptionError, RATrainWarning
from ratrain_jax.runtime.compiled import Compiled
from ratrain_jax.stacked_leaf import is_stacked_leaf


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

    Args:
        folder: made if it is not there. Checkpoints that were not written to their end are removed.
        keep: how many of the newest to keep; None for all. With more than one, a damaged one costs the steps since the
            one before it.

    Raises:
        CheckpointError: another run holds the folder, or it cannot be written in.
        OptionError: `keep` is less than 1.

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
        self._folder = Folder(folder)
        self._keep = keep
        self._damaged: set[int] = set()
        self._thread = ThreadPoolExecutor(1, "ratrain-checkpoints")
        self._writing: tuple[int, Future[None]] | None = None
        self._closed = False

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of the checkpoints that are written to their end, ascending; without those found damaged."""
        return tuple(step for step in self._folder.steps() if step not in self._damaged)

    def restore(self, like: Any, step: int | None = None) -> Restored:
        """Reads a checkpoint: the newest that is whole. Its files are checked against their digests.

        Where a newer one is damaged, a warning says which and why, and steps from here on may write it anew.

        Args:
            like: a state of the same model and optimizer, or its types (`jax.eval_shape`), in any layout. Leaves come back
                as it has them: stacked leaves, numpy arrays, JAX arrays with the shardings that it has. Or a compiled
                train step: then the leaves come where that step wants them, each device with its own part alone.
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
        steps = self.steps
        if step is not None and step not in steps:
            raise CheckpointError(
                f"{self._folder.path} has no whole checkpoint of step {step}; whole are: {_listed(steps)}."
            )
        faults: list[str] = []
        for number in (step,) if step is not None else reversed(steps):
            try:
                manifest, arrays = self._read(number, like)
            except _Damaged as error:
                faults.append(f"{self._folder.at(number)} is damaged: {error}")
                continue
            if faults:
                warnings.warn(
                    f"{' '.join(faults)} Went back to step {number}.", RATrainWarning, stacklevel=2
                )
            self._damaged.update(n for n in steps if step is None and n > number)
            return Restored(_placed(arrays, manifest, like), manifest.step, manifest.extras)
        if faults:
            raise CheckpointError(
                f"{' '.join(faults)} Restore another step, or remove the folder to begin anew."
            )
        return self._fresh(like)

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
        self._check_step(step)
        extras = dict(extras or {})
        check_extras(extras)
        leaves = describe(state)
        given = jax.tree.leaves(state, is_leaf=is_stacked_leaf)
        arrays = [host_copy(leaf, d.name) for leaf, d in zip(given, leaves, strict=True)]
        if not any(array.size for array in arrays):
            raise CheckpointError("the state has no arrays, so there is nothing to save.")
        manifest = Manifest(step, tuple(leaves), extras)
        self._writing = (step, self._thread.submit(self._write, manifest, arrays))

    def wait(self) -> None:
        """Waits until what was saved is written.

        Raises:
            CheckpointError: it could not be written; checkpoints of earlier steps are as they were.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        step, future = writing
        try:
            future.result()
        except Exception as error:
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self._folder.path}: {error}\nThose that are"
                f" whole: {_listed(self.steps)}."
            ) from error

    def close(self) -> None:
        """Waits until what was saved is written, and lets others use the folder.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._folder.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except CheckpointError as ours:
            if error is None:
                raise
            error.add_note(str(ours))  # what ended the run comes first

    def __repr__(self) -> str:
        return f"<Checkpoints in {self._folder.path}: {_listed(self.steps)}>"

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError(
                f"{self!r} is closed. Save and restore before the end of its `with`, or open the folder again."
            )

    def _check_step(self, step: int) -> None:
        if step < 0:
            raise CheckpointError(f"step {step} must be at least 0.")
        newest = max(self.steps, default=-1)
        if step <= newest:
            raise CheckpointError(
                f"step {step} is not after step {newest}, the newest checkpoint in {self._folder.path}. Restore that one"
                " and go on from there, remove the later ones, or use another folder."
            )

    def _write(self, manifest: Manifest, arrays: list[np.ndarray]) -> None:
        """Writes a checkpoint, then removes the oldest; on a thread of its own."""
        self._folder.remove(manifest.step)  # a damaged one
        try:
            write(self._folder.at(manifest.step), manifest, arrays)
        except BaseException:
            self._folder.clear()  # its part of a full disk is needed
            raise
        self._damaged.discard(manifest.step)
        if self._keep is not None:
            oldest = self.steps[-self._keep :][0]
            for step in self._folder.steps():
                if step < oldest:
                    self._folder.remove(step)

    def _read(self, step: int, like: Any) -> tuple[Manifest, list[np.ndarray]]:
        path = self._folder.at(step)
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            raise _Damaged(str(error)) from error
        if manifest.step != step:
            raise _Damaged(f"its manifest is that of step {manifest.step}.")
        compare(manifest.leaves, describe(like), str(path))
        try:
            return manifest, read_arrays(path, manifest)
        except CheckpointError as error:
            raise _Damaged(str(error)) from error

    def _fresh(self, like: Any) -> Restored:
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(like)):
            raise CheckpointError(
                f"{self._folder.path} has no checkpoint, and what was given are types alone. Give a state to begin with."
            )
        return Restored(like, 0, {})


class _Damaged(Exception):
    """A checkpoint cannot be read, or was altered."""


def _placed(arrays: list[np.ndarray], manifest: Manifest, like: Any) -> Any:
    """The state, with its leaves in the order and the places of a like one."""
    by_path: dict[tuple[str, ...], tuple[np.ndarray, Leaf]] = {
        leaf.path: (array, leaf) for array, leaf in zip(arrays, manifest.leaves, strict=True)
    }
    leaves, tree = jax.tree.flatten(like, is_leaf=is_stacked_leaf)
    described = describe(like)
    return tree.unflatten(
        [place(*by_path[d.path], leaf) for d, leaf in zip(described, leaves, strict=True)]
    )


def _listed(steps: tuple[int, ...]) -> str:
    if not steps:
        return "none"
    shown = ", ".join(map(str, steps[-5:]))
    return f"step {shown}" if len(steps) == 1 else f"steps {'…, ' if steps[5:] else ''}{shown}"
