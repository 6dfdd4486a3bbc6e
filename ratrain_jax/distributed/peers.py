"""The processes of a run, as each knows the others: host, process number of the operating system, and whether it still runs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import socket
import sys
from typing import Final

from ratrain_jax.distributed import departures
from ratrain_jax.errors import DistributedError

_BYTES: Final = 512
"""Of what a process says of itself."""
_GONE: Final = "ZX"
"""States of a process that has ended and whose parent has not looked yet."""


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """A process of the run.

    Attributes:
        process_id: which.
        host: name of its machine.
        pid: its number there.
        started: when it started, in the clock ticks of its machine; None where that cannot be told.
        numbers: whose process numbers these are: equal where one process can look another up.
    """

    process_id: int
    host: str
    pid: int
    started: int | None
    numbers: str

    def __str__(self) -> str:
        return f"process {self.process_id} (pid {self.pid} on {self.host})"

    def can_be_seen(self) -> bool:
        """Whether it runs where this process does."""
        return self.numbers == _numbers()

    def has_ended(self) -> bool:
        """Whether it is known to have ended."""
        return self.can_be_seen() and _started(self.pid) != self.started


_expected: int | None = None
_met: tuple[Peer, ...] = ()


def expect(processes: int | None) -> None:
    """Says how many processes this one was told of.

    Args:
        processes: how many; None if JAX found out.
    """
    global _expected
    _expected = processes


def meet() -> tuple[Peer, ...]:
    """All processes of the run. The first call is a collective: every process makes it at the same place.

    Raises:
        DistributedError: this process was told of another number of processes than the coordinator.
    """
    import jax

    global _met
    if _met:
        return _met
    if _expected not in (None, jax.process_count()):
        departures.fail()
        raise DistributedError(
            f"process {jax.process_index()} was told of {_expected} processes, and the coordinator, process 0, of"
            f" {jax.process_count()}; tell all the same."
        )
    own = Peer(
        jax.process_index(),
        socket.gethostname()[:128],
        os.getpid(),
        _started(os.getpid()),
        _numbers(),
    )
    _met = (own,) if jax.process_count() == 1 else _exchanged(own)
    return _met


def ended() -> list[Peer]:
    """The processes that are known to have ended; none before `meet` was called."""
    return [peer for peer in _met if peer.has_ended()]


def _exchanged(own: Peer) -> tuple[Peer, ...]:
    import numpy as np
    from jax.experimental import multihost_utils

    said = json.dumps(dataclasses.asdict(own)).encode()
    row = np.zeros(_BYTES, np.uint8)
    row[: len(said)] = np.frombuffer(said, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(row))
    return tuple(Peer(**json.loads(bytes(one).rstrip(b"\0"))) for one in rows)


def _numbers() -> str:
    """Names what gives processes their numbers: a machine since its start, and a namespace on it."""
    if sys.platform != "linux":
        return socket.gethostname()
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> int | None:
    """When a process started; None if it has ended or nothing can be told, -1 if it just runs."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            # What stands before the last bracket is the command's name.
            fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return None if fields[0] in _GONE else int(fields[19])
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return -1
