"""The verifier: takes every program that the builder makes, refuses one wrong program a fault."""

import contextlib
import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain_jax.errors import VerificationError
from ratrain_jax.lowering.memory import memory_analysis
from ratrain_jax.lowering.program import (
    ArrayType,
    Backward,
    Borrow,
    Forward,
    Free,
    GlobalReduce,
    GradSync,
    Kind,
    Metrics,
    Op,
    PrefetchView,
    Program,
    Recover,
    SendActivation,
    SendGradient,
    Settings,
    UpdateShard,
    Value,
    ZeroGradient,
)
from ratrain_jax.lowering.verify import verify
from ratrain_jax.lowering.verify.life import check_life
from tests import strategies
from tests.programs import make_program, moved, op_of, place, replaced, with_order, without

SCHEDULES = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "ratrain": {"schedule": "ratrain"},
    "ratrain, late sync": {"schedule": "ratrain", "layerwise_state": False},
    "ratrain, no prefetch": {"schedule": "ratrain", "update_prefetch": False},
}


def refused(program: Program, message: str) -> str:
    """Asserts that a program is refused with a message; returns the whole of it."""
    with pytest.raises(VerificationError) as caught:
        verify(program)
    assert message in str(caught.value)
    return str(caught.value)


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


@pytest.fixture(scope="module")
def program() -> Program:
    """Two stages, three microbatches, tied, clipped."""
    return make_program(clip=True)


@pytest.fixture(scope="module")
def plain() -> Program:
    """As `program`, without clipping, so that updates follow their syncs."""
    return make_program()


@pytest.fixture(scope="module")
def recovering() -> Program:
    """Both stages recover two blocks."""
    return make_program(schedule="gpipe", recovered=(2, 2), recovery="backward")


# Order and life.


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


# An op missing or doubled.

MISSING = {
    "forward": (Forward, {"microbatch": 1}, "lacks the Forward of layers L0:1 for microbatch 1"),
    "backward": (Backward, {"microbatch": 1}, "L3 (l3) has no Backward for microbatch 1"),
    "zero": (ZeroGradient, {"layer": 2}, "lacks the ZeroGradient of L2 (l2)"),
    "activation": (
        SendActivation,
        {"microbatch": 2},
        "Stage 0 lacks the SendActivation of the boundary x0 for microbatch 2 to stage 1",
    ),
    "cotangent": (
        SendGradient,
        {"microbatch": 2},
        "Stage 1 lacks the SendGradient of the cotangent x0 for microbatch 2 to stage 0",
    ),
    "tied share": (
        SendGradient,
        {"microbatch": None},
        "Stage 1 lacks the SendGradient of the accumulator of L0 to stage 0",
    ),
    "sync": (GradSync, {"layer": 3}, "Stage 0 lacks the GradSync of L3 (l3)"),
    "partials": (UpdateShard, {"layer": 3, "phase": 0}, "UpdateShard of L3 (l3) of phase 0"),
    "update": (UpdateShard, {"layer": 3, "phase": 1}, "UpdateShard of L3 (l3) of phase 1"),
    "replicated": (UpdateShard, {"layer": None}, "Stage 0 lacks the UpdateShard."),
    "prefetch": (PrefetchView, {"layer": 5}, "Stage 1 lacks the PrefetchView of L5 (l5)"),
    "borrow": (Borrow, {}, "Stage 0 lacks the Borrow of L0 (l0) to stage 1"),
    "reduction": (GlobalReduce, {}, "Stage 0 lacks the GlobalReduce of phase 1"),
    "metrics": (Metrics, {}, "Stage 1 lacks the Metrics."),
}


@pytest.mark.parametrize("fault", MISSING)
def test_missing_op(program, fault):
    op_type, fields, message = MISSING[fault]
    op = op_of(program, op_type, **fields)
    text = refused(without(program, op), message)
    assert "\n> " in text and "[" in text


