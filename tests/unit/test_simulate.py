"""Programs simulated: dependence, lanes, repeated steps on fast and slow links, the line that adds up, windows, cycles."""

import dataclasses
import itertools

import numpy as np
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import SimulationError
from ratrain_jax.kernels import load_machine
from ratrain_jax.kernels.machine import Link, Overlap
from ratrain_jax.lowering.build import build_program
from ratrain_jax.lowering.jsonform import from_json, to_json
from ratrain_jax.lowering.op_costs import OpCoster
from ratrain_jax.lowering.program import (
    Backward,
    Forward,
    Free,
    GradSync,
    PrefetchView,
    Recover,
    Send,
    SendActivation,
    Settings,
)
from ratrain_jax.simulation.engine import run
from ratrain_jax.simulation.program_tasks import _Builder, merged_order, program_tasks
from ratrain_jax.simulation.sharing import run_shared
from ratrain_jax.simulation.steady import chain, settle
from tests.programs import step_code

MACHINE = load_machine("generic")
CODES = {}  # programs name their code, and something must hold it
CASES = [
    Settings(2, 1, 3, recovery="none"),
    Settings(3, 2, 4, schedule="gpipe", layerwise_state=False, update_prefetch=False),
    Settings(3, 2, 5, schedule="1f1b", layerwise_state=False, update_prefetch=False),
    Settings(2, 2, 4, recovery="forward"),
    Settings(4, 2, 6, recovery="backward", zero=2),
    Settings(2, 2, 3, recovery="forward", update_prefetch=False),
    Settings(4, 2, 4, recovery="forward", zero=2, window_layers=1),
]


def program(settings, clip=False, machine=MACHINE):
    code = CODES[settings, clip] = step_code(settings, clip)
    recovered = [settings.recovery in ("forward", "backward")] * len(code.stage_of)
    return build_program(code, settings, machine, recovered)


def seconds_of(op):
    """Durations that make every kind of op matter, and no two sums equal by chance."""
    if isinstance(op, (Forward, Recover, Backward)):
        per_layer = 2.13 if isinstance(op, Backward) else 1.07
        return per_layer * (op.layers[1] - op.layers[0]) * (1 + 0.1 * op.stage)
    return {"SendActivation": 0.31, "SendGradient": 0.29, "GradSync": 1.3, "PrefetchView": 0.7}.get(
        type(op).__name__, 0.17
    )


SLOW_LINKS = [
    Settings(1, 2, 1, recovery="none", window_layers=8),
    Settings(1, 2, 3, recovery="none", zero=2, window_layers=8),
    Settings(2, 2, 1, recovery="forward", window_layers=8),
    Settings(2, 2, 4, recovery="none", window_layers=8),
    Settings(4, 2, 3, recovery="backward", zero=2, window_layers=8),
    Settings(2, 2, 2, recovery="none", window_layers=2),
    Settings(2, 2, 2, recovery="none", validation="deferred", window_layers=8),
]


def slow(factor):
    """Durations with slow links: a layer's state takes about `factor` of its compute for a microbatch."""

    def seconds(op):
        links = {GradSync: 1.7, PrefetchView: 1.3, SendActivation: 0.2}
        return factor * links[type(op)] if type(op) in links else seconds_of(op)

    return seconds


def periods_of_steps(made, seconds, engine, count):
    """Seconds from each step to the next, stage by stage, of so many steps that explicitly follow each other."""
    repeated, ops, firsts = _Builder(made, seconds), merged_order(made), []
    for _ in range(count):
        firsts.append(len(repeated.ops))
        repeated.add_step(ops)
        repeated.keep_windows()
    found = engine(repeated.tasks)
    begun = [
        [
            min(
                found.start[n]
                for n in range(first, first + len(ops))
                if isinstance(repeated.ops[n], Forward) and repeated.ops[n].stage == stage
            )
            for stage in range(made.settings.stages)
        ]
        for first in firsts
    ]
    return np.diff(begun, axis=0)


