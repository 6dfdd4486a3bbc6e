"""Errors of users' own code, in a sentence: a module that cannot be imported, a step that raises."""

from __future__ import annotations

import os
import pathlib
import sysconfig
import traceback
from typing import Final

SWITCH: Final = "RATRAIN_TRACEBACK"
"""Environment variable that asks for whole tracebacks."""
_PACKAGE: Final = pathlib.Path(__file__).parents[1]
_LIBRARIES: Final = tuple(pathlib.Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib"))


def told(error: BaseException) -> str | None:
    """What users' code raised, and where; None where no code of theirs did, or the whole traceback is asked for.

    Args:
        error: what was raised.
    """
    if os.environ.get(SWITCH, "") not in ("", "0"):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    ours = [n for n, frame in enumerate(frames) if _PACKAGE in pathlib.Path(frame.filename).parents]
    behind = frames[ours[0] :] if ours else []
    theirs = [frame for frame in behind if _is_theirs(frame.filename)]
    if not theirs:
        return None
    last = theirs[-1]
    said = str(error).strip().splitlines() or ["nothing more is said"]
    return (
        f"{last.filename}:{last.lineno}: {type(error).__name__}: {said[0].rstrip('.')}; mend it there, or set"
        f" {SWITCH}=1 to see the whole traceback."
    )


def _is_theirs(name: str) -> bool:
    parents = pathlib.Path(name).parents
    installed = "site-packages" in pathlib.Path(name).parts
    return (
        os.path.isabs(name)
        and not installed
        and not any(folder in parents for folder in (_PACKAGE, *_LIBRARIES))
    )
