"""Losses that are no mean, sum or weighted mean over examples give one warning; those that are give none."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import LossReductionWarning

ROWS, LENGTH, WIDTH = 12, 3, 4
PARAMS = {"a": jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")}
BATCH = {
    "x": jax.ShapeDtypeStruct((ROWS, LENGTH, WIDTH), "float32"),
    "mask": jax.ShapeDtypeStruct((ROWS, LENGTH), "float32"),
    "labels": jax.ShapeDtypeStruct((ROWS, LENGTH), "int32"),
}


def hidden(p, b):
    return jnp.tanh(b["x"] @ p["a"])


def each(p, b):
    """A loss a token."""
    return optax.softmax_cross_entropy_with_integer_labels(hidden(p, b), b["labels"])


def penalty(p):
    return 0.01 * jnp.sqrt((p["a"] ** 2).sum())


def balance(p, b):
    gates = jax.nn.softmax(hidden(p, b))
    chosen = jax.nn.one_hot(gates.argmax(-1), WIDTH)
    return (gates.mean((0, 1)) * chosen.mean((0, 1))).sum()


def contrastive(p, b):
    z = hidden(p, b)[:, 0]
    return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, jnp.arange(len(z))).mean()


def normed(p, b):
    z = hidden(p, b)
    return (((z - z.mean((0, 1))) / (z.std((0, 1)) + 1e-3)) ** 2).mean()


MEANS = {
    "tokens": lambda p, b: each(p, b).mean(),
    "rows, then added": lambda p, b: each(p, b).mean(0).sum(),
    "by the shape": lambda p, b: each(p, b).sum() / b["x"].shape[0],
    "times one over": lambda p, b: each(p, b).sum() * (1 / each(p, b).size),
    "with a penalty": lambda p, b: each(p, b).mean() + penalty(p),
    "scaled": lambda p, b: (2.0**10 * each(p, b).mean() + (hidden(p, b) ** 2).mean()) / 3,
    "float16": lambda p, b: each(p, b).astype(jnp.float16).mean().astype(jnp.float32),
    "masked, by rows": lambda p, b: (
        (each(p, b) * b["mask"]).sum(1) / jnp.maximum(b["mask"].sum(1), 1)
    ).mean(),
    "normed by the batch": normed,  # as BatchNorm is: each microbatch has its own, and that is documented
    "of a loop": lambda p, b: jax.lax.map(lambda row: row.mean(), each(p, b)).mean(),
    "without the batch": lambda p, b: penalty(p) ** 2,
    "weighted by what is no batch": lambda p, b: each(p, b).mean() * p["a"].mean(),
    "largest": lambda p, b: each(p, b).max(),  # not looked into
}
OTHERS = {
    "masked": (lambda p, b: (each(p, b) * b["mask"]).sum() / b["mask"].sum(), "divides by"),
    "masked, at least one": (
        lambda p, b: (each(p, b) * b["mask"]).sum() / jnp.maximum(b["mask"].sum(), 1),
        "divides by",
    ),
    "where": (lambda p, b: each(p, b).mean(where=b["mask"] > 0), "divides by"),
    "root": (lambda p, b: jnp.sqrt((each(p, b) ** 2).mean()), "takes a `sqrt`"),
    "perplexity": (lambda p, b: jnp.exp(each(p, b).mean()), "takes a `exp`"),
    "balanced": (lambda p, b: each(p, b).mean() + 0.1 * balance(p, b), "multiplies"),
    "contrastive": (contrastive, "compares examples with each other"),
}
SUMS = {
    "tokens": lambda p, b: each(p, b).sum(),
    "by a number": lambda p, b: each(p, b).sum() / 100 + penalty(p),
}


def told(loss, reduction="mean", parts=4):
    """The warnings that lowering gives."""

    def step(params, batch):
        value, grads = rt.value_and_grad(lambda p: loss(p, batch), reduction=reduction)(params)
        return jax.tree.map(jnp.subtract, params, grads), value

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        rt.train_step(microbatches=parts)(step).lower(PARAMS, BATCH)
    return [(each.category, str(each.message)) for each in found]


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_gives_no_warning(name):
    assert told(MEANS[name]) == []


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_mean_gives_one_warning_with_its_place_and_the_remedy(name):
    loss, words = OTHERS[name]
    ((category, message),) = told(loss)
    assert category is LossReductionWarning
    for part in ("the loss is no mean", words, "test_additivity.py:", 'reduction="weighted"'):
        assert part in message
    assert told(loss, parts=1) == []


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_that_is_averaged_gives_a_warning_and_none_if_it_is_said(name):
    ((category, message),) = told(SUMS[name])
    assert category is LossReductionWarning
    assert "the loss is a sum over examples" in message and "reduction='sum'" in message
    assert told(SUMS[name], "sum") == []


def test_a_mean_that_is_added_gives_a_warning():
    ((_, message),) = told(MEANS["tokens"], "sum")
    assert "the loss is a mean over examples" in message and "reduction='mean'" in message


def test_a_weighted_mean_may_divide_by_what_it_returns_only():
    def weighted(p, b):
        return (each(p, b) * b["mask"]).sum(), b["mask"].sum()

    def rooted(p, b):
        total, weight = weighted(p, b)
        return jnp.sqrt(total), weight

    assert told(weighted, "weighted") == []
    ((_, message),) = told(rooted, "weighted")
    assert "no weighted mean" in message and "`sqrt`" in message


def test_the_warning_is_true():
    """A loss that is warned of is another one when it is averaged over microbatches; one that is not is the same."""
    rng = np.random.default_rng(0)
    params = {"a": jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32)}
    batch = {
        "x": jnp.asarray(rng.normal(size=(ROWS, LENGTH, WIDTH)), jnp.float32),
        "mask": jnp.asarray(rng.integers(0, 2, (ROWS, LENGTH)), jnp.float32).at[:, 0].set(1),
        "labels": jnp.asarray(rng.integers(0, WIDTH, (ROWS, LENGTH))),
    }
    parts = [jax.tree.map(lambda leaf, n=n: leaf[3 * n : 3 * n + 3], batch) for n in range(4)]

    def differ(loss):
        return abs(np.mean([loss(params, part) for part in parts]) - loss(params, batch)) > 1e-3

    not_looked_into = {"normed by the batch", "largest"}
    assert {name for name, loss in MEANS.items() if differ(loss)} <= not_looked_into
    assert all(differ(loss) for loss, _ in OTHERS.values())
    assert all(differ(loss) for loss in SUMS.values())
