"""What a profile says of a program's ops, and of several that run at once."""

import dataclasses

import pytest

from ratrain_jax.errors import ProfileError, SimulationError
from ratrain_jax.lowering.jsonform import from_json, to_json
from ratrain_jax.lowering.op_costs import OpCoster
from ratrain_jax.lowering.program import Backward, Forward, Free, Recover, Send, Settings
from ratrain_jax.profiling.keys import Key, key_of
from ratrain_jax.profiling.profile import Line, Measured
from tests.profiles import CODES, MACHINE, ONE, SMALL, TWO, made_up, program


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
