"""What `docs/howto/faults.md` promises when an op fails: in its launch, on its device, in the host or in the compiler."""

import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import StateError
from ratrain_jax.lowering.program import Metrics
from ratrain_jax.runtime import flights, instructions, launches
from ratrain_jax.runtime.executables import shared_library
from ratrain_jax.runtime.groups import Group, make_groups
from ratrain_jax.runtime.instructions import COMPUTE, LINK
from ratrain_jax.runtime.nans import nan_check
from tests.failing import (
    assert_says_truly,
    ended,
    failing,
    losses,
    make_batch,
    make_state,
    notes,
    sgd,
    start,
    threads,
)
from tests.failing import compiled as compiled


@pytest.mark.parametrize("place", [0, 3, -1], ids=["first", "fourth", "last"])
@pytest.mark.parametrize("thread", [COMPUTE, LINK], ids=["compute", "link"])
def test_an_op_that_finds_no_memory_is_named_and_the_state_is_truly_told(compiled, thread, place):
    expected = losses(compiled, make_state())
    before = threads()
    state, _ = compiled(make_state(), make_batch())
    given = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")
    with (
        failing(compiled, thread, place, given) as op,
        pytest.raises(jax.errors.JaxRuntimeError) as caught,
    ):
        compiled(state, make_batch())
    assert caught.value is given
    assert caught.value.__context__ is None
    assert f"It came up in the launch of {type(op).__name__} (" in notes(given)
    assert_says_truly(compiled, given, state)
    assert losses(compiled, make_state()) == expected
    assert threads() == before


def test_a_measured_step_that_fails_leaves_no_thread(compiled):
    losses(compiled, make_state(), 1)
    before = threads()
    error = ValueError("of an op")
    with failing(compiled, LINK, 5, error), pytest.raises(ValueError, match="of an op"):
        compiled.trace(make_state(), make_batch())
    with failing(compiled, LINK, 5, error), pytest.raises(ValueError, match="of an op"):
        compiled.census(make_state(), make_batch())
    assert threads() == before


def test_debug_nans_names_the_op_that_made_the_first(compiled):
    state, _ = compiled(make_state(), make_batch())
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
        compiled(state, make_batch(np.nan))
    assert re.fullmatch(
        r"invalid value \(nan\) .*made by Forward \(F L0:2 i0\) on stage 0\.", str(caught.value)
    )
    assert_says_truly(compiled, caught.value, state)
    with jax.debug_nans(True):
        assert losses(compiled, make_state()) == losses(compiled, make_state())


def test_debug_infs_are_found_too_but_not_in_residuals(compiled):
    with jax.debug_infs(True):
        check = nan_check(compiled.lowered.program)
    assert nan_check(compiled.lowered.program) is None
    for instruction in compiled._plan.threads[COMPUTE]:
        kinds = [compiled.lowered.program.values[v].kind for v in instruction.writes]
        bundles = [(jnp.array([np.inf if kind == "residuals" else 1.0]),) for kind in kinds]
        check(instruction, bundles)
        bundles[0] = (jnp.arange(3), jnp.array([np.inf], jnp.bfloat16))
        if kinds[0] != "residuals":
            with pytest.raises(FloatingPointError, match=rf"\(inf\) in the {kinds[0]} .* on stage"):
                check(instruction, bundles)


class Failed:
    """What an op that failed on its device has made."""

    def is_deleted(self):
        return False

    def is_ready(self):
        return True

    def block_until_ready(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: of a device")


def test_a_state_that_a_failed_step_made_is_refused_and_a_good_one_is_not():
    known, good = flights.Flights(), jnp.ones(3)
    known.add([Failed()])
    known.admit([{"w": good, "numbers": 1}])
    known.add([Failed()])
    for _ in range(2):
        with pytest.raises(StateError, match="comes from a step that failed") as caught:
            known.admit([{"w": Failed()}])
        assert "of a device" in str(caught.value.__cause__)
    known.admit([{"w": good}])
    known.admit([{"w": Failed()}])  # nothing is known to have failed since
    gone = jnp.ones(3)
    gone.delete()
    known.add([Failed()])
    known.admit([{"w": gone}])  # what is used up is refused as such


def test_launches_behind_one_that_failed_take_no_harm(compiled):
    expected = losses(compiled, make_state())
    for key in list(launches._tokens):
        launches._tokens[key].extend([Failed()] * launches.UNDER_WAY)
    for key in list(launches._turns):
        launches._turns[key] = Failed()
    assert losses(compiled, make_state()) == expected


def test_what_an_op_made_is_looked_at_before_another_may_use_it_up():
    """JAX 0.10 ends the process where it is asked whether a used-up array is ready."""
    seen = []

    class Spy(instructions.Inbox):
        def put(self, value, bundle):
            seen.append("handed")

    given = instructions.Instruction(Metrics(0), lambda _: [("made",)], (), (1,), hands=(1,))
    instructions.run([given], {}, instructions.Inbox(), Spy(), lambda *_: seen.append("seen"))
    assert seen == ["seen", "handed"]


def test_what_failed_to_compile_is_compiled_when_asked_for_again(monkeypatch):
    lowered = rt.train_step(stages=2, microbatches=4)(sgd).lower(make_state(), make_batch())
    groups = make_groups(2, 1, None, {})
    library = shared_library(lowered.code.fingerprint, groups)  # as if another step had it
    real, failed = Group.compile, []

    def fail_once(self, *args):
        if not failed:
            failed.append(True)
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: while compiling")
        return real(self, *args)

    monkeypatch.setattr(Group, "compile", fail_once)
    with pytest.raises(jax.errors.JaxRuntimeError, match="while compiling"):
        lowered.compile()
    compiled = lowered.compile()
    assert compiled._library is library
    assert losses(compiled, make_state())


@pytest.mark.parametrize("data_parallel", [1, 2])
def test_a_function_of_the_host_that_raises_and_what_is_good_after_it(data_parallel):
    code, out, errors = ended(start("callback_raises", data_parallel))
    assert code == 0, errors[-3000:]
    told = out.splitlines()
    # With one device a stage it may raise in the launch; the state is then still good.
    assert told == ["raised True", *["refused True"] * (len(told) - 2), "again True"]
    assert data_parallel == 1 or len(told) == 3


def test_a_function_of_the_host_that_raises_on_one_device_while_others_wait_ends_the_process():
    flags = "--xla_cpu_collective_call_terminate_timeout_seconds=2"
    flags += " --xla_cpu_collective_call_warn_stuck_timeout_seconds=1"
    code, _, errors = ended(start("callback_raises", 2, "once", flags=flags))
    assert code == -signal.SIGABRT, errors[-3000:]
    assert "ValueError: armed" in errors and "Termination timeout" in errors


def test_memory_that_really_runs_out_is_an_error_of_jax():
    code, out, errors = ended(start("exhausted"))
    assert code == 1 and out == "limited\n", errors[-3000:]
    assert "JaxRuntimeError" in errors and "emory" in errors
