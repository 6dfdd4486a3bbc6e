"""Random numbers in a loss: each rank and microbatch draws its own, whatever the stages, schedule and recovery.

The reference is a plain loop over ranks and microbatches: part `r * m + i` of the batch with `fold_in(key, r * m + i)`.
"""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import RandomKeyWarning, RATrainWarning
from tests.training import differing, named_leaves

WIDTH = 6
ROWS = 8


class Net(nn.Module):
    """Four layers with dropout; gives the masks beside the result."""

    @nn.compact
    def __call__(self, x):
        kept = []
        for _ in range(4):
            x = nn.tanh(nn.Dense(WIDTH)(x))
            dropped = nn.Dropout(0.5, deterministic=False)(x)
            kept.append(dropped != 0)
            x = dropped
        return nn.Dense(WIDTH)(x), jnp.stack(kept, axis=1)


NET = Net()
BATCH = {
    "x": np.linspace(-2, 2, ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH) ** 3,
    "y": np.linspace(0, 1, ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH),
}
PARAMS = NET.init({"params": jax.random.key(0), "dropout": jax.random.key(0)}, BATCH["x"])["params"]


def loss_of(params, batch, key):
    out, kept = NET.apply({"params": params}, batch["x"], rngs={"dropout": key})
    return ((out - batch["y"]) ** 2).mean(), kept


