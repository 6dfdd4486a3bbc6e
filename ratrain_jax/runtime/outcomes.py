"""What a call comes to, the same in every process: what process 0 found, or the error of whichever process failed.

A process that goes on to a collective which another will never launch waits in vain. So where one may fail alone, as the one
that writes to a disk may, all hear of it before they go on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ratrain_jax import errors
from ratrain_jax.distributed.failures import named
from ratrain_jax.errors import DistributedError, RATrainError
from ratrain_jax.runtime.processes import exchange_text, several
from ratrain_jax.runtime.turns import in_turn


def together(call: Callable[[], Any], same: Callable[[], Mapping[str, Any]] = dict) -> Any:
    """Makes a call in every process; all must take part.

    Args:
        call: what it gives in process 0 is what JSON gives back as it was.
        same: gives what must have an equal `repr` in every process, by what messages call it; not asked for in a run of one.

    Returns:
        What it gave in process 0.

    Raises:
        RATrainError: the call raised it in this process, or in another.
        DistributedError: in another process it raised something else, or what must be the same is not.
    """
    if not several():
        return call()
    said: dict[str, Any] = {}
    own: Exception | None = None
    try:
        said["same"] = {name: _digest(value) for name, value in same().items()}
        found = call()
        if jax.process_index() == 0:
            said["found"] = found
    except Exception as error:
        own = error
        said["error"] = [type(error).__name__, str(error)]
    with named():
        every = in_turn(lambda: [json.loads(one) for one in exchange_text(_padded(said))])
    if own is not None:
        raise own
    for process, one in enumerate(every):
        if "error" in one:
            raise _raised(process, *one["error"])
    # Else an error may be the only sign that they differ.
    _compare([one["same"] for one in every])
    return every[0]["found"]


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _padded(said: Any) -> str:
    """JSON of few different lengths: each is another program to compile."""
    text = json.dumps(said)
    return text.ljust(1 << max(len(text), 256).bit_length())


def _raised(process: int, kind: str, text: str) -> RATrainError:
    """The error of another process."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, RATrainError):
        return found(text)
    return DistributedError(f"process {process} failed with {kind}: {text}")


def _compare(every: list[dict[str, str]]) -> None:
    first = every[0]
    for name in first:
        apart = [n for n, one in enumerate(every) if one.get(name) != first[name]]
        if apart:
            raise DistributedError(
                f"{name} is not the same in process {', '.join(map(str, apart))} as in process 0. Let all processes run the"
                " same script with the same arguments and versions, on batches of the same shapes."
            )
