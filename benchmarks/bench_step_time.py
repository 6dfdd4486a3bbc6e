"""Step time of the pipeline against plain `jax.jit` with accumulation, each in a process of its own, in turn.

python benchmarks/bench_step_time.py --layers 4 --stages 2
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time

SETTINGS = (
    (4, 2, 1, "at most 0.80"),
    (8, 2, 1, "at most 0.82"),
    (4, 4, 1, "at most 0.90"),
    (4, 2, 2, "no limit"),
)
"""Layers, stages, devices of a stage, and what the ratio should be."""


class Child:
    """One kind of step in a process of its own, run one step at a time."""

    def __init__(self, kind: str, options: argparse.Namespace) -> None:
        devices = 1 if kind == "plain" else options.stages * options.data_parallel
        env = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", kind, *sys.argv[1:]],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.first = self._read()["first"]

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a measured process ended early; see its message above")
        return json.loads(line)

    def step(self) -> dict[str, float]:
        """Runs one step and gives its time, CPU time and loss."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def child(options: argparse.Namespace) -> None:
    """Compiles one kind of step, then runs one for each line of standard input."""
    import gpt_step
    import jax

    import ratrain_jax as rt

    loading = time.perf_counter()
    importlib.import_module("ratrain_jax.runtime.compiled")  # as all of JAX is loaded, too
    loading = time.perf_counter() - loading

    rows = options.microbatches * options.rows * options.data_parallel
    state, batch = gpt_step.make_state(options.layers), gpt_step.make_batch(rows)
    jax.block_until_ready(state)
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
    step = step.lower(state, batch).compile()
    ready = time.perf_counter() - start
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    first = time.perf_counter() - start
    print(json.dumps({"loading": loading, "ready": ready, "first": first}), flush=True)
    for _ in sys.stdin:
        start, busy = time.perf_counter(), time.process_time()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        taken = {
            "step": time.perf_counter() - start,
            "busy": time.process_time() - busy,
            "loss": float(metrics["loss"]),
        }
        print(json.dumps(taken), flush=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, help="without it: every setting with a limit")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--data-parallel", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2, help="rows of a microbatch")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    if options.layers is None:
        for layers, stages, ranks, limit in SETTINGS:
            flags = {"--layers": layers, "--stages": stages, "--data-parallel": ranks}
            told = [str(part) for flag in flags.items() for part in flag]
            subprocess.run([sys.executable, __file__, *sys.argv[1:], *told], check=True)
            print(f"{'':10}the better of the two: {limit}\n", flush=True)
        return
    kinds = ("plain", "1f1b", "ratrain")
    children = {kind: Child(kind, options) for kind in kinds}
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for number in range(options.steps + 2):
        for kind in kinds:
            taken = children[kind].step()
            if number >= 2:
                found[kind].append(taken)
    print(
        f"{options.layers} layers, {options.stages} stages × {options.data_parallel},"
        f" {options.microbatches} microbatches of {options.rows}; medians of {options.steps} steps in turn"
    )
    print(
        f"{'':10}{'step ms':>10}{'ratio':>8}{'CPU ms':>10}{'first s':>10}{'ratio':>8}{'loss':>12}"
    )
    for kind in kinds:
        ratios = [r["step"] / p["step"] for r, p in zip(found[kind], found["plain"], strict=True)]
        step = statistics.median(r["step"] for r in found[kind])
        busy = statistics.median(r["busy"] for r in found[kind])
        first = children[kind].first
        print(
            f"{kind:10}{step * 1e3:10.1f}{statistics.median(ratios):8.3f}{busy * 1e3:10.1f}"
            f"{first:10.2f}{first / children['plain'].first:8.2f}{found[kind][-1]['loss']:12.6f}"
        )
        children[kind].close()


if __name__ == "__main__":
    main()
