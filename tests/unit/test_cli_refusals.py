"""What commands refuse, each in one sentence: targets, options, files, and code of the user that raises."""

import pytest

from ratrain_jax import cli
from tests.commands import OPTIONS, refused
from tests.commands import config as config
from tests.commands import module as module


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
