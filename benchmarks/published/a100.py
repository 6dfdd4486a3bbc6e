"""Measured iteration times of GPT training on A100s beside the model's: by published constants, then calibrated.

Run: python benchmarks/published/a100.py [--folds 5] [--all]

By published constants, nothing comes from the rows (`constants`). Calibrated, six constants (`calibration.Constants`) are
fitted to all rows of both files at once by least squares of log ratios, each file weighing the same; no row has a constant
of its own. How well that carries over to other rows is shown by cross-validation: each row predicted by constants that
were fitted without its fold.

Published: the data of vTrain (VIA Research, MIT licence); see the headers of the files.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from calibration import LEAST, MOST, Constants, Row, cross_validate, fit, predict
from constants import LAUNCH, PUBLISHED, print_sources
from facts import read
from gpt_kernels import Shape
from megatron import Training
from rich.console import Console
from rich.table import Table

FILES = {"a100_multi_node": (12, 10), "a100_single_node": (36, 9)}
"""The goals of mean absolute error in per cent: by published constants, and calibrated."""

START = Constants(
    launch=LAUNCH,
    exposed=0.0,
    product=PUBLISHED.product_efficiency,
    half=PUBLISHED.product_half_flops,
    memory=PUBLISHED.memory_efficiency,
    link=1.0,
)
VOCABULARY = 50257
CONSOLE = Console(width=100)


def rows() -> list[Row]:
    """The rows of both files."""
    return [_row(name, line) for name in FILES for line in read(name)]


def _row(file: str, line: dict[str, str]) -> Row:
    hidden, heads, sequence, rows, layers, tensor, data, stages, gpus, batch = (
        int(line[key])
        for key in (
            *("hidden", "heads", "seq", "micro_batch", "layers"),
            *("tp", "dp", "pp", "gpus", "global_batch"),
        )
    )
    padded = -(-VOCABULARY // (128 * tensor)) * 128 * tensor  # as Megatron-LM pads it
    shape = Shape(hidden, heads, sequence, rows, padded)
    training = Training(shape, layers, tensor, data, stages, batch // (data * rows))
    return Row(file, training, gpus, batch, float(line["iteration_ms"]) / 1e3)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The plan that the model prefers among the measured ones of a model on some GPUs with some batch.

    Attributes:
        rows: the measured runs.
        best: the one that was quickest.
        preferred: the one that the model says is quickest.
    """

    rows: tuple[Row, ...]
    best: Row
    preferred: Row

    @property
    def loss(self) -> float:
        """How much longer the preferred one took than the best."""
        return self.preferred.seconds / self.best.seconds - 1


def choices(measured: Sequence[Row], found: np.ndarray) -> list[Choice]:
    """All groups of two or more rows that differ in the plan alone."""

    def key(pair: tuple[Row, float]) -> tuple[str, int, int, int, int]:
        row = pair[0]
        return (row.file, row.training.shape.hidden, row.training.layers, row.gpus, row.batch)

    made = []
    for _, group in itertools.groupby(sorted(zip(measured, found, strict=True), key=key), key):
        members = list(group)
        if len(members) > 1:
            best = min((row for row, _ in members), key=lambda row: row.seconds)
            preferred = min(members, key=lambda pair: pair[1])[0]
            made.append(Choice(tuple(row for row, _ in members), best, preferred))
    return made


def errors(measured: Sequence[Row], found: np.ndarray) -> np.ndarray:
    """Predicted over measured, less 1."""
    return found / np.array([row.seconds for row in measured]) - 1


def mean_errors(measured: Sequence[Row], found: np.ndarray) -> dict[str, float]:
    """The mean absolute error of each file."""
    off = np.abs(errors(measured, found))
    return {
        name: float(off[[place for place, row in enumerate(measured) if row.file == name]].mean())
        for name in FILES
    }


def _cells(row: Row) -> tuple[str, ...]:
    t = row.training
    numbers = (
        t.shape.hidden,
        t.layers,
        row.gpus,
        row.batch,
        t.shape.rows,
        t.tensor,
        t.data,
        t.stages,
    )
    return tuple(map(str, numbers))


_HEADS = ("h", "layers", "GPUs", "batch", "b", "t", "d", "p")


