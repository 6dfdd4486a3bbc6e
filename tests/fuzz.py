"""Random train steps under random settings, against `jax.jit` of the same step, in float64.

A `Trial` is data: the parts of a model, an optimizer, what the loss is, and how it is run. `strategies` draws trials, `check`
runs one, and one that fails can be run again from the shell:

    python -m tests.fuzz '{"parts": ["dense", "tied"], "stages": 2}'
"""

import dataclasses
import json
import sys

from tests import conftest as _devices  # noqa: F401

# JAX comes after its devices are set.
# isort: split
import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import strategies as st

import ratrain_jax as rt
from ratrain_jax.errors import LayoutError

STEPS = 3
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
"""How far apart results may be, by what products are computed in; parameters are always float64."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One train step and how it is run."""

    parts: tuple[str, ...] = ("dense", "dense")
    optimizer: str = "adam"
    reduction: str = "mean"
    aux: bool = False
    stages: int = 1
    data_parallel: int = 1
    microbatches: int = 1
    zero: int = 1
    schedule: str = "ratrain"
    recovery: str = "auto"
    layerwise_state: bool = True
    update_prefetch: bool = True
    validation: str = "immediate"
    window: int = 2
    width: int = 4
    compute: str = "float64"
    tokens: bool = False
    scattered_names: bool = False
    more_state: bool = False
    twice: bool = False
    other: str = "none"
    behind: bool = False

    def command(self) -> str:
        """The line that runs it again."""
        plain = Trial()
        told = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(plain, field.name)
        }
        return f"python -m tests.fuzz '{json.dumps(told)}'"


# Parts of a model: what each draws for a width, and what it does to (x, what earlier parts made).


def _kernel(rng, *shape):
    return rng.normal(size=shape) / np.sqrt(shape[-1])


def _norm(p, x):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * p["scale"]


def _scan(p, x, earlier, first):
    def layer(x, kernel):
        return jnp.tanh(x @ kernel), None

    return jax.lax.scan(layer, x, p["stack"])[0]


def _attention(p, x, earlier, first):
    weights = jax.nn.softmax(x @ p["mix"] @ x.mT / 2)
    return (x + weights @ x) / 2


PARTS = {
    "dense": (
        lambda rng, w: {"kernel": _kernel(rng, w, w), "bias": _kernel(rng, w)},
        lambda p, x, earlier, first: jnp.tanh(x @ p["kernel"] + p["bias"]),
    ),
    "residual": (
        lambda rng, w: {"up": _kernel(rng, w, 8), "down": _kernel(rng, 8, w)},
        lambda p, x, earlier, first: x + jax.nn.gelu(x @ p["up"]) @ p["down"],
    ),
    "norm": (
        lambda rng, w: {"scale": np.ones(w)},
        lambda p, x, earlier, first: _norm(p, x),
    ),
    "attention": (lambda rng, w: {"mix": _kernel(rng, w, w)}, _attention),
    "skip": (lambda rng, w: {}, lambda p, x, earlier, first: x + earlier[0]),
    "tied": (lambda rng, w: {}, lambda p, x, earlier, first: x @ first.T),
    "scale": (
        lambda rng, w: {"factor": np.float64(1.5)},
        lambda p, x, earlier, first: x * p["factor"],
    ),
    "frozen": (
        lambda rng, w: {"kernel": _kernel(rng, w, w)},
        lambda p, x, earlier, first: x + x @ jax.lax.stop_gradient(p["kernel"]),
    ),
    "unused": (
        lambda rng, w: {"kernel": _kernel(rng, w, w), "nothing": np.zeros((0, 3))},
        lambda p, x, earlier, first: x,
    ),
    "checkpoint": (
        lambda rng, w: {"kernel": _kernel(rng, w, w)},
        lambda p, x, earlier, first: jax.checkpoint(lambda k, x: jnp.sin(x @ k))(p["kernel"], x),
    ),
    "parallel": (
        lambda rng, w: {"left": _kernel(rng, w, w), "right": _kernel(rng, w, w)},
        lambda p, x, earlier, first: x + jnp.tanh(x @ p["left"]) + jnp.sin(x @ p["right"]),
    ),
    "scan": (lambda rng, w: {"stack": _kernel(rng, 2, w, w)}, _scan),
}

