"""The figures of RATrain (arXiv 2606.10415) beside those of the simulator, for one cluster type: MT-3000.

    python examples/reproduce_paper.py                 # every table, about six minutes
    python examples/reproduce_paper.py --only scaling

Each figure is printed three times: on the built-in `mt3000` as it is, and with one parameter of it, the cores' clock, fitted
to the paper's first scaling row alone, once with `recovery="forward"` and once with `recovery="auto"` (`paper_fit.py`).
Where the paper and a model of dependences disagree by more than 5 %, a sentence says what the difference comes from.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from paper_ablation import DEPTH, MICROBATCHES, ablated
from paper_fit import CLUSTERS, NAME, NOMINAL, RECOVERIES, clock_of, fit, leeway, published_seconds
from paper_memory import (
    BATCH,
    fewest_allocated,
    fewest_by_the_papers_terms,
    fewest_of_any,
    least_peak,
    peak_of_the_papers_terms,
)
from paper_planning import (
    MACHINE,
    MINIMUM,
    PREDICTED,
    SCALING,
    SEQUENCE,
    STRATEGIES,
    TOKENS_A_CLUSTER,
    UNPUBLISHED,
    depths,
    step_of,
    work_of,
)
from paper_tables import CONSOLE, LARGE, Figure, show
from rich.table import Table

from ratrain_jax.kernels import Attention, Machine, cost_attention
from ratrain_jax.models import load_config
from ratrain_jax.planning.configuration import Configuration
from ratrain_jax.planning.workload import Workload

Machines = Sequence[Machine]
"""The machine as described, and with its clock fitted with either recovery."""


def works(name: str, batch: int, machines: Machines, sequence: int = SEQUENCE) -> list[Workload]:
    """A model's train step on each machine."""
    return [work_of(name, batch, machine, sequence) for machine in machines]


def minimum_clusters(machines: Machines) -> None:
    """The fewest clusters on which each model fits, and the peak memory of a cluster."""
    figures = []
    for name, (clusters, depth, peak) in MINIMUM.items():
        all_works = works(name, BATCH, machines)
        allocated = [fewest_allocated(work) for work in all_works]
        table = all_works[0].table(1)
        terms = fewest_by_the_papers_terms(table)
        figures += [
            Figure(
                f"{name}: clusters allocated",
                clusters,
                tuple(n for n, _ in allocated),
                "terms",
                "g",
            ),
            Figure("  by the paper's terms alone", clusters, (terms,) * 3, "terms", "g"),
            Figure("  clusters, any number", None, tuple(map(fewest_of_any, all_works)), "", "g"),
            Figure("  depth of the allocated", depth, tuple(p for _, p in allocated), "depth", "g"),
            Figure(
                f"  peak GB, {clusters} clusters, depth {depth}",
                peak,
                tuple(least_peak(work, clusters, depth) for work in all_works),
                "terms",
                ".2f",
            ),
            Figure(
                "  by the paper's terms alone",
                peak,
                (peak_of_the_papers_terms(table, clusters, depth),) * 3,
                "split",
                ".2f",
            ),
        ]
    show(figures, "Clusters, pipeline depth and GB of the fullest cluster")


