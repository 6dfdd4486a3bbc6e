"""One process of a run is lost, or fails: the others stop soon, and say which it was."""

import os
import re
import signal

import pytest

from ratrain_jax.distributed import failures
from tests.processes import BOUND, end_all, start, start_run
from tests.processes import script as script

# A process that beats: all gather, again and again, under the very errors that a step has.
SCRIPT = """
import os, sys, time
import ratrain_jax as rt
rt.initialize(heartbeat=4)
import jax, numpy as np
from jax.experimental import multihost_utils
from ratrain_jax.distributed import failures, peers
mode, me = sys.argv[1], jax.process_index()
if "strangers" not in sys.argv:
    peers.meet()
with failures.named():
    for i in range(10**6):
        multihost_utils.process_allgather(np.float32(i))
        if i == 3:
            print("at work", os.getpid(), flush=True)
            if mode == "idle":
                time.sleep(600)
            if mode == f"raise{me}":
                raise ValueError("a mistake")
            if mode == f"thread{me}":
                import threading
                threading.Thread(target=time.sleep, args=(600,)).start()
                raise ValueError("a mistake beside a thread")
            if mode == f"stop{me}":
                raise KeyboardInterrupt
        time.sleep(0.01)
"""
NAMED = "DistributedError: process {} (pid {} on "
MEANING = "has ended; its own log says why. Restart all processes; training goes on from the last"


@pytest.fixture
def run(script):
    """Starts processes that nobody looks after, and waits until all are at work."""
    started = []

    def begin(count, *arguments):
        started.extend(start_run(count, script, *arguments))
        for one in started:
            one.read_until("at work")
        return started

    yield begin
    end_all(started)


def rest(processes, lost):
    return [one for number, one in enumerate(processes) if number != lost]


@pytest.mark.parametrize(("count", "lost"), [(2, 1), (3, 2), (3, 0)])
def test_a_killed_process_is_named_by_all_others(count, lost, run):
    processes = run(count, "work")
    processes[lost].kill()
    said = [one.wait(BOUND) for one in rest(processes, lost)]
    pid = processes[lost].process.pid
    for text in said:
        if lost == 0 and "DistributedError" not in text:
            # The coordinator's end is seen by JAX at once, and may end a process before its collective fails.
            assert "leader task was preempted/died" in text
            continue
        # One that stops closes its connections too: who learns of it that way finds both.
        assert re.search(rf"DistributedError: .*process {lost} \(pid {pid} on \S+\)", text), text
        assert "Restart all processes; training goes on from the last checkpoint" in text
    if lost != 0:
        assert any(NAMED.format(lost, pid) in text and MEANING in text for text in said)
        assert all(one.code == 1 for one in rest(processes, lost))


def test_a_killed_process_that_nobody_waits_for_is_named_by_jax(run):
    processes = run(3, "idle")
    processes[2].kill()
    for one in processes[:2]:
        said = one.wait(BOUND)
        assert re.search(r"tasks are unhealthy \(stopped sending heartbeats\):\s*2\n", said), said
        assert one.code != 0


def test_a_killed_process_of_another_machine_is_named_by_jax(run):
    """Its number says nothing here: as when the processes have not met."""
    processes = run(2, "work", "strangers")
    processes[1].kill()
    said = processes[0].wait(BOUND)
    assert (
        "the connection to another process is lost; JAX's coordinator names it within 6 s" in said
    )
    assert re.search(r"stopped sending heartbeats\):\s*1\n|Task 1 heartbeat timeout", said), said


@pytest.mark.parametrize("mode", ["raise", "thread", "stop"])
def test_a_process_that_raises_does_not_wait_for_the_others(mode, run):
    processes = run(2, f"{mode}1")
    said = processes[1].wait(BOUND)
    assert "KeyboardInterrupt" in said if mode == "stop" else "ValueError: a mistake" in said
    assert processes[1].code == (130 if mode == "stop" else 1)
    said = processes[0].wait(BOUND)
    assert NAMED.format(1, processes[1].process.pid) in said and MEANING in said
    assert processes[0].code == 1


def launched(script, mode):
    process = start("-m", "ratrain_jax.cli", "launch", "-n", 3, "--", script, mode)
    said = process.wait()
    return process, said[said.index("\nratrain: ") :]


def test_the_launcher_shows_the_error_of_the_one_that_raised(script):
    process, summary = launched(script, "raise1")
    assert summary.startswith(
        "\nratrain: process 1 ended with exit code 1; the others were ended.\n"
    )
    assert "\n  ValueError: a mistake\n" in summary
    assert process.code == 1


def test_the_launcher_names_the_one_that_was_killed(script):
    process = start("-m", "ratrain_jax.cli", "launch", "-n", 2, "--grace", 1, "--", script, "idle")
    process.read_until("[1] at work")
    pid = int(re.search(r"\[1\] at work (\d+)", process.said)[1])
    os.kill(pid, signal.SIGKILL)
    said = process.wait(BOUND)
    assert "\nratrain: process 1 was ended by SIGKILL; the others were ended.\n" in said
    assert process.code == 128 + signal.SIGKILL


def test_errors_of_a_process_alone_stay_as_they_are():
    with pytest.raises(ValueError, match="Gloo is a composer's name, and failed"), failures.named():
        raise ValueError("Gloo is a composer's name, and failed")
