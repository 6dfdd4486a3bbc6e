"""Peak memory of LLaMA-2 training by Megatron-LM, as published, beside the model's, with its parts.

Run: python benchmarks/published/memory.py

Published: Megatron-LM, pull request 482 (8 H800, no recomputation, FlashAttention, distributed optimizer). Stage s of P
holds, of 1F1B, the activations of min(m, P − s) microbatches:

    parameters · (6 + 12/D)  +  in flight · layers · activations of a layer  +  head and loss on the last stage

6 bytes are the bfloat16 parameter and its float32 gradient, 12/D the optimizer's float32 master and two moments, of which
each data-parallel rank has a share. Activations are counted from the traced layer (`llama_kernels`).
"""

from __future__ import annotations

import dataclasses

from facts import read
from kernel_costs import parameter_bytes
from llama_kernels import Part, trace_head, trace_layer
from rich.console import Console
from rich.table import Table

from ratrain_jax.lowering.cost import aval_bytes

GIB = 2**30
LOGIT_BYTES = 10
"""A logit's, at the most: bfloat16, a float32 copy (from which the maximum is taken in place), and its exponential."""


@dataclasses.dataclass(frozen=True)
class Peak:
    """The peak of a published run and ours, in bytes.

    Attributes:
        name: tensor-parallel ranks, stages, data-parallel ranks, and sequences of a microbatch.
        published: the measured peak.
        stage: where ours is.
        states: parameters, gradients and optimizer.
        activations: of all layers and microbatches in flight, and of the embedding.
        loss: of head and loss.
    """

    name: str
    published: float
    stage: int
    states: float
    activations: float
    loss: float

    @property
    def total(self) -> float:
        """Ours."""
        return self.states + self.activations + self.loss

    @property
    def error(self) -> float:
        """Ours over published, less 1."""
        return self.total / self.published - 1


def peaks() -> list[Peak]:
    """All published rows and ours: of each, the stage that needs most."""
    return [
        max((_stage(row, stage) for stage in range(int(row["pp"]))), key=lambda peak: peak.total)
        for row in read("memory")
    ]


def _stage(row: dict[str, str], stage: int) -> Peak:
    hidden, wide, heads, sequence, rows, vocabulary, tensor, stages, data = (
        int(row[key])
        for key in ("hidden", "ffn", "heads", "seq_assumed", "micro_batch", "vocab", "tp", "pp", "dp")
    )  # fmt: skip
    layers = int(row["layers"]) // stages
    layer = trace_layer(hidden, wide, heads, sequence, rows)
    head = trace_head(hidden, vocabulary, sequence, rows)
    last = stage == stages - 1
    parameters = layers * parameter_bytes(layer, tensor) / 2
    parameters += hidden * vocabulary / tensor if stage == 0 else 0
    parameters += parameter_bytes(head, tensor) / 2 if last else 0
    microbatches = int(row["global_batch"]) // (data * rows)
    in_flight = min(microbatches, stages - stage)
    tokens = sequence * rows
    # Of the head the input stays and the logits' bytes are counted at their most.
    loss = tokens * (2 * 2 * hidden + LOGIT_BYTES * vocabulary / tensor) if last else 0.0
    return Peak(
        f"t={tensor} p={stages} d={data} b={rows}",
        float(row["peak_gib"]) * GIB,
        stage,
        parameters * (6 + 12 / data),
        in_flight * layers * kept(layer, tensor),
        loss,
    )


def kept(part: Part, ranks: int) -> float:
    """Bytes of one microbatch's residuals on a rank."""
    return sum(aval_bytes(var.aval) * part.forward.held(var, ranks) for var in part.residuals)


def main() -> None:
    """Prints the table."""
    table = Table(
        "LLaMA-2 7B", "published", "ours", "difference", "stage", "states", "activations", "loss"
    )
    found = peaks()
    for peak in found:
        sizes = (peak.published, peak.total, peak.states, peak.activations, peak.loss)
        published, ours, *parts = (f"{size / GIB:.1f}" for size in sizes)
        table.add_row(peak.name, published, ours, f"{peak.error:+.1%}", str(peak.stage), *parts)
    console = Console(width=100)
    console.print(table)
    worst = max(abs(peak.error) for peak in found)
    console.print(f"GiB; the largest difference is {worst:.1%} (goal 5 %).")
    console.print(
        "states = parameters of the rank · (6 + 12/D); activations = in flight · layers · residuals;"
    )
    console.print(f"loss = tokens · (4h + {LOGIT_BYTES}V/t).")


if __name__ == "__main__":
    main()
