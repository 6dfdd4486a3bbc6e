"""Models of less common shapes train as under plain `jax.jit`: shared blocks, experts, parallel branches, half precision."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import ratrain_jax as rt
from ratrain_jax.lowering.program import Kind
from tests.training import differing, named_leaves, train

WIDTH = 8
LAYOUT = {"stages": 2, "data_parallel": 2, "microbatches": 2}
STEPS = 5


class Block(nn.Module):
    """An MLP with a norm."""

    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm(dtype=self.dtype)(x)
        return x + nn.Dense(WIDTH, dtype=self.dtype)(nn.gelu(nn.Dense(16, dtype=self.dtype)(h)))


class Shared(nn.Module):
    """One block in all layers."""

    @nn.compact
    def __call__(self, x):
        block = Block(name="block")
        x = nn.Dense(WIDTH, name="inward")(x)
        for _ in range(4):
            x = block(x)
        return nn.Dense(WIDTH, name="outward")(x)


class Experts(nn.Module):
    """Mixtures of three experts, all computed, the two best weighed."""

    @nn.compact
    def __call__(self, x):
        for layer in range(3):
            gate = nn.Dense(3, use_bias=False, name=f"gate_{layer}")(x)
            best = jax.lax.top_k(gate, 2)[0][..., -1:]
            weights = jax.nn.softmax(jnp.where(gate >= best, gate, -1e9))
            up = self.param(f"up_{layer}", nn.initializers.lecun_normal(), (3, WIDTH, 16))
            down = self.param(f"down_{layer}", nn.initializers.lecun_normal(), (3, 16, WIDTH))
            each = jnp.einsum("ebth,ehd->ebtd", nn.gelu(jnp.einsum("btd,edh->ebth", x, up)), down)
            x = x + jnp.einsum("ebtd,bte->btd", each, weights)
        return x


class Parallel(nn.Module):
    """Attention and MLP side by side, behind one norm."""

    @nn.compact
    def __call__(self, x):
        for layer in range(3):
            h = nn.LayerNorm(name=f"norm_{layer}")(x)
            q, v = (nn.Dense(WIDTH, use_bias=False, name=f"{n}_{layer}")(h) for n in "qv")
            mixed = jax.nn.softmax(q @ h.mT / np.sqrt(WIDTH).astype(h.dtype)) @ v
            mlp = nn.Dense(WIDTH, name=f"down_{layer}")(
                nn.silu(nn.Dense(16, name=f"up_{layer}")(h))
            )
            x = x + mixed + mlp
        return x


class Half(nn.Module):
    """Blocks that compute in half precision."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        for layer in range(3):
            x = Block(self.dtype, name=f"block_{layer}")(x)
        return x


def make_batch(seed, dtype=np.float32):
    x = np.random.default_rng(seed).normal(size=(8, 3, WIDTH)).astype(dtype)
    return {"x": x, "y": np.sin(x[..., ::-1])}


def make_state(model):
    params = model.init(jax.random.key(0), make_batch(0)["x"])["params"]
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.result_type(float)), params)
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-3, eps=1e-4))
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def make_step(value_and_grad):
    def step(state, batch):
        def loss_fn(params):
            out = state.apply_fn({"params": params}, batch["x"])
            return ((out - batch["y"]) ** 2).mean()

        loss, grads = value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return step


@pytest.mark.parametrize(
    "model",
    [
        Shared(),
        pytest.param(Experts(), marks=pytest.mark.slow),
        pytest.param(Parallel(), marks=pytest.mark.slow),
    ],
    ids=lambda model: type(model).__name__,
)
def test_it_trains_as_under_plain_jit(model, double_precision):
    batches = [make_batch(seed, np.float64) for seed in range(STEPS)]
    state = make_state(model)
    found = train(rt.train_step(**LAYOUT)(make_step(rt.value_and_grad)), state, batches)
    wanted = train(jax.jit(make_step(jax.value_and_grad)), state, batches)
    np.testing.assert_allclose(found.losses(), wanted.losses(), rtol=1e-9)
    theirs = named_leaves(wanted.state)
    for name, leaf in named_leaves(found.state).items():
        assert np.abs(leaf - theirs[name]).max() <= 1e-9 * np.abs(theirs[name]).max(), name


def test_a_shared_block_is_owned_once_and_borrowed():
    lowered = rt.train_step(**LAYOUT)(make_step(rt.value_and_grad)).lower(
        make_state(Shared()), make_batch(0)
    )
    owned = [name for layer in lowered.program.layers for name in layer.parameters]
    assert len(owned) == len(set(owned)) == len(jax.tree.leaves(make_state(Shared()).params))
    assert any(layer.borrows for layer in lowered.program.layers)


@pytest.mark.parametrize(
    "dtype",
    [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)],
    ids=lambda dtype: dtype.__name__,
)
def test_half_precision_halves_the_views_and_every_order_agrees(dtype):
    batches = [make_batch(seed) for seed in range(STEPS)]
    state = make_state(Half(dtype))
    first = rt.train_step(**LAYOUT)(make_step(rt.value_and_grad))
    other = rt.train_step(**LAYOUT, schedule="1f1b", recovery="backward")(
        make_step(rt.value_and_grad)
    )
    found = train(first, state, batches)
    wanted = train(jax.jit(make_step(jax.value_and_grad)), state, batches)
    np.testing.assert_allclose(found.losses(), wanted.losses(), rtol=1e-2)
    again = train(other, state, batches)
    assert differing(found.metrics, again.metrics) == []
    assert differing(found.state, again.state) == []
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(found.state.params))
    program = first.lower(state, batches[0]).program
    views = {a.dtype for v in program.values if v.kind is Kind.VIEW for a in v.arrays}
    assert np.dtype(dtype).name in views
