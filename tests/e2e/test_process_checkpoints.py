"""Runs of several processes are saved and go on, in as many or in others; what fails in one is told in all."""

import json
import os
import re
import signal

import jax
import numpy as np
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import CheckpointError
from tests import saved_runs
from tests.processes import BOUND, QUICK, end_all, start, start_run


def flags(devices):
    return {"XLA_FLAGS": f"{QUICK} --xla_force_host_platform_device_count={devices}", "NPROC": 8}


def told(text):
    """What a process told, by lines of JSON."""
    found = re.findall(r"^(?:\[\d+\] )?(\{.*\})$", text, re.MULTILINE)
    return [json.loads(line) for line in found]


@pytest.fixture
def run():
    """Runs as many processes to their end; what each told, which must be the same but for their numbers."""
    started = []

    def ended(count, mode, folder, devices=1, **options):
        arguments = ("-m", "tests.saved_runs", mode, folder, json.dumps(options))
        processes = start_run(count, *arguments, **flags(devices))
        started.extend(processes)
        said = [one.wait() for one in processes]
        for one, text in zip(processes, said, strict=True):
            assert one.code == 0, text
        found = [told(text) for text in said]
        for lines in found:
            lines[0].pop("pid", None)
        return found

    yield ended
    end_all(started)


def alike(found):
    """What all processes told."""
    assert all(lines == found[0] for lines in found)
    return found[0]


LIVES = [
    (2, {"devices": 2, "stages": 2, "data_parallel": 2, "microbatches": 2}),
    # Ranks in other processes than each other, stages in both; as the step has its leaves.
    (
        2,
        {
            "devices": 2,
            "stages": 2,
            "data_parallel": 2,
            "microbatches": 2,
            "order": [0, 2, 1, 3],
            "zero": 2,
            "like": "compiled",
        },
    ),
    # In pieces that end within leaves.
    (3, {"stages": 3, "microbatches": 2, "like": "made", "piece": 1000}),
]


def test_a_run_changes_its_processes_and_goes_on(run, tmp_path):
    losses, ends = [], []
    for count, options in LIVES:
        begin, *steps, end = alike(run(count, "train", tmp_path, steps=2, **options))
        at = len(losses)
        assert begin == {
            "start": at,
            "count": at,
            "extras": {"at": at} if at else {},
            "steps": list(range(max(at - 2, 1), at + 1)),
        }
        losses += [step["loss"] for step in steps]
        assert [step["count"] for step in steps] == [at + 1, at + 2]
        ends.append(end["end"])
        # Restored in one process, to the last bit.
        with rt.Checkpoints(tmp_path) as checkpoints:
            state, found, extras = checkpoints.restore(saved_runs.make_state())
        assert (found, extras) == (at + 2, {"at": at + 2})
        assert saved_runs.digest(state) == ends[-1]
    step = saved_runs.make_step(stages=2)
    state, wanted = saved_runs.make_state(), []
    for number in range(len(losses)):
        state, metrics = step(state, saved_runs.make_batch(number))
        wanted.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)


def test_what_one_process_saved_goes_on_in_two(run, tmp_path):
    state, _ = saved_runs.make_step(stages=2)(saved_runs.make_state(), saved_runs.make_batch(0))
    wanted = saved_runs.digest(state)
    with rt.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    options = {"stages": 2, "like": "compiled", "steps": 0}
    begin, end = alike(run(2, "train", tmp_path, **options))
    assert (begin["start"], end["end"]) == (1, wanted)


def test_layers_of_stacked_leaves_come_from_their_processes(run, tmp_path):
    options = {"stacked": True, "stages": 2, "state_layout": "layers", "steps": 1}
    *_, first = alike(run(2, "train", tmp_path, **options))
    with rt.Checkpoints(tmp_path) as checkpoints:
        state, _, _ = checkpoints.restore(saved_runs.make_state(stacked=True))
    assert saved_runs.digest(state) == first["end"]
    begin, _, _ = alike(run(2, "train", tmp_path, like="compiled", **options))
    assert begin["start"] == 1