@pytest.mark.parametrize("fault", MISSING)
def test_doubled_op(program, fault):
    op_type, fields, _ = MISSING[fault]
    op = op_of(program, op_type, **fields)
    for stage in op.stages:
        program = with_order(program, stage, (*program.order[stage], op))
    refused(program, "is there twice.")


def test_same_op_again_under_new_values(program):
    op = op_of(program, ZeroGradient, 0, layer=0)
    number = len(program.values)
    copy = dataclasses.replace(program.values[op.writes[0]], id=number)
    program = dataclasses.replace(program, values=(*program.values, copy))
    again = dataclasses.replace(op, writes=(number,))
    text = refused(with_order(program, 0, (*program.order[0], again)), "is there twice")
    assert f"\n> {len(program.order[0])}  Z   L0" in text


def test_op_that_nothing_asks_for(program):
    op = op_of(program, Forward, 0, layers=(0, 1), microbatch=0)
    wrong = replaced(program, op, layers=(1, 2))
    refused(wrong, "Forward (F L1:2 i0) on stage 0 has no place in this program")


def test_backward_that_covers_a_layer_twice(program):
    op = op_of(program, Backward, 0, layers=(2, 3), microbatch=2)
    refused(replaced(program, op, layers=(1, 3)), "L1 (l1) goes backward twice for microbatch 2")


def test_recover_of_a_block_that_is_not_recovered(recovering):
    op = op_of(recovering, Recover, 0, layers=(0, 1), microbatch=1)
    missing = "lacks the Recover of layers L0:1 for microbatch 1"
    refused(without(recovering, op), missing)
    layers = tuple(dataclasses.replace(layer, recovered=False) for layer in recovering.layers)
    refused(dataclasses.replace(recovering, layers=layers), "Recover (R L0:1 i0) on stage 0 has no")


def test_op_between_stages_in_one_list_only(program):
    op = op_of(program, SendActivation, microbatch=1)
    ops = tuple(o for o in program.order[1] if o != op)
    refused(with_order(program, 1, ops), "must stand once in the lists of stages 0, 1; it is in 0")


# What an op reads.


def test_gradient_without_its_tied_share(program):
    op = op_of(program, GradSync, 0, layer=0)
    wrong = replaced(program, op, reads=op.reads[:1], donates=op.donates[:1])
    refused(wrong, "does not read the share of stage 1 in the tied gradient of L0")


def test_update_without_the_final_gradient():
    program = make_program(zero=2)
    op = op_of(program, UpdateShard, 0, layer=2)
    early = op_of(program, GradSync, 0, layer=2, microbatch=1)
    gradient = early.writes[0]
    wrong = replaced(
        program, op, reads=(gradient, *op.reads[1:]), donates=(gradient, *op.donates[1:])
    )
    refused(wrong, "the gradient shard of L2 after 2 syncs, in the place of the gradient shard of")


def test_microbatches_added_out_of_order(program):
    first = op_of(program, Backward, 0, layers=(1, 3), microbatch=0)
    second = op_of(program, Backward, 0, layers=(1, 3), microbatch=1)
    start = op_of(program, ZeroGradient, 0, layer=1).writes[0]
    after = first.writes[-2]
    swap = {start: after, after: start}
    reads = tuple(swap.get(number, number) for number in second.reads)
    donates = tuple(swap.get(number, number) for number in second.donates)
    wrong = replaced(program, second, reads=reads, donates=donates)
    refused(wrong, "the accumulator of L1 after 0 additions, in the place of the accumulator of L1")


def test_stale_view(program):
    op = op_of(program, Backward, 0, layers=(2, 3), microbatch=2)
    view = op_of(program, PrefetchView, layer=2).writes[0]
    text = refused(
        replaced(program, op, reads=(view, *op.reads[1:])),
        f"reads %{view}, the next step's view of L2, in the place of this step's view of L2",
    )
    assert "[B2:2]" in text


