"""The models under test train undecorated, and suit comparisons: no gradient is only rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.models import CASES, MAX_NORM, OPTIMIZERS


def train(case, optimizer, steps=3):
    """Trains on one batch; returns the state, the losses and each step's norm of each gradient."""

    def step(state, batch):
        norms = {}

        def value_and_grad(loss_fn):
            def evaluate(params):
                value, grads = jax.value_and_grad(loss_fn)(params)
                norms.update(
                    (jax.tree_util.keystr(path), jnp.linalg.norm(jnp.ravel(leaf)))
                    for path, leaf in jax.tree_util.tree_leaves_with_path(grads)
                )
                return value, grads

            return evaluate

        state, metrics = case.make_step(optimizer, value_and_grad)(state, batch)
        return state, metrics, norms

    state, batch = case.make_state(optimizer), case.make_batch(0, 8)
    # Three steps of so small a model take less time than optimizing its program.
    options: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
    compiled = jax.jit(step).lower(state, batch).compile(compiler_options=options)
    losses, grad_norms, leaf_norms = [], [], []
    for _ in range(steps):
        state, metrics, norms = compiled(state, batch)
        losses.append(float(metrics["loss"]))
        grad_norms.append(float(metrics["grad_norm"]))
        leaf_norms.append({path: float(norm) for path, norm in norms.items()})
    return state, losses, grad_norms, leaf_norms


QUICK = ("gpt", "skip_mlp", "equal_mlp", "lstm")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name, case in CASES.items()
    ],
)
def test_an_undecorated_step_trains(case):
    _, losses, grad_norms, leaf_norms = train(case, OPTIMIZERS["adamw"]())
    assert np.isfinite(losses).all()
    assert losses[0] > losses[1] > losses[2]
    assert min(grad_norms) > MAX_NORM, "clipping is not at work"
    # A gradient that is zero in exact arithmetic is left with some 1e-8 of the whole in rounding.
    for norms, total in zip(leaf_norms, grad_norms, strict=True):
        assert {path: norm for path, norm in norms.items() if norm < 1e-5 * total} == {}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains(name):
    _, losses, grad_norms, _ = train(CASES["skip_mlp"], OPTIMIZERS[name]())
    assert losses[0] > losses[1] > losses[2]
    assert np.isfinite(grad_norms).all()


@pytest.mark.parametrize("name", ["lstm", "nnx"])
def test_under_x64_all_is_float64(name):
    with jax.enable_x64(True):
        state, losses, _, _ = train(CASES[name], OPTIMIZERS["adamw"]())
        floating = {leaf.dtype for leaf in jax.tree.leaves(state) if leaf.dtype.kind == "f"}
    assert floating == {np.dtype(np.float64)}
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_states_and_batches_are_reproducible(case):
    optimizer = optax.sgd(1e-2)
    one, other = case.make_state(optimizer), case.make_state(optimizer)
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)

    batch = case.make_batch(3, 6)
    jax.tree.map(np.testing.assert_array_equal, batch, case.make_batch(3, 6))
    assert {leaf.shape[0] for leaf in batch.values()} == {6}
    assert any(np.any(leaf != case.make_batch(4, 6)[key]) for key, leaf in batch.items())
