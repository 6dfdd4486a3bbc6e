"""Network namespaces joined by links whose rate is limited: processes of one host that are as far apart as on two.

Each namespace has one interface, of a pair whose other end is in the next one's (two namespaces). Token buckets at
both ends limit what is sent, so that each direction has the whole rate. In each namespace the host's name stands for the
address of its interface: Gloo listens where the host's name points to.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAME = "ratrain-link"
HOSTS = Path("/etc/netns")
LOCK = Path("/run/lock/ratrain-slow-links")
BURST = 256 << 10
"""Bytes that may be sent at once after a pause: a few of the largest packets."""
QUEUE = 8 << 20
"""Bytes that may wait to be sent; beyond it packets would be lost."""


class NetworkError(SystemExit):
    """The namespaces cannot be made; says why."""


def address(number: int) -> str:
    """The address of a namespace.

    Args:
        number: which one, from 0.
    """
    return f"10.213.7.{number + 1}"


def _name(number: int) -> str:
    return f"{NAME}-{number}"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """Two namespaces and their link, until the end of the context.

    What a killed run left is removed first, its processes too.

    Raises:
        NetworkError: not root, no iproute2, no such namespaces here, or another run is under way.
    """
    _check()
    with LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NetworkError("another run of this benchmark has the namespaces.") from None
        _remove()
        before = signal.signal(signal.SIGTERM, _leave)
        try:
            yield Network()
        finally:
            # A second Ctrl-C must not leave half of it behind.
            interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
            _remove()
            signal.signal(signal.SIGINT, interrupted)
            signal.signal(signal.SIGTERM, before)


def _leave(number: int, _: Any) -> None:
    raise SystemExit(128 + number)


def _check() -> None:
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        raise NetworkError("network namespaces are made by root only; run this as root.")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NetworkError(f"{' and '.join(missing)} not found; install iproute2.")


def _remove() -> None:
    """Removes the namespaces that there are, with all that is in them."""
    names = [_name(number) for number in range(2)]
    there = {line.split()[0] for line in _run("ip", "netns", "list").splitlines()}
    for name in names:
        if name in there:
            for pid in _run("ip", "netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _run("ip", "netns", "delete", name)
        shutil.rmtree(HOSTS / name, ignore_errors=True)
    with contextlib.suppress(OSError):
        HOSTS.rmdir()  # if nobody else has one there


class Network:
    """The namespaces of a run; see `network`."""

    def __init__(self) -> None:
        for number in range(2):
            _run("ip", "netns", "add", _name(number))
        ends = ["netns", _name(0), "type", "veth", "peer", "name", "link1", "netns", _name(1)]
        _run("ip", "link", "add", "link0", *ends)
        for number in range(2):
            self._raise(number)

    def _raise(self, number: int) -> None:
        inside = ["ip", "-n", _name(number)]
        _run(*inside, "address", "add", f"{address(number)}/24", "dev", f"link{number}")
        _run(*inside, "link", "set", f"link{number}", "up")
        _run(*inside, "link", "set", "lo", "up")
        hosts = HOSTS / _name(number) / "hosts"
        hosts.parent.mkdir(parents=True)
        hosts.write_text(f"127.0.0.1 localhost\n{address(number)} {socket.gethostname()}\n")

    def limit(self, rate: float | None) -> None:
        """Limits what each end sends.

        Args:
            rate: bytes a second; None for no limit.
        """
        for number in range(2):
            at = ["tc", "-n", _name(number), "qdisc"]
            device = ["dev", f"link{number}", "root"]
            if rate is None:
                if "tbf" in _run(*at, "show", *device[:2]):
                    _run(*at, "delete", *device)
                continue
            bucket = ["rate", f"{rate * 8:.0f}bit", "burst", str(BURST), "limit", str(QUEUE)]
            _run(*at, "replace", *device, "tbf", *bucket)

    def inside(self, number: int) -> list[str]:
        """What stands before a command to run it in a namespace."""
        return ["ip", "netns", "exec", _name(number)]

    def sent(self, number: int) -> int:
        """Bytes that a namespace's end has sent."""
        path = f"/sys/class/net/link{number}/statistics/tx_bytes"
        return int(_run(*self.inside(number), "cat", path))
