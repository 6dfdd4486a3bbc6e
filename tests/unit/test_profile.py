"""Profiles: their file, how ops are looked up in them, and that simulations use their numbers."""

import contextlib
import dataclasses
import itertools
import json
import math
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ratrain_jax as rt
from ratrain_jax.errors import ProfileError, SimulationError
from ratrain_jax.kernels import load_machine
from ratrain_jax.lowering.build import build_program
from ratrain_jax.lowering.jsonform import from_json, to_json
from ratrain_jax.lowering.op_costs import OpCoster
from ratrain_jax.lowering.program import Backward, Forward, Free, Lane, Recover, Send, Settings
from ratrain_jax.profiling.calm import Others
from ratrain_jax.profiling.keys import Key, key_of
from ratrain_jax.profiling.links import fit
from ratrain_jax.profiling.measure import measured
from ratrain_jax.profiling.profile import FORM, Line, Measured, Profile
from ratrain_jax.profiling.slowdown import slowdowns
from ratrain_jax.runtime.serial import Taken, time_call
from ratrain_jax.simulation.engine import run
from ratrain_jax.simulation.sharing import run_shared
from ratrain_jax.simulation.tasks import Tasks
from ratrain_jax.simulation.waiting import CycleError
from tests.programs import step_code
from tests.strategies import json_values, task_graphs

MACHINE = load_machine("generic")
CODES = {}  # programs name their code, and something must hold it


def program(settings):
    code = CODES[settings] = step_code(settings)
    recovered = [settings.recovery in ("forward", "backward")] * len(code.stage_of)
    return build_program(code, settings, MACHINE, recovered)


def made_up(prog, seconds, **fields):
    """A profile that says how long each op of a program takes."""
    keyed = {key_of(op, prog): seconds(op) for op in prog.ops() if not isinstance(op, Free)}
    return Profile(
        **{
            "fingerprint": prog.fingerprint,
            "platform": "cpu",
            "device_kind": "cpu",
            "jax_version": "0",
            "device_count": 4,
            "cores": 2,
            "date": "2030-01-01T00:00:00+00:00",
            "launch_seconds": 1e-5,
            "wait_seconds": 2e-5,
            "measured": tuple(
                Measured(key.kind, key.code, key.devices, keyed[key], 3, 0.0)
                for key in sorted(keyed)
            ),
            **fields,
        }
    )


ONE = Settings(1, 1, 3, recovery="none")
TWO = Settings(2, 1, 4, recovery="none")
SMALL = dataclasses.replace(
    made_up(program(ONE), lambda op: 1.0),
    measured=(Measured("Forward", "ab+cd", 1, 0.5, 7, 0.01),),
    lines=(Line("Send", 1, 1e-4, 1e9, ((4096, 1e-4),)),),
    slowdowns=((1, 1.0), (2, 1.5)),
)

positive = st.floats(1e-9, 1e9)
words = st.text(max_size=8)
profiles = st.builds(
    Profile,
    fingerprint=words,
    platform=words,
    device_kind=words,
    jax_version=words,
    device_count=st.integers(1, 4096),
    cores=st.integers(1, 4096),
    date=words,
    launch_seconds=positive,
    wait_seconds=positive,
    busy_elsewhere=st.none() | positive,
    measured=st.lists(
        st.builds(
            Measured, words, words, st.integers(1, 9), positive, st.integers(1, 99), positive
        ),
        max_size=3,
    ).map(tuple),
    lines=st.lists(
        st.builds(
            Line,
            words,
            st.integers(1, 9),
            positive,
            st.floats(1, 1e12),
            st.lists(st.tuples(st.integers(0, 10**9), positive), max_size=3).map(tuple),
        ),
        max_size=3,
    ).map(tuple),
    slowdowns=st.dictionaries(st.integers(1, 99), positive, max_size=4).map(
        lambda table: tuple(sorted(table.items()))
    ),
)


# The file.


@given(profiles)
def test_json_is_read_back_to_an_equal_profile(profile):
    assert Profile.from_json(profile.to_json()) == profile


