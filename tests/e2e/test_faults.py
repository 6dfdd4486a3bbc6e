"""What `docs/howto/faults.md` promises when something goes wrong in a step, fault by fault.

Scripts that are to be stopped, to hang or to run out of memory run in processes of their own (`tests/faults.py`).
"""

import contextlib
import linecache
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import BatchError, OptionError, StateError
from ratrain_jax.lowering.program import Metrics
from ratrain_jax.runtime import flights, instructions, launches, workers
from ratrain_jax.runtime import threads as threads_of_a_step
from ratrain_jax.runtime.executables import WORKERS, shared_library
from ratrain_jax.runtime.groups import Group, make_groups
from ratrain_jax.runtime.instructions import COMPUTE, LINK
from ratrain_jax.runtime.nans import nan_check
from ratrain_jax.runtime.workers import Task
from tests.training import differing

ROOT = Path(__file__).parents[2]
FOLDERS = ("ratrain_jax/runtime", "ratrain_jax/stacked_leaf")
FLAGS = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"


def make_state(layers=4, width=8):
    return {f"layer_{i}": np.eye(width, dtype=np.float32) for i in range(layers)}


def make_batch(value=1.0):
    return {"x": np.full((8, 8), value, np.float32)}


def sgd(params, batch):
    def loss_fn(params):
        h = batch["x"]
        for name in sorted(params):
            h = jnp.tanh(h @ params[name])
        return (h**2).mean()

    loss, grads = rt.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}


def scanned(params, batch):
    def loss_fn(params):
        body = lambda h, w: (jnp.tanh(h @ w), None)  # noqa: E731
        return (jax.lax.scan(body, batch["x"], params["w"])[0] ** 2).mean()

    loss, grads = rt.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}


@pytest.fixture(scope="module", params=[1, 2], ids=["one device a stage", "two"])
def compiled(request):
    options = {"stages": 2, "data_parallel": request.param, "microbatches": 2}
    return rt.train_step(**options)(sgd).lower(make_state(), make_batch()).compile()


def losses(compiled, state, count=3):
    found = []
    for _ in range(count):
        state, metrics = compiled(state, make_batch())
        found.append(float(metrics["loss"]))
    return found


def notes(error):
    return "\n".join(getattr(error, "__notes__", []))


def assert_says_truly(compiled, error, state):
    """Whatever the note on an error says of the state is so, and the compiled step goes on with a new one."""
    told = notes(error)
    assert (flights.KEPT in told) != (flights.LOST in told)
    if flights.LOST in told:
        with pytest.raises(StateError, match=r"used up.*checkpoint"):
            compiled(state, make_batch())
    else:
        losses(compiled, state, 1)
    assert losses(compiled, make_state()) == losses(compiled, make_state())


def threads():
    return sorted(t.name for t in threading.enumerate())


# An op that fails.


@contextlib.contextmanager
def failing(compiled, thread, place, error):
    """Makes one launch of a thread raise."""
    instruction = compiled._plan.threads[thread][place]
    execute = instruction.execute

    def fail(bundles):
        raise error

    instruction.execute = fail
    yield instruction.op
    instruction.execute = execute


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


# What is refused before the step begins.


def test_what_is_refused_leaves_the_state_as_it_was(compiled):
    expected = losses(compiled, make_state())
    state, _ = compiled(make_state(), make_batch())
    first = [expected[0]]
    used = jnp.ones((8, 8))
    used.delete()
    for batch in ({"x": np.ones((8, 9), np.float32)}, {"y": make_batch()["x"]}, {"x": used}):
        with pytest.raises(BatchError):
            compiled(state, batch)
    with pytest.raises(StateError):
        compiled({**state, "other": 1}, make_batch())
    assert first + losses(compiled, state, 2) == expected


def test_a_batch_that_finds_no_memory_leaves_the_state_as_it_was(compiled, monkeypatch):
    expected = losses(compiled, make_state())
    state, _ = compiled(make_state(), make_batch())

    def fail(self, array):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.")

    with monkeypatch.context() as patch:
        patch.setattr(Group, "put_rows", fail)
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            compiled(state, make_batch())
    assert flights.KEPT in notes(caught.value)
    assert losses(compiled, state, 2) == expected[1:]


def test_an_iterator_that_raises_leaves_the_state_of_the_last_step(compiled):
    def batches():
        yield make_batch()
        yield make_batch()
        raise OSError("no more data")

    state = make_state()
    with pytest.raises(OSError, match="no more data"):
        for batch in batches():
            state, _ = compiled(state, batch)
    assert losses(compiled, state, 1) == losses(compiled, make_state())[2:]


def test_metrics_that_the_user_gave_away_do_not_stop_the_next_steps(compiled):
    state = make_state()
    for _ in range(4):
        state, metrics = compiled(state, make_batch())
        metrics["loss"].delete()
    assert losses(compiled, state, 1)[0] > 0


# Ctrl-C.


