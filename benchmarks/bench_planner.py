"""How long planning takes: GPT 175B on 1,024 to 100,000 devices, tracing included, and large simulations.

Run: python benchmarks/bench_planner.py

Goals: a plan in under 3 s on one core; 64 stages × 512 microbatches simulated in under 1 s, from seconds alone and as a
lowered program with all its state ops. A known analytic searcher
needs 128 to 329 s for its 1.0 to 1.7 million configurations.
"""

from __future__ import annotations

import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import ratrain_jax as rt
from ratrain_jax.models import ModelConfig, language_model
from ratrain_jax.simulation.engine import run
from ratrain_jax.simulation.pipelines import Pipeline, StageSeconds, pipeline_tasks

LAYERS, HIDDEN, HEADS, VOCABULARY, SEQUENCE = 96, 12288, 96, 51200, 2048


class Block(nn.Module):
    """Pre-norm attention and an MLP of four times the width."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """Maps (batch, sequence, width) to the same shape."""
        h = nn.LayerNorm(dtype=jnp.float16)(x)
        q, k, v = (
            nn.DenseGeneral((HEADS, HIDDEN // HEADS), dtype=jnp.float16, name=name)(h)
            for name in ("query", "key", "value")
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9)).astype(jnp.float16)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        x = x + nn.DenseGeneral(HIDDEN, axis=(-2, -1), dtype=jnp.float16, name="out")(mixed)
        h = nn.Dense(4 * HIDDEN, dtype=jnp.float16)(nn.LayerNorm(dtype=jnp.float16)(x))
        return x + nn.Dense(HIDDEN, dtype=jnp.float16)(nn.gelu(h)), None


class GPT(nn.Module):
    """Embeddings, 96 scanned blocks, norm and head."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of (batch, sequence) tokens."""
        x = nn.Embed(VOCABULARY, HIDDEN, dtype=jnp.float16, name="tokens")(tokens)
        places = self.param("positions", nn.initializers.normal(0.02), (SEQUENCE, HIDDEN))
        x = x + places.astype(jnp.float16)
        scanned = nn.scan(
            Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )
        x, _ = scanned(name="blocks")(x, None)
        x = nn.LayerNorm(dtype=jnp.float16, name="norm")(x)
        return nn.Dense(VOCABULARY, dtype=jnp.float16, name="head")(x)


def make_state() -> TrainState:
    """A fresh state; only ever traced."""
    model = GPT()
    params = model.init(jax.random.key(0), jnp.zeros((1, SEQUENCE), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-4))


def train_step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
    """The step as a user writes it."""

    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, batch["inputs"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    loss, grads = rt.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def main() -> None:
    """Prints the times."""
    tokens = jax.ShapeDtypeStruct((1, SEQUENCE), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    for devices in (1024, 4096, 100_000):
        start, cpu = time.perf_counter(), time.process_time()
        state = jax.eval_shape(make_state)
        plan = rt.plan(
            train_step, state, batch, machine="a100", devices=devices, global_batch=devices * 2
        )
        wall, used = time.perf_counter() - start, time.process_time() - cpu
        print(
            f"{devices} devices: {plan.searched} configurations in {wall:.2f} s wall,"
            f" {used:.2f} s of one core (goal 3)"
        )
        print(f"  {plan.configuration}: {plan.step_seconds:.3f} s")
    start = time.perf_counter()
    stage = StageSeconds(1.0, 2.0, recover=1.0, send=0.1)
    tasks, _ = pipeline_tasks(Pipeline("ratrain", (stage,) * 64, 512))
    made = time.perf_counter()
    run(tasks)
    print(
        f"64 stages × 512 microbatches: {len(tasks):,} tasks made in {made - start:.2f} s,"
        f" simulated in {time.perf_counter() - made:.2f} s (goal 1)"
    )
    simulate_lowered()


def simulate_lowered() -> None:
    """Prints how long it takes to simulate a lowered program of 64 stages and 512 microbatches."""
    config = ModelConfig("deep", layers=64, hidden=128, ffn=256, heads=4, kv_heads=4, vocab=512)
    model = language_model(config, sequence=64, dtype="bfloat16")
    layout = {"stages": 64, "data_parallel": 2, "microbatches": 512, "recovery": "forward"}
    step = rt.train_step(**layout)(model.step)
    lowered = step.lower(model.abstract_state(), model.abstract_batch(1024))
    ops = sum(1 for _ in lowered.program.ops())
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        rt.simulate(lowered, "mt3000")
        taken.append(time.perf_counter() - start)
    print(f"  lowered, with recovery and groups of 2: {ops:,} ops in {min(taken):.2f} s (goal 1)")


if __name__ == "__main__":
    main()
