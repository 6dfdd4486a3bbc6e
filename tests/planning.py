"""A small language model to plan for, stacked blocks of any size, and plans of them."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import ratrain_jax as rt
from ratrain_jax.kernels import load_machine
from ratrain_jax.models import ModelConfig, language_model
from ratrain_jax.planning.planner import workload
from ratrain_jax.planning.space import Space

A100 = load_machine("a100")
CONFIG = ModelConfig("small", layers=6, hidden=512, ffn=1024, heads=8, kv_heads=4, vocab=2048)
BATCH = 48


@functools.cache
def model():
    return language_model(CONFIG, sequence=256, dtype="bfloat16")


@functools.cache
def work(machine=A100):
    lm = model()
    return workload(lm.step, (lm.abstract_state(), lm.abstract_batch(1)), machine, BATCH)


def slow_links(bandwidth):
    links = tuple(dataclasses.replace(link, bandwidth=bandwidth) for link in A100.links)
    return dataclasses.replace(A100, links=links)


def space(**choices):
    layers = len(work().table(1).rows)
    return Space(
        **{"devices": 8, "global_batch": BATCH, "layers": layers, "rows": (1, 2), **choices}
    )


def planned(**options):
    lm = model()
    args = (lm.abstract_state(), lm.abstract_batch(1))
    return rt.plan(
        lm.step,
        *args,
        **{"machine": "a100", "devices": 8, "global_batch": BATCH, "rows": (1, 2), **options},
    )


@functools.cache
def plain_plan():
    return planned()


def scanned(width, depth, vocabulary, remat=False, tied=False):
    """A train step of scanned residual blocks whose state is its parameters alone, and its arguments' types."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(x))), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embedding = nn.Embed(vocabulary, width, name="embedding")
            block = nn.remat(Block) if remat else Block
            layers = nn.scan(
                block, variable_axes={"params": 0}, split_rngs={"params": True}, length=depth
            )
            x, _ = layers(name="blocks")(embedding(tokens), None)
            return embedding.attend(x) if tied else nn.Dense(vocabulary, name="head")(x)

    model, tokens = Model(), jax.ShapeDtypeStruct((8, 16), jnp.int32)
    params = jax.eval_shape(
        lambda: model.init(jax.random.key(0), jnp.zeros((1, 16), jnp.int32))["params"]
    )

    def step(params, batch):
        def loss(p):
            logits = model.apply({"params": p}, batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        value, grads = rt.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    return step, params, {"x": tokens, "y": tokens}
