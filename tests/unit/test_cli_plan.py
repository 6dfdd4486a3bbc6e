"""`ratrain plan`: for a `config.json` and for a step, printed, as JSON and in a file."""

import json

import pytest

import ratrain_jax as rt
from tests.commands import OPTIONS, SMALL, done, refused
from tests.commands import config as config
from tests.commands import module as module


def test_a_plan_of_a_hugging_face_config_is_printed_and_written(config, tmp_path, capsys):
    path = tmp_path / "plan.json"
    out = done("plan", "--model", config, *OPTIONS, "-o", path, capsys=capsys)
    assert "predicted step" in out
    assert max(map(len, out.splitlines())) <= 80
    assert str(rt.Plan.load(path)) == out.rstrip("\n")


def test_a_plan_is_printed_as_json(config, capsys):
    out = done("plan", "--model", config, *OPTIONS, "--json", capsys=capsys)
    assert rt.Plan.from_json(out).configuration.devices == 2


def test_a_search_is_narrowed(config, capsys):
    only = ["--stages", "1", "--schedule", "gpipe", "--zero", "2", "--microbatch-size", "1"]
    out = done("plan", "--model", config, *OPTIONS, *only, "--json", capsys=capsys)
    chosen = rt.Plan.from_json(out).configuration
    assert (chosen.stages, chosen.schedule, chosen.zero, chosen.rows) == (1, "gpipe", 2, 1)


def test_a_step_of_a_module_is_planned_for(module, capsys):
    named = ["--machine", "generic", "--devices", "2", "--global-batch", "8"]
    out = done("plan", f"{module}:step", *named, "--json", capsys=capsys)
    assert rt.Plan.from_json(out).global_batch == 8


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"model_type": "mixtral"}, "mixtral"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_a_model_that_is_refused_is_named_in_one_line(change, told, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL | change))
    assert told in refused("plan", "--model", path, *OPTIONS, capsys=capsys)


def test_what_does_not_fit_ends_with_code_2(config, capsys):
    limit = ["--memory-limit", "1000"]
    assert "lacks" in refused("plan", "--model", config, *OPTIONS, *limit, capsys=capsys)
