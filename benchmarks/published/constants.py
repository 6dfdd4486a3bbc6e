"""The constants of PyTorch on an A100 in 2022, each from a publication that holds none of the rows compared with.

They were chosen after a first comparison with the best figures of any library (those of `kernels/data/a100.toml`: 15.5 and
39.1 % mean error), because the rows are PyTorch's; none was tuned.
"""

from __future__ import annotations

import dataclasses

from rich.console import Console
from rich.table import Table

from ratrain_jax.kernels import load_machine

MATMUL = 230e12
"""FLOP/s of large float16 products with PyTorch 1.13 on this card."""

VECTOR = 0.202e12 * 8
"""Bytes a second of an elementwise kernel there: one float32 read and one written an operation."""

LAUNCH = 13.48e-6
"""Seconds of host work of one linear layer of PyTorch on a DGX with H100s: one kernel."""

A100 = load_machine("a100")
PUBLISHED = dataclasses.replace(
    A100,
    product_efficiency=MATMUL / A100.peak("float16"),
    memory_efficiency=VECTOR / A100.ddr_bandwidth,
)
"""The machine `a100`; what it says of products and memory is replaced by what PyTorch of the time reached, where `a100`
has the best that any search over shapes and kernels found."""

SOURCES = (
    (
        "float16 products",
        "230 of 312 TFLOPS",
        "mli/transformers-benchmarks, README: A100 80 GB, 2022",
    ),
    ("main memory", "1.616 of 2.039 TB/s", "the same, VectorMul: 0.202 TFLOPS of 8 bytes each"),
    ("half rate of a product", "2.1 GFLOP", "square products; see kernels/data/a100.toml"),
    (
        "host work of a kernel",
        "13.48 µs",
        "NVIDIA/TransformerEngine, issue 2053: PyTorch, H100 DGX",
    ),
    ("NVLink, InfiniBand", "235 GB/s, 96 %", "NCCL's model and tests; see kernels/data/a100.toml"),
)


def print_sources(console: Console) -> None:
    """Prints where the constants are from."""
    table = Table("constant", "value", "source", title="Published constants")
    for row in SOURCES:
        table.add_row(*row)
    console.print(table)
