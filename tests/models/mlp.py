"""Plain networks of dense layers: one with long skips, one of equal widths, one with shared layers.

The first two are hard on a layer finder in opposite ways: skips make every cut but a few heavy, and
equal widths make all cuts the same. The third reads a whole sub-module of two leaves, and a table,
both at its beginning and at its end.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from .case import Apply, Batch, cross_entropy, dict_case, linen_case, tokens

FEATURES = 24
VOCABULARY = 48
LENGTH = 8


class SkipMLP(nn.Module):
    """Eight dense layers; what the first makes is used again by the sixth, seventh and eighth.

    On four stages of two layers the first layer's output skips the two stages in between.
    """

    width: int = 16

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        early = nn.gelu(nn.Dense(self.width, name="dense_0")(x))
        second = nn.gelu(nn.Dense(self.width, name="dense_1")(early))
        x = second
        for index in range(2, 5):
            x = nn.gelu(nn.Dense(self.width, name=f"dense_{index}")(x))
        x = nn.gelu(nn.Dense(self.width, name="dense_5")(jnp.concatenate([x, second], axis=-1)))
        x = nn.gelu(nn.Dense(self.width, name="dense_6")(x + early))
        return nn.Dense(FEATURES, name="dense_7")(x * early)


class EqualMLP(nn.Module):
    """Eight dense layers, all as wide as the input and the output."""

    layers: int = 8

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for index in range(self.layers - 1):
            x = jnp.tanh(nn.Dense(FEATURES, name=f"dense_{index}")(x))
        return nn.Dense(FEATURES, name=f"dense_{self.layers - 1}")(x)


class TiedMLP(nn.Module):
    """Tokens to logits; the embedding and the dense layer after it come back at the end."""

    width: int = 16
    layers: int = 4

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        embedding = nn.Embed(VOCABULARY, self.width, name="embedding")
        shared = nn.Dense(self.width, name="shared")
        x = shared(embedding(inputs))
        for index in range(self.layers):
            hidden = nn.gelu(nn.Dense(2 * self.width, name=f"up_{index}")(x))
            x = x + nn.Dense(self.width, name=f"down_{index}")(hidden)
        return embedding.attend(jnp.tanh(shared(x)))


def make_vectors(seed: int, batch_size: int) -> Batch:
    """Random inputs and a fixed smooth function of them."""
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((batch_size, FEATURES))
    targets = np.sin(np.roll(inputs, 1, axis=1)) + 0.5 * inputs
    return {"inputs": inputs.astype(np.float32), "targets": targets.astype(np.float32)}


def make_tokens(seed: int, batch_size: int) -> Batch:
    """Sequences and the same sequences shifted by one."""
    drawn = tokens(np.random.default_rng(seed), batch_size, LENGTH + 1, VOCABULARY)
    return {"inputs": drawn[:, :-1], "targets": drawn[:, 1:]}


def squared_loss(apply: Apply, params: object, batch: Batch) -> jax.Array:
    """Mean squared error."""
    return jnp.mean((apply({"params": params}, batch["inputs"]) - batch["targets"]) ** 2)


def token_loss(apply: Apply, params: object, batch: Batch) -> jax.Array:
    """Next-token cross entropy."""
    return cross_entropy(apply({"params": params}, batch["inputs"]), batch["targets"])


def init_equal() -> object:
    """Draws the initial parameters of the equal-width network."""
    inputs = make_vectors(0, 1)["inputs"]
    return EqualMLP().init(jax.random.key(7), inputs)["params"]


SKIP_MLP_CASE = linen_case(
    "skip_mlp", SkipMLP(), inputs=("inputs",), loss=squared_loss, make_batch=make_vectors
)
EQUAL_MLP_CASE = dict_case(
    "equal_mlp",
    init_equal,
    apply=EqualMLP().apply,
    loss=squared_loss,
    make_batch=make_vectors,
)
TIED_MLP_CASE = linen_case(
    "tied_mlp", TiedMLP(), inputs=("inputs",), loss=token_loss, make_batch=make_tokens
)
