"""`Store`: the checkpoints in a folder, as the one process that holds it reads and writes them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from ratrain_jax.checkpoints.folder import Folder
from ratrain_jax.checkpoints.leaves import compare
from ratrain_jax.checkpoints.manifest import Leaf, Manifest
from ratrain_jax.checkpoints.storage import read_arrays, read_manifest, write
from ratrain_jax.errors import CheckpointError


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that was read.

    Attributes:
        manifest: what is said of it.
        arrays: one a leaf.
        faults: what is wrong with newer ones, a sentence each.
    """

    manifest: Manifest
    arrays: list[np.ndarray]
    faults: list[str]


class Store:
    """The checkpoints in a folder. They are written on a thread of their own, one at a time.

    Args:
        folder: made if it is not there.
        keep: how many of the newest to keep; None for all.

    Raises:
        CheckpointError: another run holds the folder, or it cannot be written in.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int | None) -> None:
        self._folder = Folder(folder)
        self._keep = keep
        self._damaged: set[int] = set()
        self._thread = ThreadPoolExecutor(1, "ratrain-checkpoints")
        self._writing: tuple[int, Future[None]] | None = None

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of the checkpoints that are written to their end, ascending; without those found damaged."""
        return tuple(step for step in self._folder.steps() if step not in self._damaged)

    def read(self, step: int | None, leaves: Callable[[], Sequence[Leaf]]) -> Found | None:
        """Reads the newest checkpoint that is whole; steps from there on may be written anew.

        Args:
            step: of which step; the newest unless given.
            leaves: of the state that is wanted; asked for only where a checkpoint is.

        Returns:
            It; None without any checkpoint.

        Raises:
            CheckpointError: it is of another model or optimizer; none is whole; that of `step` is damaged or not there.
        """
        steps = self.steps
        if step is not None and step not in steps:
            raise CheckpointError(
                f"{self._folder.path} has no whole checkpoint of step {step}; whole are: {listed(steps)}."
            )
        faults: list[str] = []
        for number in (step,) if step is not None else reversed(steps):
            try:
                manifest, arrays = self._read(number, leaves())
            except _Damaged as error:
                faults.append(f"{self._folder.at(number)} is damaged: {error}")
                continue
            self._damaged.update(n for n in steps if step is None and n > number)
            return Found(manifest, arrays, faults)
        if faults:
            raise CheckpointError(
                f"{' '.join(faults)} Restore another step, or remove the folder to begin anew."
            )
        return None

    def _read(self, step: int, leaves: Sequence[Leaf]) -> tuple[Manifest, list[np.ndarray]]:
        path = self._folder.at(step)
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            raise _Damaged(str(error)) from error
        if manifest.step != step:
            raise _Damaged(f"its manifest is that of step {manifest.step}.")
        compare(manifest.leaves, leaves, str(path))
        try:
            return manifest, read_arrays(path, manifest)
        except CheckpointError as error:
            raise _Damaged(str(error)) from error

    def write(self, manifest: Manifest, arrays: list[np.ndarray]) -> None:
        """Begins to write a checkpoint, and then to remove the oldest."""
        self._writing = (manifest.step, self._thread.submit(self._write, manifest, arrays))

    def _write(self, manifest: Manifest, arrays: list[np.ndarray]) -> None:
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

    def wait(self) -> None:
        """Waits until what was begun is written.

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
                f" whole: {listed(self.steps)}."
            ) from error

    def close(self) -> None:
        """Lets others use the folder, once nothing is being written."""
        self._thread.shutdown()
        self._folder.close()


class _Damaged(Exception):
    """A checkpoint cannot be read, or was altered."""


def listed(steps: Sequence[int]) -> str:
    """Steps as messages show them."""
    if not steps:
        return "none"
    shown = ", ".join(map(str, steps[-5:]))
    return f"step {shown}" if len(steps) == 1 else f"steps {'…, ' if steps[5:] else ''}{shown}"
