"""What the rows of one node are made of, and what of the plans that the model prefers there comes down to it.

Run: python benchmarks/published/composed.py

Rows of one stage follow, for each shape (hidden size, tensor-parallel ranks, sequences of a microbatch),

    iteration = microbatches · (layers · layer + ends) + layers · after + rest

with one time of a layer and one of embedding and head for each shape, and two for each number of data-parallel ranks: 100
times for 364 rows. Where there is one data-parallel rank they leave nothing but rounding. Runs that were timed one by one
would differ by their noise; these are composed of one timing a shape, and what was off in it is off in all rows of that shape.

Printed are those times of a layer; what a layer takes more from 4 to 8 sequences, beside the least that the data sheet's
rates allow with and without recomputation; and how many groups' preferred plans are within 5 % of the best once the model
is handed the rows' own time for a few shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import a100
import numpy as np
from calibration import Constants, Row, fit, predict
from constants import A100, PUBLISHED
from kernel_costs import backward_kernels, forward_kernels, gpu_seconds
from megatron import Training, stage_seconds
from rich.table import Table

Shape = tuple[int, int, int]
"""Hidden size, tensor-parallel ranks, sequences of a microbatch."""
FILE = "a100_single_node"
CORRECTED = 4


def shape_of(training: Training) -> Shape:
    """What a layer's time depends on."""
    return training.shape.hidden, training.tensor, training.shape.rows


@dataclasses.dataclass(frozen=True)
class Composition:
    """Rows of one stage as sums.

    Attributes:
        layers: seconds of a layer (forward, recomputation, backward) of one microbatch, by shape.
        rows: the rows.
        unknowns: how many times explain them.
        errors: the sum over the row's time, less 1, of each.
    """

    layers: dict[Shape, float]
    rows: tuple[Row, ...]
    unknowns: int
    errors: np.ndarray


def compose(measured: Sequence[Row]) -> Composition:
    """Finds the times that the rows of one stage are sums of, by least squares of relative errors."""
    rows = tuple(row for row in measured if row.training.stages == 1)
    shapes = sorted({shape_of(row.training) for row in rows})
    groups = sorted({(*shape_of(row.training)[:2], row.training.data) for row in rows})
    matrix = np.zeros((len(rows), 2 * (len(shapes) + len(groups))))
    for line, row in zip(matrix, rows, strict=True):
        t = row.training
        shape = shapes.index(shape_of(t))
        group = 2 * len(shapes) + groups.index((*shape_of(t)[:2], t.data))
        line[shape] = t.microbatches * t.layers
        line[len(shapes) + shape] = t.microbatches
        line[group], line[group + len(groups)] = t.layers, 1
        line /= row.seconds
    found, _, rank, _ = np.linalg.lstsq(matrix, np.ones(len(rows)), rcond=1e-12)
    layers = {shape: float(found[place]) for place, shape in enumerate(shapes)}
    return Composition(layers, rows, int(rank), matrix @ found - 1)


def rounding(measured: Sequence[Row]) -> tuple[int, float]:
    """How many rows of one stage and one data-parallel rank are told by fewer times, and the largest error of the sums.

    Args:
        measured: the rows.
    """
    count, most = 0, 0.0
    alone = [row for row in measured if row.training.stages == row.training.data == 1]
    for shape in {shape_of(row.training) for row in alone}:
        found = compose([row for row in alone if shape_of(row.training) == shape])
        if found.unknowns < len(found.rows):
            count += len(found.rows)
            most = max(most, float(np.abs(found.errors).max()))
    return count, most


def least_gain(training: Training, few: int, many: int, *, again: bool) -> float:
    """Seconds that a layer takes more for a larger microbatch at least: all rates are the data sheet's peaks.

    Args:
        training: says the layer, but for the sequences of a microbatch.
        few: sequences of the smaller one.
        many: of the larger one.
        again: whether forward runs twice.
    """
    links = tuple(dataclasses.replace(link, efficiency=1.0, latency=0.0) for link in A100.links)
    peak = dataclasses.replace(
        A100, product_efficiency=1.0, product_half_flops=0.0, memory_efficiency=1.0, links=links
    )

    def one(rows: int) -> float:
        sized = dataclasses.replace(training, shape=dataclasses.replace(training.shape, rows=rows))
        layer = sized.parts[1]
        forward, backward = (
            gpu_seconds(kernels(layer, sized.tensor), peak, sized.tensor)
            for kernels in (forward_kernels, backward_kernels)
        )
        return (1 + again) * forward + backward

    return one(many) - one(few)


