"""Time until a step is compiled, and until the first step has ended, against plain `jax.jit`: in fresh processes, in turn.

The plain step accumulates over microbatches in a scan; its layers are unrolled, as the pipeline's are. Python modules are
loaded before, for both.

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


def measured(kind: str, layers: int, stages: int) -> dict[str, float]:
    """Seconds until the step is compiled and until the first one has ended, in a process of its own."""
    devices = 1 if kind == "plain" else stages
    done = subprocess.run(
        [sys.executable, STEP, "--child", kind, "--layers", str(layers), "--stages", str(stages)],
        env={**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[0])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 24])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print(f"{'layers':>8}{'step':>10}{'compiled s':>12}{'ratio':>8}{'first s':>10}{'ratio':>8}")
    loading: list[float] = []
    for layers in options.layers:
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for _ in range(options.repeats):
            for kind in KINDS:
                found[kind].append(measured(kind, layers, options.stages))
        for kind in KINDS:
            line = f"{layers:8}{kind:>10}"
            for name, width in (("ready", 12), ("first", 10)):
                pairs = zip(found[kind], found["plain"], strict=True)
                ratio = statistics.median(ours[name] / plain[name] for ours, plain in pairs)
                seconds = statistics.median(times[name] for times in found[kind])
                line += f"{seconds:{width}.2f}{ratio:8.2f}"
            print(line, flush=True)
            loading += [times["loading"] for times in found[kind]]
    print(f"loading ratrain_jax, once a process: {statistics.median(loading):.2f} s")


if __name__ == "__main__":
    main()
