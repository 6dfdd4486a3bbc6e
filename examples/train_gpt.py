"""Trains a byte-level decoder-only transformer as a pipeline.

    python examples/train_gpt.py --stages 2 --data-parallel 2 --microbatches 4

On a machine without accelerators it runs on as many CPU devices as the pipeline asks for.
"""

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from text_data import VOCABULARY, batches, read_sources

import ratrain_jax as rt

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


class Block(nn.Module):
    """Pre-norm causal attention and MLP, each with its skip."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, length, width) to the same shape."""
        normed = nn.LayerNorm(name="norm_1")(x)
        heads = (self.heads, x.shape[-1] // self.heads)
        query, key, value = (
            nn.DenseGeneral(heads, use_bias=False, name=name)(normed)
            for name in ("query", "key", "value")
        )
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + nn.DenseGeneral(x.shape[-1], axis=(-2, -1), name="out")(mixed)
        hidden = nn.gelu(nn.Dense(4 * x.shape[-1], name="up")(nn.LayerNorm(name="norm_2")(x)))
        return x + nn.Dense(x.shape[-1], name="down")(hidden)


class GPT(nn.Module):
    """A decoder-only transformer whose embedding is also its head."""

    width: int = 64
    heads: int = 4
    layers: int = 4

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Maps tokens (batch, length) to logits (batch, length, vocabulary)."""
        embedding = nn.Embed(VOCABULARY, self.width, name="embedding")
        init = nn.initializers.normal(0.02)
        x = embedding(inputs) + self.param("positions", init, (inputs.shape[1], self.width))
        for index in range(self.layers):
            x = Block(self.heads, name=f"block_{index}")(x)
        return embedding.attend(nn.LayerNorm(name="norm")(x))


def make_state(model: nn.Module, length: int) -> TrainState:
    """Initial parameters, and AdamW behind a clipped norm."""
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, length), jnp.int32))["params"]
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3))
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """An ordinary train step; only `rt.value_and_grad` stands for `jax.value_and_grad`."""

    def loss_fn(params: optax.Params) -> jax.Array:
        logits = state.apply_fn({"params": params}, batch["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    loss, grads = rt.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "grad_norm": optax.tree.norm(grads)}


def parse_arguments(description: str) -> argparse.Namespace:
    """Reads the command line, and asks for the CPU devices that the pipeline needs."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=2, help="pipeline stages")
    parser.add_argument("--data-parallel", type=int, default=1, help="devices of each stage")
    parser.add_argument("--microbatches", type=int, default=4, help="microbatches of a step")
    parser.add_argument("--schedule", default="ratrain", choices=["gpipe", "1f1b", "ratrain"])
    parser.add_argument("--steps", type=int, default=100, help="train steps")
    parser.add_argument("--batch-size", type=int, default=16, help="passages of a step")
    parser.add_argument("--length", type=int, default=64, help="tokens of a passage")
    arguments = parser.parse_args()
    # Heeded only before the first use of a device, and only where the CPU is the platform.
    jax.config.update("jax_num_cpu_devices", arguments.stages * arguments.data_parallel)
    return arguments


def train(model: nn.Module, arguments: argparse.Namespace) -> None:
    """Trains a Linen model on Python's own sources."""
    run(train_step, make_state(model, arguments.length), arguments)


def run(
    step: Callable[..., tuple[Any, Metrics]], state: Any, arguments: argparse.Namespace
) -> None:
    """Takes the steps as a pipeline over Python's own sources and prints the loss."""
    decorate = rt.train_step(
        stages=arguments.stages,
        data_parallel=arguments.data_parallel,
        microbatches=arguments.microbatches,
        schedule=arguments.schedule,
    )
    data = batches(read_sources(), batch_size=arguments.batch_size, length=arguments.length)
    lowered = decorate(step).lower(state, next(data))
    print(lowered.summary())
    compiled = lowered.compile()
    for number, batch in enumerate(itertools.islice(data, arguments.steps), start=1):
        state, metrics = compiled(state, batch)
        if number % 10 == 0 or number == arguments.steps:
            print(f"step {number:4}   loss {metrics['loss']:.4f}", flush=True)


if __name__ == "__main__":
    train(GPT(), parse_arguments("Trains a byte-level GPT as a pipeline."))