def test_next_view_of_old_parameters(program):
    op = op_of(program, PrefetchView, layer=2)
    old = next(v.id for v in program.values if v.kind is Kind.PARAMETERS and v.layer == 2)
    wrong = replaced(program, op, reads=(old,))
    refused(wrong, "the old parameters of L2, in the place of the new parameters of L2")


def test_cotangent_of_another_microbatch(program):
    op = op_of(program, Backward, 0, layers=(3, 4), microbatch=0)
    other = op_of(program, Backward, 0, layers=(3, 4), microbatch=1)
    at = next(n for n, v in enumerate(op.reads) if program.values[v].kind is Kind.COTANGENT)
    reads = (*op.reads[:at], other.reads[at], *op.reads[at + 1 :])
    message = "for microbatch 1, summed over its readers from L4 on, in the place of the cotangent"
    refused(replaced(program, op, reads=reads), message)


def test_update_that_does_not_wait_for_its_reduction(program):
    op = op_of(program, UpdateShard, 0, layer=1, phase=1)
    refused(replaced(program, op, reads=op.reads[:-1]), "does not read the scalars of reduction 1")


def test_donation_that_is_not_the_convention(program):
    op = op_of(program, Forward, 0, layers=(0, 1), microbatch=2)
    refused(replaced(program, op, donates=op.reads[:1]), "must donate nothing")
    op = op_of(program, GradSync, 0, layer=2)
    refused(replaced(program, op, donates=()), f"must donate %{op.reads[0]}")


def test_recover_waits_for_the_incoming_cotangent(recovering):
    op = op_of(recovering, Recover, 0, layers=(0, 1), microbatch=1)
    assert op.waits
    message = "waits for nothing; with recovery 'backward' it waits for the cotangent of x0"
    refused(replaced(recovering, op, waits=()), message)
    forward = dataclasses.replace(recovering.settings, recovery="forward")
    wrong = dataclasses.replace(recovering, settings=forward)
    refused(wrong, "with recovery 'forward' it waits for nothing")


def test_backward_waits_for_the_last_microbatches_sync():
    program = make_program(zero=2)
    op = op_of(program, Backward, 0, microbatch=1)
    assert op.waits
    message = "waits for nothing; with zero=2 it waits for the gradient shard of"
    refused(replaced(program, op, waits=()), message)
    op = op_of(program, GradSync, 0, layer=2, microbatch=1)
    message = "only Forward, Recover and Backward may"
    refused(replaced(program, op, waits=op.reads[:1]), message)


def test_without_prefetch_a_stages_first_forward_waits_for_its_last_view():
    program = make_program(schedule="1f1b")
    for stage in range(program.settings.stages):
        forwards = [op for op in program.order[stage] if isinstance(op, Forward)]
        gathers = [op for op in program.order[stage] if isinstance(op, (PrefetchView, Borrow))]
        views = {v for op in gathers for v in op.writes if program.values[v].stage == stage}
        assert views == {*forwards[0].waits, *views.intersection(forwards[0].reads)}
        assert not any(op.waits for op in forwards[1:])
        message = "waits for nothing; with update_prefetch off it waits for this step's view of"
        refused(replaced(program, forwards[0], waits=()), message)
    ahead = make_program()
    op = op_of(ahead, Forward, 0, microbatch=1)
    refused(replaced(ahead, op, waits=op.reads[:1]), "with update_prefetch on it waits for nothing")


def test_replicated_update_behind_a_reduction_that_its_stage_does_not_get():
    program = make_program(schedule="1f1b")
    op = op_of(program, UpdateShard, 0, layer=None)
    refused(replaced(program, op, phase=1), "its stage does not get reduction 1")


def test_row_that_does_not_fit_the_value(program):
    number = op_of(program, Forward, 0, layers=(1, 3), microbatch=1).writes[0]
    for field, value, message in (
        ("name", "x1", "its name is x1 where x2 belongs"),
        ("microbatch", 0, "its microbatch is 0 where 1 belongs"),
        ("arrays", (), "its arrays differ"),
        ("aliased", 4, "it shares bytes"),
    ):
        row = dataclasses.replace(program.values[number], **{field: value})
        values = (*program.values[:number], row, *program.values[number + 1 :])
        refused(dataclasses.replace(program, values=values), message)


