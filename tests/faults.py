"""Scripts for `tests/e2e/test_faults_*.py` to run in processes of their own: they train, and something goes wrong.

    python -m tests.faults NAME [ARGUMENTS]

Each prints a line for each thing that it has got to, at once, so that a test can wait for it.
"""

import faulthandler
import os
import signal
import sys
import threading

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# While JAX looks a program up in its cache on disk, a Ctrl-C may come out as another error.
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np

import ratrain_jax as rt

# Python leaves SIGINT ignored where it finds it so, as in what a shell runs in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)

WIDTH, ROWS, LAYERS = 8, 8, 4
HANG = 100
"""Seconds after which a script that hangs shows where, and ends with an error."""


def fresh():
    """A new state."""
    return {f"layer_{i}": np.eye(WIDTH, dtype=np.float32) for i in range(LAYERS)}


def batch():
    return {"x": np.ones((ROWS, WIDTH), np.float32)}


def make_step(data_parallel=2, between=lambda name, h: h, **options):
    """A step of dense layers, as two stages.

    Args:
        data_parallel: D.
        between: what is done with what each layer makes.
        **options: more for `rt.train_step`.
    """

    @rt.train_step(**{"stages": 2, "microbatches": 2, "data_parallel": data_parallel, **options})
    def step(params, batch):
        def loss_fn(params):
            h = batch["x"]
            for name in sorted(params):
                h = between(name, jnp.tanh(h @ params[name]))
            return (h**2).mean()

        loss, grads = rt.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}

    return step


def called(function):
    """Calls a function of the host in the middle of a loss, behind layer 2, in each microbatch on each device."""

    def host(x):
        function()
        return np.asarray(x)

    @jax.custom_vjp
    def identity(x):
        return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    identity.defvjp(lambda x: (identity(x), None), lambda _, g: (g,))
    return lambda name, h: identity(h) if name == "layer_2" else h


def say(*words):
    print(*words, flush=True)


def losses(step, state, count=3):
    """The losses of some steps, and the state behind them."""
    found = []
    for _ in range(count):
        state, metrics = step(state, batch())
        found.append(float(metrics["loss"]))
    return found, state


def copy_of(state):
    return jax.tree.map(np.asarray, state)


def train():
    """Trains until a Ctrl-C ends it, once in a while measuring a step."""
    step = make_step()
    say("compiling")
    compiled = step.lower(fresh(), batch()).compile()
    state = fresh()
    say("training")
    for number in range(10**9):
        if number % 5 == 4:
            (state, _), _ = compiled.trace(state, batch())
        else:
            state, _ = compiled(state, batch())


def go_on(seed):
    """Is stopped by Ctrl-C over and over, and each time goes on from what it last saved, compiled anew if need be."""
    rng = np.random.default_rng(int(seed))
    expected, _ = losses(make_step(), fresh())
    caught = 0
    for _ in range(4):
        alarm(rng.uniform(0.0, 1.5))
        saved = fresh()
        try:
            step = make_step()
            state = saved
            while True:
                state, _ = step(state, batch())
        except KeyboardInterrupt:
            caught += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        found, _ = losses(step, copy_of(saved))
        assert found == expected, (found, expected)
    say("caught", caught)


def alarm(seconds):
    """Sends this process a Ctrl-C once the seconds are over; and again, for in a callback of the garbage collector it is lost."""

    def ring(*_):
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 5.0)


def callback_raises(data_parallel, where="everywhere"):
    """A function of the host raises in the middle of a step, on each device or on one."""
    armed = []

    def maybe():
        if armed and (where == "everywhere" or armed.pop()):
            raise ValueError("armed")

    step = make_step(int(data_parallel), called(maybe))
    expected, state = losses(step, fresh())
    armed.append(True)
    try:
        while True:
            state, metrics = step(state, batch())
            float(metrics["loss"])
    except jax.errors.JaxRuntimeError as error:
        say("raised", "ValueError: armed" in str(error))
    armed.clear()
    try:
        step(state, batch())
    except rt.errors.StateError as error:
        say("refused", "checkpoint" in str(error))
    found, _ = losses(step, fresh())
    say("again", found == expected)


def stall(data_parallel):
    """A function of the host blocks in the middle of a step until the watchdog has spoken."""
    free, stuck = threading.Event(), []

    def wait():
        if stuck and not free.wait(HANG / 2):
            raise RuntimeError("the watchdog has said nothing")

    step = make_step(int(data_parallel), called(wait))
    expected, _ = losses(step, fresh(), 5)
    with rt.watchdog(timeout=0.5, then=lambda message: free.set()):
        first, state = losses(step, fresh(), 2)
        stuck.append(True)
        second, _ = losses(step, state, 3)
    say("same", first + second == expected)


def exhausted():
    """Real memory runs out: the address space may grow by a little, and a step wants much."""
    import resource

    @rt.train_step(stages=2, microbatches=2)
    def step(params, batch):
        def loss_fn(params):
            h = jnp.tanh(batch["x"] @ params["a"])
            wide = jnp.broadcast_to(h[:, :, None], (*h.shape, 1 << 23))
            return (jnp.sin(wide).cumsum(axis=2).mean(axis=2) @ params["b"]).mean()

        loss, grads = rt.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}

    params = {name: np.eye(WIDTH, dtype=np.float32) for name in "ab"}
    compiled = step.lower(params, batch()).compile()
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), used + (1 << 28)))
    say("limited")
    _, metrics = compiled(params, batch())
    say("loss", float(metrics["loss"]))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(HANG, exit=True)
    globals()[sys.argv[1]](*sys.argv[2:])
