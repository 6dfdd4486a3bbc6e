"""Fits a few constants of a machine and of a framework to measured iterations.

An iteration is the longest path through its tasks, so near some constants it is linear in the seconds of its stages. The
path is found by the simulator (`path_of`); along it, thousands of evaluations cost no simulation. It is found anew once
the constants have been fitted, and they are fitted again.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np
from megatron import Framework, Training, after, iteration, pipeline_of, stage_seconds
from scipy.optimize import least_squares

from ratrain_jax.kernels import Machine
from ratrain_jax.simulation.causes import Causes
from ratrain_jax.simulation.engine import run
from ratrain_jax.simulation.pipelines import pipeline_tasks

ROUNDS = 2


@dataclasses.dataclass(frozen=True)
class Row:
    """A measured run.

    Attributes:
        file: where it was published.
        training: what ran.
        gpus: how many.
        batch: sequences of an iteration.
        seconds: of an iteration, as measured.
    """

    file: str
    training: Training
    gpus: int
    batch: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Constants:
    """What is fitted.

    Attributes:
        launch: seconds of a kernel's launch.
        exposed: share of launches that the GPU's work does not hide.
        product: share of the peak that large products reach.
        half: operations of a product at which half of that is reached.
        memory: share of memory's bandwidth that is reached.
        link: factor on the efficiencies of all links.
    """

    launch: float
    exposed: float
    product: float
    half: float
    memory: float
    link: float

    def on(self, machine: Machine) -> tuple[Machine, Framework]:
        """A machine with these constants, and the framework."""
        links = tuple(
            dataclasses.replace(link, efficiency=min(1.0, link.efficiency * self.link))
            for link in machine.links
        )
        changed = dataclasses.replace(
            machine,
            product_efficiency=self.product,
            product_half_flops=self.half,
            memory_efficiency=self.memory,
            links=links,
        )
        return changed, Framework(self.launch, self.exposed)


LEAST = Constants(5e-6, 1e-3, 0.3, 1e8, 0.3, 0.2)
MOST = Constants(2e-4, 1.0, 1.0, 1e11, 1.0, 1.25)

Path = dict[tuple[str, int], int]
"""How often forward (`F`), backward (`B`) and sending (`S`) of each stage stand on the longest path."""


def predict(rows: Sequence[Row], constants: Constants, machine: Machine) -> np.ndarray:
    """Simulated seconds of each row."""
    found = constants.on(machine)
    return np.array([iteration(row.training, *found).seconds for row in rows])


def path_of(training: Training, machine: Machine, framework: Framework) -> Path:
    """The longest path of an iteration."""
    if training.stages == 1:
        return {("F", 0): training.microbatches, ("B", 0): training.microbatches}
    stages = stage_seconds(training, machine, framework)
    tasks, numbers = pipeline_tasks(pipeline_of(training, stages))
    known = {number: (kind, place) for (kind, place, _), number in numbers.items()}
    found = run(tasks)
    causes = Causes(tasks, found, prefer=lambda number: number not in known)
    chain = causes.chain(int(np.argmax(found.end)))
    return collections.Counter(known.get(number, ("S", 0)) for number, _ in chain)


def along(path: Path, training: Training, machine: Machine, framework: Framework) -> float:
    """Seconds of an iteration whose longest path is known."""
    stages = stage_seconds(training, machine, framework)
    total = sum(after(training, machine))
    for (kind, place), count in path.items():
        stage = stages[place]
        total += count * {"F": stage.forward, "B": stage.backward, "S": stage.send}[kind]
    return total


def fit(rows: Sequence[Row], start: Constants, machine: Machine) -> Constants:
    """The constants of least squares of log ratios, in which each file weighs the same.

    Args:
        rows: what was measured.
        start: where the search begins.
        machine: what the constants are not of.
    """
    files = collections.Counter(row.file for row in rows)
    weights = np.array([files[row.file] ** -0.5 for row in rows])
    measured = np.log([row.seconds for row in rows])
    low, high = (np.log(dataclasses.astuple(end)) for end in (LEAST, MOST))
    inside = np.clip(np.log(np.maximum(dataclasses.astuple(start), 1e-12)), low + 1e-3, high - 1e-3)
    for _ in range(ROUNDS):
        constants = Constants(*np.exp(inside).tolist())
        found = constants.on(machine)
        paths = [path_of(row.training, *found) for row in rows]

        def residuals(logs: np.ndarray, paths: Sequence[Path] = paths) -> np.ndarray:
            found = Constants(*np.exp(logs).tolist()).on(machine)
            pairs = zip(paths, rows, strict=True)
            ours = [along(path, row.training, *found) for path, row in pairs]
            return weights * (np.log(ours) - measured)

        inside = least_squares(residuals, inside, bounds=(low, high), diff_step=1e-3, xtol=1e-4).x
    return Constants(*np.exp(inside).tolist())


def cross_validate(
    rows: Sequence[Row], start: Constants, machine: Machine, folds: int
) -> np.ndarray:
    """Seconds of each row by constants fitted to the other folds; a row's fold is its place modulo `folds`."""
    found = np.zeros(len(rows))
    for fold in range(folds):
        rest = [row for place, row in enumerate(rows) if place % folds != fold]
        mine = list(range(fold, len(rows), folds))
        constants = fit(rest, start, machine)
        found[mine] = predict([rows[place] for place in mine], constants, machine)
    return found
