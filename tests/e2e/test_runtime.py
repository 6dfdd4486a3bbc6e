"""What a compiled step does with state, batch and results, against `jax.jit` of the same step."""

import dataclasses
import gc
import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import ratrain_jax as rt
from ratrain_jax.errors import (
    BatchError,
    RandomKeyWarning,
    StateError,
    StepError,
    VerificationError,
)
from ratrain_jax.lowering import lower
from ratrain_jax.lowering.program import (
    Backward,
    Forward,
    Free,
    GradSync,
    PrefetchView,
    SendActivation,
    SendGradient,
)
from tests.training import assert_close, differing, train

WIDTH = 8
ROWS = 8
STEPS = 4


def make_params(layers=3, width=WIDTH, seed=0):
    rng = np.random.default_rng(seed)
    return {
        f"layer_{n}": {
            "kernel": jnp.asarray(rng.normal(size=(width, width)) / np.sqrt(width), jnp.float32),
            "bias": jnp.asarray(rng.normal(size=width) / 4, jnp.float32),
        }
        for n in range(layers)
    }


def make_batch(seed=0, rows=ROWS, width=WIDTH):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, width)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, ::-1])}


def predict(params, x):
    for layer in params.values():
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x


def mean_square(params, x, y):
    return ((predict(params, x) - y) ** 2).mean()


def sgd_step(state, batch, value_and_grad=rt.value_and_grad):
    """A dict state; nothing waits for a global norm, so views are gathered behind updates."""
    loss, grads = value_and_grad(lambda p: mean_square(p, batch["x"], batch["y"]))(state["params"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
    new = {"params": params, "momentum": momentum, "count": state["count"] + 1}
    return new, {"loss": loss}


def make_state(**shape):
    params = make_params(**shape)
    return {
        "params": params,
        "momentum": jax.tree.map(jnp.zeros_like, params),
        "count": jnp.int32(0),
    }


def plain_of(step):
    return jax.jit(lambda *args: step(*args, value_and_grad=jax.value_and_grad))


def assert_same(step, state, *batches, **options):
    """Trains the step plainly and piped; a batch is a tuple of arguments. Gives both last results."""
    piped, plain = rt.train_step(**options)(step), plain_of(step)
    results = []
    for run in (piped, plain):
        now, kept = state, []
        for batch in batches:
            result = run(now, *batch)
            now = result[0] if isinstance(result, tuple) else result
            kept.append(jax.tree.map(np.array, result))  # a copy: the state will be used up
        results.append(kept)
    assert_close(*results)
    return results[0][-1], results[1][-1]


TWO_BY_TWO = {"stages": 2, "data_parallel": 2, "microbatches": 2}


@pytest.fixture(scope="module", params=[{"stages": 2, "microbatches": 2}, TWO_BY_TWO], ids=str)
def layout(request):
    return request.param


@pytest.fixture(scope="module")
def decorated(layout):
    step = rt.train_step(**layout)(sgd_step)
    step(make_state(), make_batch())  # compiles it once for all tests
    return step


# State in and out.


def test_the_state_keeps_its_tree_shapes_and_dtypes_and_lies_on_its_stage(layout, decorated):
    state = make_state()
    new, metrics = decorated(state, make_batch())
    assert jax.tree.structure(new) == jax.tree.structure(state)
    for old_leaf, leaf in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True):
        assert isinstance(leaf, jax.Array)
        assert (leaf.shape, leaf.dtype) == (old_leaf.shape, old_leaf.dtype)
    assert (metrics["loss"].shape, metrics["loss"].dtype) == ((), jnp.float32)
    ranks, devices = layout.get("data_parallel", 1), jax.devices()
    layers = decorated.lower(state, make_batch()).program.layers
    stage_of = {name: layer.stage for layer in layers for name in layer.parameters}
    assert set(stage_of.values()) == {0, 1}
    for part in ("params", "momentum"):
        for name, stage in stage_of.items():
            layer, leaf = name.split("/")
            array = new[part][layer][leaf]
            group = set(devices[stage * ranks : (stage + 1) * ranks])
            assert array.sharding.device_set == group
            assert array.addressable_shards[0].data.size == array.size // ranks


def test_nothing_is_compiled_after_the_first_steps(decorated):
    compiled = []

    def count(event, _, **__):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    state = make_state()
    for n in range(2):  # the first takes the user's arrays, the second its own
        state, _ = decorated(state, make_batch(n))
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        for n in range(3):
            state, metrics = decorated(state, make_batch(n))
        assert compiled == []
        jax.jit(lambda x: x + 1)(metrics["loss"])
        assert len(compiled) == 1
    finally:
        jax.monitoring.unregister_event_duration_listener(count)


def test_arrays_of_the_user_are_never_used_up(decorated):
    state = make_state()
    handed = decorated(state, make_batch())[0]
    copies = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf), leaf.sharding), handed)
    for given in (state, copies):
        before = jax.tree.map(np.array, given)
        decorated(given, make_batch())
        decorated(given, make_batch())
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given))
        assert differing(given, before) == []


