"""A simulated step beside a measured one."""

import dataclasses

import pytest

import ratrain_jax as rt
from ratrain_jax.errors import SimulationError
from ratrain_jax.lowering.program import Backward, Free
from ratrain_jax.runtime.measured import MeasuredOp, MeasuredRun
from ratrain_jax.views.chart import KINDS
from tests.programs import make_program


@pytest.fixture(scope="module")
def timeline():
    program = make_program(stages=2, recovered=(1, 1), recovery="forward")
    return rt.simulate(program, "generic", seconds=lambda op: 0.25 if op.stage else 0.5)


def _run(timeline, seconds=lambda event: 2 * (event.end - event.start), program=None):
    """A run in which each op starts as simulated and takes `seconds`."""
    ops = tuple(MeasuredOp(e.op, e.start, e.start + seconds(e)) for e in timeline.events)
    return MeasuredRun(program or timeline.program, ops, max(op.end for op in ops))


def test_rows_hold_all_ops_by_kind(timeline):
    comparison = timeline.compare(_run(timeline))
    ops = [op for op in timeline.program.ops() if not isinstance(op, Free)]
    kinds = [KINDS[type(op)] for op in ops]
    assert {row.kind: row.count for row in comparison.rows} == {k: kinds.count(k) for k in kinds}
    assert {"forward", "recovery", "backward", "transfer", "sync", "update", "prefetch"} <= {*kinds}
    for row in comparison.rows:
        of = [op for op, kind in zip(ops, kinds, strict=True) if kind == row.kind]
        assert row.predicted == pytest.approx(sum(0.25 if op.stage else 0.5 for op in of))
        assert row.measured == pytest.approx(2 * row.predicted)
        assert row.difference == pytest.approx(row.predicted)


def test_steps_are_both_until_the_last_op_ends(timeline):
    run = _run(timeline)
    comparison = timeline.compare(run)
    assert comparison.predicted_step == max(event.end for event in timeline.events)
    assert comparison.measured_step == run.seconds
    assert comparison.difference == run.seconds - comparison.predicted_step


def test_the_ops_that_differ_most_come_first(timeline):
    late, early = [e for e in timeline.events if isinstance(e.op, Backward)][:2]
    took = {late.op: 9.0, early.op: 0.0}

    def seconds(event):
        return took.get(event.op, event.end - event.start)

    comparison = timeline.compare(_run(timeline, seconds))
    first, second = comparison.largest[:2]
    assert (first.op, second.op) == (late.op, early.op)
    assert first.difference == pytest.approx(9 - (late.end - late.start))
    assert second.difference == pytest.approx(early.start - early.end)


def test_the_table_fits_the_terminal_and_says_what_differs(timeline):
    text = str(timeline.compare(_run(timeline)))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    cells = {line.split()[0]: line.split()[1:] for line in lines if line}
    forwards = timeline.compare(_run(timeline)).rows[0]
    predicted = 1e3 * forwards.predicted
    assert cells["forward"] == [
        str(forwards.count),
        f"{predicted:.4g}",
        f"{2 * predicted:.4g}",
        f"{predicted:+.4g}",
        "+100%",
    ]
    assert "step" in cells
    assert "largest" in cells


def test_an_op_that_takes_no_time_has_no_share(timeline):
    free = rt.simulate(timeline.program, "generic", seconds=lambda op: 0.0)
    text = str(free.compare(_run(free, lambda event: 0.001)))
    assert "inf" not in text
    assert "%" not in text.partition("\n")[2].replace("difference ms  %", "")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: make_program(stages=2, microbatches=2), "microbatches=2, and 3"),
        (lambda p: dataclasses.replace(p, fingerprint="other"), "code differs"),
        (lambda p: dataclasses.replace(p, order=p.order[::-1]), "order differ"),
    ],
)
def test_another_program_is_refused(timeline, change, says):
    other = change(timeline.program)
    with pytest.raises(SimulationError, match=says):
        timeline.compare(_run(timeline, program=other))