@pytest.mark.parametrize("settings", CASES, ids=str)
@pytest.mark.parametrize("clip", [False, True])
def test_repeated_steps_take_as_long_as_the_one_that_is_shown(settings, clip):
    made = program(settings, clip)
    timeline = rt.simulate(made, MACHINE, seconds=seconds_of)
    assert timeline.step_seconds == pytest.approx(max(timeline.periods), rel=1e-12)
    chained = periods_of_steps(made, seconds_of, run, 8)[3:]
    assert timeline.step_seconds == pytest.approx(chained.mean(), rel=1e-9)


@pytest.mark.parametrize("settings", SLOW_LINKS, ids=str)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("factor", [0.5, 1.5, 5.0])
def test_the_period_is_that_of_many_steps_also_on_slow_links(settings, clip, factor):
    made = program(settings, clip)
    timeline = rt.simulate(made, MACHINE, seconds=slow(factor))
    chained = periods_of_steps(made, slow(factor), run, 16)[6:]
    assert timeline.step_seconds == pytest.approx(chained.mean(), rel=1e-6)
    line = timeline.breakdown
    terms = (line.ideal, line.bubble, line.exposed, line.recovery, line.tail)
    assert min(terms) >= 0
    assert sum(terms) == pytest.approx(timeline.step_seconds, rel=1e-12)


CONTENDED = dataclasses.replace(
    MACHINE, overlaps=(Overlap(("compute", "link"), (1.5, 1.2)), *MACHINE.overlaps[1:])
)


@pytest.mark.parametrize("settings", SLOW_LINKS[:4], ids=str)
@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_the_period_is_that_of_many_steps_also_where_lanes_slow_each_other_down(settings, factor):
    made, seconds = program(settings), slow(factor)
    pace = [0.0, 1.0, 1.3, 1.9, 2.6, 3.5, 4.2, 5.1, 6.0].__getitem__
    lanes = settle(program_tasks(made, seconds), CONTENDED), lambda t: run(t, CONTENDED)
    cores = settle(program_tasks(made, seconds), MACHINE, pace), lambda t: run_shared(t, pace)
    for (ran, carried), engine in (lanes, cores):
        chained = periods_of_steps(made, seconds, engine, 12)[6:]
        found = program_tasks(made, seconds).periods(ran).max()
        assert found == pytest.approx(chained.mean(), rel=1e-3)
        assert carried is not None


def test_launching_takes_cores_in_every_step():
    made, seconds = program(SLOW_LINKS[0]), slow(1.5)
    tasks = program_tasks(made, seconds)
    tasks.tasks.add(4.0)
    both = settle(tasks, MACHINE, pace=[0.0, 1.0, 1.5, 2.0, 3.0].__getitem__)[0]
    without = settle(program_tasks(made, seconds), MACHINE, pace=[0.0, 1.0, 1.5, 2.0].__getitem__)
    assert tasks.periods(both).max() > tasks.periods(without[0]).max()
    assert both.end[-1] - both.start[-1] >= 4.0
    assert len(chain(tasks, 3)) == 3 * (tasks.steps + 1) + tasks.ends - tasks.steps