def descend(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def step(params, batch, key):
    def loss(params):
        return loss_of(params, batch, rt.microbatch_key(key))

    (value, kept), grads = rt.value_and_grad(loss, has_aux=True)(params)
    return descend(params, grads), {"loss": value, "kept": kept}


def in_parts(params, batch, key, parts):
    """The reference."""
    each = []
    for part in range(parts):
        rows = slice(part * ROWS // parts, (part + 1) * ROWS // parts)
        one = jax.tree.map(lambda leaf, rows=rows: leaf[rows], batch)
        folded = jax.random.fold_in(key, part)
        each.append(jax.value_and_grad(loss_of, has_aux=True)(params, one, folded))
    values, kept = zip(*(result for result, _ in each), strict=True)
    grads = jax.tree.map(lambda *g: sum(g) / parts, *(g for _, g in each))
    return descend(params, grads), {"loss": sum(values) / parts, "kept": jnp.concatenate(kept)}


def reference(parts, key):
    run = jax.jit(in_parts, static_argnums=3)
    return run(PARAMS, BATCH, key, parts)


def assert_close(ours, theirs):
    ours, theirs = named_leaves(ours), named_leaves(theirs)
    assert ours.keys() == theirs.keys()
    for name, leaf in ours.items():
        np.testing.assert_allclose(leaf, theirs[name], rtol=1e-5, atol=1e-6, err_msg=name)


KEYS = {"typed": jax.random.key, "raw": jax.random.PRNGKey}


@pytest.mark.parametrize("kind", KEYS)
def test_dropout_is_the_same_for_any_number_of_stages(kind):
    key = KEYS[kind](3)
    wanted = reference(4, key)
    for stages, ranks, microbatches in [(1, 1, 4), (2, 2, 2), (4, 1, 4), (2, 4, 1)]:
        layout = {"stages": stages, "data_parallel": ranks, "microbatches": microbatches}
        found = rt.train_step(**layout, batch_argnums=(1,))(step)(PARAMS, BATCH, key)
        assert_close(found, wanted)
        assert differing(found[1]["kept"], wanted[1]["kept"]) == []
    kept = np.split(np.asarray(wanted[1]["kept"]), 4)
    assert all((one != other).any() for n, one in enumerate(kept) for other in kept[:n])


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_of_another_kind(impl):
    """Their numbers are promised within one program only: the masks must be whole, and recovery must repeat them."""
    key = jax.random.key(5, impl=impl)
    results = [
        rt.train_step(stages=2, microbatches=2, recovery=recovery)(step)(PARAMS, BATCH, key)
        for recovery in ("none", "forward")
    ]
    assert differing(*results) == []
    kept = np.asarray(results[0][1]["kept"])
    assert 0.3 < kept.mean() < 0.7 and (kept[: ROWS // 2] != kept[ROWS // 2 :]).any()


@pytest.mark.parametrize("ranks", [1, 2])
def test_recovery_and_schedule_draw_the_same_masks(ranks):
    """To the last bit, state and masks."""
    results = []
    for more in (
        {"recovery": "none"},
        {"recovery": "forward"},
        {"recovery": "backward"},
        {"recovery": "forward", "schedule": "gpipe"},
    ):
        run = rt.train_step(stages=2, data_parallel=ranks, microbatches=2, **more)(step)
        recovered = [layer.recovered for layer in run.lower(PARAMS, BATCH, KEY).program.layers]
        assert any(recovered) == (more["recovery"] != "none")
        results.append(run(PARAMS, BATCH, KEY))
    for other in results[1:]:
        assert differing(results[0], other) == []
    assert_close(results[0], reference(2 * ranks, KEY))


KEY = jax.random.key(11)


def test_a_key_in_the_state_that_is_split_every_step():
    def keyed(state, batch):
        key, now = jax.random.split(state["key"])
        params, metrics = step(state["params"], batch, now)
        return {"params": params, "key": key}, metrics

    piped = rt.train_step(stages=2, data_parallel=2, microbatches=2)(keyed)
    state, params, key = {"params": PARAMS, "key": KEY}, PARAMS, KEY
    run = jax.jit(in_parts, static_argnums=3)
    for _ in range(2):
        state, found = piped(state, BATCH)
        key, now = jax.random.split(key)
        params, wanted = run(params, BATCH, now, 4)
        assert_close(found, wanted)
    assert_close(state["params"], params)
    assert differing(jax.random.key_data(state["key"]), jax.random.key_data(key)) == []


def test_a_key_that_the_step_closes_over_or_makes():
    for make in (lambda: KEY, lambda: jax.random.key(11)):

        def closed(params, batch, make=make):
            return step(params, batch, make())

        found = rt.train_step(stages=2, microbatches=2)(closed)(PARAMS, BATCH)
        assert_close(found, reference(2, KEY))


def test_without_a_cut_a_step_is_the_plain_step():
    found = rt.train_step(stages=2)(step)(PARAMS, BATCH, KEY)
    assert_close(found, jax.jit(step)(PARAMS, BATCH, KEY))
    assert_close(found, reference(1, KEY))


def test_a_key_for_each_example():
    """`microbatch_key` under `vmap`, on keys split from one."""

    def noisy(params, batch, key):
        def loss(params):
            keys = jax.random.split(key, batch["x"].shape[0])
            noise = jax.vmap(lambda k: jax.random.normal(rt.microbatch_key(k), (WIDTH,)))(keys)
            return (((batch["x"] + noise) @ params["w"] - batch["y"]) ** 2).mean(), noise

        (_, noise), grads = rt.value_and_grad(loss, has_aux=True)(params)
        return descend(params, grads), noise

    params = {"w": jnp.eye(WIDTH), "unused": jnp.ones(2)}
    run = rt.train_step(stages=1, microbatches=2, data_parallel=2, batch_argnums=(1,))(noisy)
    for key in (KEY, jax.random.PRNGKey(11)):
        _, found = run(params, BATCH, key)
        keys = jax.random.split(key, ROWS // 4)
        wanted = [
            jax.random.normal(jax.random.fold_in(k, part), (WIDTH,))
            for part in range(4)
            for k in keys
        ]
        np.testing.assert_allclose(found, jnp.stack(wanted), rtol=1e-6)


# The warning.


def lower_warnings(run, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.lower(*args)
    return [w for w in caught if issubclass(w.category, RATrainWarning)]


def step_with(rngs):
    """A step whose loss draws for its dropout from `rngs(key, batch)`."""

    def shared(params, batch, key):
        def loss(params):
            return loss_of(params, batch, rngs(key, batch))[0]

        return descend(params, rt.grad(loss)(params))

    return shared


SHARED = {
    "given": lambda key, batch: key,
    "split": lambda key, batch: jax.random.split(key, 3)[1],
    "made in the loss": lambda key, batch: jax.random.key(1),
}
APART = {
    "microbatch_key": lambda key, batch: rt.microbatch_key(key),
    "split after it": lambda key, batch: jax.random.split(rt.microbatch_key(key), 3)[1],
    "of the data": lambda key, batch: jax.random.fold_in(key, batch["x"][0, 0].astype(jnp.int32)),
}


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("how", SHARED)
def test_a_key_that_all_parts_share_gives_one_warning(how, kind):
    run = rt.train_step(microbatches=2, batch_argnums=(1,))(step_with(SHARED[how]))
    (warning,) = lower_warnings(run, PARAMS, BATCH, KEYS[kind](0))
    assert warning.category is RandomKeyWarning
    message = str(warning.message)
    for words in ("same for every rank and microbatch", "test_random_keys.py:", "microbatch_key"):
        assert words in message


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("how", APART)
def test_keys_that_differ_give_no_warning(how, kind):
    run = rt.train_step(data_parallel=2, batch_argnums=(1,))(step_with(APART[how]))
    assert lower_warnings(run, PARAMS, BATCH, KEYS[kind](0)) == []


def test_no_warning_where_nothing_is_cut_or_nothing_is_drawn():
    run = rt.train_step(stages=2)(step_with(SHARED["given"]))
    assert lower_warnings(run, PARAMS, BATCH, KEY) == []

    def unused(params, batch, key):
        def loss(params):
            jax.random.normal(key, (3,))
            return ((batch["x"] @ params["w"]) ** 2).mean()

        return descend(params, rt.grad(loss)(params))

    assert (
        lower_warnings(rt.train_step(microbatches=2)(unused), {"w": jnp.eye(WIDTH)}, BATCH, KEY)
        == []
    )


def loop_with(apart):
    """A step whose loss draws inside a loop, from keys split from `apart(key)`."""

    def looping(params, batch, key):
        def loss(params):
            def body(x, k):
                return jnp.tanh(x @ params["w"]) + jax.random.normal(k, x.shape), None

            x, _ = jax.lax.scan(body, batch["x"], jax.random.split(apart(key), 3))
            return (x**2).mean()

        return descend(params, rt.grad(loss)(params))

    return looping


@pytest.mark.parametrize("kind", KEYS)
def test_a_shared_key_in_a_loop_gives_the_warning(kind):
    key = KEYS[kind](0)
    for apart, count in ((lambda key: key, 1), (rt.microbatch_key, 0)):
        run = rt.train_step(microbatches=2, batch_argnums=(1,))(loop_with(apart))
        assert len(lower_warnings(run, {"w": jnp.eye(WIDTH)}, BATCH, key)) == count
