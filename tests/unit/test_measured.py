"""When a measured op started, on each device."""

import dataclasses

from ratrain_jax.lowering.program import Forward
from ratrain_jax.runtime.measured import _Clock
from ratrain_jax.runtime.records import Record
from tests.programs import make_program


def test_an_op_starts_when_launched_ready_and_the_one_before_is_through():
    forwards = make_program(stages=1, block=8).order[0]
    first, second = [op for op in forwards if isinstance(op, Forward)][:2]
    value = first.writes[0]
    second = dataclasses.replace(second, waits=(value,))
    clock = _Clock([[7, 8]])
    clock.measured(Record(first, 0, 1.0, {(0, 0): 3.0, (0, 1): 5.0}))
    # In the same lane, in another, behind a late launch, and seen before what it waits for.
    for thread, launched, ends, starts in (
        (1, 2.0, (9.0, 9.0), (3.0, 5.0)),
        (0, 2.0, (10.0, 11.0), (3.0, 5.0)),
        (0, 2.0, (12.0, 12.0), (10.0, 11.0)),
        (0, 11.5, (13.0, 14.0), (12.0, 12.0)),
        (1, 11.5, (13.0, 14.0), (11.5, 11.5)),
        (2, 2.0, (2.5, 6.0), (2.5, 5.0)),
    ):
        seen = {(0, rank): end for rank, end in enumerate(ends)}
        measured = clock.measured(Record(second, thread, launched, seen))
        assert tuple(t.start for t in measured.devices) == starts
        assert tuple(t.end for t in measured.devices) == ends
        assert [t.device for t in measured.devices] == [7, 8]
        assert (measured.start, measured.end) == (max(starts), max(ends))


def test_what_makes_nothing_that_can_be_seen_ends_at_once():
    op = dataclasses.replace(next(iter(make_program(stages=1).order[0])), writes=())
    measured = _Clock([[7]]).measured(Record(op, 0, 1.5, {}))
    assert [(t.start, t.end) for t in measured.devices] == [(1.5, 1.5)]
