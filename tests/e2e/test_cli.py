"""Commands that compile and run, each in a process of its own as a user starts it, on the demo's step and a small model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ratrain_jax as rt
from tests.commands import CONFIG, TEXT

ROOT = Path(__file__).parents[2]
STEP = "examples/demo_step.py:train_step"


def start(*arguments, code=0):
    """Runs `ratrain`, with CPU devices as it makes them; what it printed, and its errors."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    ended = subprocess.run(
        [sys.executable, "-m", "ratrain_jax.cli", *map(str, arguments)],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == code, ended.stderr[-3000:]
    return ended.stdout, ended.stderr


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_the_demos_step_is_inspected_simulated_and_reported(tmp_path):
    out, err = start("inspect", STEP, "--machine", "a100")
    assert "block_2" in out and "GS5" in out and "step " in out
    assert err == ""
    assert max(map(len, out.splitlines())) <= 80
    trace, picture, page = (tmp_path / name for name in ("trace.json", "step.png", "report.html"))
    start("simulate", STEP, "--machine", "a100", "--perfetto", trace, "--plot", picture)
    assert json.loads(trace.read_text())["traceEvents"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    start("report", STEP, "--machine", "a100", "-o", page)
    assert "<html" in page.read_text().lower()


def test_a_profile_is_measured_and_predicts(tmp_path):
    path = tmp_path / "profile.json"
    small = ("--data-parallel", "1", "--microbatches", "2")
    out, err = start("profile", STEP, *small, "--repetitions", "1", "-o", path)
    assert "Forward" in out and str(path) in err
    profile = rt.Profile.load(path)
    assert profile.device_count == 2
    out, _ = start("simulate", STEP, *small, "--profile", path)
    assert "on cpu" in out


def test_a_model_trains_on_a_text_and_its_run_is_written(model, tmp_path):
    text, run = tmp_path / "text.txt", tmp_path / "run.jsonl"
    text.write_text(TEXT)
    layout = ("--stages", "2", "--microbatches", "2", "--microbatch-size", "4", "--sequence", "16")
    command = ("train", text, "--model", model, *layout, "--steps", "30", "-o", run)
    out, err = start(*command, "--learning-rate", "1e-2")
    assert f"{len(set(TEXT))} distinct bytes" in err
    head, *steps = map(json.loads, run.read_text().splitlines())
    assert (head["format"], head["version"], head["tokens_a_step"]) == (
        "ratrain-run",
        1,
        2 * 4 * 16,
    )
    assert head["settings"]["stages"] == 2
    assert [step["step"] for step in steps] == list(range(1, 31))
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert all(step["tokens_per_second"] > 0 and step["memory"] > 0 for step in steps)
    assert f"{steps[-1]['loss']:.4f}" in out.splitlines()[-1]
    _, err = start(*command, code=2)
    assert "--overwrite" in err and err.count("\n") == 1


def test_a_run_is_there_while_it_goes(model, tmp_path):
    text, run = tmp_path / "text.txt", tmp_path / "run.jsonl"
    text.write_text(TEXT)
    command = ["train", text, "--model", model, "--sequence", 16, "--steps", 10**6, "-o", run]
    going = subprocess.Popen(
        [sys.executable, "-m", "ratrain_jax.cli", *map(str, command)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert going.stdout is not None
        assert going.stdout.readline().startswith("step")
        assert len(run.read_text().splitlines()) > 1
    finally:
        going.terminate()
        going.communicate()


def test_bench_times_a_step_beside_plain_jit(model):
    small = ("--model", model, "--sequence", "16", "--dtype", "float32", "--stages", "2")
    out, _ = start("bench", *small, "--steps", "2", "--json")
    table = json.loads(out)
    assert set(table["kinds"]) == {"jax.jit", "ratrain"}
    assert all(len(kind["step"]) == 2 for kind in table["kinds"].values())
    _, err = start("bench", "examples/demo_step.py:nothing", code=2)
    assert "nothing" in err and err.count("\n") == 1


def test_a_plan_of_many_stages_goes_through_all_commands(tmp_path):
    model, plan, page = (tmp_path / name for name in ("config.json", "plan.json", "report.html"))
    model.write_text(json.dumps(CONFIG | {"num_hidden_layers": 60}))
    named = ("--model", model, "--sequence", "16")
    where = ("--machine", "generic", "--clusters", "48", "--stages", "48", "--schedule", "1f1b")
    start("plan", *named, *where, "--global-batch", "96", "--zero", "1", "-o", plan)
    alone, _ = start("inspect", plan)
    assert "48 stages" in alone
    out, _ = start("inspect", plan, *named)
    assert max(map(len, out.splitlines())) <= 80
    assert ")x" in out and "stage 47" in out
    out, _ = start("simulate", plan, *named)
    assert [line.split()[:1] for line in out.splitlines()].count(["mean"]) == 1
    start("report", plan, *named, "-o", page)
    assert "<html" in page.read_text().lower()
