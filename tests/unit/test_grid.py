"""The grid of slots: true to dependencies, folded to 80 columns, the bad step in brackets."""

import re

import pytest

from ratrain_jax.lowering.grid import grid, grid_around
from ratrain_jax.lowering.program import Free, GradSync, Recover
from ratrain_jax.lowering.progress import run
from tests.programs import make_program, place, with_order

ONE_FORWARD_ONE_BACKWARD = """\
slot    0   1   2   3   4   5  6  7  8 9  10 11 12 13  14 15  16  17  18  19
stage 0 U*  .   .   .   .   F0 F1 .  . B0 =  F2 B1 =   .  B2  =   .   .   .
  link  PV0 BO0 PV1 PV2 PV3                                       GS0 GS1 GS2
stage 1 U*  .   .   .   .   .  F0 B0 = F1 B1 =  F2 B2  =  M   .   .   .   U7
  link  PV4 BO0 PV5 PV6 PV7                        GR1    GS4 GS5 GS6 GS7

slot    20  21 22 23 24
stage 0 .   U3 U0 U1 U2
  link  GS3
stage 1 U4  U5 U6 .  ."""


def test_one_forward_one_backward():
    program = make_program(2, 1, 3, block=8, schedule="1f1b")
    assert grid(program) == ONE_FORWARD_ONE_BACKWARD


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "ratrain"])
@pytest.mark.parametrize("stages", [1, 3, 8])
def test_it_fits_80_columns_and_shows_every_compute_op(schedule, stages):
    program = make_program(stages, 2, 6, schedule=schedule, recovered=(1,) * stages)
    text = grid(program)
    assert max(map(len, text.splitlines())) <= 80
    for stage in range(stages):
        rows = [line for line in text.splitlines() if line.startswith(f"stage {stage} ")]
        cells = " ".join(rows).split()
        ops = [op for op in program.order[stage] if isinstance(op, Recover)]
        assert len(ops) == sum(cell[0] == "R" for cell in cells) == 6


def test_cells_name_microbatch_block_layer_and_phase():
    text = grid(make_program(2, 2, 2, clip=True))
    for cell in ("F0a", "F1c", "B0b", "B1:2", "GS2", "U2", "PV2", "GR1", "U*", "M", "BO0"):
        assert re.search(rf"(?<![\w:]){re.escape(cell)}(?![\w:])", text), cell


def test_the_marked_op_is_in_brackets():
    program = make_program(2, 2, 3)
    at = place(program, GradSync, 0, layer=2)
    assert grid(program, at).count("[") == 1
    assert "[GS2]" in grid(program, at)
    around = grid_around(program, at)
    assert "[GS2]" in around and around.count("slot") == 1


def test_an_op_without_a_cell_marks_the_one_before_it():
    program = make_program(2, 2, 3)
    stage, index = place(program, Free, 1)
    assert "[F0a]" in grid(program, (stage, index))


def test_the_band_around_a_mark_has_few_stages():
    program = make_program(8, 1, 2)
    rows = grid_around(program, (4, 0)).splitlines()
    assert [row[:7] for row in rows if row.startswith("stage")] == [
        f"stage {s}" for s in range(2, 7)
    ]


def test_a_program_that_cannot_run_is_drawn_all_the_same():
    program = make_program(2, 2, 2)
    backwards = with_order(program, 0, reversed(program.order[0]))
    assert run(backwards, lambda op: 1).cycle
    assert grid(backwards).count("F0a") == grid(program).count("F0a")


def test_a_program_without_ops():
    program = make_program(1, 1, 1)
    assert grid(with_order(program, 0, ())) == ""
