"""The command line: what it prints, writes and refuses."""

import json

import pytest
from click.testing import CliRunner

import ratrain_jax as rt
from ratrain_jax import cli

SMALL = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
OPTIONS = ["--machine", "a100", "--clusters", "2", "--global-batch", "4", "--sequence", "32"]


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return str(path)


def run(*arguments, capsys):
    """Exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return ended.value.code, *capsys.readouterr()


def test_a_plan_of_a_hugging_face_config_is_printed_and_written(config, tmp_path, capsys):
    path = tmp_path / "plan.json"
    code, out, _ = run("plan", "--model", config, *OPTIONS, "-o", str(path), capsys=capsys)
    assert code == 0
    assert "predicted step" in out
    assert max(map(len, out.splitlines())) <= 80
    assert str(rt.Plan.load(path)) == out.rstrip("\n")


def test_a_plan_is_printed_as_json(config, capsys):
    code, out, _ = run("plan", "--model", config, *OPTIONS, "--json", capsys=capsys)
    assert code == 0
    assert rt.Plan.from_json(out).configuration.devices == 2


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
    code, out, err = run("plan", "--model", str(path), *OPTIONS, capsys=capsys)
    assert (code, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1


def test_what_does_not_fit_ends_with_code_2(config, capsys):
    limit = ["--memory-limit", "1000"]
    code, _, err = run("plan", "--model", config, *OPTIONS, *limit, capsys=capsys)
    assert code == 2
    assert "lacks" in err


def test_machines_are_listed(capsys):
    code, out, _ = run("machines", capsys=capsys)
    assert code == 0
    assert {line.split()[0] for line in out.splitlines()} == set(rt.machines.names())


@pytest.mark.parametrize("command", ["plan", "machines"])
def test_every_command_has_help_with_an_example(command):
    result = CliRunner().invoke(cli.cli, [command, "--help"])
    assert result.exit_code == 0
    assert f"ratrain {command}" in result.output.split("Example:")[1]
