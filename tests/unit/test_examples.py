"""The examples' parts that need no training: the text, and what the demo shows meanwhile."""

import importlib
import io
import re
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from examples.text_data import batches, read_sources

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_text_is_the_librarys_sources_up_to_a_limit():
    first = min(Path(sysconfig.get_path("stdlib")).glob("*.py")).read_bytes()
    text = read_sources(100_000)
    assert text.dtype == np.uint8 and len(text) == 100_000
    assert text[: len(first)].tobytes() == first


def test_targets_are_the_inputs_one_byte_on():
    text = np.arange(200, dtype=np.uint8)
    batch = next(batches(text, batch_size=5, length=16))
    assert batch["inputs"].shape == batch["targets"].shape == (5, 16)
    assert batch["inputs"].dtype == batch["targets"].dtype == np.int32
    np.testing.assert_array_equal(batch["targets"], batch["inputs"] + 1)


def test_every_passage_can_be_drawn():
    text = np.arange(19, dtype=np.uint8)
    batch = next(batches(text, batch_size=100, length=16))
    assert set(batch["inputs"][:, 0].tolist()) == {0, 1, 2}


def test_equal_seeds_draw_equal_batches():
    text = np.arange(200, dtype=np.uint8)
    one, same, other = (batches(text, batch_size=4, length=8, seed=seed) for seed in (1, 1, 2))
    for _ in range(3):
        drawn = next(one)["inputs"]
        np.testing.assert_array_equal(drawn, next(same)["inputs"])
        assert (drawn != next(other)["inputs"]).any()


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("demo")


def shown(demo, *, terminal):
    """What the demo writes while a step of falling loss runs 100 times."""
    written = io.StringIO()
    console = Console(file=written, width=80, force_terminal=terminal, highlight=False)

    def step(state, batch):
        return state + 1, {"loss": np.float32(12.5 - state / 10)}

    loss = demo.train(console, "ratrain", step, 0, [None] * 100)
    assert loss == np.float32(12.5 - 9.9)
    return written.getvalue()


def test_a_terminal_gets_a_bar_of_one_line(demo):
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown(demo, terminal=True))
    lines = [line.rstrip() for line in re.split(r"[\r\n]", text) if line.strip()]
    assert all(len(line) <= 80 and line.startswith("ratrain") for line in lines)
    assert re.search(r"100/100 loss 2\.6000 +[\d,]+ tokens/s \d:\d\d:\d\d$", lines[-1])


def test_a_pipe_gets_a_line_now_and_then(demo):
    lines = shown(demo, terminal=False).splitlines()
    assert [line.split()[1] for line in lines] == ["40/100", "80/100", "100/100"]
    assert all(re.search(r"loss \d+\.\d{4} +[\d,]+ tokens/s$", line) for line in lines)
    assert max(map(len, lines)) <= 80
