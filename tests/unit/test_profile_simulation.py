"""Programs simulated with a profile: ops, launches and waits share the cores of a host."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ratrain_jax as rt
from ratrain_jax.lowering.program import Backward, Forward, Lane, Recover, Settings
from ratrain_jax.simulation.engine import run
from ratrain_jax.simulation.sharing import run_shared
from ratrain_jax.simulation.tasks import Tasks
from ratrain_jax.simulation.waiting import CycleError
from tests.profiles import ONE, TWO, made_up, program
from tests.strategies import task_graphs


def compute_only(op):
    return {Forward: 2.0, Backward: 3.0, Recover: 2.0}.get(type(op), 0.0)


def test_one_stage_takes_the_sum_of_its_ops():
    prog = program(ONE)
    profile = made_up(prog, compute_only)
    units = sum(isinstance(op, Forward) and op.microbatch == 0 for op in prog.ops())
    timeline = rt.simulate(prog, "generic", profile=profile)
    assert timeline.step_seconds == pytest.approx(3 * units * (2.0 + 3.0))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_two_equal_stages_take_m_plus_one_slots_where_nothing_is_shared(schedule):
    off = {"layerwise_state": False, "update_prefetch": False}
    prog = program(dataclasses.replace(TWO, schedule=schedule, **off))
    profile = made_up(prog, compute_only, slowdowns=((1, 1.0), (2, 1.0)))
    units = sum(isinstance(op, Forward) and op.microbatch == 0 for op in prog.order[0])
    assert units == sum(isinstance(op, Forward) and op.microbatch == 0 for op in prog.order[1])
    timeline = rt.simulate(prog, "generic", profile=profile)
    assert timeline.step_seconds == pytest.approx((4 + 1) * units * (2.0 + 3.0))


def test_where_two_stages_share_one_core_the_step_takes_the_sum_of_all():
    prog = program(TWO)
    profile = made_up(prog, compute_only, cores=1)
    total = sum(map(compute_only, prog.ops()))
    timeline = rt.simulate(prog, "generic", profile=profile)
    assert max(event.end for event in timeline.events) == pytest.approx(total)
    line = timeline.breakdown
    assert line.step == line.ideal + line.bubble + line.exposed + line.recovery + line.tail


def test_launches_keep_no_op_waiting_but_use_the_cores():
    prog = program(ONE)
    alone = made_up(prog, compute_only, cores=1)
    launched = [dataclasses.replace(m, launch=0.5 * m.seconds) for m in alone.measured]
    profile = dataclasses.replace(alone, measured=tuple(launched))
    total = sum(map(compute_only, prog.ops()))
    assert profile.launches(prog) == (total / 2, 0.0)

    def last(profile):
        return max(event.end for event in rt.simulate(prog, "generic", profile=profile).events)

    assert last(alone) == pytest.approx(total)
    assert last(profile) == pytest.approx(total * 1.5)
    assert last(dataclasses.replace(profile, cores=4)) == pytest.approx(total)


def test_given_seconds_come_before_those_of_the_profile():
    prog = program(ONE)
    profile = made_up(prog, compute_only)
    doubled = rt.simulate(prog, "generic", profile=profile, seconds=lambda op: 2 * compute_only(op))
    alone = rt.simulate(prog, "generic", profile=profile)
    assert doubled.step_seconds == pytest.approx(2 * alone.step_seconds)


@given(task_graphs())
def test_tasks_that_share_nothing_run_as_in_the_plain_engine(tasks):
    shared, plain = run_shared(tasks, lambda running: 1.0), run(tasks)
    assert shared.start == pytest.approx(plain.start)
    assert shared.end == pytest.approx(plain.end)


@given(task_graphs())
def test_one_core_is_always_busy_until_all_has_ended(tasks):
    assert run_shared(tasks, float).last == pytest.approx(sum(tasks.seconds))


@given(task_graphs(), st.sampled_from([1.5, 2.0]))
def test_work_is_done_at_the_pace_of_those_that_run(tasks, cores):
    ran = run_shared(tasks, lambda running: max(1.0, running / cores))
    moments = sorted({*ran.start.tolist(), *ran.end.tolist()})
    for n, seconds in enumerate(tasks.seconds):
        done = 0.0
        for begin, end in itertools.pairwise(moments):
            if ran.start[n] <= begin and end <= ran.end[n]:
                running = sum(
                    s <= begin and end <= e for s, e in zip(ran.start, ran.end, strict=True)
                )
                done += (end - begin) / max(1.0, running / cores)
        assert done == pytest.approx(seconds, abs=1e-9)


def test_a_task_that_waits_for_another_process_leaves_the_core_to_others():
    tasks = Tasks()
    sent, computed = tasks.add(1.0), tasks.add(2.0)
    tasks.shares[sent] = 0.25
    ran = run_shared(tasks, lambda running: max(running, 1.0))
    assert ran.end[sent] == 1.25
    assert ran.end[computed] == 2.25


def test_ops_that_wait_for_links_hide_as_if_they_had_cores_of_their_own():
    prog = program(Settings(1, 2, 1, recovery="none"))
    seconds = lambda op: 1.0 if op.lane in (Lane.COMPUTE, Lane.LINK) else 0.0  # noqa: E731
    whole = made_up(prog, seconds, cores=2)
    links = {type(op).__name__ for op in prog.ops() if op.lane == Lane.LINK}
    waiting = [
        dataclasses.replace(m, share=0.0 if m.kind in links else 1.0) for m in whole.measured
    ]
    waits = dataclasses.replace(whole, measured=tuple(waiting))
    free = rt.simulate(prog, "generic", seconds=seconds).step_seconds
    assert rt.simulate(prog, "generic", profile=waits).step_seconds == pytest.approx(free)
    assert rt.simulate(prog, "generic", profile=whole).step_seconds > 1.1 * free


def test_a_cycle_is_told():
    tasks = Tasks()
    tasks.add(1.0, after=[1])
    tasks.add(1.0, after=[0])
    with pytest.raises(CycleError):
        run_shared(tasks, float)
