"""The verifier refuses values that are used too early or too late, leaked, freed twice, or elsewhere than they live."""

import dataclasses

import pytest

from ratrain_jax.errors import VerificationError
from ratrain_jax.lowering.program import (
    ArrayType,
    Borrow,
    Forward,
    Free,
    Kind,
    Op,
    Program,
    SendActivation,
    Settings,
    UpdateShard,
    Value,
)
from ratrain_jax.lowering.verify.life import check_life
from tests.programs import moved, op_of, place, replaced, with_order
from tests.verifier import program as program
from tests.verifier import refused


def tiny(*ops: Op) -> Program:
    """One stage with parameters %0, an entry view %1 of the same buffers, and %2 and %3."""
    array = (ArrayType((2,), "float32"),)
    kinds = (Kind.PARAMETERS, Kind.VIEW, Kind.PARAMETERS, Kind.VIEW)
    values = tuple(
        Value(n, kind, "l", array, 0, layer=0, aliased=8 * (n == 1)) for n, kind in enumerate(kinds)
    )
    return Program(Settings(1, 1, 1), (), (), (), (), values, (ops,), (0, 1), (2,))


def test_use_before_definition(program):
    stage, index = place(program, Forward, 0, layers=(1, 3), microbatch=0)
    text = refused(moved(program, stage, index, 0), "before it is written")
    assert "[F0b]" in text and "\n> 0  F   L1:3 i0 " in text


def test_use_after_free(program):
    stage, index = place(program, Free, 1)
    early = place(program, Forward, 1, microbatch=0)[1]
    text = refused(moved(program, stage, index, early), "which is freed before")
    assert "Forward (F L4:5 i0) on stage 1 reads" in text


def test_use_after_donation():
    reader = Borrow(0, (0,), (3,), layer=0, target=0)
    update = UpdateShard(0, (0,), (2,), (0,), layer=0)
    check_life(tiny(reader, update, Free(0, (1,)), Free(0, (3,))))
    with pytest.raises(VerificationError, match="which is donated to UpdateShard"):
        check_life(tiny(update, reader, Free(0, (1,)), Free(0, (3,))))


def test_view_read_after_its_buffers_were_donated():
    reader = Forward(0, (1,), (3,), layers=(0, 1))
    update = UpdateShard(0, (0,), (2,), (0,), layer=0)
    check_life(tiny(reader, update, Free(0, (1,)), Free(0, (3,))))
    with pytest.raises(VerificationError, match="whose buffers are those of %0, which is donated"):
        check_life(tiny(update, reader, Free(0, (1,)), Free(0, (3,))))


def test_leak(program):
    index = place(program, Free, 0)[1]
    ops = program.order[0]
    value = ops[index].reads[0]
    text = refused(with_order(program, 0, (*ops[:index], *ops[index + 1 :])), "is a leak")
    assert text.startswith(f"%{value} (")


def test_double_free(program):
    index = place(program, Free, 0)[1]
    ops = program.order[0]
    refused(with_order(program, 0, (*ops[: index + 1], *ops[index:])), "End each life once")


def test_output_that_is_freed(program):
    value = next(n for n in program.outputs if program.values[n].stage == 1)
    ops = (*program.order[1], Free(1, (value,)))
    refused(with_order(program, 1, ops), "is not alive at the end")


def test_input_that_no_op_touches_is_a_leak(program):
    ops = tuple(op for op in program.order[0] if not (isinstance(op, Free) and op.reads == (0,)))
    refused(with_order(program, 0, ops), "%0 (replicated replicated on stage 0) is a leak")


def test_value_written_twice(program):
    first = op_of(program, Forward, 0, layers=(0, 1), microbatch=0)
    second = op_of(program, Forward, 0, layers=(0, 1), microbatch=1)
    wrong = replaced(program, second, writes=first.writes)
    refused(wrong, f"writes %{first.writes[0]}, which Forward (F L0:1 i0) on stage 0 writes")


def test_value_of_another_stage(program):
    op = op_of(program, Forward, 1, layers=(4, 5), microbatch=0)
    sent = op_of(program, SendActivation, 0, microbatch=0, writes=op.reads[1:2])
    wrong = replaced(program, op, reads=(op.reads[0], sent.reads[0], *op.reads[2:]))
    refused(wrong, "the same on stage 0, in the place of x0 of microbatch 0")


def test_free_on_another_stage(program):
    index = place(program, Free, 0)[1]
    free = program.order[0][index]
    ops = (*program.order[0][:index], *program.order[0][index + 1 :])
    wrong = with_order(program, 0, ops)
    wrong = with_order(wrong, 1, (*wrong.order[1], dataclasses.replace(free, stage=1)))
    refused(wrong, "which lives elsewhere")
