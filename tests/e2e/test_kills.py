"""A run that is killed at any moment goes on from its newest whole checkpoint, and ends with the same state."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ratrain_jax.checkpoints.storage import UNFINISHED

ROOT = Path(__file__).parents[2]
LINGERS = 0.03
"""Seconds, at most, at each dangerous place of a save."""


class Child:
    """A process of the run, and what it told."""

    def __init__(self, folder, steps, cache, output):
        self.output = output
        command = [sys.executable, "-m", "tests.kills", str(folder), str(steps), str(LINGERS)]
        env = {
            **os.environ,
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "PYTHONPATH": str(ROOT),
        }
        self._file = output.open("w")
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=self._file, stderr=subprocess.STDOUT
        )

    def told(self, what):
        """What it told of one kind."""
        lines = [line for line in self.output.read_text().splitlines() if line.endswith("}")]
        return [line[what] for line in map(json.loads, lines) if what in line]

    def wait_for(self, condition):
        """Until a condition holds or the process has ended."""
        while self.process.poll() is None and not condition():
            time.sleep(0.002)

    def kill(self):
        """Ends it as a crash would; whether it was still running."""
        self.process.send_signal(signal.SIGKILL)
        self.close()
        return self.process.returncode == -signal.SIGKILL

    def close(self):
        self.process.wait()
        self._file.close()
        assert self.process.returncode in (0, -signal.SIGKILL), self.output.read_text()


def whole(folder):
    """The newest checkpoint; 0 before the first."""
    return max((int(p.name) for p in folder.glob("*") if p.name.isdecimal()), default=0)


def unfinished(folder):
    return list(folder.glob(f"*{UNFINISHED}*"))


def strike(child, folder, rng, seconds, in_a_save):
    """Kills at a random moment of a life: up to some seconds from its start, or in a save."""
    if in_a_save:
        first = rng.randrange(3, 7)
        child.wait_for(lambda: len(child.told("step")) >= first and unfinished(folder))
        time.sleep(rng.uniform(0, 6 * LINGERS))
    else:
        until = time.monotonic() + rng.uniform(0, seconds)
        child.wait_for(lambda: time.monotonic() > until)
    return child.kill()


@pytest.mark.parametrize("kills", [4, pytest.param(30, marks=pytest.mark.slow)])
def test_killed_runs_end_as_if_they_were_not(kills, tmp_path):
    rng = random.Random(kills)
    steps, cache = 3 * kills, tmp_path / "cache"
    alone = Child(tmp_path / "alone", steps, cache, tmp_path / "alone.txt")
    started = time.monotonic()
    alone.wait_for(lambda: len(alone.told("step")) >= 4)
    seconds = time.monotonic() - started
    alone.close()
    (wanted,) = alone.told("end")
    assert alone.told("step") == list(range(steps))

    killed = hit = lives = runs = 0
    while killed < kills:
        folder = tmp_path / f"run_{runs}"
        ended, runs = [], runs + 1
        while not ended:
            before = whole(folder)
            child = Child(folder, steps, cache, tmp_path / f"life_{lives}.txt")
            lives += 1
            if killed < kills and strike(child, folder, rng, seconds, in_a_save=killed % 2 == 0):
                killed += 1
                hit += bool(unfinished(folder))
            child.close()
            ended = child.told("end")
            check_life(child, folder, before)
        assert ended == [wanted]
        assert not unfinished(folder)
    assert hit >= kills // 4


def check_life(child, folder, before):
    """A life begins at the newest whole checkpoint, and loses no more than the steps since the newest."""
    assert child.told("start") in ([], [before])
    steps = child.told("step")
    assert steps == list(range(before, before + len(steps)))
    # While a step runs, the one before it is being saved; that one's save began when the one before was whole.
    assert before + len(steps) - whole(folder) <= 2