@pytest.mark.parametrize("name", ["inputs", "outputs"])
def test_missing_input_or_output(program, name):
    numbers = getattr(program, name)
    with pytest.raises(VerificationError):
        verify(dataclasses.replace(program, **{name: numbers[:2] + numbers[3:]}))


def test_output_that_is_missing(program):
    wrong = dataclasses.replace(program, outputs=program.outputs[1:])
    refused(wrong, "is not among the outputs")


# Bounds.


def test_cyclic_wait_between_stages(program):
    stage, index = place(program, SendGradient, 0, microbatch=0)
    later = next(
        n
        for n, op in enumerate(program.order[0])
        if n > index and isinstance(op, SendActivation) and op.microbatch == 1
    )
    text = refused(moved(program, stage, later, index), "A cyclic wait: ")
    assert "which waits for" in text


def test_window_of_layers():
    program = make_program(1, window_layers=3)
    verify(program)
    tight = dataclasses.replace(program.settings, window_layers=2)
    text = refused(
        dataclasses.replace(program, settings=tight),
        "in flight, of 2 layers that its window allows",
    )
    assert "[GS" in text


def test_window_of_bytes():
    program = make_program(1, window_layers=3)
    one = dataclasses.replace(program.settings, window_bytes=1)
    refused(dataclasses.replace(program, settings=one), "above the 1 of its window")
    verify(make_program(1, window_layers=3, window_bytes=1))


def test_window_of_recovered_microbatches():
    program = make_program(schedule="gpipe", recovered=(1, 1), recovery="forward")
    ops = list(program.order[0])
    recovers = [op for op in ops if isinstance(op, Recover)]
    rest = [op for op in ops if not isinstance(op, Recover)]
    last = max(n for n, op in enumerate(rest) if isinstance(op, Forward))
    rest[last + 1 : last + 1] = recovers
    recovered = {number for op in recovers for number in op.writes}
    early = [op for op in rest if isinstance(op, Free) and op.reads[0] in recovered]
    wrong = with_order(program, 0, [op for op in rest if op not in early] + early)
    refused(wrong, "has recovered the residuals of 3 microbatches, where its window allows 1")


def test_memory_limit(program):
    peaks = memory_analysis(program).peaks
    fits = dataclasses.replace(program.settings, memory_limit=peaks)
    verify(dataclasses.replace(program, settings=fits))
    tight = dataclasses.replace(program.settings, memory_limit=(peaks[0], peaks[1] - 1))
    text = refused(
        dataclasses.replace(program, settings=tight),
        f"Stage 1 needs {peaks[1]:,} bytes a device, above its limit of {peaks[1] - 1:,}",
    )
    assert "\n> " in text


# Form.


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("stages", 3, "stages is 3, but there are lists for 2"),
        ("microbatches", 0, "microbatches is 0"),
        ("zero", 3, "zero is 3; it must be one of (1, 2)"),
        ("schedule", "zigzag", "schedule is 'zigzag'"),
        ("recovery", "maybe", "recovery is 'maybe'"),
        ("memory_limit", (1,), "memory_limit has 1 numbers for 2 stages"),
    ],
)
def test_settings_that_contradict(program, field, value, message):
    changed = dataclasses.replace(program.settings, **{field: value})
    refused(dataclasses.replace(program, settings=changed), message)