def test_what_later_forwards_wait_for_in_mid_step_is_exposed_communication():
    made = program(Settings(1, 2, 1, recovery="none", window_layers=8))
    timeline = rt.simulate(made, MACHINE, seconds=slow(1.5))
    assert timeline.breakdown.exposed > 0
    forwards = [e for e in timeline.events if isinstance(e.op, Forward)]
    waited = [b.start - a.end for a, b in itertools.pairwise(forwards)]
    assert sum(waited) == pytest.approx(timeline.breakdown.exposed)
    gathered = {e.op.layer: e for e in timeline.events if isinstance(e.op, PrefetchView)}
    for event in forwards:
        # Views are there when the step before has gathered them.
        there = max(gathered[n].end for n in range(*event.op.layers)) - timeline.step_seconds
        assert event.start >= there - 1e-9
    path = timeline.critical_path
    assert isinstance(path[0].op, (Forward, PrefetchView))
    lasts = sum(event.end - event.start for event in path)
    assert lasts == pytest.approx(timeline.step_seconds)


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_the_line_adds_up_and_no_term_is_negative(settings):
    timeline = rt.simulate(program(settings), MACHINE, seconds=seconds_of)
    line = timeline.breakdown
    terms = (line.ideal, line.bubble, line.exposed, line.recovery, line.tail)
    first, again = timeline.made.entered[line.stage]
    lasts = timeline.run.start[again] - timeline.run.start[first]
    assert sum(terms) == pytest.approx(lasts, rel=1e-12)
    assert min(terms) >= 0
    recovered = sum(
        seconds_of(op) for op in timeline.program.order[line.stage] if isinstance(op, Recover)
    )
    assert line.recovery == pytest.approx(recovered)
    assert str(line).count("+") == 4


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_ops_wait_for_what_they_read_and_for_their_lanes(settings):
    timeline = rt.simulate(program(settings), MACHINE, seconds=seconds_of)
    written = {v: e.end for e in timeline.events for v in e.op.writes}
    for event in timeline.events:
        assert event.end == pytest.approx(event.start + seconds_of(event.op))
        for value in (*event.op.reads, *event.op.waits):
            assert event.start >= written.get(value, 0.0)
    for stage, ops in enumerate(timeline.program.order):
        for lane in ("compute", "link"):
            mine = [e for e in timeline.events if e.op in ops and e.op.lane == lane]
            if lane == "link":  # the directions of a link are independent of each other
                mine = [e for e in mine if not isinstance(e.op, Send) or e.op.stage == stage]
            mine.sort(key=lambda e: ops.index(e.op))
            for before, after in itertools.pairwise(mine):
                assert after.start >= before.end


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_the_critical_path_has_no_gaps(settings):
    timeline = rt.simulate(program(settings), MACHINE, seconds=seconds_of)
    path = timeline.critical_path
    first = timeline.events[timeline.made.entered[timeline.breakdown.stage][0]]
    assert path[0] == first or path[0].start in (0, first.start)
    for before, after in itertools.pairwise(path):
        # Rounded in another order, where the step before had it.
        assert after.start == pytest.approx(before.end) or after.start == before.start
    again = timeline.made.entered[timeline.breakdown.stage][1]
    assert path[-1].end <= timeline.run.start[again]


def test_an_even_pipeline_takes_what_the_formula_says():
    # The order of transfers is that of a machine on which they cost nothing.
    instant = dataclasses.replace(MACHINE, links=(Link("instant", 1e16, 0.0),))
    made = program(Settings(4, 1, 8, recovery="none", schedule="gpipe"), machine=instant)

    def seconds(op):  # every stage has two layers
        each = {Forward: 0.5, Backward: 1.0}.get(type(op), 0.0)
        return each * (op.layers[1] - op.layers[0]) if each else 0.0

    timeline = rt.simulate(made, MACHINE, seconds=seconds)
    assert timeline.step_seconds == pytest.approx(3.0 * (8 + 4 - 1))
    assert timeline.breakdown.ideal == pytest.approx(3.0 * 8)
    assert timeline.breakdown.bubble == pytest.approx(3.0 * 3)
    assert timeline.bubble_rate == pytest.approx(3 / 11)


def test_waiting_for_a_transfer_is_exposed_communication():
    made = program(Settings(2, 1, 2, recovery="none"))

    def seconds(op):
        return 5.0 if isinstance(op, SendActivation) else float(isinstance(op, (Forward, Backward)))

    timeline = rt.simulate(made, MACHINE, seconds=seconds)
    exposed, hidden = zip(*timeline.communication, strict=True)
    assert timeline.breakdown.exposed > 0
    assert sum(exposed) > sum(hidden)


def test_recovery_is_told_apart_by_whether_it_is_on_the_critical_path():
    made = program(Settings(4, 1, 4, recovery="forward"))
    on, off = rt.simulate(made, MACHINE, seconds=seconds_of).recovery
    total = sum(seconds_of(op) for op in made.ops() if isinstance(op, Recover))
    assert on + off == pytest.approx(total)
    assert on > 0 < off


