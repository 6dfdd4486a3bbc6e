"""Models with stacked layers train as under plain jit; their state comes back stacked, or layer by layer."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as checkpoint
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import OptionError, StateError
from tests.models.lstm import LSTM_CASE
from tests.models.scanned import mlp_case, scanned_gpt, scanned_mlp
from tests.training import TWO_BY_TWO, differing, named_leaves, train

CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3, eps=1e-4))
MOMENTUM = optax.sgd(0.1, momentum=0.9)
STEPS = 4


def batches(case, options, steps=STEPS):
    rows = 2 * options.get("data_parallel", 1) * options.get("microbatches", 1)
    return [case.make_batch(seed, rows) for seed in range(steps)]


def pipe(case, optimizer, **options):
    return rt.train_step(**options)(case.make_step(optimizer, rt.value_and_grad))


def check(case, optimizer, tolerance=1e-5, **options):
    """Trains both ways. Differences are measured against each leaf's norm."""
    data = batches(case, options)
    piped = pipe(case, optimizer, **options)
    found = train(piped, case.make_state(optimizer), data)
    plain = jax.jit(case.make_step(optimizer, jax.value_and_grad))
    wanted = train(plain, case.make_state(optimizer), data)
    np.testing.assert_allclose(found.losses(), wanted.losses(), rtol=tolerance)
    ours, theirs = named_leaves(found.state), named_leaves(wanted.state)
    assert ours.keys() == theirs.keys()
    for name, leaf in theirs.items():
        assert (ours[name].shape, ours[name].dtype) == (leaf.shape, leaf.dtype), name
        difference = np.linalg.norm((ours[name].astype(float) - leaf).ravel())
        assert difference <= tolerance * np.linalg.norm(leaf.astype(float).ravel()), name
    return piped, found


# Training.

LAYOUTS = [
    {"stages": 1},
    {"stages": 2, "data_parallel": 2, "microbatches": 2, "zero": 2},
    {"stages": 3, "microbatches": 2},
    {"stages": 4, "data_parallel": 2},
]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "layout", [LAYOUTS[0], LAYOUTS[1], *(pytest.param(x, marks=SLOW) for x in LAYOUTS[2:])], ids=str
)
def test_layers_under_lax_scan_train_as_under_plain_jit(layout):
    check(mlp_case(), CLIPPED, **layout)


@pytest.mark.parametrize("layout", [pytest.param(LAYOUTS[1], marks=SLOW), LAYOUTS[2]], ids=str)
def test_in_double_precision(layout, double_precision):
    check(mlp_case(), CLIPPED, tolerance=1e-9, **layout)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"lengths": (2,)}, marks=SLOW),
        {"lengths": (2,), "remat": True},
        pytest.param({"lengths": (2, 2)}, marks=SLOW),
    ],
    ids=["scan", "remat in scan", "remat_scan"],
)
def test_linen_models_train_as_under_plain_jit(fields):
    check(scanned_gpt("gpt", width=8, **fields), CLIPPED, stages=2, microbatches=2)


OPTIMIZERS = {
    "multi_steps": optax.MultiSteps(optax.adam(1e-2), 2),
    "if_finite": optax.apply_if_finite(optax.adam(1e-2), 2),
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "block_rms": optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(0.1)),
}


LONGER = ("if_finite", "adafactor", "block_rms")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[SLOW] if n in LONGER else []) for n in OPTIMIZERS],
)
def test_optimizers(name):
    check(mlp_case(3), OPTIMIZERS[name], stages=2, data_parallel=2)


def test_a_reversed_scan():
    case = mlp_case(3, lambda params, x: scanned_mlp(params, x, reverse=True))
    piped, _ = check(case, MOMENTUM, stages=2)
    lowered = piped.lower(case.make_state(MOMENTUM), batches(case, {})[0])
    names = [layer.name for layer in lowered.program.layers if "/" in layer.name]
    assert names == ["layers/2", "layers/1", "layers/0"]


def test_a_scan_over_time_trains_whole():
    piped, _ = check(LSTM_CASE, MOMENTUM, stages=2)
    case = LSTM_CASE
    code = piped.lower(case.make_state(MOMENTUM), batches(case, {})[0]).code
    assert code.stacks is None


def test_all_orders_give_the_same_bits():
    case = mlp_case(3, lambda params, x: scanned_mlp(params, x, remat=True))
    data = batches(case, TWO_BY_TWO)
    steps = [
        pipe(case, CLIPPED, **TWO_BY_TWO, **options)
        for options in (
            {},
            {"schedule": "1f1b"},
            {"recovery": "none"},
            {"recovery": "forward"},
            {"update_prefetch": False, "state_layout": "layers"},
        )
    ]
    runs = [train(step, case.make_state(CLIPPED), data) for step in steps]
    for other in runs[1:]:
        state = jax.tree.map(np.asarray, other.state, is_leaf=is_leaf)
        assert differing(runs[0].metrics, other.metrics) == []
        assert differing(runs[0].state, state) == []


def is_leaf(node):
    return isinstance(node, rt.StackedLeaf)


def test_gradients_of_stacked_layers_as_results():
    case = mlp_case(3)
    loss = lambda p, b: ((scanned_mlp(p, b["x"]) - b["y"]) ** 2).mean()  # noqa: E731

    def step(state, batch, value_and_grad=rt.value_and_grad):
        value, grads = value_and_grad(loss)(state["params"], batch)
        norms = jnp.sqrt((grads["layers"]["kernel"] ** 2).sum((1, 2)))
        return {"loss": value, "grads": grads, "norms": norms}

    state, batch = case.make_state(MOMENTUM), case.make_batch(0, 4)
    found = rt.train_step(**TWO_BY_TWO)(step)(state, batch)
    wanted = jax.jit(lambda *args: step(*args, jax.value_and_grad))(state, batch)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


