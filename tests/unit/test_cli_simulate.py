"""`ratrain simulate`: what is printed of a step, and of its failures, stragglers and checkpoints."""

import dataclasses
import json
import sys

import pytest

import ratrain_jax as rt
from tests.commands import done, refused
from tests.commands import module as module


def test_a_step_is_simulated(module, capsys):
    out = done("simulate", f"{module}:step", "--machine", "a100", capsys=capsys)
    assert max(map(len, out.splitlines())) <= 80
    expected = rt.simulate(sys.modules["user_step"].lowered, "a100")
    assert str(expected.breakdown) in " ".join(out.split()) or "ideal" in out
    for shown in ("compute", "exposed", "hidden", "tail", "critical path", "Backward"):
        assert shown in out
    table = json.loads(
        done("simulate", f"{module}:step", "--machine", "a100", "--json", capsys=capsys)
    )
    assert table["step"]["step"] == expected.step_seconds


def test_failures_and_stragglers_are_told(module, capsys):
    given = ["simulate", f"{module}:step", "--machine", "a100", "--stragglers", "0.05"]
    assert "ranks computes" in " ".join(done(*given, capsys=capsys).split())
    given += ["--mtbf", "1000", "--checkpoint", "60", "--restart", "600", "--interval", "1800"]
    out = done(*given, capsys=capsys)
    assert max(map(len, out.splitlines())) <= 80
    told = json.loads(done(*given, "--json", capsys=capsys))["expected"]
    failures = rt.Failures(mtbf=3.6e6, checkpoint=60.0, restart=600.0, interval=1800.0)
    timeline = rt.simulate(sys.modules["user_step"].lowered, "a100")
    expected = timeline.expected(failures, stragglers=0.05)
    assert told == dataclasses.asdict(expected)
    assert f"lost {1 - expected.lost.goodput:.2%}" in " ".join(out.split())


def test_a_checkpoint_takes_the_states_bytes_at_the_storages_rate(module, capsys):
    given = ["simulate", f"{module}:step", "--machine", "a100", "--mtbf", "1", "--json"]
    rate = done(*given, "--storage", "1000", capsys=capsys)
    count = 2 * 8 * 8 * 4  # two float32 matrices
    assert json.loads(rate) == json.loads(
        done(*given, "--checkpoint", str(count / 1000), capsys=capsys)
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--checkpoint", "60"], "--checkpoint says nothing without --mtbf"),
        (["--mtbf", "10"], "give either --checkpoint seconds or --storage"),
        (["--mtbf", "10", "--checkpoint", "1", "--storage", "1"], "give either"),
        (["--mtbf", "0", "--checkpoint", "1"], "--mtbf"),
        (["--stragglers", "0.5"], "--stragglers"),
    ],
)
def test_failures_that_say_nothing_are_refused(options, told, module, capsys):
    given = ["simulate", f"{module}:step", "--machine", "a100", *options]
    assert told in refused(*given, capsys=capsys)