def test_a_state_handed_back_is_used_up(decorated):
    state, _ = decorated(make_state(), make_batch())
    decorated(state, make_batch())
    gc.collect()
    large = [leaf for leaf in jax.tree.leaves(state) if leaf.size > 1]
    assert all(leaf.is_deleted() for leaf in large)


def test_a_state_used_twice_is_refused_and_nothing_breaks(decorated):
    state, _ = decorated(make_state(), make_batch())
    decorated(state, make_batch())
    with pytest.raises(StateError, match=r"state\['.*used up.*donate_state=False"):
        decorated(state, make_batch())
    fresh = train(decorated, make_state(), [make_batch()] * 2)
    again = train(decorated, make_state(), [make_batch()] * 2)
    assert differing(fresh.state, again.state) == []


def test_donate_state_false_keeps_what_was_handed_back(layout, decorated):
    keeping = rt.train_step(**layout, donate_state=False)(sgd_step)
    state, _ = keeping(make_state(), make_batch())
    one, _ = keeping(state, make_batch(1))
    two, _ = keeping(state, make_batch(1))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert differing(one, two) == []
    found = train(keeping, make_state(), [make_batch(seed) for seed in range(STEPS)])
    wanted = train(decorated, make_state(), [make_batch(seed) for seed in range(STEPS)])
    assert differing(found.state, wanted.state) == []
    assert differing(found.metrics, wanted.metrics) == []


def averaged(state, other):
    return {**state, "params": jax.tree.map(lambda a, b: (a + b) / 2, state["params"], other)}


def one_leaf(state, _):
    params = {**state["params"], "layer_2": {**state["params"]["layer_2"], "bias": jnp.ones(WIDTH)}}
    return {**state, "params": params}


def other_momentum(state, other):
    return {**state, "momentum": jax.tree.map(jnp.asarray, other)}


def from_numpy(state, _):
    return jax.tree.map(np.asarray, state)


def exchanged_layers(state, _):
    """Arrays of the runtime's own, each in another's place and on another stage."""
    params = dict(zip(state["params"], reversed(state["params"].values()), strict=True))
    return {**state, "params": params}


def same_arrays_twice(state, _):
    """As if an average were started anew from the parameters."""
    return {**state, "momentum": state["params"]}


SWAPS = [averaged, one_leaf, other_momentum, from_numpy, exchanged_layers, same_arrays_twice]


@pytest.mark.parametrize("swap", SWAPS)
def test_leaves_swapped_between_steps_are_honoured(decorated, swap):
    """Also where a view of what was there before has been gathered already."""
    assert decorated.options.update_prefetch
    other = jax.tree.map(np.asarray, make_params(seed=5))
    results = []
    for run in (decorated, plain_of(sgd_step)):
        state = make_state()
        for seed in range(3):
            state, metrics = run(state, make_batch(seed))
            if seed < 2:
                state = swap(state, other)
        results.append((state, metrics))
    assert_close(*results)


def test_a_state_of_another_compiled_step_is_taken_and_brought_back(layout, decorated):
    """A view gathered before the state went elsewhere is not used when it returns."""
    twin = rt.train_step(**layout)(sgd_step)
    batches = [make_batch(seed) for seed in range(5)]
    state = make_state()
    for run, batch in zip([decorated, twin, decorated, twin, decorated], batches, strict=True):
        state, metrics = run(state, batch)
    wanted = train(decorated, make_state(), batches)
    assert differing(state, wanted.state) == []
    assert differing(metrics, wanted.metrics[-1]) == []


