"""A training run that another process kills: `python -m tests.kills FOLDER STEPS SECONDS`.

It trains a small model in two stages, saves after every step, and tells what it does by lines of JSON: where it goes on, each
step that it has run, and at its end a digest of its state. SECONDS is how long it lingers, at most, at the places where a
save would be hurt most: before each file of a checkpoint is listed in its manifest, and before files are removed.
"""

import hashlib
import json
import random
import shutil
import sys
import time

import jax
import numpy as np
import optax

import ratrain_jax as rt
from ratrain_jax.checkpoints.manifest import File
from tests.models.scanned import init_mlp, make_points, mlp_loss, scanned_mlp

OPTIMIZER = optax.adam(1e-2)
ROWS = 4


def make_state():
    params = jax.jit(lambda: init_mlp(2))()
    opt_state = OPTIMIZER.init(params)
    return {"params": params, "opt_state": opt_state, "key": jax.random.key(11)}


@rt.train_step(stages=2, microbatches=2)
def train(state, batch):
    key, drawn = jax.random.split(state["key"])

    def loss(params):
        noise = jax.random.normal(rt.microbatch_key(drawn), batch["x"].shape)
        return mlp_loss(scanned_mlp, params, {"x": batch["x"] + noise, "y": batch["y"]})

    value, grads = rt.value_and_grad(loss)(state["params"])
    updates, opt_state = OPTIMIZER.update(grads, state["opt_state"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "key": key}, {"loss": value}


def digest(state):
    found = hashlib.sha256()
    for leaf in jax.tree.leaves({**state, "key": jax.random.key_data(state["key"])}):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def tell(**what):
    print(json.dumps(what), flush=True)


def linger(seconds):
    """Makes saves slow."""

    def late(function):
        def wrapped(*args, **kwargs):
            time.sleep(random.uniform(0, seconds))
            return function(*args, **kwargs)

        return wrapped

    File.of = staticmethod(late(File.of))
    shutil.rmtree = late(shutil.rmtree)


def main(folder, steps):
    with rt.Checkpoints(folder, keep=2) as checkpoints:
        state, start, extras = checkpoints.restore(make_state())
        seed = extras.get("seed", 0)
        tell(start=start)
        for step in range(start, steps):
            state, _ = train(state, make_points(seed, ROWS))
            seed += 3
            jax.block_until_ready(state)
            tell(step=step)
            checkpoints.save(step + 1, state, {"seed": seed})
    tell(end=digest(state))


if __name__ == "__main__":
    linger(float(sys.argv[3]))
    main(sys.argv[1], int(sys.argv[2]))