def interrupted(call, count):
    """Calls with a Ctrl-C at the `count`-th line of the runtime; the line, or None if it has fewer."""
    seen, where = 0, None

    def line_by_line(frame, event, _):
        nonlocal seen, where
        if event == "line":
            name, number = frame.f_code.co_filename, frame.f_lineno
            # A `with` line is also seen when its block is left, where Python looks for no signal.
            if not linecache.getline(name, number).lstrip().startswith("with "):
                seen += 1
                if seen == count:
                    where = f"{name}:{number}"
                    raise KeyboardInterrupt
        return line_by_line

    def enter(frame, event, _):
        name = frame.f_code.co_filename
        # Python ignores what is raised in a callback of a weak reference.
        ours = any(folder in name for folder in FOLDERS) and frame.f_code.co_name != "_forget"
        return line_by_line if ours else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(before)
    return where


def until(so, seconds=60):
    """Waits until something is so."""
    end = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < end
        time.sleep(0.05)


def interrupt_everywhere(compiled, call, expected, stride):
    """Interrupts `call(state)` at every `stride`-th line, and trains on behind each."""
    before = threads()
    outcomes = set()
    for count in range(1, 10**6, stride):
        state, _ = compiled(make_state(), make_batch())
        try:
            assert interrupted(lambda state=state: call(state), count) is None
            break
        except KeyboardInterrupt as error:
            told = notes(error)
        try:
            again = losses(compiled, state, 1)
        except StateError as error:
            assert "used up" in str(error) and "checkpoint" in str(error)
            assert flights.KEPT not in told
            outcomes.add("lost")
        else:
            assert again == expected[1:2]
            assert flights.LOST not in told
            outcomes.add("kept")
        assert losses(compiled, make_state()) == expected
    until(lambda: threads() == before)
    assert outcomes == {"kept", "lost"}


def test_a_thread_that_nobody_told_to_stop_sees_that_the_other_is_gone(monkeypatch):
    """As after a second Ctrl-C, which keeps the first from being told."""
    monkeypatch.setattr(instructions, "PATIENCE", 0.05)
    held = threading.Lock()
    inbox, table = instructions.Inbox(giver=held), {}
    with held:
        inbox.put(1, ("one",))
        inbox.fetch(1, table)
        inbox.put(2, ("two",))
    inbox.fetch(2, table)  # what was given before comes first
    assert table == {1: ("one",), 2: ("two",)}
    with pytest.raises(instructions.Stopped):
        inbox.fetch(3, table)


def test_a_ctrl_c_that_comes_before_the_other_thread_can_be_told(compiled, monkeypatch):
    state, real = make_state(), threads_of_a_step.run

    def run(*args):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(threads_of_a_step, "run", run)
        with pytest.raises(KeyboardInterrupt):
            compiled(state, make_batch())
    assert losses(compiled, state) == losses(compiled, make_state())


