"""How a process leaves that has failed.

JAX lets a process that ends wait until all others end too. One that failed has nothing to wait for, and the others, which
may be waiting for it in a collective, learn of its end only once its connections are closed.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from types import TracebackType
from typing import Final

_GRACE: Final = 5.0
"""Seconds that a failed process has for ending by itself."""
_INTERRUPTED: Final = 130

_code: int | None = None
"""The exit code of a process that has failed."""
_watching = False


def watch() -> None:
    """From now on an exception that nobody catches ends this process at once, once it has been shown."""
    global _watching
    if _watching:
        return
    _watching = True
    shown = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        from ratrain_jax.distributed import failures  # it needs this module

        shown(kind, error, traceback)
        fail(_INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1)
        # What waits for a step's results outside of this package gets JAX's own error.
        found = failures.lost(error)
        if found is not None:
            print(f"{type(found).__name__}: {found}", file=sys.stderr, flush=True)
        # No thread that waits for another process may hold this one.
        last = threading.Timer(_GRACE, _leave)
        last.daemon = True
        last.start()

    sys.excepthook = hook
    atexit.register(_leave)  # registered after JAX's own, and so called before it


def fail(code: int = 1) -> None:
    """Notes that this process has failed: however it ends, it will not wait for the others. Alone it ends as ever.

    Args:
        code: its exit code.
    """
    global _code
    if _watching:
        _code = code


def _leave() -> None:
    if _code is None:
        return
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    logging.shutdown()
    os._exit(_code)