def corrections(
    measured: Sequence[Row], layers: dict[Shape, float], constants: Constants
) -> dict[Shape, float]:
    """Seconds by which the rows' time of a layer is more than the model's, by shape."""
    machine, framework = constants.on(PUBLISHED)

    def one_pass(training: Training, count: int) -> float:
        alone = dataclasses.replace(training, layers=count, stages=1, data=1)
        stage = stage_seconds(alone, machine, framework)[0]
        return stage.forward + stage.backward

    known = {shape_of(row.training): row.training for row in measured}
    return {
        shape: seconds - (one_pass(known[shape], 24) - one_pass(known[shape], 12)) / 12
        for shape, seconds in layers.items()
    }


def corrected(
    measured: Sequence[Row], found: np.ndarray, by: dict[Shape, float], shapes: set[Shape]
) -> list[a100.Choice]:
    """The preferred plans where the model has the rows' own time of a layer for some shapes.

    Args:
        measured: the rows.
        found: their seconds by the model.
        by: what `corrections` gives.
        shapes: those that are corrected.
    """
    seconds = found.copy()
    for place, row in enumerate(measured):
        t = row.training
        if shape_of(t) in shapes:
            passes = (t.microbatches + t.stages - 1) * t.layers / t.stages
            seconds[place] += passes * by[shape_of(t)]
    return a100.choices(measured, seconds)


def decisive(
    measured: Sequence[Row], found: np.ndarray, by: dict[Shape, float]
) -> list[tuple[Shape, list[a100.Choice]]]:
    """The shapes whose correction brings most groups within 5 %, one after the other, and the plans preferred with them."""
    chosen: list[tuple[Shape, list[a100.Choice]]] = []
    for _ in range(CORRECTED):
        done = {shape for shape, _ in chosen}
        tried = [(s, corrected(measured, found, by, {*done, s})) for s in by if s not in done]
        chosen.append(max(tried, key=lambda pair: (within(pair[1]), -_mean(pair[1]))))
    return chosen


def within(made: Sequence[a100.Choice]) -> int:
    """Groups whose preferred plan takes at most 5 % more than the best."""
    return sum(choice.loss <= 0.05 for choice in made)


def _mean(made: Sequence[a100.Choice]) -> float:
    return sum(choice.loss for choice in made) / len(made)


def _print_layers(layers: dict[Shape, float], by: dict[Shape, float]) -> None:
    sizes = sorted({b for *_, b in layers})
    heads = [f"b={b}" for b in sizes]
    title = "Milliseconds of a layer: the rows', ours; < where a larger microbatch takes less"
    table = Table("h", "t", *heads, title=title, box=None, title_justify="left")
    for h, t in sorted({shape[:2] for shape in layers}):
        cells, before = [], 0.0
        for b in sizes:
            seconds = layers[h, t, b]
            mark = " <" if seconds < before else ""
            cells.append(f"{1e3 * seconds:.2f} {1e3 * (seconds - by[h, t, b]):.2f}{mark}")
            before = seconds
        table.add_row(str(h), str(t), *cells)
    a100.CONSOLE.print(table)


def _print_gains(measured: Sequence[Row], layers: dict[Shape, float], few: int, many: int) -> None:
    title = f"Milliseconds more of a layer, {many} sequences against {few}"
    heads = ("h", "t", "rows", "least, recomputed", "least, not recomputed")
    table = Table(*heads, title=title, box=None, title_justify="left")
    known = {shape_of(row.training)[:2]: row.training for row in measured}
    for (h, t), training in sorted(known.items()):
        gain = layers[h, t, many] - layers[h, t, few]
        least = (least_gain(training, few, many, again=again) for again in (True, False))
        table.add_row(str(h), str(t), *(f"{1e3 * seconds:.2f}" for seconds in (gain, *least)))
    a100.CONSOLE.print(table)


def _print_choices(made: Sequence[a100.Choice], what: str) -> None:
    most = max(choice.loss for choice in made)
    a100.CONSOLE.print(
        f"{what}: at most 5 % more than the best in {within(made)} of {len(made)} groups;"
        f" {_mean(made):.1%} more in the mean, {most:.1%} at the most"
    )


def main() -> None:
    """Prints the times and the choices."""
    everything = a100.rows()
    measured = [row for row in everything if row.file == FILE]
    sums = compose(measured)
    off = np.abs(sums.errors)
    exact, most = rounding(measured)
    a100.CONSOLE.print(
        f"{len(sums.rows)} rows of one stage are sums of {sums.unknowns} times: {(off < 1e-3).mean():.0%} of them to 0.1 %,"
        f" all to {off.max():.1%}; {exact} rows of one data-parallel rank, each shape by itself, to {most:.0e}.\n"
    )
    constants = fit(everything, a100.START, PUBLISHED)
    found = predict(measured, constants, PUBLISHED)
    by = corrections(measured, sums.layers, constants)
    _print_layers(sums.layers, by)
    _print_gains(measured, sums.layers, 4, 8)
    _print_choices(a100.choices(measured, found), "Calibrated")
    for shape, made in decisive(measured, found, by):
        _print_choices(made, "and with the rows' layer of h={}, t={}, b={}".format(*shape))


if __name__ == "__main__":
    main()
