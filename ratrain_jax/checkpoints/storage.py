"""Checkpoints on disk, written and read by Orbax: `<step>/state` holds the arrays, `<step>/manifest.json` the manifest."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from ratrain_jax.checkpoints.manifest import File, Leaf, Manifest
from ratrain_jax.errors import CheckpointError

STATE, MANIFEST = "state", "manifest.json"
UNFINISHED = ".orbax-checkpoint-tmp"
"""What is in the names of folders that Orbax is still writing."""


_ALONE = ocp.options.MultiprocessingOptions(
    primary_host=0, active_processes={0}, barrier_sync_key_prefix="ratrain"
)
"""Process 0 writes and reads; no other takes part."""


class _Handler(ocp.CompositeCheckpointHandler):
    """Orbax's handler of a folder with one item; with a manifest, it writes that too before the folder gets its name."""

    def __init__(self, manifest: Manifest | None = None) -> None:
        super().__init__(
            composite_options=ocp.CompositeOptions(multiprocessing_options=_ALONE),
            state=ocp.PyTreeCheckpointHandler(multiprocessing_options=_ALONE),
        )
        self._manifest = manifest

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        if self._manifest is not None:
            folder = Path(directory)
            parts = sorted(path for path in (folder / STATE).rglob("*") if path.is_file())
            files = tuple(File.of(folder, path) for path in parts)
            manifest = dataclasses.replace(self._manifest, files=files).signed()
            text = json.dumps(manifest.table(), indent=1)
            (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


@ocp.args.register_with_handler(_Handler, for_save=True, for_restore=True)
class _Args(ocp.args.Composite, ocp.args.CheckpointArgs):
    """What Orbax's handler is given."""


def write(path: Path, manifest: Manifest, arrays: Sequence[np.ndarray]) -> None:
    """Writes a checkpoint: its folder appears when all is in it.

    Args:
        path: the folder.
        manifest: without files.
        arrays: one a leaf.
    """
    pairs = zip(manifest.leaves, arrays, strict=True)
    # Orbax takes no arrays without elements.
    tree = _tree([(leaf, array) for leaf, array in pairs if array.size])
    with ocp.Checkpointer(_Handler(manifest), multiprocessing_options=_ALONE) as checkpointer:
        checkpointer.save(path.resolve(), args=_Args(state=ocp.args.PyTreeSave(tree)))


def read_manifest(path: Path) -> Manifest:
    """Reads what is said of a checkpoint.

    Raises:
        CheckpointError: it is damaged.
    """
    return Manifest.load(path / MANIFEST)


def read_arrays(path: Path, manifest: Manifest) -> list[np.ndarray]:
    """Reads the arrays of a checkpoint, once all its files are found to be as they were written.

    Returns:
        An array a leaf.

    Raises:
        CheckpointError: it is damaged.
    """
    for file in manifest.files:
        file.check(path)
    kept = [leaf for leaf in manifest.leaves if 0 not in leaf.shape]
    args = _tree([(leaf, ocp.RestoreArgs(restore_type=np.ndarray)) for leaf in kept])
    restore = ocp.args.PyTreeRestore(restore_args=args)
    try:
        with ocp.Checkpointer(_Handler(), multiprocessing_options=_ALONE) as checkpointer:
            found = checkpointer.restore(path.resolve(), args=_Args(state=restore))
    except MemoryError:
        raise
    except Exception as error:  # whatever the parsers of Orbax and TensorStore meet
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"its arrays cannot be read: {reason}.") from error
    return [_leaf(leaf, found[STATE]) for leaf in manifest.leaves]


def _leaf(leaf: Leaf, tree: Any) -> np.ndarray:
    if 0 in leaf.shape:
        return _empty(leaf)
    for part in _keys(leaf):
        tree = tree[part]
    return np.asarray(tree)


def _empty(leaf: Leaf) -> np.ndarray:
    if leaf.key is None:
        return np.empty(leaf.shape, leaf.dtype)
    one = jax.random.key_data(jax.random.key(0, impl=leaf.key))
    return np.empty((*leaf.shape, *one.shape), one.dtype)


def _tree(items: Sequence[tuple[Leaf, Any]]) -> dict[str, Any]:
    """Nested dicts by the leaves' paths: what Orbax takes, and gives to who reads the checkpoint by it alone."""
    tree: dict[str, Any] = {}
    for leaf, item in items:
        *parents, last = _keys(leaf)
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = item
    return tree


def _keys(leaf: Leaf) -> list[str]:
    """A leaf's path in Orbax, which joins keys by dots and names files by them."""
    parts = leaf.path or ("state",)
    return [p.replace("%", "%25").replace(".", "%2E").replace("/", "%2F") or "%" for p in parts]
