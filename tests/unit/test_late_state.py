"""Where a switch is off, state work really comes late: no lane could start it earlier."""

import itertools

import pytest

from ratrain_jax.lowering.program import Backward, GradSync, Kind, SendGradient, UpdateShard
from ratrain_jax.lowering.progress import run
from tests.programs import make_program

LAYOUTS = [
    {"stages": stages, "microbatches": microbatches, "zero": zero}
    for stages, microbatches, zero in itertools.product((1, 2, 3, 8), (1, 2, 5), (1, 2))
]


def timed(program, stage):
    """The ops of a stage with the slots in which they start and end, every op taking one."""
    starts = run(program, lambda op: 1).starts[stage]
    ops = zip(program.order[stage], starts, strict=True)
    return [(op, start, start + 1) for op, start in ops if start >= 0]


def sends_share(program, op, stage):
    """Whether an op sends a tied gradient to its owner."""
    shares = (Kind.ACCUMULATOR, Kind.GRADIENT)
    at_sender = isinstance(op, SendGradient) and op.stage == stage
    return at_sender and program.values[op.reads[0]].kind in shares


def early_syncs(program):
    """Syncs that start before the last Backward of their stage and microbatch has ended."""
    early = []
    last = program.settings.microbatches - 1
    for stage in range(program.settings.stages):
        ops = timed(program, stage)
        over = {}
        for op, _, end in ops:
            if isinstance(op, Backward):
                over[op.microbatch] = max(end, over.get(op.microbatch, 0))
        for op, start, _ in ops:
            syncs = isinstance(op, GradSync) or sends_share(program, op, stage)
            if syncs and start < over[last if op.microbatch is None else op.microbatch]:
                early.append(op)
    return early


def early_updates(program):
    """Updates that start before the last sync of their stage's own layers has ended."""
    early = []
    for stage in range(program.settings.stages):
        ops = timed(program, stage)
        own = [n for n, layer in enumerate(program.layers) if layer.stage == stage]
        syncs = [end for op, _, end in ops if isinstance(op, GradSync) and op.layer in own]
        over = max(syncs, default=0)
        final = [
            (op, start)
            for op, start, _ in ops
            if isinstance(op, UpdateShard) and op.layer is not None and op.donates
        ]
        early += [op for op, start in final if start < over]
    return early


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_state_work_is_early_where_the_schedule_has_it_late(layout, clip):
    for schedule in ("gpipe", "1f1b"):
        off = {"layerwise_state": False, "update_prefetch": False}
        program = make_program(clip=clip, schedule=schedule, data_parallel=2, **off, **layout)
        assert early_syncs(program) == []
        assert early_updates(program) == []
    late_syncs = make_program(clip=clip, data_parallel=2, layerwise_state=False, **layout)
    assert early_syncs(late_syncs) == []
    late_updates = make_program(clip=clip, data_parallel=2, update_prefetch=False, **layout)
    assert early_updates(late_updates) == []


@pytest.mark.parametrize("layout", [row for row in LAYOUTS if row["stages"] < 8], ids=str)
def test_state_work_is_early_where_both_switches_are_on(layout):
    program = make_program(data_parallel=2, **layout)
    assert early_syncs(program) != []
    assert early_updates(program) != []
