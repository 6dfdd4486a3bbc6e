"""Step time on the MT-3000 backend against the XLA one: the same pipeline, one step of each in turn, in one process.

python benchmarks/kernels_step.py --layers 4 --stages 2
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import gpt_step
import jax

import ratrain_jax as rt
from ratrain_jax.kernels import Arithmetic

BACKENDS: dict[str, str | Arithmetic] = {
    "xla": "xla",
    "mt3000, fp32": Arithmetic.of("mt3000", "fp32", "fast"),
    "mt3000, promote": Arithmetic.of("mt3000", "promote", "fast"),
}


def one_step(step: Any, state: Any, batch: Any) -> tuple[Any, float, float]:
    """Runs one step; returns the state, the seconds and the loss."""
    start = time.perf_counter()
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    return state, time.perf_counter() - start, float(metrics["loss"])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Times a step on the MT-3000 backend.")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2, help="rows of a microbatch")
    parser.add_argument("--steps", type=int, default=9)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.stages)
    batch = gpt_step.make_batch(options.microbatches * options.rows)
    steps: dict[str, Any] = {}
    states: dict[str, Any] = {}
    for name, backend in BACKENDS.items():
        decorate = rt.train_step(
            stages=options.stages,
            microbatches=options.microbatches,
            recovery="none",
            backend=backend,
        )
        state = gpt_step.make_state(options.layers)
        steps[name] = decorate(gpt_step.pipelined).lower(state, batch).compile()
        states[name] = state
    taken: dict[str, list[float]] = {name: [] for name in steps}
    loss = dict.fromkeys(steps, 0.0)
    for number in range(options.steps + 2):
        for name, step in steps.items():
            states[name], seconds, loss[name] = one_step(step, states[name], batch)
            if number >= 2:
                taken[name].append(seconds)
    print(
        f"{options.layers} layers, {options.stages} stages, {options.microbatches} microbatches"
        f" of {options.rows}; medians of {options.steps} steps in turn"
    )
    print(f"{'':18}{'step ms':>10}{'ratio':>8}{'loss':>12}   goal: 2")
    for name, seconds in taken.items():
        ratios = [ours / xla for ours, xla in zip(seconds, taken["xla"], strict=True)]
        print(
            f"{name:18}{statistics.median(seconds) * 1e3:10.1f}"
            f"{statistics.median(ratios):8.2f}{loss[name]:12.6f}"
        )


if __name__ == "__main__":
    main()