def test_the_form_is_named_and_versioned(tmp_path):
    table = json.loads(SMALL.to_json())
    assert (table["format"], table["version"]) == ("ratrain-profile", 1)
    SMALL.save(tmp_path / "here.json")
    assert Profile.load(tmp_path / "here.json") == SMALL
    assert rt.Profile is Profile


@pytest.mark.parametrize(
    "old, new, message",
    [
        ('"version": 1', '"version": 2', "version: expected 1, found 2; write the profile again"),
        (FORM.name, "other", "the whole: expected an object whose format is 'ratrain-profile'"),
        ('"count": 7', '"count": 0.5', "measured[0].count: expected a whole number, found 0.5"),
        ('"count": 7', '"count": 0', "count: expected a number of at least 1, found 0"),
        ('"seconds": 0.5', '"seconds": -1', "seconds: expected a number of at least 0, found -1"),
        ('"seconds": 0.5', '"seconds": NaN', "NaN is no number of JSON"),
        ('"cores": 2', '"cores": "2"', 'cores: expected a whole number, found "2"'),
        ('"bandwidth": 1000000000.0', '"bandwidth": 0', "bandwidth: expected a number of at least"),
        ("[[1, 1.0], [2, 1.5]]", "[[2, 1.0], [1, 1.5]]", "slowdowns: expected pairs of a number"),
        ("[[1, 1.0], [2, 1.5]]", "[[1, 0]]", "slowdowns: expected pairs of a number"),
        ("[[1, 1.0], [2, 1.5]]", "[1]", "slowdowns[0]: expected a list of 2, found 1"),
        ('"date"', '"data"', "the whole: expected only the fields fingerprint"),
        ('"platform": "cpu",', "", "the whole: expected a field 'platform'"),
        ('"fingerprint"', "fingerprint", "line 3: not valid JSON"),
    ],
)
def test_errors_name_the_file_the_spot_and_what_was_expected(old, new, message, tmp_path):
    text = SMALL.to_json()
    assert old in text
    path = tmp_path / "damaged.json"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ProfileError, match=re.escape(message)) as caught:
        Profile.load(path)
    assert str(caught.value).startswith(str(path))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ProfileError, match=r"absent\.json: expected a profile, found"):
        Profile.load(tmp_path / "absent.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match=r"bytes\.json: expected a profile, found"):
        Profile.load(tmp_path / "bytes.json")


@given(st.text() | st.sampled_from(["[" * 100_000, "1" * 5000, "{}", "[]"]))
def test_any_text_is_a_profile_or_an_error(text):
    with pytest.raises(ProfileError):
        Profile.from_json(text)


@given(profiles, json_values, st.data())
def test_a_damaged_table_is_a_profile_or_an_error(profile, junk, data):
    table = json.loads(profile.to_json())
    spot, key = table, data.draw(st.sampled_from(sorted(table)))
    while isinstance(spot[key], (list, dict)) and spot[key] and data.draw(st.booleans()):
        spot = spot[key]
        keys = range(len(spot)) if isinstance(spot, list) else sorted(spot)
        key = data.draw(st.sampled_from(keys))
    spot[key] = junk
    with contextlib.suppress(ProfileError):
        assert isinstance(Profile.from_json(json.dumps(table)), Profile)


# Lookup.


def test_recover_runs_forwards_code_and_equal_units_of_any_schedule_have_equal_keys():
    late = program(dataclasses.replace(TWO, recovery="backward", schedule="1f1b"))
    keys = {key_of(op, program(TWO)) for op in program(TWO).ops() if isinstance(op, Forward)}
    assert keys == {key_of(op, late) for op in late.ops() if isinstance(op, Forward)}
    assert keys == {key_of(op, late) for op in late.ops() if isinstance(op, Recover)}


@pytest.mark.parametrize("settings", [ONE, TWO, Settings(2, 2, 2, zero=2)], ids=str)
def test_nothing_of_the_program_that_was_measured_is_missing(settings):
    prog = program(settings)
    profile = made_up(prog, lambda op: float(op.stage + 1))
    assert profile.missing(prog) == ()
    seconds = profile.seconds(prog)
    for op in prog.ops():
        assert seconds(op) in ({0.0} if isinstance(op, Free) else {1.0, 2.0})


def test_what_was_not_measured_is_listed_and_falls_back_to_the_machine():
    prog = program(TWO)
    full = made_up(prog, lambda op: 7.0)
    kept = tuple(m for m in full.measured if m.kind not in ("Backward", "Send"))
    profile = dataclasses.replace(full, measured=kept)
    assert {key.kind for key in profile.missing(prog)} == {"Backward", "Send"}
    assert str(profile.missing(prog)[0]).endswith(" on 1")
    model = OpCoster(CODES[TWO], prog, MACHINE).seconds
    seconds = profile.seconds(prog, MACHINE)
    for op in prog.ops():
        wanted = model(op) if isinstance(op, (Backward, Send)) else 7.0
        assert seconds(op) == (0.0 if isinstance(op, Free) else wanted)


def test_a_fallback_needs_the_code():
    prog = dataclasses.replace(from_json(to_json(program(TWO))), fingerprint="unknown")
    profile = dataclasses.replace(made_up(prog, lambda op: 1.0), measured=())
    forward = next(op for op in prog.ops() if isinstance(op, Forward))
    with pytest.raises(SimulationError, match=r"lacks .*Forward.*'unknown' is not known"):
        profile.seconds(prog)(forward)


def test_a_unit_is_pieced_together_from_the_fewest_runs_of_its_layers():
    prog = program(ONE)
    named = [dataclasses.replace(layer, fingerprint=f"{n}") for n, layer in enumerate(prog.layers)]
    forward = dataclasses.replace(
        next(op for op in prog.ops() if isinstance(op, Forward)), layers=(1, 5)
    )
    prog = dataclasses.replace(prog, layers=tuple(named), order=((forward,),))

    def profile(**pieces):
        entries = tuple(
            Measured("Forward", "+".join(run), 1, seconds, 1, 0.0)
            for run, seconds in pieces.items()
        )
        return dataclasses.replace(SMALL, measured=entries)

    singles = {"1": 1.0, "2": 1.0, "3": 1.0, "4": 1.0}
    assert profile(**singles).seconds(prog)(forward) == 4.0
    assert profile(**singles, **{"12": 3.0, "34": 4.0}).seconds(prog)(forward) == 7.0
    assert profile(**singles, **{"12": 3.0, "34": 4.0, "234": 5.0}).seconds(prog)(forward) == 6.0
    assert profile(**singles, **{"1234": 9.0}).seconds(prog)(forward) == 9.0
    assert profile(**{"12": 3.0, "3": 1.0}).missing(prog) == (Key("Forward", "1+2+3+4", 1),)


def test_units_of_groups_of_other_sizes_differ_by_the_slowdown_of_their_devices():
    prog = program(TWO)
    other = tuple(dataclasses.replace(m, devices=2) for m in made_up(prog, lambda op: 3.0).measured)
    profile = dataclasses.replace(
        made_up(prog, lambda op: 0.0), measured=other, slowdowns=((1, 1.0), (2, 1.5))
    )
    forward = next(op for op in prog.ops() if isinstance(op, Forward))
    assert profile.seconds(prog)(forward) == pytest.approx(2.0)
    assert {key.kind for key in profile.missing(prog)}.isdisjoint({"Forward", "Backward"})


def test_transfers_of_any_size_are_on_a_line():
    prog = program(TWO)
    none = dataclasses.replace(made_up(prog, lambda op: 0.0), measured=())
    profile = dataclasses.replace(none, lines=(Line("Send", 1, 0.25, 64.0),))
    send = next(op for op in prog.ops() if isinstance(op, Send))
    count = prog.values[send.reads[0]].bytes
    assert profile.seconds(prog)(send) == 0.25 + count / 64


# Slowdowns.


def test_slowdowns_are_interpolated_and_grow_on_in_proportion_where_cores_are_shared():
    profile = dataclasses.replace(SMALL, slowdowns=((1, 1.0), (2, 1.5), (4, 2.5)))
    assert [profile.slowdown(n) for n in (0, 1, 2, 3, 4, 8)] == [1.0, 1.0, 1.5, 2.0, 2.5, 5.0]
    assert profile.pace(2)(1) == 1.0
    assert profile.pace(2)(2) == pytest.approx(2.5 / 1.5)
    assert dataclasses.replace(profile, platform="gpu").slowdown(8) == 2.5
    nothing = dataclasses.replace(profile, slowdowns=())
    assert [nothing.slowdown(n) for n in (1, 2, 3)] == [1.0, 1.0, 1.5]


def test_profiles_are_merged_entry_by_entry_and_only_of_like_devices():
    other = dataclasses.replace(
        SMALL,
        measured=(
            Measured("Forward", "ab+cd", 1, 9.0, 1, 0.0),
            Measured("Backward", "x", 1, 2.0, 1, 0.0),
        ),
        lines=(Line("Send", 1, 9.0, 1.0), Line("Send", 2, 1.0, 1.0)),
        slowdowns=((1, 1.0), (2, 1.6), (3, 2.0)),
    )
    both = SMALL.merge(other)
    assert {m.key: m.seconds for m in both.measured} == {
        Key("Backward", "x", 1): 2.0,
        Key("Forward", "ab+cd", 1): 0.5,
    }
    assert [(line.devices, line.latency) for line in both.lines] == [(1, 1e-4), (2, 1.0)]
    assert both.slowdowns == other.slowdowns
    with pytest.raises(ProfileError, match="cores: expected 2 as in the other profile, found 3"):
        SMALL.merge(dataclasses.replace(other, cores=3))


# Simulation.


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


# Statistics.


def test_a_line_goes_through_its_points_and_never_has_a_negative_part():
    points = [(count, 3e-5 + count / 2e9) for count in (4096, 65536, 1_000_000)]
    line = fit("Send", 2, points)
    assert line.latency == pytest.approx(3e-5, rel=1e-4)
    assert line.bandwidth == pytest.approx(2e9, rel=1e-4)
    assert line.points == tuple(points)
    falling = fit("Send", 1, [(1000, 3e-6), (2000, 2e-6)])
    assert falling.seconds(10**9) == pytest.approx(2.5e-6, rel=0.7)
    steep = fit("Send", 1, [(1000, 1e-6), (2000, 9e-6)])
    assert steep.latency == 0


def test_medians_and_quartiles():
    key = Key("Metrics", "8", 2)
    entry = measured(key, [Taken(0.5, total) for total in (5.5, 1.5, 2.5, 3.5, 4.5)], 0.25)
    assert (entry.seconds, entry.count, entry.spread, entry.launch) == (2.75, 5, 2.0, 0.5)
    inline = measured(key, [Taken(2.0, 2.5)], 0.25)
    assert (inline.seconds, inline.launch) == (2.25, 0.0)
    assert measured(key, [Taken(0.1, 0.1)], 0.25).seconds == 0
    assert slowdowns([{1: 1.0, 2: 1.5}, {1: 1.0, 2: 1.7}, {1: 1.0, 2: 4.0}]) == ((1, 1.0), (2, 1.7))


def test_time_in_which_an_op_waits_for_other_processes_is_idle():
    assert Taken(1.0, 5.0, 3.0).share == 0.25
    assert Taken(1.0, 5.0).share == Taken().share == 1.0
    device = object()
    _, waited = time_call(time.sleep, 0.2, waits=[device])
    _, alone = time_call(time.sleep, 0.2)
    assert waited.share < 0.5 < alone.share == 1.0


def test_what_others_do_is_not_what_this_process_does():
    watch = Others()
    assert sum(range(2_000_000)) > 0
    cores = watch.cores()
    assert cores is None or 0 <= cores < math.inf


def test_a_profile_is_a_table():
    text = str(SMALL)
    assert "500.000" in text and "Send on 1: 100 µs + bytes / 1.00 GB/s" in text
    assert repr(SMALL) == "<Profile of 1 kinds of op, 4 cpu devices, 2030-01-01T00:00:00+00:00>"
