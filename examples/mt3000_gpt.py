"""A GPT on real text, trained on the MT-3000 backend and in float32: how far apart are the losses?

python examples/mt3000_gpt.py --steps 300

Four runs from one state on the same batches: float32 under plain `jax.jit`; the backend with float32 sums under the schedules
`1f1b` and `ratrain`, which must agree to the last bit; the backend with sums that are float16 in part ("promote") or
throughout, rounded panel by panel and, "exact", at every step as the machine does. The loss is multiplied by a loss scale
before it is differentiated, as for any training in float16, in all runs alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from text_data import batches, read_sources
from train_gpt import GPT

import ratrain_jax as rt
from ratrain_jax.kernels import Arithmetic, vmac_dot_general

LOSS_SCALE = 1024.0
DEPTHS = (64, 1024, 16384)
Step = Callable[..., Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Of the model and its batches.

    Attributes:
        layers: blocks of the model.
        width: of its activations.
        rows: passages of a batch.
        length: tokens of a passage.
    """

    layers: int = 2
    width: int = 64
    rows: int = 8
    length: int = 64


def make_state(sizes: Sizes) -> TrainState:
    """Initial parameters, and AdamW behind a clipped norm."""
    model = GPT(width=sizes.width, heads=4, layers=sizes.layers)
    tokens = jnp.zeros((1, sizes.length), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, jax.Array]:
    """One step; returns the loss beside the state."""

    def scaled_loss(params: optax.Params) -> jax.Array:
        logits = state.apply_fn({"params": params}, batch["inputs"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return losses.mean() * LOSS_SCALE

    loss, grads = rt.value_and_grad(scaled_loss)(state.params)
    grads = jax.tree.map(lambda g: g / LOSS_SCALE, grads)
    return state.apply_gradients(grads=grads), loss / LOSS_SCALE


def text(sizes: Sizes) -> Iterator[dict[str, np.ndarray]]:
    """The same batches every time."""
    return batches(read_sources(), batch_size=sizes.rows, length=sizes.length)


def run(step: Step, sizes: Sizes, steps: int) -> tuple[list[float], Any]:
    """Trains, and returns the losses and the last state."""
    state, losses = make_state(sizes), []
    for batch in itertools.islice(text(sizes), steps):
        state, loss = step(state, batch)
        losses.append(loss)
    return [float(loss) for loss in losses], jax.tree.map(np.asarray, state)


def furthest(losses: list[float], reference: list[float]) -> float:
    """The largest relative distance between two runs at any step."""
    return max(abs(a / b - 1) for a, b in zip(losses, reference, strict=True))


def same_bits(one: Any, other: Any) -> bool:
    """Whether two states are equal to the last bit."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


def on_backend(
    accumulator: str, schedule: str, stages: int, microbatches: int, mode: str = "fast"
) -> Step:
    """The step on the backend."""
    decorate = rt.train_step(
        stages=stages,
        microbatches=microbatches,
        schedule=schedule,
        backend=Arithmetic.of("mt3000", accumulator, mode),
    )
    return decorate(train_step)


def show_sums() -> None:
    """Prints how far sums of random products are from float64's, in the machine's own bits."""
    rng = np.random.default_rng(0)
    print(f"{'error of sums of K products':28}{'fp32':>10}{'promote':>10}{'fp16':>10}")
    for depth in DEPTHS:
        a, b = (
            rng.standard_normal(shape).astype(np.float16) for shape in ((16, depth), (depth, 16))
        )
        wanted = a.astype(np.float64) @ b.astype(np.float64)
        found = []
        for accumulator in ("fp32", "promote", "fp16"):
            numbers = (((1,), (0,)), ((), ()))
            made = vmac_dot_general(
                jnp.asarray(a),
                jnp.asarray(b),
                numbers,
                preferred_element_type=jnp.float32,
                accumulator=accumulator,
                mode="exact",
            )
            error = np.asarray(made, np.float64) - wanted
            found.append(np.sqrt((error**2).mean() / (wanted**2).mean()))
        print(f"K = {depth:<24}" + "".join(f"{error:10.1e}" for error in found))


def main() -> None:
    """Trains all runs and prints how far apart they are."""
    parser = argparse.ArgumentParser(description="Trains a GPT on the MT-3000 backend.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=2)
    for field in dataclasses.fields(Sizes):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    options = parser.parse_args()
    sizes = Sizes(*(getattr(options, field.name) for field in dataclasses.fields(Sizes)))
    jax.config.update("jax_num_cpu_devices", options.stages)
    layout = (options.stages, options.microbatches)
    runs = {
        "float32, jit": jax.jit(train_step),
        "fp32, ratrain": on_backend("fp32", "ratrain", *layout),
        "fp32, 1f1b": on_backend("fp32", "1f1b", *layout),
        "promote, ratrain": on_backend("promote", "ratrain", *layout),
        "fp16, ratrain": on_backend("fp16", "ratrain", *layout),
        "fp16, exact": on_backend("fp16", "ratrain", *layout, mode="exact"),
    }
    found: dict[str, tuple[list[float], Any]] = {}
    print(f"{'run':18}{'first loss':>12}{'last loss':>12}{'furthest':>12}{'seconds':>10}")
    for name, step in runs.items():
        start = time.perf_counter()
        found[name] = run(step, sizes, options.steps)
        losses, reference = found[name][0], found["float32, jit"][0]
        print(
            f"{name:18}{losses[0]:12.5f}{losses[-1]:12.5f}{furthest(losses, reference):12.4%}"
            f"{time.perf_counter() - start:10.1f}",
            flush=True,
        )
    ratrain, one_f = found["fp32, ratrain"], found["fp32, 1f1b"]
    same = ratrain[0] == one_f[0] and same_bits(ratrain[1], one_f[1])
    print(f"1f1b and ratrain equal to the last bit: {same}")
    show_sums()


if __name__ == "__main__":
    main()
