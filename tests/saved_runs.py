"""Training runs of several processes that are saved: `python -m tests.saved_runs MODE FOLDER [OPTIONS]`.

Each process tells what it does by lines of JSON. Started by itself it is a run of one.
"""

import contextlib
import hashlib
import json
import os
import sys
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ratrain_jax as rt
from ratrain_jax.checkpoints import streams
from tests.models.scanned import init_mlp, mlp_loss, scanned_mlp

WIDTH, ROWS, LAYERS = 8, 8, 4
OPTIMIZER = optax.adam(1e-2)


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def make_batch(seed):
    return {"x": random(seed, ROWS, WIDTH), "y": random(seed + 1000, ROWS, WIDTH)}


def make_state(layers=LAYERS, stacked=False):
    """With matrices, a counter and random keys; matrices alone, or stacked ones."""
    params = {f"l{n}": random(n, WIDTH, WIDTH) * 0.3 for n in range(layers)}
    if stacked:
        params = jax.jit(lambda: init_mlp(layers))()
    return {"params": params, "opt": OPTIMIZER.init(params), "key": jax.random.key(3)}


def loss(params, batch):
    x = batch["x"]
    for name in sorted(params):
        x = jnp.tanh(rt.layer(x, name) @ params[name])
    return jnp.mean((x - batch["y"]) ** 2)


def stacked_loss(params, batch):
    points = {"x": batch["x"][:, :4], "y": batch["y"][:, :2]}
    return mlp_loss(scanned_mlp, params, points)


def make_step(stacked=False, **options):
    function = stacked_loss if stacked else loss

    @rt.train_step(**options)
    def step(state, batch):
        key, drawn = jax.random.split(state["key"])
        noise = 0.1 * jax.random.normal(drawn, (WIDTH,))

        def noisy(params):
            return function(params, {"x": batch["x"] + noise, "y": batch["y"]})

        value, grads = rt.value_and_grad(noisy)(state["params"])
        updates, moments = OPTIMIZER.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": moments, "key": key}, {"loss": value}

    return step


def data(state):
    """Random keys as their data."""
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.extended) else x,
        state,
    )


def digest(state):
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(data(rt.gather(state))):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def tell(**what):
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def train(folder, options):
    """Goes on for some steps, each of which is saved; `like` says what is restored like."""
    steps, until = options.pop("steps", 10**6), options.pop("until", 10**6)
    like, pause = options.pop("like", "state"), options.pop("pause", 0)
    if "order" in options:
        options["devices"] = [jax.devices()[n] for n in options.pop("order")]
    streams.PIECE = options.pop("piece", streams.PIECE)
    stacked = options.get("stacked", False)
    begin = make_state(stacked=stacked)
    step = make_step(**options)
    if like == "compiled":
        step = step.lower(begin, make_batch(0)).compile()
    wanted = {"state": begin, "compiled": step}.get(like)
    if like == "made":
        wanted, _ = step(begin, make_batch(0))
    with rt.Checkpoints(folder) as checkpoints:
        state, start, extras = checkpoints.restore(wanted)
        count = int(
            state["opt"][0].count
        )  # which every process can read, whatever it was restored like
        tell(start=start, count=count, extras=extras, steps=checkpoints.steps, pid=os.getpid())
        with contextlib.nullcontext() if like == "state" else nothing_is_brought():
            for number in range(start, min(start + steps, until)):
                state, metrics = step(state, make_batch(number))
                tell(step=number, loss=float(metrics["loss"]), count=int(state["opt"][0].count))
                checkpoints.save(number + 1, state, {"at": number + 1})
                time.sleep(pause)
    tell(end=digest(state), steps=checkpoints.steps)


@contextlib.contextmanager
def nothing_is_brought():
    """Refuses to bring leaves of a state from one process to another."""
    from ratrain_jax.runtime import placing

    def refuse(leaf):
        raise AssertionError(f"{leaf.shape} was brought to all processes")

    whole, placing.whole = placing.whole, refuse
    yield
    placing.whole = whole


@contextlib.contextmanager
def told(case):
    """Tells the error that a case ends with, and its warnings."""
    error = None
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            yield
        except Exception as raised:
            error = raised
    tell(
        case=case,
        kind=type(error).__name__,
        text=str(error),
        warned=[str(w.message) for w in caught],
    )


def mistakes(folder, options):
    """What goes wrong in process 0 alone, or in all; each is told, and none may hang."""
    me = jax.process_index()
    step = make_step(stages=2)
    made = [step(make_state(), make_batch(0))[0]]
    made.append(step(made[0], make_batch(1))[0])
    used, state = made
    first = rt.Checkpoints(folder)
    with told("held"):
        rt.Checkpoints(folder)
    with told("types"):
        first.restore(jax.eval_shape(make_state))
    first.save(2, state)
    with told("not after"):
        first.save(2, state)
    with told("extras"):
        first.save(3, state, {"x": {1}})
    with told("used"):
        first.save(3, used)
    with told("apart"):
        first.save(3 + me, state)
    with told("apart in extras"):
        first.save(3, state, {"process": me})
    with told("other"):
        first.restore(make_state(LAYERS + 1))
    with told("missing"):
        first.restore(state, 7)
    full_disk(first, state, me)
    first.save(4, state)
    first.wait()
    if me == 0:
        damage(folder, 4)
    with told("damaged"):
        tell(back=first.restore(state).step, steps=first.steps)
    if me == 0:
        damage(folder, 2)
    with told("all damaged"):
        first.restore(state)
    broken(first, state, me)
    first.close()
    with told("closed"):
        first.save(9, state)


def full_disk(checkpoints, state, me):
    from ratrain_jax.checkpoints import store

    write = store.write

    def full(*_):
        raise OSError(28, "No space left on device")

    if me == 0:
        store.write = full
    with told("save to a full disk"):
        checkpoints.save(3, state)
    with told("full"):
        checkpoints.wait()
    store.write = write


def damage(folder, step):
    files = [path for path in Path(folder, str(step), "state").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])


def broken(checkpoints, state, me):
    """What is no mistake of the user's, in process 0 alone."""
    if me == 0:
        checkpoints._store.read = lambda *_: [][0]
    with told("broken"):
        checkpoints.restore(state)


def leave(folder, options):
    """Process 1 leaves its `with` by an error while process 0 is busy with something else."""
    state, _ = make_step(stages=2)(make_state(), make_batch(0))
    with rt.Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state)
        if jax.process_index() == 1:
            raise ValueError("a mistake")
        tell(busy=True)
        time.sleep(600)


MODES = {"train": train, "mistakes": mistakes, "leave": leave}

if __name__ == "__main__":
    rt.initialize(heartbeat=4)
    MODES[sys.argv[1]](sys.argv[2], json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
