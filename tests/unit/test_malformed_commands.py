"""Commands that are given damaged files: they end with one sentence."""

import contextlib
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain_jax.cli import main
from ratrain_jax.errors import RATrainError
from tests.malformed import EVERY_FORM, FORMS, ROUNDS, damaged

STEP = """
import jax
from tests.malformed import TYPES, plain as step
state, batch = TYPES
"""
WITH_A_FILE = {
    "program text": ("inspect", "{file}"),
    "program JSON": ("inspect", "{file}"),
    "plan": ("inspect", "{file}"),
    "profile": ("simulate", "{step}", "--machine", "cpu", "--profile", "{file}"),
    "machine": ("simulate", "{step}", "--machine", "{file}"),
    "config": ("inspect", "--sequence", "8", "--model", "{file}"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("malformed")


@EVERY_FORM
@given(data=st.data())
@settings(ROUNDS, max_examples=20)
def test_a_command_given_a_damaged_file_ends_with_one_sentence(name, folder, data):
    form = FORMS[name]
    step = folder / "user.py"
    step.write_text(STEP)
    path = folder / f"given.{form.suffix}"
    path.write_bytes(data.draw(damaged(name) | st.binary(max_size=20)))
    if name == "config":
        try:
            form.load(path)
            return  # of a model that can be very large
        except RATrainError:
            pass
    code, told = command(
        *(word.format(file=path, step=f"{step}:step") for word in WITH_A_FILE[name])
    )
    assert code in (0, 2)
    assert (code == 2) == told.startswith("ratrain: "), told
    assert "Traceback" not in told


def command(*words):
    """Runs a command; its exit code, and what it prints on standard error."""
    out, errors = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
        pytest.raises(SystemExit) as ended,
    ):
        main([*words, "--quiet"])
    return ended.value.code, errors.getvalue()
