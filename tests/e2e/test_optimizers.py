"""Every alias of optax, and what is put around them, trains on shards of two stages as under plain `jax.jit`, in float64."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ratrain_jax as rt
from tests.training import named_leaves

LAYOUT = {"stages": 2, "data_parallel": 2, "microbatches": 2}
STEPS = 3

# Those that optax's documentation lists as aliases. The rest of them is called another way than a train step calls them:
# with a function to evaluate (lbfgs, polyak_sgd).
ALIASES = {
    "adabelief": lambda: optax.adabelief(1e-2),
    "adadelta": lambda: optax.adadelta(1e-1),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "adagrad": lambda: optax.adagrad(1e-2),
    "adam": lambda: optax.adam(1e-2),
    "adamax": lambda: optax.adamax(1e-2),
    "adamaxw": lambda: optax.adamaxw(1e-2),
    "adamw": lambda: optax.adamw(1e-2),
    "adan": lambda: optax.adan(1e-2),
    "amsgrad": lambda: optax.amsgrad(1e-2),
    "fromage": lambda: optax.fromage(1e-2),
    "lamb": lambda: optax.lamb(1e-2),
    "lars": lambda: optax.lars(1e-1),
    "lion": lambda: optax.lion(1e-3),
    "nadam": lambda: optax.nadam(1e-2),
    "nadamw": lambda: optax.nadamw(1e-2),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-2, key=jax.random.key(3)),
    "novograd": lambda: optax.novograd(1e-2),
    "optimistic_adam_v2": lambda: optax.optimistic_adam_v2(1e-2),
    "optimistic_gradient_descent": lambda: optax.optimistic_gradient_descent(1e-2),
    "radam": lambda: optax.radam(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-2, momentum=0.9, centered=True),
    "rprop": lambda: optax.rprop(1e-2),
    "sgd": lambda: optax.sgd(1e-1, momentum=0.9, nesterov=True),
    "sign_sgd": lambda: optax.sign_sgd(1e-3),
    "signum": lambda: optax.signum(1e-3),
    "sm3": lambda: optax.sm3(1e-1),
    "yogi": lambda: optax.yogi(1e-2),
}
CALLED_OTHERWISE = {"lbfgs", "polyak_sgd"}
OLDER_NAMES = {"optimistic_adam"}

# Alone or around an alias; what each of them is for, users reach for it.
WRAPPED = {
    "global norm": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2)),
    "each norm": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(1e-1)),
    "every second step": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "if finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 2),
    "by group": lambda: optax.multi_transform(
        {"kernel": optax.adam(1e-2), "bias": optax.sgd(1e-1)},
        lambda params: jax.tree.map(lambda leaf: "kernel" if leaf.ndim > 1 else "bias", params),
    ),
    "masked": lambda: optax.chain(
        optax.masked(
            optax.add_decayed_weights(0.1), lambda p: jax.tree.map(lambda leaf: leaf.ndim > 1, p)
        ),
        optax.sgd(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 5)),
    ),
    "noise": lambda: optax.chain(
        optax.add_noise(0.1, 0.5, jax.random.key(1)), optax.sgd(optax.linear_schedule(0.1, 0, 9))
    ),
    "average": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "injected rate": lambda: optax.inject_hyperparams(optax.adam)(
        optax.exponential_decay(0.1, 2, 0.5)
    ),
    "schedule free": lambda: optax.contrib.schedule_free_sgd(1e-1),
}
QUICK = {"adafactor", "lamb", "radam", "rprop", "if finite", "by group", "noise", "injected rate"}


pytestmark = pytest.mark.usefixtures("double_precision")


def make_params():
    rng = np.random.default_rng(0)
    return {
        f"layer_{n}": {
            "kernel": jnp.asarray(rng.normal(size=(8, 8)) / np.sqrt(8)),
            "bias": jnp.asarray(rng.normal(size=8) / 4),
        }
        for n in range(3)
    }


def make_batch(seed):
    x = np.random.default_rng(seed).normal(size=(8, 8))
    return {"x": x, "y": np.sin(x[:, ::-1])}


def make_step(optimizer, value_and_grad):
    def loss_fn(params, batch):
        x = batch["x"]
        for layer in params.values():
            x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
        return ((x - batch["y"]) ** 2).mean()

    def step(state, batch):
        loss, grads = value_and_grad(loss_fn)(state["params"], batch)
        updates, inner = optimizer.update(grads, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": inner}, loss

    return step


def run(step, optimizer):
    params = make_params()
    state = {"params": params, "optimizer": optimizer.init(params)}
    for seed in range(STEPS):
        state, loss = step(state, make_batch(seed))
    return {"state": state, "loss": loss}


def params_of(table):
    return [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in table]


@pytest.mark.parametrize("name", params_of({**ALIASES, **WRAPPED}))
def test_it_trains_as_under_plain_jit(name):
    optimizer = {**ALIASES, **WRAPPED}[name]()
    piped = rt.train_step(**LAYOUT)(make_step(optimizer, rt.value_and_grad))
    found = run(piped, optimizer)
    wanted = run(jax.jit(make_step(optimizer, jax.value_and_grad)), optimizer)
    theirs = named_leaves(jax.tree.map(_words, wanted))
    for path, leaf in named_leaves(jax.tree.map(_words, found)).items():
        reference = theirs[path].astype(float)
        assert (leaf.shape, leaf.dtype) == (reference.shape, theirs[path].dtype), path
        largest = np.abs(reference).max(initial=1e-30)
        assert np.abs(leaf - reference).max(initial=0) <= 1e-9 * largest, path


def _words(leaf):
    typed = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if typed else leaf


def test_no_alias_of_optax_is_forgotten():
    listed = {
        name
        for name, value in vars(optax).items()
        if inspect.isfunction(value) and value.__module__ == "optax._src.alias"
    }
    assert listed - set(ALIASES) == (CALLED_OTHERWISE | OLDER_NAMES) & listed
