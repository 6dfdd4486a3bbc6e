"""The manifest of a checkpoint: what is in it, with digests; JSON, read as data only."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any, Final

from ratrain_jax.errors import CheckpointError
from ratrain_jax.lowering.records import Form, Problem, read, teach

FORM: Final = Form("ratrain-checkpoint", 1, "manifest", CheckpointError)


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of a saved state.

    Attributes:
        path: keys, fields and numbers from the state's root, as strings.
        shape: of the whole array; of an array of random keys, the keys' own.
        dtype: its name; `key<fry>` and the like for random keys.
        weak: whether JAX took its type from a Python number.
        key: the implementation of random keys; None for other leaves.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    weak: bool = False
    key: str | None = None

    @property
    def name(self) -> str:
        """Its path as messages show it."""
        return "/".join(self.path) or "the state"

    @property
    def type(self) -> str:
        """Its type as messages show it."""
        return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True, slots=True)
class File:
    """A file that holds a part of a saved state.

    Attributes:
        path: from the checkpoint's folder, with slashes.
        bytes: its size.
        sha256: its digest.
    """

    path: str
    bytes: int
    sha256: str

    @staticmethod
    def of(folder: Path, path: Path) -> File:
        """Reads a file for its size and digest."""
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            return File(path.relative_to(folder).as_posix(), file.tell(), found)

    def check(self, folder: Path) -> None:
        """Checks that the file is as it was.

        Raises:
            CheckpointError: it is not.
        """
        try:
            found = File.of(folder, folder / self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}.") from error
        if found.bytes != self.bytes:
            raise CheckpointError(f"{self.path} has {found.bytes} bytes instead of {self.bytes}.")
        if found != self:
            raise CheckpointError(f"{self.path} was altered: its digest is another.")


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: how many steps led to the state.
        leaves: of the state.
        extras: what the user added.
        files: that hold the leaves.
        sha256: of all the rest.
    """

    step: int
    leaves: tuple[Leaf, ...]
    extras: dict[str, Any]
    files: tuple[File, ...] = ()
    sha256: str = ""

    def signed(self) -> Manifest:
        """The same with its digest."""
        text = json.dumps({**self.table(), "sha256": ""}, sort_keys=True)
        return dataclasses.replace(self, sha256=hashlib.sha256(text.encode()).hexdigest())

    def table(self) -> dict[str, Any]:
        """What its file holds."""
        return {**FORM.head, **dataclasses.asdict(self)}

    @staticmethod
    def load(path: Path) -> Manifest:
        """Reads a manifest from a file.

        Raises:
            CheckpointError: it cannot be read, and as `parse` does.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"its manifest cannot be read: {error}.") from error
        return Manifest.parse(text)

    @staticmethod
    def parse(text: str) -> Manifest:
        """Reads a manifest.

        Raises:
            CheckpointError: it is none, is of another version, or was altered.
        """
        manifest = read(Manifest, text, FORM)
        if manifest != manifest.signed():
            raise CheckpointError("the manifest was altered: its digest is another.")
        return manifest


def check_extras(value: Any, where: str = "extras") -> None:
    """Checks that JSON gives a value back as it is.

    Raises:
        CheckpointError: it does not; the message says where.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str:
                raise CheckpointError(f"{where} has the key {key!r}; keys must be strings.")
            check_extras(item, f"{where}[{key!r}]")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            check_extras(item, f"{where}[{number}]")
    elif type(value) not in (bool, int, str, type(None)) and not (
        type(value) is float and math.isfinite(value)
    ):
        raise CheckpointError(
            f"{where} is {value!r} of type {type(value).__name__}; extras are what JSON gives back as it was:"
            " dicts, lists, strings, finite numbers, True, False, None. Put arrays and random keys into the state."
        )


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Problem("an object", value)
    return value


teach(dict[str, Any], _object)
