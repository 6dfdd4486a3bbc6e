"""Published bubble rates beside the simulator's, from the published times of each op.

Run: python benchmarks/published/bubbles.py
"""

from __future__ import annotations

import dataclasses

from facts import read
from rich.console import Console
from rich.table import Table

from ratrain_jax.simulation.engine import run
from ratrain_jax.simulation.pipelines import Pipeline, StageSeconds, pipeline_tasks


@dataclasses.dataclass(frozen=True)
class Row:
    """One published bubble rate and ours."""

    schedule: str
    stages: int
    microbatches: int
    published: str
    ours: float


def rows() -> list[Row]:
    """All published rows, simulated."""
    return [_simulated(row) for row in read("bubble_rates")]


def _simulated(row: dict[str, str]) -> Row:
    forward, grad_input, grad_weight, transfer = (
        float(row[f"t_{name}_us"])
        for name in ("forward", "backward_input", "backward_weight", "transfer")
    )
    stages, microbatches = int(row["stages"]), int(row["microbatches"])
    backward = grad_input + grad_weight
    stage = StageSeconds(forward, backward, weight=grad_weight, send=transfer)
    # Their rule: a transfer is a pure delay.
    pipeline = Pipeline(row["schedule"].lower(), (stage,) * stages, microbatches, links=False)
    step = run(pipeline_tasks(pipeline)[0]).last
    rate = (step - microbatches * (forward + backward)) / step
    return Row(row["schedule"], stages, microbatches, row["bubble_rate"], rate)


def main() -> None:
    """Prints the table."""
    table = Table("schedule", "stages", "microbatches", "published", "ours", "difference")
    for row in rows():
        difference = row.ours - float(row.published)
        table.add_row(
            row.schedule,
            str(row.stages),
            str(row.microbatches),
            row.published,
            f"{row.ours:.4f}",
            f"{difference:+.5f}",
        )
    console = Console(width=80)
    console.print(table)
    console.print("Published: P. Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024.")


if __name__ == "__main__":
    main()