def test_a_state_of_another_structure_or_shape(decorated):
    state, batch = make_state(), make_batch()
    compiled = decorated.lower(state, batch).compile()
    with pytest.raises(StateError, match=r"another structure.*state\['extra'\].*compiles anew"):
        compiled({**state, "extra": jnp.ones(3)}, batch)
    less = {name: part for name, part in state.items() if name != "count"}
    with pytest.raises(StateError, match=r"another structure.*state\['count'\]"):
        compiled(less, batch)
    with pytest.raises(
        StateError, match=r"state\['count'\] is float32\[\].*compiled for int32\[\]"
    ):
        compiled({**state, "count": jnp.float32(0)}, batch)
    with pytest.raises(StateError, match=r"state\['count'\] is int32\[2\]"):
        compiled({**state, "count": jnp.zeros(2, jnp.int32)}, batch)
    with pytest.raises(BatchError, match=r"another structure.*batch\['z'\]"):
        compiled(state, {**batch, "z": batch["x"]})
    with pytest.raises(BatchError, match=r"batch\['x'\] is float32\[4, 8\].*float32\[8, 8\]"):
        compiled(state, make_batch(rows=4))
    with pytest.raises(StateError, match="another structure"):
        compiled()
    compiled(state, batch)


def test_a_train_state_and_the_undecorated_step():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(WIDTH)(nn.tanh(nn.Dense(2 * WIDTH)(x)))

    net = Net()
    params = net.init(jax.random.key(0), jnp.ones((1, WIDTH)))["params"]
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    state = TrainState.create(apply_fn=net.apply, params=params, tx=optimizer)

    def step(state, batch):
        def loss_fn(params):
            return ((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2).mean()

        loss, grads = rt.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "norm": optax.tree.norm(grads)}

    piped = rt.train_step(**TWO_BY_TWO)(step)
    assert piped.__wrapped__ is step
    assert (piped.__name__, piped.__doc__) == (step.__name__, step.__doc__)
    batches = [make_batch(seed) for seed in range(STEPS)]
    ours, theirs = train(piped, state, batches), train(jax.jit(piped.__wrapped__), state, batches)
    assert isinstance(ours.state, TrainState)
    assert_close(ours.metrics, theirs.metrics)
    assert_close(ours.state, theirs.state)


# What a step returns.


def test_metrics_beside_the_state():
    """Norms, a schedule, the parameters' mean, the batch's mean, constants and whole gradients."""

    def step(state, batch, value_and_grad=rt.value_and_grad):
        def loss_fn(params):
            out = predict(params, batch["x"])
            return ((out - batch["y"]) ** 2).mean(), {"mean": out.mean(), "ones": (out > 9).sum()}

        (loss, aux), grads = value_and_grad(loss_fn, has_aux=True)(state["params"])
        rate = 0.1 / (1 + state["count"])
        scaled = jax.tree.map(lambda g: jnp.clip(2 * g, -0.2, 0.2), grads)
        params = jax.tree.map(lambda p, g: p - rate * g, state["params"], scaled)
        metrics = {
            "loss": loss,
            "aux": aux,
            "rate": rate,
            "norm": optax.tree.norm(grads),
            "scaled": optax.tree.norm(scaled),
            "weights": sum(leaf.sum() for leaf in jax.tree.leaves(state["params"])),
            "inputs": batch["x"].mean(),
            "two": 2,
            "gradient": grads["layer_1"],
        }
        return {**state, "params": params, "count": state["count"] + 1}, metrics

    batches = [(make_batch(seed),) for seed in range(STEPS)]
    (state, metrics), _ = assert_same(step, make_state(), *batches, **TWO_BY_TWO)
    assert int(state["count"]) == STEPS
    assert metrics["aux"]["ones"].dtype == jnp.int32
    assert metrics["gradient"]["kernel"].shape == (WIDTH, WIDTH)


def returns(result):
    """A step that returns something made of the loss and the gradients, but no state."""

    def step(state, batch, value_and_grad=rt.value_and_grad):
        loss_fn = lambda p: mean_square(p, batch["x"], batch["y"])  # noqa: E731
        return result(*value_and_grad(loss_fn)(state["params"]))

    return step


RESULTS = {
    "metrics": lambda loss, grads: {"loss": loss, "norm": optax.tree.norm(grads)},
    "loss": lambda loss, grads: loss,
    "gradients": lambda loss, grads: grads,
    "a list": lambda loss, grads: [grads, loss, loss + 1],
}


