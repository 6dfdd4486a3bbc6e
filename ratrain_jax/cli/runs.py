"""The file of a run of `ratrain train`: JSON lines, written while it goes.

The first has `format` (`ratrain-run`) and `version` (1), the model, what tokens are, and the settings; each of the others
a step: `step`, `loss` (null if it is not finite), `seconds` and `tokens_per_second` (over the last ten steps, for steps
overlap), and `memory`, the most bytes so far of a device, or of the process where devices do not tell (`memory_of` of the
first line says which). In a run of several processes, all that is process 0's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from ratrain_jax.errors import OptionError

FORMAT, VERSION = "ratrain-run", 1


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A step that has run.

    Attributes:
        step: its number, from 1.
        loss: of its batch.
        seconds: of a step, over the last ten.
        tokens_per_second: likewise.
        memory: the most bytes so far.
    """

    step: int
    loss: float
    seconds: float
    tokens_per_second: float
    memory: int

    def line(self) -> str:
        """The step as a line of the run's file."""
        loss = self.loss if math.isfinite(self.loss) else None
        return json.dumps({**dataclasses.asdict(self), "loss": loss})

    def __str__(self) -> str:
        from ratrain_jax.lowering.text import readable_bytes

        return (
            f"step {self.step:6}  loss {self.loss:8.4f}  {self.tokens_per_second:9,.0f} tokens/s"
            f"  {readable_bytes(self.memory)}"
        )


def check(path: str, overwrite: bool, goes_on: bool) -> None:
    """Checks that the run may be written.

    Args:
        path: its file.
        overwrite: whether the file may be replaced.
        goes_on: whether the run goes on from a checkpoint, and so with the file of its beginning.

    Raises:
        OptionError: another file is there.
    """
    if overwrite or not os.path.exists(path):
        return
    if not goes_on:
        raise OptionError(
            f"{path} is there already; name another file with -o, or give --overwrite."
        )
    if not _is_run(path):
        raise OptionError(
            f"{path} is not the file of a run, so it cannot be gone on with; name another file with -o."
        )


@contextlib.contextmanager
def opened(path: str, head: Mapping[str, Any], start: int) -> Iterator[TextIO]:
    """The file of a run, to write its steps in.

    Args:
        path: the file, as `check` found it good.
        head: what the first line says.
        start: the step behind which the run goes on; later ones are taken out of a file that is there.
    """
    lines = [json.dumps({"format": FORMAT, "version": VERSION, **head})]
    if start and os.path.exists(path) and _is_run(path):
        lines = _until(path, start)
    fresh = Path(f"{path}.new")  # the old one stays whole until this one is
    fresh.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    fresh.replace(path)
    with open(path, "a", encoding="utf-8") as file:
        yield file


def write(file: TextIO, step: Step) -> None:
    """Writes a step, at once."""
    file.write(f"{step.line()}\n")
    file.flush()


def _is_run(path: str) -> bool:
    try:
        with open(path, encoding="utf-8") as file:
            return json.loads(file.readline()).get("format") == FORMAT
    except (ValueError, AttributeError):
        return False


def _until(path: str, start: int) -> list[str]:
    """The head of a run and its steps until one; a last line may be torn."""
    kept = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            if json.loads(line).get("step", 0) <= start:
                kept.append(line)
    return kept
