"""The command line: what it prints, writes and refuses."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
import types

import pytest
from click.testing import CliRunner

import ratrain_jax as rt
from ratrain_jax import cli
from ratrain_jax.cli.text import passages, read_tokens
from ratrain_jax.errors import OptionError

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
STEP = """
    import jax, jax.numpy as jnp, ratrain_jax as rt

    def plain(state, x):
        def loss_fn(params):
            return (jnp.tanh(x @ params["a"]) @ params["b"]).mean()
        loss, grads = rt.value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": loss}

    step = rt.train_step(stages=2, microbatches=4, boundaries=("b",))(plain)
    def make_state():
        state = {"a": jnp.ones((8, 8)), "b": jnp.ones((8, 8))}
        MADE.append(type(state["a"]).__name__)
        return state
    MADE = []
    batch = jax.ShapeDtypeStruct((8, 8), "float32")
    def wide_batch():
        return jnp.ones((16, 8))
    def long_batch():
        return jnp.ones((8, 16))
    def three(state, x, key):
        return state, x
    def raises(state, x):
        raise KeyError("of\\nmy own")
    def makes_nothing():
        return [][0]
    def needs(argument):
        return argument
    lowered = step.lower(jax.eval_shape(make_state), batch)
    program = lowered.program
    plan = rt.plan(step, jax.eval_shape(make_state), batch, machine="generic", devices=2, global_batch=8)
    number = 3
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return str(path)


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    """A module with a step and all that goes with it; its path."""
    path = tmp_path_factory.mktemp("user") / "user_step.py"
    path.write_text(textwrap.dedent(STEP))
    return str(path)


