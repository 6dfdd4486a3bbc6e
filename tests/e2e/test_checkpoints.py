"""A run that is saved goes on under any layout as if it had never stopped; under its own, to the last bit."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import CheckpointError
from tests.models.case import OPTIMIZERS
from tests.models.gpt import GPT_CASE
from tests.models.scanned import mlp_case, scanned_gpt, scanned_mlp
from tests.training import TWO_BY_TWO, differing, train

TIED = GPT_CASE
SCANNED_MLP = mlp_case(4)
SCANNED = scanned_gpt("scanned", width=8, lengths=(4,))
OPTIMIZER = OPTIMIZERS["adamw"]()
FOUR_STAGES = {"stages": 4, "microbatches": 2}
ONE_DEVICE = {"stages": 1, "microbatches": 2}
PLAIN: dict = {}
ROUND = [TWO_BY_TWO, FOUR_STAGES, ONE_DEVICE, PLAIN, TWO_BY_TWO]
ROWS = 4
STEPS = 2
"""Of each layout."""


@functools.cache
def _make_step(case, options):
    options = dict(options)
    if not options:
        return jax.jit(case.make_step(OPTIMIZER, jax.value_and_grad), donate_argnums=0)
    return rt.train_step(**options)(case.make_step(OPTIMIZER, rt.value_and_grad))


def make_step(case, options):
    """The same for the same options: a second run compiles nothing."""
    return _make_step(case, tuple(sorted(options.items())))


def batches(case, start, stop):
    return [case.make_batch(seed, ROWS) for seed in range(start, stop)]


def go_on(folder, case, options, steps=STEPS):
    """A process's life: restores, trains some steps, saves; gives the losses and the last state."""
    step = make_step(case, options)
    losses = []
    with rt.Checkpoints(folder) as checkpoints:
        state, start, extras = checkpoints.restore(case.make_state(OPTIMIZER))
        assert extras == ({"batch": start} if start else {})
        for number, batch in enumerate(batches(case, start, start + steps), start + 1):
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
            checkpoints.save(number, state, {"batch": number})
    return [float(loss) for loss in losses], state


SLOW = pytest.mark.slow


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(SCANNED_MLP, id="scanned mlp"),
        pytest.param(SCANNED, id="scanned and tied", marks=SLOW),
        pytest.param(TIED, id="tied", marks=SLOW),
    ],
)
def test_a_run_changes_its_layout_and_goes_on(case, zero, tmp_path):
    losses = []
    for options in ROUND:
        more = {"zero": zero} if options.get("data_parallel", 1) > 1 else {}
        found, _ = go_on(tmp_path, case, {**options, **more})
        losses += found
    whole = make_step(case, {**TWO_BY_TWO, "zero": zero})
    wanted = train(whole, case.make_state(OPTIMIZER), batches(case, 0, STEPS * len(ROUND)))
    np.testing.assert_allclose(losses, wanted.losses(), rtol=1e-6)
    assert losses[:STEPS] == wanted.losses()[:STEPS]


@pytest.mark.parametrize("layout", ["stacked", "layers"])
@pytest.mark.parametrize("options", [TWO_BY_TWO, pytest.param(FOUR_STAGES, marks=SLOW)], ids=str)
@pytest.mark.parametrize(
    "case", [SCANNED_MLP, pytest.param(SCANNED, marks=SLOW)], ids=["mlp", "gpt"]
)
def test_a_run_goes_on_to_the_last_bit(case, options, layout, tmp_path):
    options = {**options, "state_layout": layout}
    found, last = [], None
    for steps in (1, 2, 1):
        losses, last = go_on(tmp_path, case, options, steps)
        found += losses
    state, wanted = case.make_state(OPTIMIZER), []
    step = make_step(case, options)
    for batch in batches(case, 0, len(found)):
        state, metrics = step(state, batch)
        wanted.append(float(metrics["loss"]))
    assert found == wanted
    assert differing(rt.gather(last), rt.gather(state)) == []


@pytest.fixture(scope="module", params=["stacked", "layers"])
def compiled(request):
    case = SCANNED_MLP
    step = make_step(case, {**TWO_BY_TWO, "state_layout": request.param})
    compiled = step.lower(case.make_state(OPTIMIZER), case.make_batch(0, ROWS)).compile()
    return case, compiled


def test_leaves_arrive_where_a_compiled_step_has_them(compiled, tmp_path):
    case, step = compiled
    state, _ = step(case.make_state(OPTIMIZER), case.make_batch(0, ROWS))
    with rt.Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match="no checkpoint, and what was given are types"):
            checkpoints.restore(step)
        checkpoints.save(1, state)
        restored = checkpoints.restore(step).state
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)
    wanted, _ = step(state, case.make_batch(1, ROWS))
    found, _ = step(restored, case.make_batch(1, ROWS))
    assert differing(rt.gather(found), rt.gather(wanted)) == []


def test_an_evaluation_has_no_state_to_restore(tmp_path):
    case = SCANNED_MLP
    train_step = make_step(case, TWO_BY_TWO)
    state = case.make_state(OPTIMIZER)

    @rt.eval_step(train_step)
    def loss(state, batch):
        out = scanned_mlp(state["params"], batch["x"])
        return {"loss": jnp.square(out - batch["y"]).mean()}

    step = loss.lower(state, case.make_batch(0, ROWS)).compile()
    with (
        rt.Checkpoints(tmp_path) as checkpoints,
        pytest.raises(CheckpointError, match="returns no"),
    ):
        checkpoints.restore(step)


def test_random_keys_and_the_loss_scale_go_on(tmp_path):
    net = nn.Sequential([nn.Dense(8), nn.Dropout(0.5, deterministic=False), nn.tanh, nn.Dense(1)])
    optimizer = optax.adam(1e-2)

    def make_state():
        key = jax.random.key(0)
        params = net.init({"params": key, "dropout": key}, jnp.zeros((1, 4)))["params"]
        scale = rt.DynamicLossScale.create(scale=8.0, growth_interval=2)
        return {"params": params, "moments": optimizer.init(params), "key": key, "scale": scale}

    def step(state, batch):
        key, drop = jax.random.split(state["key"])
        scale = state["scale"]

        def loss(params):
            rngs = {"dropout": rt.microbatch_key(drop)}
            out = net.apply({"params": params}, batch["x"], rngs=rngs)
            return scale.scale * jnp.square(out[:, 0] - batch["y"][:, 0]).mean()

        value, grads = rt.value_and_grad(loss)(state["params"])
        grads = scale.unscale(grads)
        finite = rt.loss_scale.all_finite(grads)
        updates, moments = optimizer.update(grads, state["moments"])
        params = optax.apply_updates(state["params"], updates)
        new = {"params": params, "moments": moments, "key": key, "scale": scale.adjust(finite)}
        return new, {"loss": value}

    run = rt.train_step(**TWO_BY_TWO)(step)
    state, wanted = make_state(), []
    for seed in range(6):
        state, metrics = run(state, SCANNED_MLP.make_batch(seed, ROWS))
        wanted.append(float(metrics["loss"]))
    found = []
    for _ in range(2):
        with rt.Checkpoints(tmp_path) as checkpoints:
            state, start, _ = checkpoints.restore(make_state())
            for seed in range(start, start + 3):
                state, metrics = run(state, SCANNED_MLP.make_batch(seed, ROWS))
                found.append(float(metrics["loss"]))
                checkpoints.save(seed + 1, state)
    assert found == wanted
    assert float(state["scale"].scale) == 64.0
