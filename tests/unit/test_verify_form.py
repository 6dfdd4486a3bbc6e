"""The verifier refuses tables of a program whose rows contradict each other, or name what does not exist."""

import dataclasses

import pytest

from ratrain_jax.lowering.program import Forward
from tests.programs import op_of, replaced
from tests.verifier import program as program
from tests.verifier import refused


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
