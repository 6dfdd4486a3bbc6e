"""`ratrain train` in several processes: they train one model, one of them prints and writes, and all end together."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.commands import CONFIG, TEXT
from tests.processes import BOUND, QUICK, end_all, free_port, start

LAYOUT = ("--stages", 2, "--microbatches", 2, "--microbatch-size", 2, "--sequence", 16)
STEPS = 6


@pytest.fixture
def command(tmp_path):
    """`train`, with a small model, a text and the run's file."""
    model, text = tmp_path / "config.json", tmp_path / "text.txt"
    model.write_text(json.dumps(CONFIG))
    text.write_text(TEXT)
    return ["train", text, "--model", model, *LAYOUT, "-o", tmp_path / "run.jsonl"]


def ratrain(*words, **variables):
    return start("-m", "ratrain_jax.cli", *words, XLA_FLAGS=QUICK, **variables)


def launched(command, **variables):
    return ratrain("launch", "-n", 2, "--grace", 1, "--", "ratrain", *command, **variables)


def steps_of(path):
    """The losses in a run's file, by step."""
    head, *lines = map(json.loads, path.read_text().splitlines())
    assert head["format"] == "ratrain-run" and head["settings"]["stages"] == 2
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def test_processes_train_one_model_and_one_of_them_tells(command, tmp_path):
    several = launched([*command, "--steps", STEPS, "--data-parallel", 2])
    said = several.wait()
    assert several.code == 0, said
    # Two devices each, as nobody said another number; Gloo speaks for itself.
    lines = [line for line in said.splitlines() if "[Gloo]" not in line]
    assert all(line.startswith("[0] ") for line in lines), said
    assert sum("loss" in line for line in lines) == STEPS
    found = steps_of(tmp_path / "run.jsonl")
    one = ratrain(*command, "--steps", STEPS, "--data-parallel", 2, "--overwrite")
    assert one.wait().count("loss") == STEPS and one.code == 0
    np.testing.assert_allclose(found, steps_of(tmp_path / "run.jsonl"), rtol=1e-5)


def children(launcher):
    """The process numbers of what it started, in order."""
    pid = launcher.process.pid
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_run_that_is_killed_goes_on_from_its_checkpoint(command, tmp_path):
    saved = [*command, "--checkpoints", tmp_path / "saved", "--save-every", 5]
    first = launched([*saved, "--steps", 200])
    try:
        first.read_until("[0] step     10 ")
        os.kill(children(first)[1], signal.SIGKILL)
        assert "ratrain: process 1 was ended by SIGKILL" in first.wait(BOUND)
    finally:
        first.close()
    last = max(int(path.name) for path in (tmp_path / "saved").iterdir() if path.name.isdecimal())
    assert last >= 5
    before = steps_of(tmp_path / "run.jsonl")[:last]
    second = launched([*saved, "--steps", last + 3])
    said = second.wait()
    assert second.code == 0 and f"goes on from step {last}" in said, said
    found = steps_of(tmp_path / "run.jsonl")
    assert found[:last] == before and len(found) == last + 3
    # The same batches as a run that was never stopped, in one process.
    whole = ratrain(*command, "--steps", last + 3, "--overwrite")
    assert whole.wait() and whole.code == 0
    np.testing.assert_allclose(found, steps_of(tmp_path / "run.jsonl"), rtol=1e-4)
    other = ratrain(*saved, "--steps", last + 4, "--seed", 1)
    assert "are of a run with another --seed; give the same" in other.wait() and other.code == 2
    done = ratrain(*saved, "--steps", last)
    assert f"nothing is left of {last} steps" in done.wait() and done.code == 0


def placed(command, count=2, **each):
    """Processes that are told on the command line which they are."""
    place = ("--coordinator", f"127.0.0.1:{free_port()}", "--processes", count)
    return [
        ratrain(*command, *place, "--process-id", n, *each.get(f"of_{n}", ())) for n in range(count)
    ]


@pytest.mark.parametrize(
    ("wrong", "code", "told"),
    [
        ({"of_1": ["--seed", 5]}, 2, "is not the same in process 1 as in process 0"),
        ({"count": 3}, 2, "2 devices would lie in 2 of 3 processes; start fewer"),
        ({"there": True}, 2, "is there already; name another file with -o, or give --overwrite"),
    ],
)
def test_what_is_wrong_ends_all_processes(wrong, code, told, command, tmp_path):
    if wrong.pop("there", False):
        (tmp_path / "run.jsonl").write_text("mine")
    processes = placed([*command, "--steps", 2], **wrong)
    try:
        for one in processes:
            assert told in one.wait(), one.said
            assert one.code == code
    finally:
        end_all(processes)
    if (tmp_path / "run.jsonl").exists():
        assert (tmp_path / "run.jsonl").read_text() == "mine"
