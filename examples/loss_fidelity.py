"""Trains one GPT three times at once, as a pipeline under two schedules and under plain `jax.jit`, and compares every step.

    python examples/loss_fidelity.py --steps 3000 --output fidelity

`ratrain` and `1f1b` must agree to the last bit, in the loss and in the whole state, at every step. Against the plain step
sums are added in another order, so losses differ by rounding, which training can amplify: the largest, the mean and the
last relative difference are printed and drawn. The folder holds the losses (JSON lines), the picture and checkpoints; run
again, the script goes on from the last one.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from rich.console import Console
from rich.progress import track
from text_data import batches, read_sources
from train_gpt import GPT, train_step

import ratrain_jax as rt

LIMIT = 0.0008
"""The largest relative difference to the plain step that is allowed in float32; the paper reports 0.081 %."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Of the model, its batches and the run.

    Attributes:
        steps: train steps.
        layers: blocks of the model.
        width: of its activations.
        rows: passages of a batch.
        length: tokens of a passage.
        every: steps between checkpoints.
    """

    steps: int = 3000
    layers: int = 4
    width: int = 64
    rows: int = 16
    length: int = 64
    every: int = 250


def make_state(sizes: Sizes) -> TrainState:
    """Initial parameters; AdamW, warmed up and cooled down, behind a clipped norm."""
    model = GPT(width=sizes.width, heads=4, layers=sizes.layers)
    tokens = jnp.zeros((1, sizes.length), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
    warm_up = min(200, sizes.steps // 2)
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-3, warm_up, sizes.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


def make_runs(stages: int, microbatches: int) -> dict[str, Any]:
    """The step of each run."""
    layout: dict[str, Any] = {"stages": stages, "microbatches": microbatches}
    return {
        "jit": jax.jit(train_step),
        "1f1b": rt.train_step(schedule="1f1b", **layout)(train_step),
        "ratrain": rt.train_step(schedule="ratrain", **layout)(train_step),
    }


def same_bits(one: Any, other: Any) -> bool:
    """Whether two trees are equal to the last bit."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def train(sizes: Sizes, runs: dict[str, Any], folder: Path) -> None:
    """Takes the steps that the folder lacks, and writes the losses of each as a line."""
    losses = folder / "losses.jsonl"
    # All runs are one state to be saved; the trees are equal but for what the model's methods are bound to.
    start = jax.tree.leaves(make_state(sizes))
    structure = jax.tree.structure(make_state(sizes))
    with rt.Checkpoints(folder / "checkpoints", keep=2) as checkpoints:
        kept, done, _ = checkpoints.restore({name: list(map(jnp.copy, start)) for name in runs})
        states = {name: jax.tree.unflatten(structure, leaves) for name, leaves in kept.items()}
        lines = losses.read_text().splitlines()[:done] if losses.exists() else []
        losses.write_text("".join(f"{line}\n" for line in lines))
        text = batches(read_sources(), batch_size=sizes.rows, length=sizes.length)
        rest = itertools.islice(enumerate(text, 1), done, sizes.steps)
        told = Console(stderr=True)
        with losses.open("a") as file:
            for number, batch in track(rest, "training", sizes.steps - done, console=told):
                line: dict[str, float] = {"step": number}
                for name, step in runs.items():
                    states[name], metrics = step(states[name], batch)
                    line[name] = float(metrics["loss"])
                if line["1f1b"] != line["ratrain"] or not same_bits(
                    states["1f1b"], states["ratrain"]
                ):
                    raise SystemExit(f"step {number}: 1f1b and ratrain differ: {line}")
                file.write(json.dumps(line) + "\n")
                if number % sizes.every == 0 or number == sizes.steps:
                    file.flush()
                    os.fsync(file.fileno())  # no checkpoint without its losses
                    leaves = {name: jax.tree.leaves(state) for name, state in states.items()}
                    checkpoints.save(number, leaves)


def read(folder: Path) -> Iterator[dict[str, float]]:
    """The losses of each step."""
    yield from map(json.loads, (folder / "losses.jsonl").read_text().splitlines())


def draw(steps: np.ndarray, losses: np.ndarray, differences: np.ndarray, path: Path) -> None:
    """Draws the loss, and below it how far the runs are apart."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    above.plot(steps, losses, linewidth=0.6, color="#0072b2")
    above.set_ylabel("loss")
    shown = np.maximum(100 * differences, 1e-7)  # equal losses have no logarithm
    below.semilogy(steps, shown, linewidth=0.4, color="#d55e00")
    below.axhline(100 * LIMIT, color="black", linestyle="--", linewidth=0.8)
    below.set_ylabel("ratrain against jit, %")
    below.set_xlabel("step")
    figure.savefig(path, dpi=120)


def report(folder: Path) -> float:
    """Prints and draws how far apart the runs are; returns the largest difference."""
    lines = list(read(folder))
    steps, plain, ours = (np.array([line[k] for line in lines]) for k in ("step", "jit", "ratrain"))
    differences = np.abs(ours / plain - 1)
    largest = int(differences.argmax())
    print(f"{len(lines)} steps; loss from {plain[0]:.4f} to {plain[-1]:.4f}")
    print("1f1b against ratrain: equal to the last bit at every step, states too")
    print(f"ratrain against jit, relative difference of the losses (allowed {LIMIT:.2%}):")
    print(f"  largest {differences[largest]:.6%} (step {int(steps[largest])})")
    print(f"  mean    {differences.mean():.6%}")
    print(f"  last    {differences[-1]:.6%}")
    draw(steps, ours, differences, folder / "fidelity.png")
    print("drawn in fidelity.png, beside losses.jsonl")
    return float(differences[largest])


def main() -> None:
    """Trains, compares, and ends with an error if the runs are too far apart."""
    parser = argparse.ArgumentParser(
        description="Compares the losses of a pipeline with those of jax.jit.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--stages", type=int, default=2, help="pipeline stages")
    parser.add_argument("--microbatches", type=int, default=4, help="microbatches of a step")
    parser.add_argument("--output", type=Path, default=Path("fidelity"), help="folder of the run")
    for field in dataclasses.fields(Sizes):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.stages)
    sizes = Sizes(*(getattr(options, field.name) for field in dataclasses.fields(Sizes)))
    options.output.mkdir(parents=True, exist_ok=True)
    train(sizes, make_runs(options.stages, options.microbatches), options.output)
    if report(options.output) > LIMIT:
        raise SystemExit("the losses are too far apart")


if __name__ == "__main__":
    main()
