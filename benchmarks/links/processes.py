"""The processes of a run, one in each namespace and on one core, which do what they are told, all the same."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from links.network import Network, address

_ports = itertools.count(7911)
WORKER = Path(__file__).with_name("worker.py")


class Team:
    """The workers. A context: they are ended behind it.

    Args:
        network: their namespaces.
        threads: of XLA's pool in each process: with as few as cores, a collective that waits keeps all else from running.
        devices: of each process.
        count: how many processes there are.
    """

    def __init__(self, network: Network, threads: int, devices: int = 1, count: int = 2) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        cores = sorted(os.sched_getaffinity(0))
        flags = f"--xla_force_host_platform_device_count={devices}"
        env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "NPROC": str(threads),
            "XLA_FLAGS": flags,
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        place = f"{address(0)}:{next(_ports)}"
        for number in range(count):
            mine, other = cores[number % len(cores)], cores[(number + 1) % len(cores)]
            pinned = ["taskset", "-c", str(mine)]
            told = [place, str(count), str(number), str(other)]
            command = [sys.executable, str(WORKER), *told]
            self._processes.append(
                subprocess.Popen(
                    [*network.inside(number), *pinned, *command],
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def ask(self, **request: Any) -> list[Any]:
        """Lets all do something; gives the answer of each."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        return [self._answer(process) for process in self._processes]

    def _answer(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("a measured process ended early; see its message above")
        return json.loads(line)["answer"]
