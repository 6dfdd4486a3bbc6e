"""What `docs/howto/faults.md` promises of a Ctrl-C: at any line of a step, while compiling, and in a process of its own."""

import contextlib
import linecache
import random
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import StateError
from ratrain_jax.runtime import flights, instructions, workers
from ratrain_jax.runtime import threads as threads_of_a_step
from ratrain_jax.runtime.executables import WORKERS
from ratrain_jax.runtime.groups import Group
from ratrain_jax.runtime.instructions import LINK
from ratrain_jax.runtime.workers import Task
from tests.failing import (
    assert_says_truly,
    ended,
    losses,
    make_batch,
    make_state,
    notes,
    sgd,
    start,
    threads,
)
from tests.failing import compiled as compiled

FOLDERS = ("ratrain_jax/runtime", "ratrain_jax/stacked_leaf")


def scanned(params, batch):
    def loss_fn(params):
        body = lambda h, w: (jnp.tanh(h @ w), None)  # noqa: E731
        return (jax.lax.scan(body, batch["x"], params["w"])[0] ** 2).mean()

    loss, grads = rt.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}


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
    # The first that was asked for is waited for; which thread begins first is open.
    first = threading.Semaphore(WORKERS)

    def first_ones(self, *args):
        is_first = first.acquire(blocking=False)
        calls.append(args)
        assert is_first or free.wait(60)
        return real(self, *args)

    def stop(done, total):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Group, "compile", first_ones)
        with pytest.raises(KeyboardInterrupt):
            lowered.compile(progress=stop)
        free.set()
        until(lambda: not any(busy.locked() for busy in workers._busy))
    assert len(calls) <= 2 * WORKERS
    compiled = lowered.compile()
    assert compiled.executables > len(calls)
    assert losses(compiled, make_state())


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
