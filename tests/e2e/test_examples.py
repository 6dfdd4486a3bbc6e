"""The examples run as scripts, as a user starts them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# The demo, with fewer steps than `make demo` takes.
SHORT_DEMO = "import demo; demo.STEPS = 6; demo.main()"


def run(*arguments):
    """Runs Python in the examples' folder, piped and in 80 columns; returns what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT / "examples",
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert max(map(len, done.stdout.splitlines())) <= 80
    return done.stdout


@pytest.mark.parametrize("script", ["train_gpt.py", "llama.py", "nnx_gpt.py"])
def test_a_script_trains(script):
    small = ("--length", "16", "--batch-size", "8", "--microbatches", "2", "--steps", "20")
    text = run(script, "--stages", "2", "--schedule", "1f1b", *small)
    assert {"0", "1"} <= {line.split()[0] for line in text.splitlines() if "block" in line}
    first, last = map(float, re.findall(r"loss (\d+\.\d+)$", text, re.MULTILINE))
    assert last < first


def test_the_demo_shows_all_and_ends_at_the_plain_loss():
    text = run("-c", SHORT_DEMO)
    for shown in ("block_2", "slot ", "stage 1", "F3", "GS", "PV"):
        assert shown in text
    progress = re.findall(r"(ratrain|jax\.jit) +6/6 +loss (\d\.\d+) +[\d,]+ tokens/s", text)
    assert [name for name, _ in progress] == ["ratrain", "jax.jit"]
    ours, theirs = map(float, re.findall(r"loss of step 6, .* (\d\.\d{6})$", text, re.MULTILINE))
    assert abs(ours - theirs) <= 1e-5 * theirs


def test_schedules_are_drawn(tmp_path):
    text = run("draw_schedules.py", "-o", str(tmp_path), "--stages", "10", "--microbatches", "24")
    one_f_one_b, ratrain = map(float, re.findall(r"(?:1f1b|ratrain) (\d+\.\d+) s", text))
    assert ratrain < one_f_one_b
    for name in ("tail.png", "pipeline.png"):
        picture = (tmp_path / name).read_bytes()
        assert picture.startswith(b"\x89PNG") and 10_000 < len(picture) < 200_000


def test_losses_are_faithful_and_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path):
    small = ("--layers", "2", "--width", "32", "--rows", "8", "--length", "16")
    command = ("loss_fidelity.py", *small, "--steps", "40", "--every", "16", "--output")
    text = run(*command, str(tmp_path))
    assert "40 steps; loss from" in text
    assert "equal to the last bit at every step" in text
    largest, mean, last = (
        float(re.search(rf"{name} +(\d+\.\d+)%", text)[1]) for name in ("largest", "mean", "last")
    )
    assert max(mean, last) <= largest <= 0.08
    assert (tmp_path / "fidelity.png").read_bytes().startswith(b"\x89PNG")
    losses = (tmp_path / "losses.jsonl").read_text()
    assert losses.count("\n") == 40
    # As if it had been killed in step 38: what is behind the last checkpoint is done again.
    shutil.rmtree(tmp_path / "checkpoints" / "40")
    (tmp_path / "losses.jsonl").write_text("".join(losses.splitlines(keepends=True)[:37]))
    assert run(*command, str(tmp_path)) == text
    assert (tmp_path / "losses.jsonl").read_text() == losses
