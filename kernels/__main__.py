"""Prints how a matrix product runs on an accelerator: `python -m ratrain_jax.kernels M N K`."""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from ratrain_jax.errors import MachineError
from ratrain_jax.kernels.gemm_plan import OBJECTIVES, plan_for
from ratrain_jax.kernels.machine import ACCUMULATORS
from ratrain_jax.kernels.machine_file import load_machine
from ratrain_jax.kernels.show import WIDTH, show_gemm
from ratrain_jax.kernels.tiles import DTYPE_BYTES, FORMS, Gemm, accelerator_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ratrain_jax.kernels",
        description="Plan C[M,N] = A[M,K]·B[K,N] on an accelerator's memories and print the plan.",
    )
    for name in ("M", "N", "K"):
        parser.add_argument(name, type=int)
    parser.add_argument("--machine", default="mt3000", help="a built-in machine or a .toml file")
    parser.add_argument("--dtype", default="float16", choices=tuple(DTYPE_BYTES))
    parser.add_argument("--form", default="nn", choices=FORMS, help="nt: A·Bᵀ, tn: Aᵀ·B")
    parser.add_argument("--accumulator", choices=ACCUMULATORS, help="default: the machine's")
    parser.add_argument("--objective", default="time", choices=OBJECTIVES)
    options = parser.parse_args(arguments)
    try:
        machine = load_machine(options.machine)
        accumulator = options.accumulator or accelerator_of(machine).accumulator
        gemm = Gemm(options.M, options.N, options.K, options.dtype, options.form, accumulator)
        plan = plan_for(gemm, machine, options.objective)
    except MachineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH, no_color=True)
    show_gemm(gemm, machine, plan, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
