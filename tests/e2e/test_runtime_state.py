"""What a compiled step does with the state: how it comes back, when it is used up, and what may be swapped between steps."""

import gc

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import ratrain_jax as rt
from ratrain_jax.errors import BatchError, StateError
from tests.dense import STEPS, WIDTH, make_batch, make_params, make_state, plain_of, sgd_step
from tests.dense import decorated as decorated
from tests.dense import layout as layout
from tests.training import TWO_BY_TWO, assert_close, differing, train


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


def test_devices_are_taken_in_the_order_given():
    devices = jax.devices()[5:1:-1]
    step = rt.train_step(**TWO_BY_TWO, devices=devices)(sgd_step)
    state, _ = step(make_state(), make_batch())
    assert state["params"]["layer_0"]["kernel"].sharding.device_set == set(devices[:2])
    assert state["params"]["layer_2"]["kernel"].sharding.device_set == set(devices[2:])