def scaling(machines: Machines) -> None:
    """LLaMA-2-7B from 256 to 1,024 clusters, the batch growing with them."""
    rates: dict[str, dict[int, tuple[float, ...]]] = {recovery: {} for recovery in RECOVERIES}
    for clusters in SCALING:
        tokens = clusters * TOKENS_A_CLUSTER
        all_works = works("llama2-7b", tokens // SEQUENCE, machines)
        for recovery, found in rates.items():
            found[clusters] = tuple(
                tokens / step_of(work, clusters, recoveries=(recovery,)) for work in all_works
            )
    figures = [
        Figure(
            f"{clusters} clusters, {recovery}", paper, rates[recovery][clusters], recovery, ",.0f"
        )
        for clusters, paper in SCALING.items()
        for recovery in RECOVERIES
    ]
    first, last = min(SCALING), max(SCALING)
    for recovery, found in rates.items():
        kept = tuple(b / a * first / last for a, b in zip(found[first], found[last], strict=True))
        published = SCALING[last] / SCALING[first] * first / last
        figures.append(Figure(f"{first} to {last}, {recovery}", published, kept, "scaling", ".1%"))
    show(figures, "Tokens a second of LLaMA-2-7B, and the share of linear scaling")


def predicted(machines: Machines) -> None:
    """Steps of three models as the paper's planner predicts them, as measured, and ours."""
    figures = []
    for name, (theirs, measured) in PREDICTED.items():
        known = name == "llama2-7b"
        all_works = works(name, CLUSTERS * TOKENS_A_CLUSTER // SEQUENCE, machines)
        for clusters in (CLUSTERS,) if known else UNPUBLISHED:
            for recovery in RECOVERIES:
                found = tuple(
                    step_of(work, clusters, stages=depths(work, clusters), recoveries=(recovery,))
                    for work in all_works
                )
                cause = recovery if known else "unpublished"
                figures.append(Figure(f"{name}, {clusters}, {recovery}", measured, found, cause))
        figures.append(Figure("  the paper's planner", measured, (theirs,) * 3))
    show(
        figures, "Seconds of a step of 2^22 tokens, by model and clusters: measured, and predicted"
    )


RATRAIN = {"schedules": ("ratrain",), "recoveries": ("forward",)}
STRATEGY_SPACES: dict[str, dict[str, tuple]] = {
    "ratrain": RATRAIN,
    "ratrain, auto": {"schedules": ("ratrain",), "recoveries": ("auto",)},
    "tp-heavy": {**RATRAIN, "tensors": (4,)},
    "zero3-heavy": {**RATRAIN, "zeros": (3,)},
    "backward-checkpoint": {"schedules": ("1f1b",), "recoveries": ("backward",)},
    "tuned-pp-dp-zero": {"schedules": ("1f1b",), "recoveries": ("none", "backward")},
    "full-save": {"recoveries": ("none",)},
}


def strategies(machines: Machines) -> None:
    """Steps of 2^23 tokens under several strategies, for both numbers of clusters that fit."""
    for name, paper in STRATEGIES.items():
        all_works = works(name, 2**23 // SEQUENCE, machines)
        steps = {
            clusters: {
                kind: tuple(_strategy_step(work, clusters, choices) for work in all_works)
                for kind, choices in STRATEGY_SPACES.items()
            }
            for clusters in UNPUBLISHED
        }
        for clusters, other in zip(UNPUBLISHED, reversed(UNPUBLISHED), strict=True):
            figures = []
            for kind, found in steps[clusters].items():
                theirs = paper.get(kind)
                cause = elsewhere(kind, theirs, steps[other][kind])
                figures.append(Figure(kind, theirs, found, cause))
                if theirs and kind not in ("ratrain", "full-save"):
                    ratios = tuple(
                        a / b for a, b in zip(found, steps[clusters]["ratrain"], strict=True)
                    )
                    over = theirs / paper["ratrain"]
                    figures.append(Figure("  over ratrain", over, ratios, kind, ".3f"))
            show(figures, f"Seconds of a step: {name} on {clusters} clusters")


def _strategy_step(work: Workload, clusters: int, choices: dict[str, tuple]) -> float:
    stages = depths(work, clusters, choices.get("tensors", (1,))[0])
    return step_of(work, clusters, stages=stages, **choices)


def elsewhere(cause: str, paper: float | None, other: Sequence[float]) -> tuple[str, ...]:
    """What a difference comes from: the number of clusters where ours at the other number that fits is close.

    Args:
        cause: what it comes from else.
        paper: the paper's figure.
        other: ours at the other number.
    """
    close = Figure("", paper, tuple(other)).differences
    return tuple("clusters" if off is not None and abs(off) <= LARGE else cause for off in close)


def ablation(machines: Machines) -> None:
    """Qwen2.5-32B without each mechanism, at both ZeRO stages, over the batch size and the clusters."""
    for clusters in UNPUBLISHED:
        group = clusters // DEPTH
        tables = {
            m: [work.table(1) for work in works("qwen2.5-32b", group * m, machines)]
            for m in MICROBATCHES
        }
        for zero in (1, 2):
            figures = []
            for m, of_machines in tables.items():
                base = Configuration(
                    stages=DEPTH,
                    data_parallel=group,
                    rows=1,
                    microbatches=m,
                    zero=zero,
                    recovery="forward",
                )
                figures += ablated(base, of_machines, machines)
            show(
                figures,
                f"Without a mechanism, over the full system: zero={zero}, {clusters} clusters",
            )


LENGTHS = (512, 1024, 2048, 3072, 4096)


def sequences(machines: Machines) -> None:
    """LLaMA-2-7B on 256 clusters by the length of the examples; model FLOPs are 6 a parameter and token."""
    figures = []
    times: dict[str, list[tuple[float, ...]]] = {recovery: [] for recovery in RECOVERIES}
    for length in LENGTHS:
        batch = CLUSTERS * TOKENS_A_CLUSTER // length // CLUSTERS * CLUSTERS
        all_works = works("llama2-7b", batch, machines, length)
        tokens = batch * length
        flops = 6 * load_config("llama2-7b").parameters * tokens
        for recovery in RECOVERIES:
            steps = [step_of(work, CLUSTERS, recoveries=(recovery,)) for work in all_works]
            shares = tuple(flops / CLUSTERS / MACHINE.peak("float16") / step for step in steps)
            each = tuple(1e6 * step / tokens for step in steps)
            times[recovery].append(each)
            figures += [
                Figure(f"{length}, {recovery}: µs a token", None, each, "", ".2f"),
                Figure("  model FLOPs, of 8.1 TFLOPS", None, shares, "", ".1%"),
            ]
    best_at = (
        f"{recovery} {', '.join(str(LENGTHS[each.index(min(each))]) for each in zip(*found, strict=True))}"
        for recovery, found in times.items()
    )
    show(
        figures,
        "By the length of the examples",
        "The paper (shape only): better from 512 to 2048, best at 1024 and 2048, slightly worse at 3072"
        f" and 4096. Ours is best at: {'; '.join(best_at)}.",
    )


def attention(machines: Machines) -> None:
    """Backward of LLaMA-2-7B's attention: scores kept on chip, or staged through DDR."""
    figures = []
    for length in (512, 1024, 2048, 4096):
        call = Attention(1, 32, 32, length, length, 128, causal=True)
        resident = [cost_attention(call, machine, "backward") for machine in machines]
        staged = [cost_attention(call, machine, "staged") for machine in machines]
        figures += [
            Figure(
                f"{length}: ms, on chip", None, tuple(1e3 * c.seconds for c in resident), "", ".2f"
            ),
            Figure("  ms, through DDR", None, tuple(1e3 * c.seconds for c in staged), "", ".2f"),
            Figure(
                "  speed-up",
                None,
                tuple(s.seconds / r.seconds for s, r in zip(staged, resident, strict=True)),
                "",
                ".2f",
            ),
            Figure(
                "  MB of DDR, on chip", None, tuple(c.ddr_bytes / 1e6 for c in resident), "", ",.0f"
            ),
            Figure(
                "  MB of DDR, staged", None, tuple(c.ddr_bytes / 1e6 for c in staged), "", ",.0f"
            ),
        ]
    show(figures, "Attention backward of one example")


TABLES: dict[str, Callable[[Machines], None]] = {
    "minimum": minimum_clusters,
    "scaling": scaling,
    "predicted": predicted,
    "strategies": strategies,
    "ablation": ablation,
    "sequences": sequences,
    "attention": attention,
}


def fitted() -> Machines:
    """Fits the machine, prints what was fitted, and gives all three."""
    fits = [fit(recovery) for recovery in RECOVERIES]
    CONSOLE.rule("What is fitted: one parameter, for one row determines no more")
    table = Table("recovery", f"{NAME}, GHz", "fitted", "step s: paper", "ours", "fitted", box=None)
    for found in fits:
        clocks = (f"{clock_of(machine) / 1e9:.3f}" for machine in (MACHINE, found.machine))
        steps = (published_seconds(), found.before, found.after)
        table.add_row(found.recovery, *clocks, *(f"{step:.2f}" for step in steps))
    CONSOLE.print(table)
    CONSOLE.print(
        f"Nominal: {NOMINAL / 1e9:g} GHz. Not fitted, though open, for none of it moves that step far enough:"
    )
    table = Table("parameter", "at the most favourable", "step, forward", box=None)
    for name, value, change in leeway("forward"):
        table.add_row(name, value, f"{change:+.1%}")
    CONSOLE.print(table)
    CONSOLE.print()
    return (MACHINE, *(found.machine for found in fits))


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", choices=TABLES, help="print one table")
    only = parser.parse_args().only
    machines = fitted()
    for name, make in TABLES.items():
        if only in (None, name):
            CONSOLE.rule((make.__doc__ or name).splitlines()[0])
            make(machines)
    CONSOLE.print(
        "The paper's losses (its Fig. 7) are compared by loss_fidelity.py; its usable 20 GB and 3.7 GB/s are the machine's."
    )


if __name__ == "__main__":
    main()