def test_a_window_keeps_later_chains_waiting():
    def spread(layers):
        """Most gradients of a stage that are synchronised but not yet gathered anew."""
        made = program(Settings(1, 2, 1, recovery="none", window_layers=layers))
        # Not the durations that the ops were put in order with.
        seconds = {GradSync: 0.1, PrefetchView: 0.1, Backward: 0.1, Forward: 0.1}
        timeline = rt.simulate(made, MACHINE, seconds=lambda op: seconds.get(type(op), 3.0))
        opened = sorted(e.start for e in timeline.events if isinstance(e.op, GradSync))
        closed = sorted(e.start for e in timeline.events if isinstance(e.op, PrefetchView))
        return max(sum(o <= t for o in opened) - sum(c <= t for c in closed) for t in opened)

    assert [spread(1), spread(2), spread(3)] == [1, 2, 3]


def test_lanes_that_slow_each_other_down_expose_communication():
    made = program(Settings(2, 2, 4, recovery="none", zero=2))
    free = rt.simulate(made, MACHINE, seconds=seconds_of)
    slowed = rt.simulate(made, CONTENDED, seconds=seconds_of)
    assert slowed.breakdown.ideal == pytest.approx(free.breakdown.ideal)
    assert slowed.breakdown.exposed > free.breakdown.exposed
    assert slowed.step_seconds > free.step_seconds


def test_stages_that_wait_for_each_other_are_reported_as_a_cycle():
    made = program(Settings(2, 1, 4, recovery="none"))
    sends = [op for op in made.order[0] if isinstance(op, Send)][:2]
    swapped = {sends[0]: sends[1], sends[1]: sends[0]}
    wrong = dataclasses.replace(
        made, order=(made.order[0], tuple(swapped.get(op, op) for op in made.order[1]))
    )
    with pytest.raises(
        SimulationError, match=r"stage 0 waits at .*stage 1 waits at|stage 1 waits at .*stage 0"
    ):
        rt.simulate(wrong, MACHINE, seconds=seconds_of)


def test_the_ops_of_one_stage_that_wait_for_each_other_are_named():
    made = program(Settings(1, 1, 2, recovery="none"))
    ops = list(made.order[0])
    forward = next(n for n, op in enumerate(ops) if isinstance(op, Forward))
    backward = next(n for n, op in enumerate(ops) if isinstance(op, Backward))
    ops[forward], ops[backward] = ops[backward], ops[forward]
    wrong = dataclasses.replace(made, order=(tuple(ops),))
    with pytest.raises(SimulationError, match=r"in a cycle: .*stage 0 F L"):
        rt.simulate(wrong, MACHINE, seconds=seconds_of)


def test_a_program_is_costed_by_the_code_that_it_names():
    settings = Settings(2, 2, 2, recovery="none")
    made = program(settings)
    code = CODES[settings, False]
    read_back = from_json(to_json(made))
    expected = rt.simulate(made, "a100")
    assert rt.simulate(read_back, "a100").step_seconds == expected.step_seconds
    coster = OpCoster(code, made, load_machine("a100"))
    for event in expected.events:
        assert event.end - event.start == pytest.approx(coster.seconds(event.op), abs=1e-15)
        alone = sum(work.seconds for _, work in coster.of(event.op))
        assert coster.seconds(event.op) == pytest.approx(alone, rel=1e-12)


def test_a_program_of_unknown_code_is_refused():
    made = dataclasses.replace(program(Settings(1, 1, 1)), fingerprint="0123")
    with pytest.raises(SimulationError, match="'0123' is not known"):
        rt.simulate(made, "generic")


def test_a_step_that_only_evaluates_is_simulated_too():
    made = program(Settings(2, 1, 3, schedule="forward"))
    timeline = rt.simulate(made, MACHINE, seconds=seconds_of)
    assert timeline.breakdown.recovery == 0
    assert timeline.step_seconds == pytest.approx(
        sum(t for t in dataclasses.astuple(timeline.breakdown)[1:])
    )


def test_all_ops_but_frees_run_once():
    made = program(CASES[4])
    tasks = program_tasks(made, seconds_of)
    ops = [op for op in made.ops() if not isinstance(op, Free)]
    assert sorted(map(repr, tasks.ops[: tasks.steps])) == sorted(map(repr, ops))