ERRORS = {
    "held": ("CheckpointError", "is being written in by process"),
    "types": ("CheckpointError", "what was given are types alone"),
    "not after": ("CheckpointError", "step 2 is not after step 2"),
    "extras": ("CheckpointError", "extras\\['x'\\] is {.*} of type set"),
    "used": ("CheckpointError", "was used up by a later step"),
    "apart": ("DistributedError", "the step is not the same in process 1 as in process 0"),
    "apart in extras": ("DistributedError", "what the extras hold is not the same in process 1"),
    "other": ("CheckpointError", "of another model or optimizer"),
    "missing": ("CheckpointError", "has no whole checkpoint of step 7"),
    "save to a full disk": ("NoneType", "None"),
    "full": ("CheckpointError", "No space left on device\nThose that are whole: step 2"),
    "all damaged": ("CheckpointError", "is damaged: .* Restore another step"),
    "closed": ("CheckpointError", "is closed"),
}


def test_what_goes_wrong_in_process_0_is_told_in_all(run, tmp_path):
    first, second = run(2, "mistakes", tmp_path, devices=1)
    ours = {line["case"]: line for line in first if "case" in line}
    theirs = {line["case"]: line for line in second if "case" in line}
    assert ours.keys() == theirs.keys() == {*ERRORS, "damaged", "broken"}
    for case, (kind, text) in ERRORS.items():
        assert ours[case] == theirs[case]
        assert ours[case]["kind"] == kind and re.search(text, ours[case]["text"]), ours[case]
    assert {"back": 2, "steps": [2]} in first and {"back": 2, "steps": [2]} in second
    for found in (ours, theirs):
        (warned,) = found["damaged"]["warned"]
        assert "4 is damaged" in warned and warned.endswith("Went back to step 2.")
    assert ours["broken"]["kind"] == "IndexError"
    assert theirs["broken"]["kind"] == "DistributedError"
    assert theirs["broken"]["text"].startswith("process 0 failed with IndexError")


def test_a_process_that_fails_does_not_wait_for_the_others_to_save(tmp_path):
    processes = start_run(2, "-m", "tests.saved_runs", "leave", tmp_path, **flags(1))
    try:
        processes[0].read_until("busy")
        assert "ValueError: a mistake" in processes[1].wait(BOUND)
        assert processes[1].code == 1
    finally:
        end_all(processes)


STEPS = 12


def launched(folder, **options):
    options = {"stages": 2, "microbatches": 2, "until": STEPS, **options}
    program = ("-m", "tests.saved_runs", "train", folder, json.dumps(options))
    command = ("-m", "ratrain_jax.cli", "launch", "-n", 2, "--grace", 1, "--", *program)
    return start(*command, **flags(1))


def last(process):
    """Where a run that ends well went on, and the digest of its state in each process."""
    lines = told(process.wait())
    assert process.code == 0, process.said
    begun = {line["start"] for line in lines if "start" in line}
    return begun, [line["end"] for line in lines if "end" in line]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    begun, (ours, theirs) = last(launched(tmp_path_factory.mktemp("undisturbed")))
    assert begun == {0} and ours == theirs
    return ours


@pytest.mark.parametrize("lost", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_run_whose_process_is_killed_goes_on_to_the_last_bit(lost, undisturbed, tmp_path):
    first = launched(tmp_path, pause=0.3)
    try:
        first.read_until(f'[{lost}] {{"step": 2')
        (pid,) = re.findall(rf'^\[{lost}\] {{"start": 0.*"pid": (\d+)', first.said, re.MULTILINE)
        os.kill(int(pid), signal.SIGKILL)
        said = first.wait(BOUND)
        assert f"ratrain: process {lost} was ended by SIGKILL" in said
    finally:
        first.close()
    second = launched(tmp_path)
    begun, ends = last(second)
    (start_at,) = begun
    assert 0 < start_at < STEPS
    assert ends == [undisturbed] * 2


def test_errors_of_a_run_of_one_are_as_they_were(tmp_path):
    """What several processes need costs one nothing: no error is wrapped."""
    with rt.Checkpoints(tmp_path) as checkpoints:
        checkpoints._store.read = lambda *_: [][0]
        with pytest.raises(IndexError):
            checkpoints.restore(jax.numpy.zeros(3))
    with pytest.raises(CheckpointError, match="closed"):
        checkpoints.wait() or checkpoints.save(1, {})
