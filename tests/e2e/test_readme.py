"""The code in the README runs as it stands, given a state, a batch and a model."""

from pathlib import Path

import jax
import numpy as np
from flax.training.train_state import TrainState

from tests.blocks import matches, read_blocks, run_console, run_python
from tests.models.case import OPTIMIZERS, linen_case
from tests.models.gpt import GPT, loss, make_batch

README = Path(__file__).parents[2] / "README.md"


def test_the_code_of_the_readme_runs(capsys, tmp_path, monkeypatch):
    blocks = read_blocks(README.read_text())
    step, masked, planned = (block for block in blocks if block.language == "python")
    model = GPT(width=8, layers=2)
    case = linen_case("gpt", model, inputs=("inputs",), loss=loss, make_batch=make_batch)
    state, batch = case.make_state(OPTIMIZERS["adamw"]()), make_batch(0, 16)
    names = {"state": state, "batch": batch}
    run_python(step, README, names)
    assert isinstance(names["state"], TrainState)
    assert set(names["metrics"]) == {"loss", "grad_norm"}
    assert "peak" in capsys.readouterr().out
    mask = np.arange(batch["targets"].size).reshape(batch["targets"].shape) % 3 > 0
    more = {
        "model": model,
        "params": state.params,
        "dropout_key": jax.random.key(0),
        "batch": {**batch, "mask": mask},
    }
    run_python(masked, README, {**names, **more})
    monkeypatch.chdir(tmp_path)
    run_python(planned, README, {**names, "batch": batch})
    assert "why not" in capsys.readouterr().out
    assert {"step.png", "report.html", "trace.json"} <= {path.name for path in tmp_path.iterdir()}


def test_the_terminal_shows_what_the_readme_says(capsys, monkeypatch):
    monkeypatch.chdir(README.parent)
    (shown,) = (b for b in read_blocks(README.read_text()) if b.output and "ratrain" in b.code)
    run_console(shown, README, {})
    printed = capsys.readouterr().out
    if jax.__version__.startswith("0.10."):
        assert matches(shown.output, printed)
    else:  # other versions of JAX keep other residuals of the same step; its schedule is the same
        assert shown.output.split("\n\n")[2] == printed.split("\n\n")[2]