def _print_rows(title: str, measured: Sequence[Row], plain: np.ndarray, fitted: np.ndarray) -> None:
    heads = ("published s", "ours", "diff.", "calibrated", "diff.")
    table = Table(*_HEADS, *heads, title=title, box=None, title_justify="left")
    pairs = [(found, errors(measured, found)) for found in (plain, fitted)]
    for place, row in enumerate(measured):
        ours = [f for found, off in pairs for f in (f"{found[place]:.3f}", f"{off[place]:+.1%}")]
        table.add_row(*_cells(row), f"{row.seconds:.3f}", *ours)
    CONSOLE.print(table)


def _print_choices(title: str, made: Sequence[Choice], *, everything: bool) -> None:
    heads = ("model", "GPUs", "batch", "rows", "best s", "preferred s", "more", "preferred t,d,p,b")
    table = Table(*heads, title=title, box=None, title_justify="left")
    shown = [c for c in made if everything or c.loss > 0.05 or c.best.file == "a100_multi_node"]
    for choice in shown:
        t, best = choice.preferred.training, choice.best
        table.add_row(
            f"h={t.shape.hidden}, {t.layers} layers",
            *(str(n) for n in (best.gpus, best.batch, len(choice.rows))),
            *(f"{row.seconds:.3f}" for row in (best, choice.preferred)),
            f"{choice.loss:.1%}",
            f"{t.tensor}, {t.data}, {t.stages}, {t.shape.rows}",
        )
    CONSOLE.print(table)
    for line in _summaries(made):
        CONSOLE.print(line)


def _summaries(made: Sequence[Choice]) -> Iterator[str]:
    for name in FILES:
        losses = [choice.loss for choice in made if choice.best.file == name]
        within = sum(loss <= 0.05 for loss in losses)
        mean = sum(losses) / len(losses)
        yield (
            f"{name}: at most 5 % more than the best in {within} of {len(losses)} groups;"
            f" {mean:.1%} more in the mean, {max(losses):.1%} at the most"
        )


def _print_constants(constants: Constants) -> None:
    table = Table("calibrated", "published", "fitted", "bounds", box=None)
    for field in dataclasses.fields(Constants):
        numbers = (getattr(one, field.name) for one in (START, constants, LEAST, MOST))
        published, fitted, least, most = (f"{number:.4g}" for number in numbers)
        table.add_row(field.name, published, fitted, f"{least} to {most}")
    CONSOLE.print(table)


def _print_means(found: dict[str, dict[str, float]]) -> None:
    table = Table("mean absolute error", "rows", *found, "goals", title="Errors")
    for name, goals in FILES.items():
        shown = (f"{means[name]:.1%}" for means in found.values())
        table.add_row(name, str(len(read(name))), *shown, f"{goals[0]} %, {goals[1]} %")
    CONSOLE.print(table)


def main() -> None:
    """Prints all tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folds", type=int, default=5, help="of the cross-validation; 0 for none")
    parser.add_argument("--all", action="store_true", help="print every row and group")
    options = parser.parse_args()
    print_sources(CONSOLE)
    measured = rows()
    plain = predict(measured, START, PUBLISHED)
    constants = fit(measured, START, PUBLISHED)
    fitted = predict(measured, constants, PUBLISHED)
    means = {"published": mean_errors(measured, plain), "calibrated": mean_errors(measured, fitted)}
    if options.folds:
        others = cross_validate(measured, START, PUBLISHED, options.folds)
        means[f"{options.folds}-fold"] = mean_errors(measured, others)
    _print_constants(constants)
    _print_means(means)
    off = np.abs(errors(measured, fitted)) > 0.2
    shown = [
        n for n, row in enumerate(measured)
        if options.all or off[n] or row.file == "a100_multi_node"
    ]  # fmt: skip
    title = "All rows" if options.all else "All rows of the first file, and rows over 20 % off"
    _print_rows(title, [measured[n] for n in shown], plain[shown], fitted[shown])
    CONSOLE.print(f"{off.sum()} of {len(measured)} rows are over 20 % off after calibration.\n")
    for title, found in (("published constants", plain), ("calibrated", fitted)):
        title = f"Preferred plans, {title}" + (
            "" if options.all else ": over 5 %, and several nodes"
        )
        _print_choices(title, choices(measured, found), everything=options.all)


if __name__ == "__main__":
    main()
