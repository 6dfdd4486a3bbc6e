"""Time from the first call to the end of the first step, against plain `jax.jit`, each in a fresh process, in turn.

The plain step accumulates over microbatches in a scan; its layers are unrolled, as the pipeline's are.

python benchmarks/bench_compile_time.py --layers 4 24
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

KINDS = ("plain", "1f1b", "ratrain")
STEP = Path(__file__).with_name("bench_step_time.py")


def first_step(kind: str, layers: int, stages: int) -> float:
    """Seconds until the first step has ended, in a process of its own."""
    devices = 1 if kind == "plain" else stages
    done = subprocess.run(
        [sys.executable, STEP, "--child", kind, "--layers", str(layers), "--stages", str(stages)],
        env={**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[0])["first"]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 24])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print(f"{'layers':>8}{'step':>10}{'first s':>10}{'ratio':>8}")
    for layers in options.layers:
        found: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(options.repeats):
            for kind in KINDS:
                found[kind].append(first_step(kind, layers, options.stages))
        for kind in KINDS:
            pairs = zip(found[kind], found["plain"], strict=True)
            ratio = statistics.median(ours / plain for ours, plain in pairs)
            print(f"{layers:8}{kind:>10}{statistics.median(found[kind]):10.2f}{ratio:8.2f}")


if __name__ == "__main__":
    main()
