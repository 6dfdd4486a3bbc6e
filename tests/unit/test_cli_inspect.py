"""`ratrain inspect`: steps, programs, plans and models, from modules and files, under settings of their own."""

import json
import os
import sys

import pytest

import ratrain_jax as rt
from tests.commands import OPTIONS, done, refused
from tests.commands import config as config
from tests.commands import module as module


@pytest.mark.parametrize("name", ["step", "plain", "lowered", "program", "plan"])
def test_inspect_takes_steps_lowered_programs_and_plans(name, module, capsys):
    out = done("inspect", f"{module}:{name}", capsys=capsys)
    assert max(map(len, out.splitlines())) <= 80
    for shown in ("layer", "params", "stage 0", "F0", "bytes a device"):
        assert shown in out


def test_types_of_the_state_are_taken_without_making_it(module, capsys):
    done("inspect", f"{module}:step", capsys=capsys)
    made = sys.modules["user_step"].MADE
    assert made and all(name.endswith("Tracer") for name in made)


def test_a_module_is_found_in_the_working_directory(module, capsys, monkeypatch):
    monkeypatch.chdir(os.path.dirname(module))
    monkeypatch.delitem(sys.modules, "user_step", raising=False)
    assert "stage 1" in done("inspect", "user_step:step", capsys=capsys)


def test_settings_replace_those_of_the_step(module, capsys):
    given = ["--microbatches", "2", "--schedule", "gpipe", "--zero", "2", "--recovery", "none"]
    table = json.loads(done("inspect", f"{module}:step", *given, "--json", capsys=capsys))
    found = table["settings"]
    assert (found["stages"], found["microbatches"], found["schedule"]) == (2, 2, "gpipe")
    assert (found["zero"], found["recovery"]) == (2, "none")


def test_a_batch_can_be_named(module, capsys):
    batch = ["--batch", f"{module}:wide_batch"]
    table = json.loads(done("inspect", f"{module}:step", "--json", capsys=capsys))
    wide = json.loads(done("inspect", f"{module}:step", *batch, "--json", capsys=capsys))
    assert wide["layers"][0]["flops"] == 2 * table["layers"][0]["flops"]


def test_a_model_is_looked_at_without_code(config, capsys):
    given = ["--sequence", "32", "--stages", "2", "--microbatches", "4", "--machine", "a100"]
    table = json.loads(done("inspect", "--model", config, *given, "--json", capsys=capsys))
    assert (table["format"], table["version"]) == ("ratrain-inspection", 1)
    assert len(table["stages"]) == 2
    assert table["step"]["machine"] == "a100"


@pytest.mark.parametrize("form", ["as_json", "as_text"])
def test_a_saved_program_shows_what_the_step_does(form, module, tmp_path, capsys):
    step = done("inspect", f"{module}:step", capsys=capsys)
    lowered = sys.modules["user_step"].lowered
    path = tmp_path / "program"
    path.write_text(getattr(lowered, form)())
    assert done("inspect", path, capsys=capsys) == step


def test_a_saved_plan_is_shown_alone_and_with_its_model(config, tmp_path, capsys):
    path = tmp_path / "plan.json"
    done("plan", "--model", config, *OPTIONS, "--memory-limit", 10**7, "-o", path, capsys=capsys)
    alone = done("inspect", path, capsys=capsys)
    assert alone.startswith(str(rt.Plan.load(path)))
    assert "P parameters" in alone
    assert done("inspect", path, "--json", capsys=capsys) == path.read_text()
    model = ["--model", config, "--sequence", "32"]
    line = rt.Plan.load(path)
    assert "F0" in done("inspect", path, *model, capsys=capsys)
    table = json.loads(done("simulate", path, *model, "--json", capsys=capsys))
    assert table["step"]["machine"] == "a100"
    assert table["step"]["step"] == pytest.approx(line.step_seconds, rel=0.1)
    assert "--model" in refused("simulate", path, capsys=capsys)
    assert "--stages" in refused("inspect", path, *model, "--stages", "1", capsys=capsys)


def test_a_saved_plan_says_the_settings_of_a_step(module, tmp_path, capsys):
    path = tmp_path / "plan.json"
    named = ["--machine", "generic", "--devices", "2", "--global-batch", "8", "--stages", "2"]
    done("plan", f"{module}:step", *named, "--schedule", "gpipe", "-o", path, capsys=capsys)
    given = [f"{module}:step", "--plan", path]
    table = json.loads(done("simulate", *given, "--json", capsys=capsys))
    assert (table["settings"]["schedule"], table["step"]["machine"]) == ("gpipe", "generic")
    assert "--zero" in refused("inspect", *given, "--zero", "2", capsys=capsys)
    assert "another" in refused("inspect", *given, "--batch", "long_batch", capsys=capsys)


def test_a_plan_says_how_many_examples_a_batch_has(module, tmp_path, capsys):
    path = tmp_path / "plan.json"
    named = ["--machine", "generic", "--devices", "2", "--global-batch", "8", "--stages", "2"]
    done("plan", f"{module}:step", *named, "-o", path, capsys=capsys)
    given = [f"{module}:step", "--plan", path, "--batch", "wide_batch"]
    table = json.loads(done("inspect", *given, "--json", capsys=capsys))
    alone = json.loads(done("inspect", *given[:3], "--json", capsys=capsys))
    assert table == alone
    assert "of 8 with --batch" in refused("profile", *given, capsys=capsys)
