"""Processes that find each other, and what each is told when they do not."""

import re
import signal
import socket

import pytest

from ratrain_jax.distributed.failures import explained
from tests.processes import end_all, environment, free_port, start, start_run
from tests.processes import script as script

WAITS = 3
"""Seconds until processes give up."""
SCRIPT = """
import os, sys, time
import ratrain_jax as rt
arguments = eval(f"dict({sys.argv[1]})")
stay = arguments.pop("stay", 0)
try:
    rt.initialize(**{"timeout": 60, **arguments})
except rt.errors.DistributedError as error:
    sys.exit(f"DistributedError: {error}")
import jax, numpy as np
from jax.experimental import multihost_utils
from ratrain_jax.distributed import peers
try:
    print("met", [peer.process_id for peer in peers.meet()], len(jax.devices()))
except rt.errors.DistributedError as error:
    sys.exit(f"DistributedError: {error}")
print("sum", multihost_utils.process_allgather(np.int32(10 + jax.process_index())).sum(), flush=True)
time.sleep(stay)
"""
ALONE = """
import ratrain_jax as rt
rt.initialize()
rt.initialize()
import jax
print(jax.process_count(), jax.distributed.is_initialized())
"""
TWICE = """
import ratrain_jax as rt
rt.initialize()
try:
    rt.initialize()
except rt.errors.DistributedError as error:
    print(error)
"""


@pytest.fixture
def begin(script):
    """Starts one process, with arguments of `rt.initialize`."""
    started = []

    def one(arguments="", **variables):
        started.append(start(script, arguments, **variables))
        return started[-1]

    yield one
    end_all(started)


def at(address, processes, process_id, timeout=60):
    return f"coordinator={address!r}, processes={processes}, process_id={process_id}, timeout={timeout}"


def refused(process):
    """What a process was told; it must have ended by itself, with a sentence."""
    said = process.wait()
    assert process.code == 1, said
    return re.search(r"DistributedError: (.*)", said)[1]


def test_a_process_alone_goes_on_alone():
    process = start("-c", ALONE)
    assert process.wait() == "1 False\n"


def test_processes_are_told_by_arguments(begin):
    address = f"127.0.0.1:{free_port()}"
    processes = [begin(at(address, 3, me)) for me in (2, 0, 1)]
    for process in processes:
        said = process.wait()
        assert process.code == 0, said
        assert "met [0, 1, 2] 3\n" in said and "sum 33\n" in said


SLURM = {
    "SLURM_JOB_ID": 1234,
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NTASKS": 2,
    "SLURM_STEP_NUM_NODES": 1,
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1,10.96.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": 2,
}


@pytest.mark.parametrize(
    ("variables", "numbers"),
    [
        (SLURM, ("SLURM_PROCID", "SLURM_LOCALID")),
        (OPEN_MPI, ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")),
    ],
)
def test_what_a_clusters_launcher_sets_is_picked_up(variables, numbers, begin):
    variables = {**variables, "JAX_COORDINATOR_PORT": free_port()}
    processes = [begin(**variables, **dict.fromkeys(numbers, me)) for me in range(2)]
    for process in processes:
        assert "sum 21\n" in process.wait()


def test_not_all_come_and_one_comes_late(begin):
    address = f"127.0.0.1:{free_port()}"
    first, second = (begin(at(address, 3, me, WAITS)) for me in range(2))
    assert refused(first).startswith(f"not all 3 processes came within {WAITS} s: see whether")
    assert refused(second).startswith(
        (
            f"process 1 reached the coordinator at {address}, but not all 3 processes came within",
            f"process 1 found no coordinator at {address} within",  # it gave up a moment before
        )
    )
    assert "coordination_service" not in first.said  # the sentence is not buried in JAX's log
    late = refused(begin(at(address, 3, 2, WAITS)))
    assert late.startswith(f"process 2 found no coordinator at {address} within {WAITS} s (")
    assert "was not started, has given up or ended, or cannot be reached" in late


def test_a_host_that_is_not_known(begin):
    said = refused(begin(at("no-such-host.invalid:7890", 2, 1, WAITS)))
    assert "process 1 found no coordinator at no-such-host.invalid:7890" in said


def test_the_coordinators_port_is_taken(begin):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refused(begin(at(f"127.0.0.1:{port}", 2, 0)))
    assert said.startswith(
        f"process 0 cannot open the coordinator's port {port} (address already in use)"
    )


def test_a_second_process_0_is_refused(begin):
    address = f"127.0.0.1:{free_port()}"
    first = begin(at(address, 2, 0))
    while first.process.poll() is None:  # until it listens
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", int(address.split(":")[1]))) == 0:
                break
    said = refused(begin(at(address, 2, 0)))
    assert "another run, or a second process 0, has it" in said
    other = begin(at(address, 2, 1))
    assert "sum 21" in other.wait() and "sum 21" in first.wait()


def test_processes_that_were_told_of_different_numbers(begin):
    address = f"127.0.0.1:{free_port()}"
    first, second = begin(at(address, 2, 0)), begin(at(address, 3, 1))
    assert refused(second).startswith(
        "process 1 was told of 3 processes, and the coordinator, process 0, of 2; tell all the same"
    )
    end_all([first])


def ended_by_jax(process):
    """What is made of JAX's log, of a process that JAX ended."""
    said = process.wait()
    assert process.code == -signal.SIGABRT, said
    return explained(said.splitlines())


def test_an_id_that_the_coordinator_does_not_expect(begin):
    address = f"127.0.0.1:{free_port()}"
    begin(at(address, 2, 0))
    said = ended_by_jax(begin(at(address, 3, 2)))
    assert said.startswith("the coordinator knows no process 2: start all processes with the same")


def test_an_id_that_two_processes_have_before_all_are_there(begin):
    address = f"127.0.0.1:{free_port()}"
    begin(at(address, 3, 0))
    both = [begin(at(address, 3, 1, WAITS)) for _ in range(2)]
    told = {process: process.wait() for process in both}
    first = next(process for process in both if process.code == -signal.SIGABRT)
    said = explained(told[first].splitlines())
    assert said.startswith("another process came with the id of this one")


def test_an_id_that_is_taken_while_the_others_run(begin):
    address = f"127.0.0.1:{free_port()}"
    processes = [begin(f"{at(address, 2, me)}, stay=600") for me in range(2)]
    for process in processes:
        process.read_until("sum 21")
    begin(at(address, 2, 1))
    for process in processes:
        assert ended_by_jax(process).startswith("two processes have the id 1, or process 1 was")


def test_arguments_that_are_missing(begin):
    said = refused(begin("processes=2, process_id=1"))
    assert said.startswith("coordinator must be given too: no cluster's launcher")
    said = refused(begin("coordinator='127.0.0.1:7890'"))
    assert said.startswith("processes and process_id must be given too")


def test_twice_is_refused():
    (process,) = started = start_run(1, "-c", TWICE)
    assert (
        "this process is connected with the others already; call rt.initialize once"
        in process.wait()
    )
    end_all(started)


def test_launched_by_the_command(script):
    process = start(
        "-m", "ratrain_jax.cli", "launch", "-n", 2, "--devices-per-process", 2, "--", script, ""
    )
    said = process.wait()
    assert process.code == 0, said
    for me in range(2):
        assert f"[{me}] met [0, 1] 4\n" in said and f"[{me}] sum 21\n" in said


def test_the_environment_of_tests_says_nothing():
    assert not any(name.startswith(("SLURM_", "RATRAIN_", "JAX_COORD")) for name in environment())
