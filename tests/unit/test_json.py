"""The JSON form: read back to an equal program; errors name the path and what was expected."""

import contextlib
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain_jax.errors import ProgramFormatError
from ratrain_jax.lowering.jsonform import FORMAT, VERSION, from_json, to_json
from ratrain_jax.lowering.program import ArrayType, Forward, Kind, Program, Settings, Value
from tests.strategies import json_values, programs, put_somewhere

SMALL = Program(
    Settings(1, 1, 1),
    (),
    (),
    (),
    (),
    (Value(0, Kind.VIEW, "w", (ArrayType((2,), "float32"),), 0, layer=0),),
    ((Forward(0, (0,), (), layers=(0, 1), microbatch=0),),),
    (0,),
    (),
)


@given(programs)
def test_json_is_read_back_to_an_equal_program(program):
    assert from_json(to_json(program)) == program


def test_the_form_is_named_and_versioned():
    table = json.loads(to_json(SMALL))
    assert (table["format"], table["version"]) == (FORMAT, VERSION)
    assert table["order"] == [[{"op": "F", "stage": 0, "reads": [0], "layers": [0, 1]}]]


@pytest.mark.parametrize(
    "old, new, message",
    [
        ('"version":1', '"version":2', "version: expected 1, found 2"),
        ('"version":1', '"version":true', "version: expected 1, found true"),
        (FORMAT, "other", f"format is '{FORMAT}'"),
        ('"zero":1', '"zero":"1"', 'settings.zero: expected a whole number, found "1"'),
        ('"zero":1', '"zero":true', "settings.zero: expected a whole number, found true"),
        ('"zero":1,', "", None),
        ('"kind":"view"', '"kind":"vow"', "values[0].kind: expected one of parameters"),
        ('"dtype":"float32"', '"dtype":"f"', "values[0].arrays[0].dtype: expected the name of"),
        ('"op":"F"', '"op":"Q"', "order[0][0]: expected an object whose op is one of P, F"),
        ('"layers":[0,1]', '"layers":[0]', "order[0][0].layers: expected a list of 2"),
        ('"reads":[0]', '"read":[0]', "order[0][0]: expected only the fields stage, reads"),
        ('"inputs": [0],', "", "the whole: expected a field 'inputs'"),
        ('"inputs": [0],', '"inputs": [0', "line 15: not valid JSON"),
        ('"stages":1', '"stages":NaN', "NaN is no number of JSON"),
    ],
)
def test_errors_name_the_spot_and_what_was_expected(old, new, message):
    text = to_json(SMALL)
    assert old in text
    damaged = text.replace(old, new, 1)
    if message is None:
        assert from_json(damaged) == SMALL
        return
    with pytest.raises(ProgramFormatError, match=re.escape(message)):
        from_json(damaged)


@given(st.text() | st.sampled_from(["[" * 100_000, "1" * 5000, '{"a":' * 50_000, "{}", "[]"]))
def test_any_text_is_a_program_or_a_format_error(text):
    with pytest.raises(ProgramFormatError):
        from_json(text)


@given(programs, json_values, st.data())
def test_a_damaged_table_is_a_program_or_a_format_error(program, junk, data):
    table = json.loads(to_json(program))
    put_somewhere(table, junk, data)
    with contextlib.suppress(ProgramFormatError):
        assert isinstance(from_json(json.dumps(table)), Program)
