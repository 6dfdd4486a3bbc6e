"""A compiled step for faults to be put into, what must hold behind them, and scripts of `tests.faults` in their own processes.

A module that asks for the fixture imports it `as` itself, so that the linter sees that it is wanted.
"""

import contextlib
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import StateError
from ratrain_jax.runtime import flights
from tests.processes import ROOT

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
