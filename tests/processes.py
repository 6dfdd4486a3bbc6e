"""Several processes of one run, for tests.

A module that asks for the fixture imports it `as` itself, so that the linter sees that it is wanted.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LONG = 120
"""Seconds after which a test gives up; none should take as long."""
BOUND = 30
"""Seconds after which all processes of a run have stopped when one was lost: what is promised."""
QUICK = " ".join(f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f)
"""The `XLA_FLAGS` of the tests, without how many devices there are."""


@pytest.fixture
def script(request, tmp_path):
    """The file of the test module's `SCRIPT`."""
    path = tmp_path / "script.py"
    path.write_text(request.module.SCRIPT)
    return path


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(**more):
    """Of a process that JAX is told nothing of, with one CPU device."""
    known = ("XLA_FLAGS", "RATRAIN_", "JAX_COORD", "SLURM_", "OMPI_")
    base = {name: value for name, value in os.environ.items() if not name.startswith(known)}
    base |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    return base | {name: str(value) for name, value in more.items()}


class Started:
    """A process of a run; a thread reads what it prints."""

    def __init__(self, process):
        self.process = process
        self._lines = []
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        with self.process.stdout:
            for line in self.process.stdout:
                with self._more:
                    self._lines.append(line)
                    self._more.notify_all()

    @property
    def said(self):
        return "".join(self._lines)

    @property
    def code(self):
        return self.process.returncode

    def wait(self, timeout=LONG):
        """Until it has ended; what it printed."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.close()
            raise AssertionError(f"still running after {timeout} s:\n{self.said}") from None
        self._reader.join(LONG)
        return self.said

    def read_until(self, word):
        """Until it has printed a word."""
        with self._more:
            found = self._more.wait_for(lambda: word in self.said, LONG)
        assert found, f"no {word!r} in:\n{self.said}"

    def kill(self):
        self.process.send_signal(signal.SIGKILL)

    def close(self):
        """Kills it if it still runs."""
        self.process.kill()
        self.process.wait()
        self._reader.join(LONG)


def start(*arguments, **variables):
    """Starts Python; standard output and errors come together."""
    return Started(
        subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=ROOT,
            env=environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    )


def start_run(count, *arguments, **variables):
    """Starts as many processes, as machines of a cluster would: nobody looks after them."""
    place = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "RATRAIN_PROCESSES": count}
    return [
        start(*arguments, **place, RATRAIN_PROCESS_ID=number, **variables)
        for number in range(count)
    ]


def end_all(started):
    """Kills what is left of a run."""
    for one in started:
        one.close()
