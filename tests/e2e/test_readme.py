"""The code in the README runs as it stands, given a state, a batch and a model."""

from pathlib import Path

import jax
import numpy as np
from flax.training.train_state import TrainState

from tests.blocks import read_blocks, run_python
from tests.models.case import OPTIMIZERS, linen_case
from tests.models.gpt import GPT, loss, make_batch

README = Path(__file__).parents[2] / "README.md"


def test_the_code_of_the_readme_runs(capsys):
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
    run_python(planned, README, {**names, "batch": batch})
    assert "why not" in capsys.readouterr().out
