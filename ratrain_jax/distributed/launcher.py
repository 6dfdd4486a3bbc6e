"""Starts the processes of a run on this machine, shows what they say, and ends all when one fails.

Each process is the leader of a process group of its own, so that a Ctrl-C comes to it once, from here, and so that what it
starts itself ends with it.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Final

from ratrain_jax.distributed.initialize import COORDINATOR, PROCESS_ID, PROCESSES

_TAIL: Final = 10
"""Last lines on standard error that are kept of each process."""
_SETTLE: Final = 1.0
"""Seconds that the others have, after one has failed, to say themselves what they know."""
_DRAIN: Final = 2.0
"""Seconds to read what a process has left in its pipes; what it started may keep them open for ever."""
_PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PARENT_DEATH: Final = 1
"""`PR_SET_PDEATHSIG` of Linux."""
_STACK: Final = b"    @ "
"""How a line of a stack trace of C++ begins."""

Show = Callable[[int, bytes, bool], None]
"""Shows a line, with its end, of a process's standard output, or of its standard error."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """A process that has ended.

    Attributes:
        process_id: which.
        code: its exit code; negative for a signal.
        tail: its last lines on standard error, without stack traces of C++.
    """

    process_id: int
    code: int
    tail: tuple[str, ...]

    @property
    def how(self) -> str:
        """How it ended, in words."""
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        try:
            return f"was ended by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"was ended by signal {-self.code}"

    @property
    def exit_code(self) -> int:
        """The exit code of a shell that ran it."""
        return self.code if self.code >= 0 else 128 - self.code


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How a run has ended.

    Attributes:
        failed: the process that failed first; None if none did.
        interrupted: the signal that ended the run; None without.
    """

    failed: Ended | None = None
    interrupted: int | None = None


def command_of(words: Sequence[str]) -> list[str]:
    """The command of one process.

    Args:
        words: `script.py …`, or `-m module …`, as behind `python`; or `ratrain …`, a command of this package.

    Examples:
        >>> command_of(["-m", "pkg.main", "--lr", "0.1"])[1:]
        ['-m', 'pkg.main', '--lr', '0.1']
        >>> command_of(["ratrain", "train", "book.txt"])[1:]
        ['-m', 'ratrain_jax.cli', 'train', 'book.txt']
    """
    if words[0] == "ratrain" and not os.path.exists(words[0]):
        return [sys.executable, "-m", "ratrain_jax.cli", *words[1:]]
    return [sys.executable, *words]


def environment_of(
    base: Mapping[str, str], coordinator: str, processes: int, process_id: int
) -> dict[str, str]:
    """The environment of one process.

    Args:
        base: what all have.
        coordinator: `host:port`.
        processes: of the whole run.
        process_id: which one it is for.
    """
    return {
        **base,
        COORDINATOR: coordinator,
        PROCESSES: str(processes),
        PROCESS_ID: str(process_id),
        "PYTHONUNBUFFERED": "1",  # a line is seen when it is written
    }


def free_port() -> int:
    """A port that nothing uses now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def run(
    command: Sequence[str], environments: Mapping[int, Mapping[str, str]], show: Show, grace: float
) -> Outcome:
    """Runs processes until all have ended. When one fails, or a signal comes, the others are ended.

    Args:
        command: of each.
        environments: of each, by its process id.
        show: called with each line as it comes, one at a time.
        grace: seconds between asking a process to end and killing it.

    Returns:
        How it went.

    Raises:
        OSError: a process cannot be started.
    """
    # All are started before the first thread is: what runs between fork and exec must not meet a lock of another thread.
    children: list[_Child] = []
    events: queue.SimpleQueue[_Child | int] = queue.SimpleQueue()
    with _signals(events):
        try:
            for process_id, environment in environments.items():
                children.append(_Child(process_id, command, environment))
            lock = threading.Lock()

            def one_at_a_time(process_id: int, line: bytes, is_error: bool) -> None:
                with lock:
                    show(process_id, line, is_error)

            for child in children:
                child.follow(one_at_a_time, events)
            return _wait(children, events, grace)
        finally:
            for child in children:
                child.signal(signal.SIGKILL)
            for child in children:
                child.close()


def _wait(
    children: Sequence[_Child], events: queue.SimpleQueue[_Child | int], grace: float
) -> Outcome:
    """Until all have ended, by themselves or because one failed."""
    running = set(children)
    failed: _Child | None = None
    asked: int | None = None
    patience, harder = None, signal.SIGTERM
    while running:
        try:
            event = events.get(timeout=patience)
        except queue.Empty:
            for child in running:
                child.signal(harder)
            patience, harder = grace, signal.SIGKILL
            continue
        if isinstance(event, int):
            # A second Ctrl-C does not wait.
            for child in running:
                child.signal(event if asked is None else signal.SIGKILL)
            asked, patience, harder = event, grace, signal.SIGKILL
            continue
        running.discard(event)
        if event.code != 0 and failed is None and asked is None:
            failed, patience = event, _SETTLE
    return Outcome(None if failed is None else failed.ended(), asked)


class _Child:
    """A process, and the threads that read what it says."""

    def __init__(
        self, process_id: int, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.process_id = process_id
        self.code = 0
        self._tail: collections.deque[bytes] = collections.deque(maxlen=_TAIL)
        self._threads: list[threading.Thread] = []
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=_ending_with(os.getpid()) if sys.platform == "linux" else None,
        )

    def follow(self, show: Show, events: queue.SimpleQueue[_Child | int]) -> None:
        """Shows its lines, and puts it among the events when it has ended."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        readers = [
            self._start(self._read, self._process.stdout, show, False),
            self._start(self._read, self._process.stderr, show, True),
        ]

        def wait() -> None:
            self.code = self._process.wait()
            for reader in readers:
                reader.join(_DRAIN)
            events.put(self)

        self._threads = [*readers, self._start(wait)]

    def signal(self, number: int) -> None:
        """Sends a signal to it and to what it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Waits for its end, after it was killed."""
        self._process.wait()
        for thread in self._threads:
            thread.join(_DRAIN)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def ended(self) -> Ended:
        """How it ended."""
        lines = tuple(line.decode(errors="replace").rstrip("\n") for line in tuple(self._tail))
        return Ended(self.process_id, self.code, lines)

    def _read(self, pipe: IO[bytes], show: Show, is_error: bool) -> None:
        for line in pipe:
            if is_error and not line.startswith(_STACK):
                self._tail.append(line)
            show(self.process_id, line if line.endswith(b"\n") else line + b"\n", is_error)

    def _start(self, target: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        thread.start()
        return thread


def _ending_with(parent: int) -> Callable[[], None]:
    """What makes a new process end when the launcher does, even if that is killed."""
    prctl = ctypes.CDLL(None).prctl

    def apply() -> None:
        prctl(_PARENT_DEATH, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before
            os._exit(1)

    return apply


@contextlib.contextmanager
def _signals(events: queue.SimpleQueue[_Child | int]) -> Iterator[None]:
    """Puts signals among the events."""
    before = {
        number: signal.signal(number, lambda got, _: events.put(got)) for number in _PASSED_ON
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