@pytest.mark.parametrize(
    "number, changes, message",
    [
        (3, {"stage": 1}, "out of order"),
        (4, {"stage": 0, "block": 3}, "is in block"),
        (1, {"recovered": True}, "blocks are whole"),
        (1, {"parameters": ("l0",)}, "owns a parameter that another layer owns too"),
        (1, {"inputs": (5,)}, "reads x5, which does not name it"),
        (1, {"outputs": (0,)}, "makes x0, which does not name it"),
        (1, {"backward_inputs": (0, 2)}, "needs for its backward an input that it does not read"),
        (7, {"borrows": ((1, ("nothing",)),)}, "borrows from L1 what that does not own"),
        (7, {"operands": (9,)}, "reads an operand that does not exist"),
        (7, {"update_phase": 4}, "updates after 4 reductions, of 1"),
    ],
)
def test_layers_that_contradict(program, number, changes, message):
    row = dataclasses.replace(program.layers[number], **changes)
    layers = (*program.layers[:number], row, *program.layers[number + 1 :])
    refused(dataclasses.replace(program, layers=layers), message)


@pytest.mark.parametrize(
    "table, number, changes, message",
    [
        ("variables", 2, {"producer": 77}, "L2 (l2) makes x2, which does not name it"),
        ("variables", 2, {"readers": (3, 5)}, "x2 names L5 as a reader, which does not read it"),
        ("variables", 2, {"readers": (3, 3)}, "its readers are out of order"),
        ("variables", 2, {"role": "guest"}, "x2 has the role 'guest'"),
        ("variables", 2, {"role": "loss", "join": "mean"}, "2 variables have the role 'loss'"),
        ("variables", 2, {"join": "mean"}, "x2 has the join 'mean'; it must be one of ('none',)"),
        ("variables", 7, {"join": "none"}, "x7 has the join 'none'; it must be one of ('mean',"),
        ("operands", 1, {"name": "batch['x']"}, "2 operands are named \"batch['x']\""),
        ("reductions", 0, {"phase": 2}, "reduction 1 has phase 2"),
        ("reductions", 0, {"stages": ()}, "reduction 1 goes to no stage"),
        ("reductions", 0, {"stages": (0, 9)}, "goes to a stage that does not exist"),
        ("reductions", 0, {"stages": (1,)}, "L0 (l0) waits for reduction 1, which does not go to"),
        ("reductions", 0, {"layers": (9,)}, "reduction 1 takes from L9, which does not exist"),
        ("values", 3, {"id": 4}, "value %4 stands in place 3"),
        ("values", 3, {"stage": 2}, "%3 is on stage 2, which does not exist"),
        ("values", 3, {"layer": 8}, "%3 belongs to L8, which does not exist"),
        ("values", 3, {"microbatch": 3}, "%3 belongs to microbatch 3, which does not exist"),
        ("values", 3, {"aliased": 10**6}, "%3 shares 1000000 bytes, more than it has"),
    ],
)
def test_rows_that_contradict(program, table, number, changes, message):
    rows = getattr(program, table)
    row = dataclasses.replace(rows[number], **changes)
    changed = (*rows[:number], row, *rows[number + 1 :])
    refused(dataclasses.replace(program, **{table: changed}), message)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"inputs": (0, 0)}, "inputs names a value twice"),
        ({"outputs": (9999,)}, "outputs names a value that does not exist"),
    ],
)
def test_inputs_and_outputs_that_name_nothing(program, changes, message):
    refused(dataclasses.replace(program, **changes), message)


def test_inputs_that_no_reader_wants(program):
    number = len(program.values)
    view = program.values[op_of(program, Forward, 0, layers=(0, 1)).reads[0]]
    more = dataclasses.replace(
        program,
        values=(*program.values, dataclasses.replace(view, id=number)),
        inputs=(*program.inputs, number),
    )
    refused(more, "The inputs have this step's view of L0 twice")
    inputs = tuple(n for n in program.inputs if n != view.id)
    refused(dataclasses.replace(program, inputs=inputs), "The inputs lack this step's view of L0")


def test_op_that_names_nothing(program):
    op = op_of(program, Forward, 0, layers=(0, 1), microbatch=0)
    refused(replaced(program, op, reads=(9999,)), "names a value that does not exist")
    refused(replaced(program, op, layers=(0, 5)), "covers layers of several blocks")
    refused(replaced(program, op, microbatch=7), "is for microbatch 7, which does not exist")


# Anything.


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
