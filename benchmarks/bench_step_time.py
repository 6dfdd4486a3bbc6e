"""Step time of the pipeline against plain `jax.jit` with accumulation, each in a process of its own, in turn.

python benchmarks/bench_step_time.py --layers 4 --stages 2
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time


def measure(kind: str, options: argparse.Namespace) -> dict[str, float]:
    """Runs one measurement in a fresh process."""
    devices = 1 if kind == "plain" else options.stages * options.data_parallel
    env = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [sys.executable, __file__, "--child", kind, *sys.argv[1:]]
    out = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    return json.loads(out.stdout.splitlines()[-1])


def child(options: argparse.Namespace) -> None:
    """Times one kind of step; prints JSON."""
    import gpt_step
    import jax

    import ratrain_jax as rt

    rows = options.microbatches * options.rows * options.data_parallel
    state, batch = gpt_step.make_state(options.layers), gpt_step.make_batch(rows)
    start = time.perf_counter()
    if options.child == "plain":
        step = jax.jit(gpt_step.accumulated(options.microbatches), donate_argnums=0)
    else:
        step = rt.train_step(
            stages=options.stages,
            data_parallel=options.data_parallel,
            microbatches=options.microbatches,
            schedule=options.child,
            recovery="none",
        )(gpt_step.pipelined)
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    first = time.perf_counter() - start
    times = []
    busy = time.process_time()
    for _ in range(options.steps):
        start = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        times.append(time.perf_counter() - start)
    busy = (time.process_time() - busy) / options.steps
    loss = float(metrics["loss"])
    print(
        json.dumps({"step": statistics.median(times), "busy": busy, "first": first, "loss": loss})
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--data-parallel", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2, help="rows of a microbatch")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    kinds = ("plain", "1f1b", "ratrain")
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(options.rounds):
        for kind in kinds:
            found[kind].append(measure(kind, options))
    plain = statistics.median(r["step"] for r in found["plain"])
    first = statistics.median(r["first"] for r in found["plain"])
    print(
        f"{options.layers} layers, {options.stages} stages × {options.data_parallel},"
        f" {options.microbatches} microbatches of {options.rows}"
    )
    print(
        f"{'':10}{'step ms':>10}{'ratio':>8}{'CPU ms':>10}{'first s':>10}{'ratio':>8}{'loss':>12}"
    )
    for kind in kinds:
        step = statistics.median(r["step"] for r in found[kind])
        busy = statistics.median(r["busy"] for r in found[kind])
        begin = statistics.median(r["first"] for r in found[kind])
        print(
            f"{kind:10}{step * 1e3:10.1f}{step / plain:8.3f}{busy * 1e3:10.1f}{begin:10.2f}{begin / first:8.2f}"
            f"{found[kind][-1]['loss']:12.6f}"
        )


if __name__ == "__main__":
    main()