# Each is smooth enough that rounding is not amplified; the hand-written one uses the loss.
OPTIMIZERS = {
    "adam": lambda: optax.adam(1e-2, eps=1e-3),
    "clipped adamw": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3)
    ),
    "momentum": lambda: optax.sgd(optax.linear_schedule(0.1, 0.01, 5), momentum=0.9),
    "every second step": lambda: optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    "if finite": lambda: optax.apply_if_finite(optax.sgd(0.1), 2),
    "lamb": lambda: optax.lamb(1e-2),
    "masked": lambda: optax.masked(optax.sgd(0.1), lambda p: jax.tree.map(lambda a: a.ndim > 1, p)),
    "by loss": optax.identity,
}


def part_name(trial: Trial, number: int) -> str:
    """The name of a part; scattered ones sort otherwise than the parts follow each other, and leave numbers out."""
    return f"part_{(7 * number + 5) % 23}" if trial.scattered_names else f"part_{number}"


def make_params(trial: Trial, seed: int = 0):
    rng = np.random.default_rng(len(trial.parts) + seed)
    width = trial.width
    layers = {part_name(trial, n): PARTS[part][0](rng, width) for n, part in enumerate(trial.parts)}
    params = {"first": {"kernel": _kernel(rng, width, width)}, **layers}
    return jax.tree.map(jnp.asarray, {name: leaves for name, leaves in params.items() if leaves})


def make_batch(trial: Trial, seed: int):
    rows = 2 * trial.data_parallel * trial.microbatches
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3, trial.width))
    inputs = rng.integers(0, trial.width, size=(rows, 3)) if trial.tokens else x
    return {
        "x": inputs,
        "y": np.sin(x[..., ::-1]),
        "weight": rng.integers(0, 2, size=(rows, 3)) + 0.1,
    }


def predict(trial: Trial, params, x):
    params = jax.tree.map(lambda p: p.astype(trial.compute), params)
    first = params["first"]["kernel"]
    x = first[x] if trial.tokens else x.astype(trial.compute) @ first
    earlier = [x]
    for n, part in enumerate(trial.parts):
        x = PARTS[part][1](params.get(part_name(trial, n), {}), x, earlier, first)
        earlier.append(x)
    # Bounded, so that no trial diverges: one that does amplifies rounding, plainly run in another order too.
    return jnp.tanh(x.astype("float64"))


def outputs(trial: Trial, params, other, x):
    """What the loss compares with the targets: of one pass or two, and of another net beside the first or behind it."""
    out = predict(trial, params, x)
    if trial.twice:
        out = (out + predict(trial, params, x[:, ::-1])) / 2
    if other is not None:
        out = (out + predict(trial, other, out if trial.behind and not trial.tokens else x)) / 2
    return out


# The next parameters of the other net, from them and the new parameters.
OTHERS = {
    "fixed": lambda params, other: other,
    "average": lambda params, other: optax.incremental_update(params, other, 0.3),
    "copy": lambda params, other: params,
}


def more_state():
    """State that no optimizer knows: a counter, a flag, a random key, and an array that nothing reads."""
    return {
        "count": jnp.int32(3),
        "odd": jnp.bool_(True),
        "key": jax.random.key(1),
        "kept": jnp.arange(5, dtype=jnp.uint8),
    }


def next_more_state(more):
    """What it is after a step."""
    return {
        **more,
        "count": more["count"] + 1,
        "odd": ~more["odd"],
        "key": jax.random.fold_in(more["key"], more["count"]),
    }


def make_step(trial: Trial, value_and_grad):
    optimizer = OPTIMIZERS[trial.optimizer]()

    def loss_of(params, other, batch):
        error = ((outputs(trial, params, other, batch["x"]) - batch["y"]) ** 2).mean(-1)
        loss = {
            "mean": error.mean(),
            "sum": error.sum() / 16,
            "weighted": ((error * batch["weight"]).sum(), batch["weight"].sum()),
        }[trial.reduction]
        return (loss, {"error": error, "count": (error > 1).sum()}) if trial.aux else loss

    def step(state, batch):
        def loss_fn(params, batch):
            return loss_of(params, state.get("other"), batch)

        both = value_and_grad(loss_fn, has_aux=trial.aux)
        value, grads = both(state["params"], batch)
        loss, aux = value if trial.aux else (value, None)
        updates, inner = optimizer.update(grads, state["optimizer"], state["params"])
        if trial.optimizer == "by loss":
            updates = jax.tree.map(lambda g: -0.1 * g / (1 + loss), grads)
        params = optax.apply_updates(state["params"], updates)
        metrics = {"loss": loss, "norm": optax.tree.norm(grads), "aux": aux}
        new = {"params": params, "optimizer": inner}
        if trial.more_state:
            new["more"] = next_more_state(state["more"])
        if trial.other != "none":
            new["other"] = OTHERS[trial.other](params, state["other"])
        return new, metrics

    return step


