"""What a compiled step takes: batches of any content and size, parameters of any shape, against `jax.jit` of the same step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import BatchError, RandomKeyWarning
from tests.dense import (
    ROWS,
    STEPS,
    WIDTH,
    assert_same,
    make_batch,
    make_params,
    make_state,
    mean_square,
    predict,
    sgd_step,
)
from tests.dense import decorated as decorated
from tests.dense import layout as layout
from tests.training import TWO_BY_TWO, differing


def test_numbers_as_leaves_of_state_and_batch():
    def step(state, batch, value_and_grad=rt.value_and_grad):
        def loss_fn(params):
            return mean_square(params, batch["x"] * batch["scale"], batch["y"]) + batch["plus"]

        loss, grads = value_and_grad(loss_fn)(state["params"])
        params = jax.tree.map(lambda p, g: p - state["rate"] * g, state["params"], grads)
        new = {"params": params, "rate": state["rate"] * 0.5, "count": state["count"] + 1}
        return new, loss

    numbers = [
        {"scale": 2.0, "plus": 1},
        {"scale": np.float32(0.5), "plus": np.int32(2)},
        {"scale": jnp.float32(0.25), "plus": jnp.int32(3)},
        {"scale": np.array(0.125, np.float32), "plus": 4},
    ]
    batches = [({**make_batch(seed), **more},) for seed, more in enumerate(numbers)]
    state = {"params": make_params(), "rate": 0.1, "count": 0}
    (new, _), _ = assert_same(step, state, *batches, **TWO_BY_TWO)
    assert int(new["count"]) == len(batches)
    assert float(new["rate"]) == pytest.approx(0.1 / 2 ** len(batches))


def test_several_batch_arguments_and_one_that_is_not_cut():
    def step(state, x, y, weights, value_and_grad=rt.value_and_grad):
        def loss_fn(params):
            return (((predict(params, x) - y) ** 2) * weights).mean()

        loss, grads = value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": loss}

    weights = np.linspace(0, 1, WIDTH, dtype=np.float32)  # as long as the batch, and yet not cut
    batches = [(*make_batch(seed).values(), weights) for seed in range(STEPS)]
    assert_same(step, make_params(), *batches, **TWO_BY_TWO, batch_argnums=(1, 2))


def test_a_prologue_computes_on_the_batch():
    """Pixels to floats, tokens cut into inputs and targets, all before the loss."""

    def step(state, batch, value_and_grad=rt.value_and_grad):
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        pixels = batch["pixels"] / 255
        total = batch["tokens"].sum()

        def loss_fn(params):
            table = params["layer_0"]["kernel"]
            hidden = predict(params, table[inputs] + pixels[:, None])
            each = optax.softmax_cross_entropy_with_integer_labels(hidden @ table.T, targets)
            return each.mean()

        loss, grads = value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), (loss, total)

    rng = np.random.default_rng(0)
    batches = [
        (
            {
                "tokens": rng.integers(0, WIDTH, (ROWS, 6)).astype(np.int32),
                "pixels": rng.integers(0, 256, (ROWS, WIDTH)).astype(np.uint8),
            },
        )
        for _ in range(STEPS)
    ]
    assert_same(step, make_params(), *batches, **TWO_BY_TWO)
    assert_same(step, make_params(), *batches, stages=3, microbatches=4)


def test_keys_in_the_batch():
    """A typed key passes whole; a raw one stands in an argument that is not cut.

    All rows share their numbers here, so that the plain step is a reference; a user is warned of that.
    """

    def step(state, batch, raw, value_and_grad=rt.value_and_grad):
        first, second = jax.random.split(batch["key"])
        noise = jax.random.normal(second, (WIDTH,))

        def loss_fn(params):
            mask = jax.random.bernoulli(first, 0.5, (WIDTH,))
            shift = jax.random.uniform(jax.random.wrap_key_data(raw), (WIDTH,))
            x = jnp.where(mask, batch["x"], noise) + shift
            return mean_square(params, x, batch["y"])

        loss, grads = value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    def batch(seed):
        raw = jax.random.key_data(jax.random.key(seed + 50))
        return {**make_batch(seed), "key": jax.random.key(seed)}, raw

    batches = [batch(seed) for seed in range(STEPS)]
    with pytest.warns(RandomKeyWarning, match="same for every rank and microbatch"):
        assert_same(step, make_params(), *batches, **TWO_BY_TWO, batch_argnums=(1,))


def test_arrays_that_the_loss_closes_over():
    table = jnp.linspace(-1, 1, WIDTH)
    fixed = np.linspace(0, 1, WIDTH, dtype=np.float32)

    def step(state, batch, value_and_grad=rt.value_and_grad):
        def loss_fn(params):
            return mean_square(params, batch["x"] * table, batch["y"] + fixed)

        loss, grads = value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g * fixed.max(), state, grads), loss

    assert_same(step, make_params(), (make_batch(),), (make_batch(1),), **TWO_BY_TWO)


def test_frozen_and_unused_parameters():
    labels = {"layer_0": "frozen", "layer_1": "trained", "layer_2": "trained", "spare": "trained"}
    optimizer = optax.multi_transform(
        {"frozen": optax.set_to_zero(), "trained": optax.adam(1e-2)}, labels
    )

    def step(state, batch, value_and_grad=rt.value_and_grad):
        def loss_fn(params):
            used = {name: layer for name, layer in params.items() if name != "spare"}
            return mean_square(used, batch["x"], batch["y"])

        loss, grads = value_and_grad(loss_fn)(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        return {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
        }, loss

    params = {**make_params(), "spare": jnp.ones((4, 2))}
    state = {"params": params, "opt_state": optimizer.init(params)}
    (new, _), _ = assert_same(step, state, (make_batch(),), (make_batch(1),), **TWO_BY_TWO)
    assert differing(new["params"]["layer_0"], params["layer_0"]) == []
    assert differing(new["params"]["spare"], params["spare"]) == []


@pytest.mark.parametrize("layout", [{"stages": 2, "microbatches": 2}, TWO_BY_TWO], ids=str)
def test_parameters_of_size_zero_and_scalars(layout):
    def step(state, batch, value_and_grad=rt.value_and_grad):
        def loss_fn(params):
            hidden = predict(params["layers"], batch["x"]) * params["scale"]
            return ((hidden - batch["y"]) ** 2).mean() + params["nothing"].sum()

        loss, grads = value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    state = {"layers": make_params(), "nothing": jnp.zeros((0, 4)), "scale": jnp.float32(2)}
    batches = [(make_batch(n),) for n in range(2)]
    ours, _ = assert_same(step, state, *batches, **layout)
    assert ours[0]["nothing"].shape == (0, 4)


def test_two_batch_sizes_alternate(decorated):
    """Training goes on unharmed after a step at another size; each size is compiled once."""
    sizes = [8, 16, 8, 8, 16, 8]
    batches = [(make_batch(seed, rows),) for seed, rows in enumerate(sizes)]
    assert_same(sgd_step, make_state(), *batches, **TWO_BY_TWO)
    piped = rt.train_step(stages=2, microbatches=2)(sgd_step)
    state = make_state()
    for (batch,) in batches:
        state, _ = piped(state, batch)
    assert len(piped._compiled) == 2


def test_a_batch_that_ends_early(decorated):
    state, _ = decorated(make_state(), make_batch())
    with pytest.raises(BatchError, match=r"batch of 7 .*nearest batch that does is 8"):
        decorated(state, make_batch(rows=7))
    decorated(state, make_batch())  # nothing of the state was used up


@pytest.mark.parametrize("microbatches", [1, 2])
def test_fewer_microbatches_than_stages(microbatches):
    state = make_state(layers=4)
    batches = [(make_batch(seed),) for seed in range(STEPS)]
    assert_same(sgd_step, state, *batches, stages=4, microbatches=microbatches)


def test_a_step_without_arguments_beside_the_state():
    def step(state, value_and_grad=rt.value_and_grad):
        loss, grads = value_and_grad(lambda p: mean_square(p, jnp.ones((2, WIDTH)), 0.5))(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    assert_same(step, make_params(), (), (), stages=2)
