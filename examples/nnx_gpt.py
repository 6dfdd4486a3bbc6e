"""A small byte-level transformer in Flax NNX, trained as a pipeline.

    python examples/nnx_gpt.py --stages 2 --microbatches 4

An NNX model is an object that holds its parameters. `nnx.split` takes it apart into a static graph and a tree of
parameters; the step differentiates by the tree, and `nnx.merge` makes the model anew inside the loss.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from text_data import VOCABULARY
from train_gpt import Batch, Metrics, parse_arguments, run

import ratrain_jax as rt

State = dict[str, Any]


class Block(nnx.Module):
    """Pre-norm causal attention and MLP, each with its skip."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs) -> None:
        self.norm_1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            heads, width, use_bias=False, decode=False, rngs=rngs
        )
        self.norm_2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, length, width) to the same shape."""
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm_1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class GPT(nnx.Module):
    """A decoder-only transformer."""

    def __init__(
        self, length: int, width: int = 64, heads: int = 4, layers: int = 4, *, rngs: nnx.Rngs
    ) -> None:
        self.tokens = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.positions = nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs=rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, VOCABULARY, rngs=rngs)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Maps tokens (batch, length) to logits (batch, length, vocabulary)."""
        x = self.tokens(inputs) + self.positions(jnp.arange(inputs.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_step(
    graph: Any, optimizer: optax.GradientTransformation
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """The train step of a model whose static half is `graph`."""

    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        def loss_fn(params: Any) -> jax.Array:
            logits = nnx.merge(graph, params)(batch["inputs"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            return losses.mean()

        loss, grads = rt.value_and_grad(loss_fn)(state["params"])
        updates, moments = optimizer.update(grads, state["moments"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "moments": moments}, {"loss": loss}

    return train_step


def main() -> None:
    """Trains on Python's own sources and prints the loss."""
    arguments = parse_arguments("Trains a byte-level GPT written in NNX as a pipeline.")
    graph, params = nnx.split(GPT(arguments.length, rngs=nnx.Rngs(0)), nnx.Param)
    optimizer = optax.adamw(2e-3)
    state: State = {"params": params, "moments": optimizer.init(params)}
    run(make_step(graph, optimizer), state, arguments)


if __name__ == "__main__":
    main()
