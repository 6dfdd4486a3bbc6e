"""Iteration times and activation memory of GPT by Megatron-LM, as published, beside the model's.

Run: python benchmarks/published/megatron_times.py

Published: V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022: times from
table 5, activation bytes of one layer from equations 1, 2, 4 and table 2. Nothing is fitted.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from constants import LAUNCH, PUBLISHED, print_sources
from facts import read
from gpt_kernels import HALF, Part, Shape, layer, layer_parameters, trace, trace_layer
from jax import ShapeDtypeStruct, checkpoint, make_jaxpr
from megatron import Framework, Iteration, Training, iteration
from rich.console import Console
from rich.table import Table

from ratrain_jax.kernels import Machine
from ratrain_jax.lowering.autodiff import differentiate
from ratrain_jax.lowering.cost import Cost, aval_bytes
from ratrain_jax.lowering.layers import Layer, LossVariable
from ratrain_jax.lowering.tensor_parallel import Mark

CONSOLE = Console(width=100)
MASKS = [Mark.DIVIDED, Mark.WHOLE, Mark.WHOLE]


@dataclasses.dataclass(frozen=True)
class TimeRow:
    """A published iteration time and ours."""

    model: str
    recompute: str
    published: float
    ours: Iteration

    @property
    def error(self) -> float:
        """Ours over the published time, less 1."""
        return self.ours.seconds / self.published - 1


@dataclasses.dataclass(frozen=True)
class ActivationRow:
    """The published bytes of a layer's activations on a rank, and those of the traced layer."""

    model: str
    form: str
    published: float
    counted: float

    @property
    def error(self) -> float:
        """Counted over published, less 1."""
        return self.counted / self.published - 1


def selene() -> Machine:
    """The machine of the published runs: nodes of 8 A100 80 GB with eight 200 Gb/s InfiniBand adapters (their section 6)."""
    near, far = PUBLISHED.links
    return dataclasses.replace(PUBLISHED, links=(near, dataclasses.replace(far, bandwidth=200e9)))


def training(row: dict[str, str]) -> Training:
    """What a published row ran."""
    hidden, heads, sequence, rows, vocabulary = (
        int(row[key]) for key in ("hidden", "heads", "seq", "micro_batch", "vocab")
    )
    selective = row["recompute"] != "full"
    return Training(
        Shape(hidden, heads, sequence, rows, vocabulary),
        layers=int(row["layers"]),
        tensor=int(row["tp"]),
        data=1,
        stages=int(row["pp"]),
        microbatches=int(row["global_batch"]) // rows,
        chunks=int(row["interleave"]),
        recompute="selective" if selective else "full",
        sequence_parallel=selective,
    )


def times() -> list[TimeRow]:
    """All published times and ours."""
    machine, framework = selene(), Framework(LAUNCH)
    return [
        TimeRow(
            row["model"],
            row["recompute"],
            float(row["iteration_s"]),
            iteration(training(row), machine, framework),
        )
        for row in read("megatron_times")
    ]


def activations(model: str, shape: Shape, ranks: int) -> list[ActivationRow]:
    """The closed forms for one layer, and the bytes that the traced layer's kernels keep for backward."""
    s, b, h, a = shape.sequence, shape.rows, shape.hidden, shape.heads
    whole, selective, full = trace_layer(shape), trace_layer(shape, selective=True), _full(shape)
    score = 5 * a * s / h
    forms = (
        ("sbh(34 + 5as/h)", 34 + score, _kept(whole, 1)),
        (f"sbh(10 + 24/t + 5as/(ht)), t = {ranks}", 10 + (24 + score) / ranks, _kept(whole, ranks)),
        (
            f"34sbh/t, t = {ranks}, sequence parallel, selective",
            34 / ranks,
            _kept(selective, ranks, sequence_parallel=True, drawn_again=1),
        ),
        ("2sbh, full recomputation", 2.0, _kept(full, 1, drawn_again=3)),
    )
    return [
        ActivationRow(model, form, s * b * h * factor, counted) for form, factor, counted in forms
    ]


