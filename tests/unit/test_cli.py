"""The command line as a whole: its commands, their help and completion, and what `--quiet` leaves out."""

import json
import subprocess
import sys
import types

import pytest
from click.testing import CliRunner

import ratrain_jax as rt
from ratrain_jax import cli
from tests.commands import OPTIONS, done, run
from tests.commands import config as config


def test_machines_are_listed(capsys):
    out = done("machines", capsys=capsys)
    assert {line.split()[0] for line in out.splitlines()} == set(rt.machines.names())
    table = json.loads(done("machines", "--json", capsys=capsys))
    assert [machine["name"] for machine in table["machines"]] == list(rt.machines.names())


COMMANDS = sorted(cli.cli.commands)


def test_the_commands_are_there():
    wanted = [
        "bench",
        "completion",
        "inspect",
        "launch",
        "machines",
        "plan",
        "profile",
        "report",
        "simulate",
        "train",
    ]
    assert wanted == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command):
    result = CliRunner().invoke(cli.cli, [command, "--help"])
    assert result.exit_code == 0
    assert f"ratrain {command}" in result.output.split("Example:")[1]
    assert max(map(len, result.output.splitlines())) <= 80
    if command != "completion":
        assert "--quiet" in result.output


def test_the_command_line_starts_without_jax():
    code = (
        "import sys, ratrain_jax.cli; assert not {'jax', 'matplotlib', 'bokeh'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_a_command_the_help_is_shown(capsys):
    code, out, err = run(capsys=capsys)
    assert (code, out) == (2, "")
    assert str(err).startswith("Usage: ratrain")


def test_quiet_silences_notes(config, tmp_path, capsys):
    narrow = ["--stages", "1", "--schedule", "gpipe", "--recovery", "none"]
    command = ["plan", "--model", config, *OPTIONS, *narrow, "-o", tmp_path / "plan.json"]
    for where in ("before", "behind"):
        given = ["--quiet", *command] if where == "before" else [*command, "--quiet"]
        assert run(*given, capsys=capsys)[2] == ""
    assert "wrote" in run(*command, capsys=capsys)[2]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_names_ratrain(shell, capsys):
    assert "_RATRAIN_COMPLETE" in done("completion", shell, capsys=capsys)


def test_names_are_completed(monkeypatch, capsys):
    monkeypatch.setenv("_RATRAIN_COMPLETE", "fish_complete")
    for line, word, wanted in [
        ("ratrain inspect --model", "llama2", "llama2-7b"),
        ("ratrain simulate --machine", "mt", "mt3000"),
        ("ratrain", "ins", "inspect"),
    ]:
        monkeypatch.setenv("COMP_WORDS", f"{line} {word}")
        monkeypatch.setenv("COMP_CWORD", word)
        assert wanted in run(capsys=capsys)[1]


def test_commands_are_one_module_each():
    for name, command in cli.cli.commands.items():
        assert command.callback.__module__ == f"ratrain_jax.cli.{name}"
    assert isinstance(sys.modules["ratrain_jax.cli"], types.ModuleType)
