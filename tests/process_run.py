"""One process of a run that trains a small model, for tests: `python -m tests.process_run CASE.json OUT.npz`.

The case says the options of `train_step`, and of `data` what is tried. The first process writes the gathered state and
the metrics of every step.
"""

import json
import sys

import ratrain_jax as rt

rt.initialize()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from tests.programs import LAYERS, chain  # noqa: E402

WIDTH, BATCH = 16, 16


def loss(params, batch):
    """A chain of layers with a skip, a tied matrix, and auxiliary values of every kind."""
    x, y = chain(params, batch["x"])
    aux = {"size": jnp.mean(x), "rows": jnp.sum(y, 1), "count": jnp.sum(y > 0)}
    return jnp.mean((y - batch["y"]) ** 2), aux


def scanned_loss(params, batch):
    """Stacked layers."""

    def layer(x, p):
        return jnp.tanh(x @ p["w"] + p["b"]), None

    x, _ = jax.lax.scan(layer, batch["x"], params)
    return jnp.mean((x - batch["y"]) ** 2), {"size": jnp.mean(x)}


def make_params(numbers, scanned):
    """The same in every process."""
    if scanned:
        return {"w": numbers(LAYERS, WIDTH, WIDTH), "b": numbers(LAYERS, WIDTH)}
    params = {f"l{n}": {"w": numbers(WIDTH, WIDTH), "b": numbers(WIDTH)} for n in range(1, 7)}
    return params | {"l0": numbers(WIDTH, WIDTH), "l7": numbers(WIDTH)}


def main(case, out):
    """Trains, and writes what came out."""
    scanned, steps, swap = case.pop("scanned", False), case.pop("steps", 3), case.pop("swap", False)
    averaged = case.pop("averaged", False)
    order = case.pop("order", None)
    if order is not None:
        case["devices"] = [jax.devices()[n] for n in order]
    random = np.random.default_rng(0)

    def numbers(*shape):
        return (0.3 * random.standard_normal(shape)).astype(np.float32)

    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))

    @rt.train_step(**case)
    def step(state, batch):
        def loss_fn(params, batch):
            value, aux = (scanned_loss if scanned else loss)(params, batch)
            if averaged:
                said = chain(state["average"], batch["x"])[1]
                value += jnp.mean((chain(params, batch["x"])[1] - said) ** 2)
            return value, aux

        (value, aux), grads = rt.value_and_grad(loss_fn, has_aux=True)(state["params"], batch)
        updates, new = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        noise = jax.random.uniform(state["key"])
        key = jax.random.split(state["key"])[0]
        new = {"params": params, "opt": new, "key": key}
        if averaged:
            new["average"] = optax.incremental_update(params, state["average"], 0.2)
        return new, {"loss": value, "noise": noise, **aux}

    @rt.eval_step(step)
    def evaluate(state, batch):
        return (scanned_loss if scanned else loss)(state["params"], batch)[0]

    params = make_params(numbers, scanned)
    state = {"params": params, "opt": optimizer.init(params), "key": jax.random.key(3)}
    if averaged:
        state["average"] = jax.tree.map(lambda x: 0.5 * x, params)
    kept = []
    for n in range(steps):
        batch = {"x": numbers(BATCH, WIDTH), "y": numbers(BATCH, WIDTH)}
        if swap and n == 1:  # averaged weights, as a user would bring them back
            params = jax.tree.map(lambda x: 0.5 * x, rt.gather(state["params"]))
            state = {**state, "params": params}
        state, metrics = step(state, batch)
        kept.append({**metrics, "evaluated": evaluate(state, batch)})
    count = int(state["opt"][1][0].count)
    assert count == steps, count
    state = rt.gather({**state, "key": jax.random.key_data(state["key"])})
    if jax.process_index() == 0:
        leaves = jax.tree_util.tree_leaves_with_path((state, kept))
        np.savez(out, **{jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves})
    print("losses", [float(metrics["loss"]) for metrics in kept])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2])