def _kept(
    part: Part, ranks: int, *, sequence_parallel: bool = False, drawn_again: int = 0
) -> float:
    """Bytes that a rank keeps; dropout masks of what is recomputed are drawn again, not kept."""
    given = part.forward.closed.jaxpr.invars[-len(MASKS) :][:drawn_again]
    return sum(
        aval_bytes(var.aval) * part.forward.held(var, ranks, sequence_parallel=sequence_parallel)
        for var in part.residuals
        if var not in given
    )


def _full(shape: Shape) -> Part:
    """A layer that keeps its input alone."""
    return trace(checkpoint(layer), layer_parameters(shape.hidden), *_operands(shape), marks=MASKS)


def _operands(shape: Shape) -> tuple[ShapeDtypeStruct, list[ShapeDtypeStruct]]:
    s, b, h, a = shape.sequence, shape.rows, shape.hidden, shape.heads
    masks = [ShapeDtypeStruct(sizes, bool) for sizes in ((b, a, s, s), (s, b, h), (s, b, h))]
    return ShapeDtypeStruct((s, b, h), HALF), masks


def runtime_bytes(shape: Shape) -> float:
    """Bytes that the runtime keeps of the layer: residuals chosen by `lowering.residuals`, its input, and masks."""
    x, masks = _operands(shape)
    types = {
        name: ShapeDtypeStruct(sizes, HALF)
        for name, sizes in layer_parameters(shape.hidden).items()
    }
    program = make_jaxpr(lambda p, masks, x: [layer(p, x, *masks)])(types, masks, x)
    boundary = functools.partial(LossVariable, differentiable=True, role="boundary")
    variables = [
        boundary(program.in_avals[-1], producer=-1, readers=(0,)),
        boundary(program.out_avals[0], producer=0, readers=(1,)),
    ]
    reads = tuple(range(len(types)))
    made = Layer(
        "layer",
        reads,
        reads,
        reads,
        tuple(range(len(masks))),
        (0,),
        (1,),
        program,
        Cost(),
        0.0,
        False,
    )
    kept = sum(map(aval_bytes, differentiate(made, variables).residuals))
    return kept + aval_bytes(x) + sum(map(aval_bytes, masks))


def _print_times(rows: Sequence[TimeRow]) -> None:
    table = Table(
        "model", "recomputation", "published s", "ours s", "difference", title="Iterations"
    )
    for row in rows:
        seconds = f"{row.ours.seconds:.2f}"
        table.add_row(row.model, row.recompute, f"{row.published}", seconds, f"{row.error:+.1%}")
    CONSOLE.print(table)
    mean = sum(abs(row.error) for row in rows) / len(rows)
    CONSOLE.print(f"mean absolute error {mean:.1%} (goal 8 %)\n")


def _print_activations(rows: Sequence[dict[str, str]]) -> None:
    table = Table("model", "form", "published MB", "counted MB", "difference", title="Activations")
    notes = []
    for row in rows:
        run = training(row)
        for found in activations(row["model"], run.shape, run.tensor):
            published, counted = (f"{n / 1e6:.1f}" for n in (found.published, found.counted))
            table.add_row(found.model, found.form, published, counted, f"{found.error:+.2%}")
        ours = runtime_bytes(run.shape) / 1e6
        notes.append(f"{row['model']} {ours:.1f} MB")
    CONSOLE.print(table)
    CONSOLE.print(
        "One layer, one microbatch. What this runtime itself keeps of the layer on one device, for it makes again"
        f" what is cheap: {', '.join(notes)}."
    )


def main() -> None:
    """Prints both tables."""
    print_sources(CONSOLE)
    _print_times(times())
    _print_activations([row for row in read("megatron_times") if row["recompute"] == "full"])


if __name__ == "__main__":
    main()
