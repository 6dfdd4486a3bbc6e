"""Profiles that are made up, for tests."""

import dataclasses

from hypothesis import strategies as st

from ratrain_jax.kernels import load_machine
from ratrain_jax.lowering.build import build_program
from ratrain_jax.lowering.program import Free, Settings
from ratrain_jax.profiling.keys import key_of
from ratrain_jax.profiling.profile import Line, Measured, Profile
from tests.programs import step_code

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
