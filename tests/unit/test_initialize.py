"""`rt.initialize` where nothing is started: arguments, and what a launcher says."""

import jax
import pytest

import ratrain_jax as rt
from ratrain_jax.distributed.initialize import Place, is_one_of_several, place_of

LAUNCHED = {
    "JAX_COORDINATOR_ADDRESS": "node1:7890",
    "RATRAIN_PROCESSES": "4",
    "RATRAIN_PROCESS_ID": "2",
}


def test_arguments_come_before_what_a_launcher_says():
    assert place_of(None, None, None, {}) == Place()
    assert place_of("a:1", 2, 1, {}) == Place("a:1", 2, 1)
    assert place_of(None, None, None, LAUNCHED) == Place("node1:7890", 4, 2, launched=True)
    assert place_of("a:1", None, 0, LAUNCHED) == Place("a:1", 4, 0, launched=True)


def test_a_coordinator_alone_is_left_to_jax():
    assert place_of(None, None, None, {"JAX_COORDINATOR_ADDRESS": "a:1"}) == Place()


def test_who_started_this_process():
    assert is_one_of_several(LAUNCHED)
    assert is_one_of_several({"SLURM_STEP_NODELIST": "node[1-2]"})
    assert not is_one_of_several({"SLURM_JOB_ID": "7", "PATH": "/bin"})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("node1", 2, 0), "the coordinator is given as 'node1'; write host:port"),
        (("node1:0", 2, 0), "'node1:0'"),
        (("node1:99999", 2, 0), "'node1:99999'"),
        ((":7890", 2, 0), "':7890'"),
        (("a:1", 0, 0), "processes is 0; there must be at least one"),
        (("a:1", 2, 2), "process_id is 2 of 2 processes; ids count from 0 to 1"),
        (("a:1", 2, -1), "process_id is -1 of 2 processes; ids count from 0 to 1"),
        ((None, None, -1), "process_id is -1; ids count from 0."),
    ],
)
def test_arguments_that_cannot_be(arguments, said):
    with pytest.raises(rt.errors.DistributedError) as caught:
        rt.initialize(*arguments)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["timeout", "heartbeat"])
def test_times_are_at_least_a_second(name):
    with pytest.raises(rt.errors.DistributedError, match=f"{name} is 0; give at least one second"):
        rt.initialize(**{name: 0})


def test_a_variable_that_is_no_number(monkeypatch):
    monkeypatch.setenv("RATRAIN_PROCESSES", "two")
    monkeypatch.setenv("RATRAIN_PROCESS_ID", "0")
    with pytest.raises(rt.errors.DistributedError, match="RATRAIN_PROCESSES is 'two'"):
        rt.initialize()


def test_jax_must_not_have_been_used_before():
    jax.devices()
    with pytest.raises(rt.errors.DistributedError, match=r"JAX was used before rt\.initialize"):
        rt.initialize()
