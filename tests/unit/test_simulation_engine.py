"""The engine: starts and ends by hand, against an event-driven run, under contention, and in cycles."""

import dataclasses

import numpy as np
import pytest
from bubbles import rows
from hypothesis import given, settings

from ratrain_jax.errors import OptionError
from ratrain_jax.kernels import load_machine
from ratrain_jax.kernels.machine import Overlap
from ratrain_jax.simulation.contention import run_contended
from ratrain_jax.simulation.engine import run
from ratrain_jax.simulation.pipelines import Pipeline, StageSeconds, pipeline_tasks, slots
from ratrain_jax.simulation.tasks import Port, Tasks
from ratrain_jax.simulation.waiting import CycleError
from tests.strategies import task_graphs

GENERIC = load_machine("generic")


def with_overlaps(*overlaps):
    return dataclasses.replace(GENERIC, overlaps=overlaps)


def slow_reference(tasks):
    """Starts by relaxing every constraint until none is broken."""
    start = [0.0] * len(tasks)
    changed = True
    while changed:
        changed = False
        last = {}
        for n in range(len(tasks)):
            least = max(
                [start[a] + tasks.seconds[a] for a in tasks.after[n]]
                + [start[b] for b in tasks.behind.get(n, ())]
                + [start[last[p]] + tasks.seconds[last[p]] for p in tasks.ports[n] if p in last],
                default=0.0,
            )
            last.update(dict.fromkeys(tasks.ports[n], n))
            if least > start[n]:
                start[n], changed = least, True
    return start


@given(task_graphs())
@settings(max_examples=100, deadline=None)
def test_tasks_start_when_the_last_of_what_they_wait_for_is_over(tasks):
    found = run(tasks)
    assert found.start.tolist() == slow_reference(tasks)
    np.testing.assert_array_equal(found.end, found.start + np.array(tasks.seconds))


@given(task_graphs())
@settings(max_examples=100, deadline=None)
def test_stepping_from_event_to_event_gives_the_same_where_nothing_disturbs(tasks):
    one, other = run(tasks, GENERIC), run_contended(tasks, GENERIC)
    np.testing.assert_allclose(one.start, other.start, rtol=1e-12)
    np.testing.assert_allclose(one.end, other.end, rtol=1e-12)


def test_lanes_slow_each_other_down_while_both_work():
    tasks = Tasks()
    tasks.add(4.0, [(0, Port.COMPUTE)])
    tasks.add(1.0, [(0, Port.SEND), (1, Port.RECEIVE)])
    found = run(tasks, with_overlaps(Overlap(("compute", "link"), (2.0, 1.5))))
    # The transfer takes 1.5; in it compute does 0.75, and the rest alone.
    assert found.end.tolist() == [1.5 + 3.25, 1.5]


def test_a_transfer_goes_at_the_pace_of_its_slower_end():
    tasks = Tasks()
    tasks.add(10.0, [(1, Port.COMPUTE)])
    tasks.add(1.0, [(0, Port.SEND), (1, Port.RECEIVE)])
    found = run(tasks, with_overlaps(Overlap(("compute", "link"), (1.0, 3.0))))
    assert found.end.tolist() == [10.0, 3.0]


def test_lanes_that_may_not_overlap_take_turns():
    tasks = Tasks()
    tasks.add(4.0, [(0, Port.COMPUTE)])
    tasks.add(1.0, [(0, Port.SEND)])
    tasks.add(1.0, [(0, Port.RECEIVE)])
    found = run(tasks, with_overlaps())
    assert found.start.tolist() == [0.0, 4.0, 4.0]  # both directions of a link work at once


def test_a_cycle_is_reported():
    tasks = Tasks()
    tasks.add(1.0)
    tasks.add(1.0, after=[0, 3])
    tasks.add(1.0, after=[1])
    tasks.add(1.0, after=[2])
    for machine in (None, with_overlaps()):
        with pytest.raises(CycleError) as caught:
            run(tasks, machine)
        assert sorted(caught.value.cycle) == [1, 2, 3]
        places = {1: 3, 3: 2, 2: 1}  # who waits for whom
        cycle = caught.value.cycle
        assert all(places[a] == b for a, b in zip(cycle, [*cycle[1:], cycle[0]], strict=True))


def test_published_bubble_rates_to_four_digits():
    found = rows()
    assert len(found) == 12
    for row in found:
        assert f"{row.ours:.4f}" == f"{float(row.published):.4f}", row


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [(4, 2, 8), (8, 3, 16), (2, 4, 2)])
def test_interleaving_divides_the_bubble_by_the_chunks(stages, chunks, microbatches):
    # Narayanan et al. 2021, section 2.2.2: the bubble is (P - 1)(F + B) / v.
    even = StageSeconds(1 / chunks, 2 / chunks)
    pipeline = Pipeline("interleaved", (even,) * (stages * chunks), microbatches, chunks=chunks)
    found = run(pipeline_tasks(pipeline)[0]).last
    assert found == pytest.approx(3 * microbatches + 3 * (stages - 1) / chunks)


@pytest.mark.parametrize("late", [False, True])
def test_recovery_ahead_of_the_gradient_gains_what_the_formula_says(late):
    stages, microbatches, (f, r, b) = 4, 16, (1.0, 1.0, 2.0)
    even = StageSeconds(f, b, recover=r)
    pipeline = Pipeline("1f1b", (even,) * stages, microbatches, late_recovery=late)
    found = run(pipeline_tasks(pipeline)[0]).last
    fill = (f + r + b) if late else (f + b)
    assert found == pytest.approx(microbatches * (f + r + b) + (stages - 1) * fill)


def test_every_schedule_runs_each_microbatch_once_everywhere():
    for schedule, chunks in [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)]:
        pipeline = Pipeline(schedule, (StageSeconds(1, 2, 1),) * 4 * chunks, 8, chunks=chunks)
        for device in range(4):
            found = slots(pipeline, device)
            kinds = "FBW" if schedule == "zb-h1" else "FB"
            expected = [(k, i, c) for k in kinds for i in range(8) for c in range(chunks)]
            assert sorted(found) == sorted(expected)


def test_links_carry_one_transfer_at_a_time():
    slow = (StageSeconds(1.0, 2.0, send=4.0),) * 2
    free = run(pipeline_tasks(Pipeline("gpipe", slow, 6, links=False))[0]).last
    held = run(pipeline_tasks(Pipeline("gpipe", slow, 6))[0]).last
    # One forward, then six transfers one by one, forward and backward on the last stage; the same coming back.
    assert free == 6 + 4 + 1 + 6 * 2 + 4 + 2
    assert held == 1 + 6 * 4 + 1 + 2 + 6 * 4 + 2


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "chunks"),
    [("interleaved", 4, 3, 2), ("1f1b", 4, 4, 2), ("interleaved", 3, 4, 2), ("nonsense", 2, 2, 1)],
)
def test_pipelines_that_make_no_sense_are_refused(schedule, stages, microbatches, chunks):
    with pytest.raises(OptionError):
        pipeline = Pipeline(schedule, (StageSeconds(1, 2),) * stages, microbatches, chunks=chunks)
        pipeline_tasks(pipeline)