@pytest.mark.parametrize("what", RESULTS)
def test_a_step_that_returns_no_state(what):
    step, state, batch = returns(RESULTS[what]), make_state(), make_batch()
    for ranks in (1, 2):
        piped = rt.train_step(stages=2, data_parallel=ranks, microbatches=2)(step)
        for _ in range(2):
            assert_close(piped(state, batch), plain_of(step)(state, batch))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_a_state_of_bare_parameters():
    """Gradients have the tree of such a state; taken for a new state they are still right."""

    def gradients(params, batch, value_and_grad=rt.value_and_grad):
        return value_and_grad(lambda p: mean_square(p, batch["x"], batch["y"]))(params)[1]

    def descend(params, batch, value_and_grad=rt.value_and_grad):
        grads = gradients(params, batch, value_and_grad)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    for step in (gradients, descend):
        assert_same(step, make_params(), (make_batch(),), (make_batch(1),), **TWO_BY_TWO)


# What a step takes.


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


def test_metrics_that_read_nothing():
    def step(state, batch, value_and_grad=rt.value_and_grad):
        grads = value_and_grad(lambda p: mean_square(p, batch["x"], batch["y"]))(state)[1]
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"rate": 0.1}

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


# Shapes.


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


def test_devices_are_taken_in_the_order_given():
    devices = jax.devices()[5:1:-1]
    step = rt.train_step(**TWO_BY_TWO, devices=devices)(sgd_step)
    state, _ = step(make_state(), make_batch())
    assert state["params"]["layer_0"]["kernel"].sharding.device_set == set(devices[:2])
    assert state["params"]["layer_2"]["kernel"].sharding.device_set == set(devices[2:])


def test_a_loss_cached_in_a_jit_outside_is_still_found():
    """Its trace is reused by the step, which must find the loss in it."""

    @jax.jit
    def loss_and_grads(params, batch):
        return rt.value_and_grad(lambda p: mean_square(p, batch["x"], batch["y"]))(params)

    params, batch = make_params(), make_batch()
    loss, grads = loss_and_grads(params, batch)

    @rt.train_step(stages=2)
    def step(params, batch):
        value, grads = loss_and_grads(params, batch)
        return grads, value

    found, value = step(params, batch)
    assert_close((found, value), (grads, loss))

    @rt.train_step()
    def without(params, batch):
        return jax.jit(jax.grad(lambda p: mean_square(p, batch["x"], batch["y"])))(params)

    with pytest.raises(StepError):
        without(params, batch)


# Executables and time.


def stack(layers):
    """A step over equal layers, each marked."""

    def step(params, batch):
        def loss_fn(params):
            x = batch["x"]
            for n in range(layers):
                x = rt.layer(x, f"layer_{n}")
                x = jnp.tanh(x @ params[f"layer_{n}"]["kernel"] + params[f"layer_{n}"]["bias"])
            return ((rt.layer(x, "head") - batch["y"]) ** 2).mean()

        loss, grads = rt.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def test_equal_layers_share_one_executable():
    counts = {}
    for ranks in (1, 2):
        for layers in (9, 13):
            state, batch = make_params(layers), make_batch()
            step = rt.train_step(data_parallel=ranks, microbatches=2)(stack(layers))
            compiled = step.lower(state, batch).compile()
            counts[ranks, layers] = compiled.executables
            gc.collect()
    assert counts[1, 9] == counts[1, 13]
    assert counts[2, 9] == counts[2, 13]


def test_time_stamps_show_gradient_syncs_during_backward():
    """Layers are so large here that to see an op's end a little late makes no difference."""
    layers, width, rows = 6, 768, 1024
    state, batch = make_params(layers, width), make_batch(0, rows, width)
    compiled = rt.train_step(data_parallel=2)(stack(layers)).lower(state, batch).compile()
    overlapped = []
    for _ in range(4):  # a busy machine may hold the link's thread up in one run
        (state, _), run = compiled.trace(state, batch)
        assert all(0 <= m.start <= m.end <= run.seconds for m in run.ops)
        last = max(run.of(Backward), key=lambda m: m.end)
        assert last.op.layers[0] == 0
        early = [m.op.layer for m in run.of(GradSync) if m.end <= last.start]
        assert 0 not in early
        overlapped.append(layers in early or layers - 1 in early)
    assert any(overlapped)


def test_a_traced_step_gives_what_a_called_one_gives(decorated):
    batch = make_batch(3)
    compiled = decorated.lower(make_state(), batch).compile()
    (traced, _), run = compiled.trace(make_state(), batch)
    called, _ = compiled(make_state(), batch)
    assert differing(traced, called) == []
    ops = [op for op in compiled.lowered.program.ops() if type(op).__name__ != "Free"]
    assert len(run.ops) == len(ops)


# Compiling.


