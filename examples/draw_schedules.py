"""Draws what a step of a GPT does over time on MT-3000, without a device: the pictures of the documentation.

    python examples/draw_schedules.py -o docs/images

`tail.png` has the schedules `1f1b` and `ratrain` on one time axis: `ratrain` reduces, updates and gathers layers while
earlier ones still compute, so the next step starts sooner. `pipeline.png` has 48 stages and 128 microbatches, of
which most are alike and therefore left out.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from PIL import Image
from train_gpt import GPT, train_step

import ratrain_jax as rt
from ratrain_jax.simulation.timeline import Timeline

LENGTH = 256


def simulated(model: GPT, rows: int, stages: int, microbatches: int, schedule: str) -> Timeline:
    """A step on MT-3000, of two clusters a stage and so many rows a microbatch and cluster; only types are needed."""
    tokens = jax.ShapeDtypeStruct((2 * rows * microbatches, LENGTH), jnp.int32)

    def make_state() -> TrainState:
        params = model.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))["params"]
        # Clipping would make every update wait for all gradients, and both schedules alike.
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))

    decorate = rt.train_step(
        stages=stages,
        data_parallel=2,
        microbatches=microbatches,
        schedule=schedule,
    )
    batch = {"inputs": tokens, "targets": tokens}
    lowered = decorate(train_step).lower(jax.eval_shape(make_state), batch)
    return rt.simulate(lowered, "mt3000")


def save(timeline: Timeline, path: pathlib.Path, *others: Timeline) -> None:
    """Writes a picture; a PNG with no more colours than it needs."""
    timeline.plot(*others).savefig(path)
    if path.suffix == ".png":
        Image.open(path).convert("RGB").quantize(256, Image.Quantize.FASTOCTREE).save(
            path, optimize=True
        )


def main() -> None:
    """Draws both pictures."""
    parser = argparse.ArgumentParser(description="Draws schedules of a GPT on MT-3000.")
    parser.add_argument("-o", "--output", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("--format", default="png", choices=["png", "svg", "pdf"])
    parser.add_argument("--stages", type=int, default=48, help="of the long pipeline")
    parser.add_argument("--microbatches", type=int, default=128, help="of the long pipeline")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)

    small = GPT(width=512, heads=8, layers=8)
    one_f_one_b, ratrain = (simulated(small, 1, 4, 6, schedule) for schedule in ("1f1b", "ratrain"))
    tail = arguments.output / f"tail.{arguments.format}"
    save(one_f_one_b, tail, ratrain)
    print(
        f"{tail.name}: 1f1b {one_f_one_b.step_seconds:.4f} s, ratrain {ratrain.step_seconds:.4f} s"
    )

    deep = GPT(width=512, heads=8, layers=arguments.stages)
    long = simulated(deep, 4, arguments.stages, arguments.microbatches, "ratrain")
    pipeline = arguments.output / f"pipeline.{arguments.format}"
    save(long, pipeline)
    print(f"{pipeline.name}: {arguments.stages} stages, {long.step_seconds:.4f} s")


if __name__ == "__main__":
    main()