def run(*arguments, capsys):
    """Exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(map(str, arguments)))
    return ended.value.code, *capsys.readouterr()


def refused(*arguments, capsys):
    """The one sentence that a command ends with."""
    code, out, err = run(*arguments, capsys=capsys)
    assert (code, out) == (2, "")
    assert err.startswith("ratrain: ") and err.count("\n") == 1
    return err


def done(*arguments, capsys):
    """What a command prints."""
    code, out, err = run(*arguments, capsys=capsys)
    assert code == 0, err
    return out


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


# What is looked at.


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


# What is refused.


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("nowhere_at_all:step", "nowhere_at_all"),
        ("{module}:nothing", "nothing"),
        ("{module}:number", "int"),
        ("{module}:three", "(state, x, key)"),
        ("{module}", ".py:train_step"),
        ("{module}:", "module:name"),
        ("no/such/file.json", "no/such/file.json"),
    ],
)
def test_what_cannot_be_found_is_named(target, told, module, capsys):
    assert told in refused("inspect", target.format(module=module), capsys=capsys)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--state", "{module}:needs"], "takes arguments"),
        (["--state", "needs"], "takes arguments"),
        (["--batch", "batch", "--batch", "batch"], "(state, x)"),
        (["--batch", "{module}:nothing"], "nothing"),
        (["--microbatches", "3"], "8"),
        (["--model", "llama2-7b"], "--model"),
        (["--nope"], "--nope"),
        (["--machine", "abacus"], "abacus"),
    ],
)
def test_options_that_do_not_fit_end_in_one_sentence(options, told, module, capsys):
    given = [option.format(module=module) for option in options]
    assert told in refused("inspect", f"{module}:step", *given, capsys=capsys)


def test_a_missing_batch_is_said(tmp_path, capsys):
    path = tmp_path / "no_batch.py"
    path.write_text("state = 1.0\ndef step(state, batch): return state\n")
    err = refused("inspect", f"{path}:step", capsys=capsys)
    assert "--batch" in err and "make_batch" in err


def test_a_module_that_fails_is_named(tmp_path, capsys):
    path = tmp_path / "broken_module.py"
    path.write_text("import nowhere_at_all\n")
    assert "nowhere_at_all" in refused("inspect", f"{path}:step", capsys=capsys)


@pytest.mark.parametrize("content", ["{}", "{", "no program\n", '{"format": "ratrain-plan"}'])
def test_a_file_that_is_neither_is_named(content, tmp_path, capsys):
    path = tmp_path / "odd.json"
    path.write_text(content)
    assert "odd.json" in refused("inspect", path, capsys=capsys)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["{module}:raises"], "KeyError: 'of"),
        (["{module}:step", "--state", "makes_nothing"], "IndexError: list index out of range"),
        (["{module}:step", "--state", "number"], "TypeError"),
    ],
)
def test_users_code_that_raises_is_one_sentence_with_its_line(
    options, told, module, capsys, monkeypatch
):
    given = [option.format(module=module) for option in options]
    err = refused("inspect", *given, capsys=capsys)
    assert f"{module}:" in err and told in err
    monkeypatch.setenv("RATRAIN_TRACEBACK", "1")
    with pytest.raises((KeyError, IndexError, TypeError)):
        cli.main(["inspect", *given])


@pytest.mark.parametrize(
    ("content", "told"),
    [("x = 1 / 0\n", ":1: ZeroDivisionError"), ("raise SystemExit('hello')\n", "ends Python")],
)
def test_a_module_that_raises_is_one_sentence(content, told, tmp_path, capsys):
    path = tmp_path / "raising_module.py"
    path.write_text(content)
    assert told in refused("inspect", f"{path}:step", capsys=capsys)


def test_our_own_mistakes_keep_their_traceback(module, monkeypatch):
    monkeypatch.setattr("ratrain_jax.views.terminal_inspection.inspection", None)
    with pytest.raises(TypeError):
        cli.main(["inspect", f"{module}:step"])


def test_an_empty_file_is_named(tmp_path, capsys):
    path = tmp_path / "empty.json"
    path.write_text("")
    assert "empty.json is empty" in refused("inspect", path, capsys=capsys)


def test_without_a_command_the_help_is_shown(capsys):
    code, out, err = run(capsys=capsys)
    assert (code, out) == (2, "")
    assert str(err).startswith("Usage: ratrain")


def test_nothing_to_look_at_is_said(capsys):
    assert "module:step" in refused("inspect", capsys=capsys)
    assert "module:step" in refused("plan", *OPTIONS, capsys=capsys)


def test_a_program_cannot_be_simulated_without_its_code(module, capsys):
    err = refused("simulate", f"{module}:program", "--machine", "a100", capsys=capsys)
    assert "module:step" in err
    assert "--machine" in refused("simulate", f"{module}:step", capsys=capsys)


def test_types_cannot_be_run(module, capsys):
    err = refused("profile", f"{module}:step", capsys=capsys)
    assert "types alone" in err


def test_a_file_that_cannot_be_written_is_one_sentence(config, tmp_path, capsys):
    path = tmp_path / "nowhere" / "plan.json"
    assert "plan.json" in refused("plan", "--model", config, *OPTIONS, "-o", path, capsys=capsys)


@pytest.mark.parametrize(
    ("command", "option"),
    [("report", "-o"), ("profile", "-o"), ("plan", "-o"), ("simulate", "--plot"), ("train", "-o")],
)
def test_a_missing_folder_is_told_before_the_work(command, option, tmp_path, capsys):
    target = "nowhere_at_all:step"
    if command == "train":
        target = tmp_path / "text.txt"
        target.write_text("some text\n")
    path = tmp_path / "nowhere" / "file"
    err = refused(command, target, option, path, capsys=capsys)
    assert "there is no folder" in err and "make it" in err


def test_a_folder_that_cannot_be_written_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ratrain_jax.cli.options.os.access", lambda *_: False)
    err = refused("report", "a:b", "-o", tmp_path / "report.html", capsys=capsys)
    assert "nothing can be written in" in err


# Simulation, and what commands write.


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


# Texts.


def test_tokens_are_bytes_or_numbers_of_distinct_bytes(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"hello\xff")
    tokens, words = read_tokens(str(path), 256)
    assert bytes(tokens) == b"hello\xff" and words == "tokens are bytes"
    tokens, words = read_tokens(str(path), 1000)
    assert bytes(tokens) == b"hello\xff" and "1,000" in words
    tokens, words = read_tokens(str(path), 5)
    assert tokens.tolist() == [1, 0, 2, 2, 3, 4] and "5 distinct" in words
    with pytest.raises(OptionError, match="5 distinct bytes"):
        read_tokens(str(path), 4)


def test_passages_are_drawn_from_the_text_with_targets_one_on(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(10)))
    tokens, _ = read_tokens(str(path), 256)
    batch = next(passages(tokens, 50, 8, 0))
    assert batch["inputs"].shape == (50, 8)
    assert (batch["targets"] == batch["inputs"] + 1).all()
    assert set(batch["inputs"][:, 0].tolist()) == {0, 1}
    with pytest.raises(OptionError, match="shorter"):
        next(passages(tokens, 1, 10, 0))


def test_commands_are_one_module_each():
    for name, command in cli.cli.commands.items():
        assert command.callback.__module__ == f"ratrain_jax.cli.{name}"
    assert isinstance(sys.modules["ratrain_jax.cli"], types.ModuleType)