# State in and out.


@pytest.fixture(scope="module")
def case():
    return mlp_case(4)


@pytest.fixture(scope="module", params=["stacked", "layers"])
def step(request, case):
    return pipe(case, MOMENTUM, **TWO_BY_TWO, state_layout=request.param)


def layers_of(state):
    return state["params"]["layers"]["kernel"]


def host(state):
    return jax.tree.map(lambda x: np.array(x), state, is_leaf=is_leaf)


def test_the_layout_of_the_state(case, step):
    layout = step.options.state_layout
    given = case.make_state(MOMENTUM)
    state, _ = step(given, batches(case, TWO_BY_TWO)[0])
    leaf = layers_of(state)
    assert leaf.shape == layers_of(given).shape and leaf.dtype == layers_of(given).dtype
    if layout == "stacked":
        assert isinstance(leaf, jax.Array)
        assert leaf.sharding.device_set == set(jax.devices()[:2])
    else:
        assert isinstance(leaf, rt.StackedLeaf)
        devices = [min(d.id for d in part.sharding.device_set) for part in leaf]
        assert devices == sorted(devices) and len(set(devices)) == 2


def test_a_state_is_taken_in_either_form_from_anywhere(case, step):
    first, second = batches(case, TWO_BY_TWO)[:2]
    state, _ = step(case.make_state(MOMENTUM), first)
    saved = host(state)
    wanted = host(step(state, second)[0])
    apart = jax.tree.map(lambda x: x, saved)
    apart["params"]["layers"] = {
        name: rt.StackedLeaf(list(leaf)) for name, leaf in saved["params"]["layers"].items()
    }
    for other in (saved, jax.tree.map(jnp.asarray, saved), apart):
        assert differing(host(step(other, second)[0]), wanted) == []


def test_orbax_saves_and_restores_a_state_as_it_is(case, step, tmp_path):
    first, second = batches(case, TWO_BY_TWO)[:2]
    state, _ = step(case.make_state(MOMENTUM), first)
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        types = jax.tree.map(checkpoint.utils.to_shape_dtype_struct, state)
        restored = checkpointer.restore(tmp_path / "state", types)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert differing(host(restored), host(state)) == []
    assert differing(host(step(restored, second)[0]), host(step(state, second)[0])) == []


def test_a_state_that_comes_back_is_not_taken_apart_again(case, step, monkeypatch):
    from ratrain_jax.runtime import stacks

    first, second = batches(case, TWO_BY_TWO)[:2]
    state, _ = step(case.make_state(MOMENTUM), first)
    taken = []
    for name in ("_taking_apart", "_indexed"):
        monkeypatch.setattr(stacks, name, lambda *args, name=name: taken.append(name))
    step(state, second)
    assert taken == []


def test_a_state_that_was_handed_back_is_used_up(case, step):
    first, second = batches(case, TWO_BY_TWO)[:2]
    state, _ = step(case.make_state(MOMENTUM), first)
    step(state, second)
    assert layers_of(state).is_deleted()
    with pytest.raises(StateError, match="used up"):
        step(state, second)


def test_a_swapped_leaf_counts(case, step):
    first, second = batches(case, TWO_BY_TWO)[:2]
    state, _ = step(case.make_state(MOMENTUM), first)
    doubled = host(state)
    doubled["params"]["layers"]["kernel"] *= 2
    wanted = host(step(doubled, second)[0])
    swapped = jax.tree.map(lambda x: x, state, is_leaf=is_leaf)
    swapped["params"]["layers"]["kernel"] = jax.tree.map(lambda x: 2 * x, layers_of(state))
    assert differing(host(step(swapped, second)[0]), wanted) == []


def test_a_state_may_be_kept(case):
    first, second = batches(case, TWO_BY_TWO)[:2]
    keeping = pipe(case, MOMENTUM, **TWO_BY_TWO, donate_state=False)
    state, _ = keeping(case.make_state(MOMENTUM), first)
    once, again = (host(keeping(state, second)[0]) for _ in range(2))
    assert differing(once, again) == []


def test_layers_of_a_forgotten_state_are_let_go(case):
    step = pipe(case, MOMENTUM, stages=2)
    state, metrics = step(case.make_state(MOMENTUM), batches(case, {})[0])
    jax.block_until_ready(metrics)
    (compiled,) = step._compiled.values()
    assert len(compiled._handover._stacks._known) == 6  # three stacked parameters and their momenta
    del state
    gc.collect()
    assert not compiled._handover._stacks._known


def test_layers_of_another_split_are_taken(case):
    """A state handed out layer by layer goes on with another number of stages."""
    first, second = batches(case, {})[:2]
    two = pipe(case, MOMENTUM, stages=2, state_layout="layers")
    one = pipe(case, MOMENTUM, stages=4, state_layout="layers")
    state, _ = two(case.make_state(MOMENTUM), first)
    saved = host(state)
    assert differing(host(one(state, second)[0]), host(one(saved, second)[0])) == []


def test_an_unknown_layout_is_refused():
    with pytest.raises(OptionError, match="state_layout='flat'"):
        rt.train_step(state_layout="flat")
