"""The verifier refuses a program where an op of any kind is missing, doubled, or has no place."""

import dataclasses

import pytest

from ratrain_jax.lowering.program import (
    Backward,
    Borrow,
    Forward,
    GlobalReduce,
    GradSync,
    Metrics,
    PrefetchView,
    Recover,
    SendActivation,
    SendGradient,
    UpdateShard,
    ZeroGradient,
)
from tests.programs import op_of, replaced, with_order, without
from tests.verifier import program as program
from tests.verifier import recovering as recovering
from tests.verifier import refused

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
