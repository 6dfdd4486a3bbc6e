"""What `docs/howto/faults.md` promises of `rt.watchdog`: it names what a step waits for, and disturbs nothing."""

import logging
import threading
import time

import pytest

import ratrain_jax as rt
from ratrain_jax.errors import OptionError
from ratrain_jax.runtime.instructions import LINK
from tests.failing import compiled as compiled
from tests.failing import ended, failing, losses, make_batch, make_state, start, threads
from tests.training import differing


@pytest.mark.parametrize("data_parallel", [1, 2])
def test_a_watchdog_names_what_a_step_waits_for_and_disturbs_nothing(data_parallel):
    code, out, errors = ended(start("stall", data_parallel))
    assert (code, out) == (0, "same True\n"), errors[-3000:]
    told = [line for line in errors.splitlines() if "no progress" in line]
    assert len(told) == 1  # once a stall
    stuck = errors.splitlines()[errors.splitlines().index(told[0]) + 1]
    assert stuck.startswith("  stage 1, microbatch 0, compute lane: Forward (F L2:4 i0) ")
    assert stuck.endswith(("runs", "is being launched"))


def test_a_watchdog_sees_a_launch_that_blocks_and_what_waits_behind_it(compiled, caplog):
    free = threading.Event()
    instruction = next(i for i in compiled._plan.threads[LINK] if i.op.lane == "link")
    execute = instruction.execute
    messages = []

    def block(bundles):
        free.wait(60)
        return execute(bundles)

    def told(message):
        messages.append(message)
        free.set()

    instruction.execute = block
    try:
        with caplog.at_level(logging.ERROR), rt.watchdog(timeout=0.2, then=told):
            found = losses(compiled, make_state())
    finally:
        instruction.execute = execute
    assert found == losses(compiled, make_state())
    (message,) = messages
    assert caplog.messages == [message]
    assert f"{type(instruction.op).__name__} (" in message and "is being launched" in message
    assert "which is not launched either" in message
    assert threads().count("ratrain-watchdog") == 0


def test_a_watchdog_says_nothing_of_steps_that_get_on_or_that_nobody_calls(compiled):
    expected, state = losses(compiled, make_state()), make_state()
    messages = []
    with rt.watchdog(timeout=0.4, then=messages.append):
        assert losses(compiled, state) == expected
        time.sleep(1.5)
        (state, _), measured = compiled.trace(make_state(), make_batch())
        assert measured.ops
        time.sleep(1)
        error = ValueError("of an op")
        with failing(compiled, LINK, 5, error), pytest.raises(ValueError, match="of an op"):
            compiled(state, make_batch())
        time.sleep(1)
    assert messages == []
    assert not differing(compiled(make_state(), make_batch()), compiled(make_state(), make_batch()))


def test_a_watchdog_needs_a_time_and_is_one():
    for timeout in (0, -1, float("nan"), "1", True):
        with pytest.raises(OptionError, match="timeout"), rt.watchdog(timeout):
            pass
    with rt.watchdog(), pytest.raises(OptionError, match="at work already"), rt.watchdog():
        pass
    with rt.watchdog():  # the first has ended
        pass
