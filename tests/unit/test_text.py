"""The text form: read back to an equal program, legible, and errors with line and expectation."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain_jax.errors import ProgramFormatError
from ratrain_jax.lowering.mnemonics import op_label, op_line
from ratrain_jax.lowering.program import (
    ArrayType,
    Backward,
    GradSync,
    Kind,
    Program,
    SendActivation,
    Settings,
    Value,
)
from ratrain_jax.lowering.text import as_text, parse, readable_bytes
from tests.strategies import ops, programs

EMPTY = Program(Settings(1, 1, 1), (), (), (), (), (), ((),), (), ())


@given(programs)
def test_text_is_read_back_to_an_equal_program(program):
    assert parse(as_text(program)) == program


@given(ops, st.integers(0, 3))
def test_an_op_is_one_line_without_blanks_at_its_ends(op, stage):
    line = op_line(op, stage)
    assert "\n" not in line and line == line.strip()
    assert line.split()[: len(op_label(op).split())] == op_label(op).split()


def test_donated_reads_and_waits_are_marked():
    op = Backward(0, (4, 5), (7,), (5,), (3,), layers=(0, 2), microbatch=1)
    assert op_line(op, 0) == "B   L0:2 i1    %4 %5! -> %7  after %3"
    assert op_line(op, 1).endswith("@0")


def test_what_is_sent_once_a_step_has_no_microbatch():
    assert op_line(SendActivation(0, (1,), (2,), target=1), 0) == "SA  >1         %1 -> %2"
    assert op_label(GradSync(0, layer=3)) == "GS L3"


@pytest.mark.parametrize(
    "count, text", [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1024**2 - 1, "1.0 MiB")]
)
def test_bytes_are_readable(count, text):
    assert readable_bytes(count) == text


def test_equal_arrays_are_written_once_and_bytes_are_a_note():
    arrays = (ArrayType((2,), "float32"),) * 3
    value = Value(0, Kind.VIEW, "w", arrays, 0, layer=1, aliased=8)
    text = as_text(dataclasses.replace(EMPTY, values=(value,)))
    assert "%0       view  w     s0    L1     -           {16 B}  f32[2] x 3 aliased 8" in text
    assert parse(text.replace("{16 B}", "{a note}")).values == (value,)


def test_blank_lines_comments_and_spacing_are_free():
    text = as_text(EMPTY).replace("\n", "   # a note\n\n").replace("  ", "\t ")
    text = re.sub(r"^(\w.*?)\s*# a note", r"\1", text, flags=re.M)
    assert parse(text) == EMPTY


@pytest.mark.parametrize(
    "old, new, line, expected",
    [
        ("ratrain program 1", "ratrain program 2", 1, "'ratrain program 1'"),
        ("fingerprint", "finger", 2, "a line 'fingerprint'"),
        ("settings\n", "", 4, "the section 'settings'"),
        ("stages  ", "stages x", 5, "a whole number"),
        ("layerwise_state      on", "layerwise_state maybe", 11, "one of on, off"),
        ("stage 0", "stage 1", 33, "the section 'stage 0'"),
        ("stage 0", "stage 0\nF L0 i0", 34, "layers such as L0:3"),
        ("stage 0", "stage 0\nQ %1", 34, "an op: one of P, F, R"),
        ("stage 0", "stage 0\nX %1 %2 )", 34, "the end of the line"),
        ("values\n", "values\n%0 view a s0 - - f99[2]\n", 28, "an array of a known dtype"),
        ("values\n", "values\n%0 vow a s0 - - f32[2]\n", 28, "one of parameters, optimizer"),
        ("layers\n", "layers\nL1 a\n", 20, "'L0'"),
        ("inputs\n", "inputs\n1 2\n", 30, "values such as %0"),
    ],
)
def test_errors_have_the_line_and_what_was_expected(old, new, line, expected):
    text = as_text(EMPTY).replace(old, new, 1)
    with pytest.raises(ProgramFormatError, match=f"^line {line}: expected {re.escape(expected)}"):
        parse(text)


@given(st.text())
def test_any_text_is_a_program_or_a_format_error(text):
    with pytest.raises(ProgramFormatError, match=r"^line \d+: expected "):
        parse(text)


@given(programs, st.data())
def test_a_damaged_text_is_a_program_or_a_format_error(program, data):
    text = as_text(program)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 10)))
    pieces = st.text(max_size=4) | st.sampled_from(text.split())
    damaged = text[:start] + data.draw(pieces) + text[end:]
    try:
        assert isinstance(parse(damaged), Program)
    except ProgramFormatError as error:
        assert re.match(r"line \d+: expected .*\.$", str(error), re.S)