def run(trial: Trial, step):
    params = make_params(trial)
    state = {"params": params, "optimizer": OPTIMIZERS[trial.optimizer]().init(params)}
    if trial.more_state:
        state["more"] = more_state()
    if trial.other != "none":
        state["other"] = make_params(trial, seed=1)
    kept = []
    for seed in range(STEPS):
        state, metrics = step(state, make_batch(trial, seed))
        kept.append(jax.tree.map(np.asarray, metrics))
    if trial.more_state:
        state["more"]["key"] = jax.random.key_data(state["more"]["key"])
    return jax.tree.map(np.asarray, {"state": state, "metrics": kept})


def check(trial: Trial) -> bool:
    """Trains both ways.

    Returns:
        Whether the trial could be run; one with more stages than layers cannot.

    Raises:
        AssertionError: a leaf of the last state, or a metric, differs; the message says how to run the trial again.
    """

    def reduced(loss_fn, **options):
        return rt.value_and_grad(loss_fn, reduction=trial.reduction, **options)

    piped = rt.train_step(
        stages=trial.stages,
        data_parallel=trial.data_parallel,
        microbatches=trial.microbatches,
        zero=trial.zero,
        schedule=trial.schedule,
        recovery=trial.recovery,
        layerwise_state=trial.layerwise_state,
        update_prefetch=trial.update_prefetch,
        validation=trial.validation,
        window=rt.Window(layers=trial.window, microbatches=trial.window),
    )(make_step(trial, reduced))
    try:
        found = run(trial, piped)
    except LayoutError:
        return False
    except Exception as error:
        error.add_note(f"To run it again: {trial.command()}")
        raise
    # Outside a compiled step, rt.value_and_grad is JAX's own, also for a weighted loss.
    wanted = run(trial, jax.jit(make_step(trial, _plain(trial))))
    theirs = dict(jax.tree_util.tree_leaves_with_path(wanted))
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
        reference = theirs[path].astype(float)
        apart = np.abs(leaf - reference).max(initial=0) / np.abs(reference).max(initial=1e-3)
        where = f"{jax.tree_util.keystr(path)} is {apart:.1e} of its largest value apart"
        assert (leaf.shape, leaf.dtype) == (reference.shape, theirs[path].dtype), where
        assert apart <= TOLERANCE[trial.compute], f"{where}. To run it again: {trial.command()}"
    return True


def _plain(trial: Trial):
    """`jax.value_and_grad` of the whole loss."""

    def plain(loss_fn, *, has_aux):
        def whole(params, batch):
            out = loss_fn(params, batch)
            loss, aux = out if has_aux else (out, None)
            if trial.reduction == "weighted":
                loss = loss[0] / loss[1]
            return (loss, aux) if has_aux else loss

        return jax.value_and_grad(whole, has_aux=has_aux)

    return plain


strategies = st.builds(
    Trial,
    parts=st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=5).map(tuple),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    reduction=st.sampled_from(["mean", "sum", "weighted"]),
    aux=st.booleans(),
    stages=st.integers(1, 4),
    data_parallel=st.integers(1, 3),
    microbatches=st.integers(1, 5),
    zero=st.integers(1, 2),
    schedule=st.sampled_from(["ratrain", "1f1b", "gpipe"]),
    recovery=st.sampled_from(["auto", "none", "backward", "forward"]),
    layerwise_state=st.booleans(),
    update_prefetch=st.booleans(),
    validation=st.sampled_from(["immediate", "deferred"]),
    window=st.integers(1, 3),
    width=st.integers(3, 6),
    compute=st.sampled_from(["float64", "float32"]),
    tokens=st.booleans(),
    scattered_names=st.booleans(),
    more_state=st.booleans(),
    twice=st.booleans(),
    other=st.sampled_from(["none", *OTHERS]),
    behind=st.booleans(),
)
"""Trials of every kind."""


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    told = json.loads(sys.argv[1])
    trial = Trial(**{**told, "parts": tuple(told.get("parts", Trial.parts))})
    print("agrees" if check(trial) else "more stages than layers")
