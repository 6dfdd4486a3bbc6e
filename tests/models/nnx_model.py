"""A small transformer in Flax NNX, split into a static graph and a tree of parameters.

NNX writes no names into the traced program, and its parameters are `nnx.Param` leaves in an
`nnx.State`; the train step merges them with the static graph inside the loss.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from .case import Apply, Batch, cross_entropy, dict_case
from .gpt import LENGTH, VOCABULARY, make_batch


class Block(nnx.Module):
    """Pre-norm single-head causal attention and MLP, each with its skip."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.norm_1 = nnx.LayerNorm(width, rngs=rngs)
        self.query = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.key = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.value = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm_1(x)
        scores = self.query(y) @ jnp.swapaxes(self.key(y), 1, 2) / jnp.sqrt(y.shape[-1])
        mask = jnp.tril(jnp.ones(scores.shape[1:], bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min))
        x = x + self.out(weights @ self.value(y))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class Decoder(nnx.Module):
    """Tokens (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, width: int, layers: int, *, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs=rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embedding(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@functools.cache
def graph() -> nnx.GraphDef:
    """The static half of the model."""
    return nnx.graphdef(nnx.eval_shape(lambda: Decoder(16, 4, rngs=nnx.Rngs(7))))


def init() -> nnx.State:
    """Draws the initial parameters."""
    return nnx.state(Decoder(16, 4, rngs=nnx.Rngs(7)), nnx.Param)


def apply(params: nnx.State, tokens: jax.Array) -> jax.Array:
    """Logits of the model with these parameters."""
    return nnx.merge(graph(), params)(tokens)


def loss(apply: Apply, params: nnx.State, batch: Batch) -> jax.Array:
    """Next-token cross entropy."""
    return cross_entropy(apply(params, batch["inputs"]), batch["targets"])


NNX_CASE = dict_case("nnx", init, apply=apply, loss=loss, make_batch=make_batch)
