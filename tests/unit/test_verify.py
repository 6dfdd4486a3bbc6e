"""The verifier takes every program that the builder makes, and refuses any other without a traceback."""

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain_jax.errors import VerificationError
from ratrain_jax.lowering.verify import verify
from tests import strategies
from tests.programs import make_program, replaced, with_order, without
from tests.verifier import program as program

SCHEDULES = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "ratrain": {"schedule": "ratrain"},
    "ratrain, late sync": {"schedule": "ratrain", "layerwise_state": False},
    "ratrain, no prefetch": {"schedule": "ratrain", "update_prefetch": False},
}


def check_builder(schedule, stages, microbatches):
    """Verifies a program with the other settings drawn by chance, the same in every run."""
    chance = random.Random(f"{schedule} {stages} {microbatches}")
    verify(
        make_program(
            stages,
            data_parallel=chance.choice((1, 2)),
            microbatches=microbatches,
            zero=chance.choice((1, 2)),
            clip=chance.random() < 0.5,
            block=chance.choice((1, 2, 4)),
            recovery=chance.choice(("forward", "backward", "auto")),
            recovered=tuple(chance.randint(0, 2) for _ in range(stages)),
            window_layers=chance.randint(1, 3),
            window_bytes=chance.choice((None, 100, 200)),
            window_microbatches=chance.randint(1, 3),
            **SCHEDULES[schedule],
        )
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", range(1, 9))
def test_programs_of_the_builder_are_right(schedule, stages):
    for microbatches in (1, stages, 5):
        check_builder(schedule, stages, microbatches)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", range(1, 9))
def test_programs_of_the_builder_are_right_at_any_number_of_microbatches(schedule, stages):
    for microbatches in range(1, 17):
        check_builder(schedule, stages, microbatches)


@given(strategies.programs)
def test_any_program_is_right_or_refused(program):
    with pytest.raises(VerificationError):
        verify(program)


@settings(max_examples=60)
@given(st.data())
def test_a_program_without_one_op_is_refused(program, data):
    stage = data.draw(st.sampled_from(range(len(program.order))))
    op = data.draw(st.sampled_from(program.order[stage]))
    with pytest.raises(VerificationError):
        verify(without(program, op))


@settings(max_examples=60)
@given(st.data())
def test_a_program_with_one_wrong_read_is_refused(program, data):
    stage = data.draw(st.sampled_from(range(len(program.order))))
    op = data.draw(st.sampled_from([op for op in program.order[stage] if op.reads]))
    at = data.draw(st.sampled_from(range(len(op.reads))))
    values = st.integers(0, len(program.values) - 1).filter(lambda n: n != op.reads[at])
    wrong = data.draw(values)
    reads = (*op.reads[:at], wrong, *op.reads[at + 1 :])
    donates = tuple(wrong if number == op.reads[at] else number for number in op.donates)
    with pytest.raises(VerificationError):
        verify(replaced(program, op, reads=reads, donates=donates))


@settings(max_examples=60)
@given(st.data(), strategies.ops)
def test_a_program_with_any_op_in_the_place_of_another_gives_no_traceback(program, data, op):
    stage = data.draw(st.sampled_from(range(len(program.order))))
    index = data.draw(st.sampled_from(range(len(program.order[stage]))))
    ops = program.order[stage]
    with contextlib.suppress(VerificationError):
        verify(with_order(program, stage, (*ops[:index], op, *ops[index + 1 :])))