def test_a_ctrl_c_that_comes_while_the_other_thread_still_launches(compiled, monkeypatch):
    (state, _), over = compiled(make_state(), make_batch()), []
    last = compiled._plan.threads[LINK][-1]
    execute, launch = last.execute, compiled._threads.launch

    def slow(bundles):
        time.sleep(0.3)
        over.append(True)
        return execute(bundles)

    def interrupted(task):
        raise KeyboardInterrupt

    def launch_interrupted(tables, watch):
        with monkeypatch.context() as patch:
            patch.setattr(last, "execute", slow)
            patch.setattr(Task, "result", interrupted)
            launch(tables, watch)

    with monkeypatch.context() as patch:
        patch.setattr(compiled._threads, "launch", launch_interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            compiled(state, make_batch())
        assert over
    assert_says_truly(compiled, caught.value, state)


def test_what_an_op_made_is_looked_at_before_another_may_use_it_up():
    """JAX 0.10 ends the process where it is asked whether a used-up array is ready."""
    seen = []

    class Spy(instructions.Inbox):
        def put(self, value, bundle):
            seen.append("handed")

    given = instructions.Instruction(Metrics(0), lambda _: [("made",)], (), (1,), hands=(1,))
    instructions.run([given], {}, instructions.Inbox(), Spy(), lambda *_: seen.append("seen"))
    assert seen == ["seen", "handed"]


@pytest.mark.parametrize("stride", [31, pytest.param(1, marks=pytest.mark.slow)])
def test_a_ctrl_c_at_any_line_of_a_step(compiled, stride):
    expected = losses(compiled, make_state())
    interrupt_everywhere(compiled, lambda state: compiled(state, make_batch()), expected, stride)


@pytest.mark.parametrize("stride", [151, pytest.param(11, marks=pytest.mark.slow)])
def test_a_ctrl_c_at_any_line_of_a_measured_step(compiled, stride):
    expected = losses(compiled, make_state())
    call = lambda state: compiled.trace(state, make_batch())  # noqa: E731
    interrupt_everywhere(compiled, call, expected, stride)


def test_a_ctrl_c_while_stacked_leaves_come_in():
    """A stacked array is given up only once the step has begun; until then it is as good as before."""
    step = rt.train_step(stages=2, data_parallel=2)(scanned)
    params = {"w": np.stack([np.eye(8, dtype=np.float32)] * 4)}
    compiled = step.lower(params, make_batch()).compile()
    expected = losses(compiled, params)
    kept = 0
    for count in range(1, 400, 13):
        state, _ = compiled(params, make_batch())
        with contextlib.suppress(KeyboardInterrupt):
            interrupted(lambda state=state: compiled(state, make_batch()), count)
        if not state["w"].is_deleted():
            kept += 1
            assert losses(compiled, state, 1) == expected[1:2]
        assert losses(compiled, params) == expected
    assert kept


def test_a_stacked_leaf_of_a_call_that_failed_early_is_not_given_up_by_the_next(monkeypatch):
    step = rt.train_step(stages=2, data_parallel=2)(scanned)
    params = {"w": np.stack([np.eye(8, dtype=np.float32)] * 4)}
    compiled = step.lower(params, make_batch()).compile()
    expected = losses(compiled, params)
    state, _ = compiled(params, make_batch())

    def fail(state):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(compiled._handover, "_enter_leaves", fail)
        with pytest.raises(KeyboardInterrupt):
            compiled(state, make_batch())
    assert losses(compiled, params) == expected
    assert losses(compiled, state, 2) == expected[1:]


@pytest.mark.parametrize(
    "counts", [(40, 400), pytest.param(range(1, 3000, 97), marks=pytest.mark.slow)]
)
def test_a_ctrl_c_while_compiling_asks_for_no_more_and_the_next_compile_is_whole(counts):
    for count in counts:
        lowered = rt.train_step(stages=2, microbatches=2)(sgd).lower(make_state(), make_batch())
        with contextlib.suppress(KeyboardInterrupt):
            interrupted(lowered.compile, count)
        assert losses(lowered.compile(), make_state())


def test_a_ctrl_c_while_compiling_drops_what_waits_for_its_turn(monkeypatch):
    lowered = rt.train_step(stages=2, microbatches=8)(sgd).lower(make_state(), make_batch())
    real, calls, free = Group.compile, [], threading.Event()

    def first_alone(self, *args):
        calls.append(args)
        assert len(calls) == 1 or free.wait(60)
        return real(self, *args)

    def stop(done, total):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Group, "compile", first_alone)
        with pytest.raises(KeyboardInterrupt):
            lowered.compile(progress=stop)
        free.set()
        until(lambda: not any(busy.locked() for busy in workers._busy))
    assert len(calls) <= 1 + WORKERS
    compiled = lowered.compile()
    assert compiled.executables > len(calls)
    assert losses(compiled, make_state())


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


# In processes of their own.


def start(*words, flags=""):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": f"{FLAGS} {flags}"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.faults", *map(str, words)],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process, timeout=150):
    """Exit code, standard output and standard error; a process that hangs is ended, and told of."""
    try:
        out, errors = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, out, errors


def stop_training(after, line, times=1):
    process = start("train")
    while process.stdout.readline().strip() != line:
        assert process.poll() is None, process.stderr.read()
    time.sleep(after)
    for _ in range(times):
        process.send_signal(signal.SIGINT)
    code, _, errors = ended(process)
    assert code == -signal.SIGINT, errors[-3000:]
    assert "KeyboardInterrupt" in errors.splitlines()[-1] or "KeyboardInterrupt" in errors


STOPS = [("compiling", 0.5, 1), ("training", 0.3, 1), ("training", 0.05, 3)]


@pytest.mark.parametrize(("line", "after", "times"), STOPS)
def test_a_ctrl_c_ends_the_process_as_python_does(line, after, times):
    stop_training(after, line, times)


@pytest.mark.slow
def test_a_ctrl_c_at_twenty_moments():
    rng = random.Random(1)
    for _ in range(20):
        stop_training(rng.uniform(0, 3), "compiling", rng.randint(1, 2))


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_a_script_that_catches_ctrl_c_goes_on_from_what_it_saved(seed):
    code, out, errors = ended(start("go_on", seed))
    assert (code, out) == (0, "caught 4\n"), errors[-3000:]


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


@pytest.mark.parametrize("data_parallel", [1, 2])
def test_a_watchdog_names_what_a_step_waits_for_and_disturbs_nothing(data_parallel):
    code, out, errors = ended(start("stall", data_parallel))
    assert (code, out) == (0, "same True\n"), errors[-3000:]
    told = [line for line in errors.splitlines() if "no progress" in line]
    assert len(told) == 1  # once a stall
    stuck = errors.splitlines()[errors.splitlines().index(told[0]) + 1]
    assert stuck.startswith("  stage 1, microbatch 0, compute lane: Forward (F L2:4 i0) ")
    assert stuck.endswith(("runs", "is being launched"))


# A watchdog.


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