def test_progress_tells_of_every_executable(capsys):
    lowered = rt.train_step(stages=2, microbatches=2)(sgd_step).lower(make_state(), make_batch())
    told = []
    compiled = lowered.compile(progress=lambda done, total: told.append((done, total)))
    assert told == [(n, compiled.executables) for n in range(1, compiled.executables + 1)]
    lowered.compile()
    assert capsys.readouterr().err == ""  # standard error is no terminal
    lowered.compile(progress=True)
    assert "compiling" in capsys.readouterr().err


def test_compiler_options_reach_the_compiler():
    lowered = rt.train_step(stages=2, microbatches=2)(sgd_step).lower(make_state(), make_batch())
    one = lowered.compile()
    other = lowered.compile({"xla_cpu_enable_fast_math": True})
    assert one._library is not other._library
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        lowered.compile({"xla_no_such_option": True})


# What runs where, and what is not done again.


def test_every_lowered_program_is_verified(monkeypatch):
    right = lower.program_within_limit

    def short_of_an_op(*args):
        program = right(*args)
        first, *others = program.order
        dropped = next(op for op in first if isinstance(op, Backward))
        kept = tuple(op for op in first if op is not dropped)
        return dataclasses.replace(program, order=(kept, *others))

    monkeypatch.setattr(lower, "program_within_limit", short_of_an_op)
    with pytest.raises(VerificationError, match="has no Backward"):
        rt.train_step(stages=2, microbatches=2)(sgd_step).lower(make_state(), make_batch())


def watched(compiled):
    """Replaces what each instruction runs by what also notes its op and thread."""
    seen = []

    def noting(op, execute):
        def noted(bundles):
            seen.append((type(op), threading.current_thread().name))
            return execute(bundles)

        return noted

    for instructions in compiled._plan.threads:
        for instruction in instructions:
            instruction.execute = noting(instruction.op, instruction.execute)
    return seen


def test_compute_and_link_ops_are_launched_from_two_threads():
    lowered = rt.train_step(**TWO_BY_TWO)(sgd_step).lower(make_state(), make_batch())
    compiled = lowered.compile()
    seen = watched(compiled)
    compiled(make_state(), make_batch())
    here = threading.current_thread().name
    threads = {kind: {name for k, name in seen if k is kind} for kind, _ in seen}
    assert threads[Forward] == threads[Backward] == {here}
    for kind in (GradSync, SendActivation, SendGradient, PrefetchView):
        (name,) = threads[kind]
        assert name.startswith("ratrain-link")
    assert len(seen) == sum(not isinstance(op, Free) for op in lowered.program.ops())


def test_prefetched_views_are_used_unless_their_leaves_were_swapped():
    compiled = rt.train_step(**TWO_BY_TWO)(sgd_step).lower(make_state(), make_batch()).compile()
    gathered = []
    for view, gather in compiled._handover._gathers.items():
        compiled._handover._gathers[view] = lambda shards, v=view, g=gather: (
            gathered.append(v),
            g(shards),
        )[1]
    state, _ = compiled(make_state(), make_batch())
    assert sorted(gathered) == sorted(
        compiled._handover._gathers
    )  # the user's arrays have no views yet
    gathered.clear()
    state, _ = compiled(state, make_batch())
    assert gathered == []
    kernel = state["params"]["layer_0"]["kernel"]
    state["params"]["layer_0"]["kernel"] = kernel * 0.5
    compiled(state, make_batch())
    assert len(gathered) == 1


def test_accumulators_of_several_devices_are_used_up_in_place():
    compiled = rt.train_step(**TWO_BY_TWO)(sgd_step).lower(make_state(), make_batch()).compile()
    given = []

    def noting(op, execute):
        def noted(bundles):
            made = execute(bundles)
            given.extend(bundles[op.reads.index(v)] for v in op.donates)
            return made

        return noted

    for instruction in compiled._plan.threads[0]:
        if isinstance(instruction.op, Backward):
            instruction.execute = noting(instruction.op, instruction.execute)
    compiled(make_state(), make_batch())
    assert given and all(array.is_deleted() for bundle in given for array in bundle)


def test_no_more_than_two_steps_are_launched_ahead_if_only_the_state_comes_back():
    def step(params, batch):
        loss = lambda p: mean_square(p, batch["x"], batch["y"])  # noqa: E731
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, rt.grad(loss)(params))

    compiled = rt.train_step(**TWO_BY_TWO)(step).lower(make_params(), make_batch()).compile()
    params = make_params()
    for n in range(4):
        params = compiled(params, make_batch(n))
    waited = [len(marks) for marks in compiled._flights._marks]
    assert len(waited) <= 2 and set(waited) == {4}  # a mark on each device
