"""The verifier refuses ops that read, donate, wait for or leave behind another value than they should."""

import dataclasses

import pytest

from ratrain_jax.errors import VerificationError
from ratrain_jax.lowering.program import (
    Backward,
    Borrow,
    Forward,
    GradSync,
    Kind,
    PrefetchView,
    Recover,
    UpdateShard,
    ZeroGradient,
)
from ratrain_jax.lowering.verify import verify
from tests.programs import make_program, op_of, replaced
from tests.verifier import program as program
from tests.verifier import recovering as recovering
from tests.verifier import refused


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
