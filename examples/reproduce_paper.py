"""The figures of RATrain (arXiv 2606.10415) beside those of the simulator, for one cluster type: MT-3000.

    python examples/reproduce_paper.py                 # every table, about three minutes
    python examples/reproduce_paper.py --only scaling

Nothing is fitted: the machine is the built-in `mt3000`, whose assumed values `rt.machines.load("mt3000").assumed` lists.
Where the paper and a model of dependences disagree, both are printed, with what the difference comes from.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

import ratrain_jax as rt
from ratrain_jax.kernels import Attention, cost_attention
from ratrain_jax.models import language_model, load_config
from ratrain_jax.planning.configuration import Configuration
from ratrain_jax.planning.fewest import fewest_devices
from ratrain_jax.planning.planner import MARGIN, workload
from ratrain_jax.planning.search import Candidate, look_at, search
from ratrain_jax.planning.space import Space
from ratrain_jax.planning.workload import Workload

MACHINE = rt.machines.load("mt3000")
LIMIT = int(MACHINE.usable_bytes * (1 - MARGIN))
ALLOCATIONS = (8, 16, 32, 64, 96, 128)
SEQUENCE = 2048
CONSOLE = Console(width=100, emoji=False)

# Secondary: the fewest clusters, their pipeline depth, and the peak in GB of a cluster.
MINIMUM = {
    "llama2-7b": (8, 2, 19.57),
    "baichuan2-13b": (16, 8, 19.06),
    "qwen2.5-32b": (64, 16, 18.14),
    "llama2-70b": (96, 48, 19.46),
}
# Tokens a second of LLaMA-2-7B; 1,024 stated, the others secondary. The batch grows with the clusters.
SCALING = {256: 29069.73, 512: 57558.07, 768: 85465.01, 1024: 112790.55}
# Secondary: seconds of a step of 2^23 tokens; the number of clusters is not published.
STRATEGIES = {
    "llama2-13b": {
        "ratrain": 688.09,
        "zero3-heavy": 717.93,
        "backward-checkpoint": 937.04,
        "tuned-pp-dp-zero": 945.84,
    },
    "qwen2.5-32b": {"ratrain": 1592.51, "zero3-heavy": 1798.78, "backward-checkpoint": 2162.54},
}
# Stated: Qwen2.5-32B, step and tail over those of the full system.
ABLATION = {
    "nothing": (1.00, 1.00),
    "forward recovery": (1.33, 1.00),
    "update-prefetch": (1.01, 2.31),
    "layerwise state": (1.03, 4.59),
}


def work_of(name: str, batch: int, sequence: int = SEQUENCE) -> Workload:
    """A model's train step, to plan for."""
    lm = language_model(load_config(name), sequence=sequence)
    return workload(lm.step, (lm.abstract_state(), lm.abstract_batch(1)), MACHINE, batch)


def best(work: Workload, devices: int, **choices: tuple) -> Candidate | None:
    """The fastest configuration with microbatches of one or two examples."""
    options = {"rows": (1, 2), "zeros": (2, 1), **choices}
    layers = len(work.table(1).rows)
    space = Space(devices=devices, global_batch=work.global_batch, layers=layers, **options)
    return search(space, work.table, MACHINE, LIMIT).best


def difference(ours: float, paper: float) -> str:
    """Ours over the paper's."""
    return f"{ours / paper - 1:+.1%}"


def minimum_clusters() -> Iterator[Table]:
    """The fewest clusters on which each model fits: any number, and the allocations with D of 2 or more."""
    table = Table(
        "model", "paper", "ours, any", "ours, allocations", "depth", "peak GB: paper", "ours"
    )
    for name, (clusters, depth, peak) in MINIMUM.items():
        work = work_of(name, 3840)  # shares factors with every number of clusters
        layers = len(work.table(1).rows)
        space = Space(devices=1, global_batch=3840, layers=layers, rows=(1,), zeros=(2,))
        free = fewest_devices(space, work.table, MACHINE, LIMIT, range(2, 257))
        doubled = [
            (count, tuple(p for p in range(1, layers + 1) if count % (2 * p) == 0))
            for count in ALLOCATIONS
        ]
        allocated, found = 0, None
        for count, stages in doubled:
            found = best(work, count, rows=(1,), zeros=(2,), stages=stages, schedules=("ratrain",))
            if found is not None:
                allocated = count
                break
        fullest = (
            max(s.memory.total for s in found.split.stages) / 1e9 if found and found.split else 0
        )
        shown = f"{found.configuration.stages} ({depth})" if found else ""
        table.add_row(
            name,
            str(clusters),
            str(free),
            str(allocated or "more"),
            shown,
            f"{peak}",
            f"{fullest:.2f}" if fullest else "",
        )
    yield table
    CONSOLE.print(
        "Ours counts what the runtime holds beside the paper's terms: the whole float32 gradient of the layer that is"
        " being synchronised, the residuals of one recovered microbatch, and the logits."
    )


def scaling() -> Iterator[Table]:
    """LLaMA-2-7B from 256 to 1,024 clusters, the batch growing with them."""
    table = Table("clusters", "paper tokens/s", "forward", "difference", "auto", "difference")
    for clusters, paper in SCALING.items():
        work = work_of("llama2-7b", 8 * clusters)
        cells = []
        for recovery in ("forward", "auto"):
            found = best(work, clusters, recoveries=(recovery,))
            assert found is not None
            assert found.seconds is not None
            rate = work.global_batch * SEQUENCE / found.seconds.step
            cells += [f"{rate:,.0f}", difference(rate, paper)]
        table.add_row(str(clusters), f"{paper:,.0f}", *cells)
    yield table
    CONSOLE.print(
        "The paper scales to 97.0 %. Here every cluster has the same link whatever their number, so that a larger ring"
        " only adds latency; stragglers and contention are not modelled."
    )


def strategies() -> Iterator[Table]:
    """Steps of 2^23 tokens under several strategies, for both numbers of clusters that fit."""
    kinds = {
        "ratrain": {"schedules": ("ratrain",), "recoveries": ("forward",)},
        "ratrain, auto": {"schedules": ("ratrain",), "recoveries": ("auto",)},
        "zero3-heavy": {"schedules": ("ratrain",), "zeros": (3,), "recoveries": ("forward",)},
        "backward-checkpoint": {"schedules": ("1f1b",), "recoveries": ("backward",)},
        "tuned-pp-dp-zero": {"schedules": ("1f1b",)},
        "full-save": {"recoveries": ("none",), "zeros": (1,)},
    }
    for name, paper in STRATEGIES.items():
        work = work_of(name, 2**23 // SEQUENCE)
        table = Table(
            "strategy", "paper s", "192: s", "difference", "256: s", "difference", title=name
        )
        for kind, choices in kinds.items():
            cells = []
            for clusters in (192, 256):
                # 4,096 examples do not divide by 3: only depths that take the factor.
                depths = tuple(
                    p for p in range(1, 65) if clusters % p == 0 and 4096 % (clusters // p) == 0
                )
                found = best(work, clusters, stages=depths, **choices)
                if found is None or found.seconds is None:
                    cells += ["out of memory", ""]
                    continue
                step = found.seconds.step
                cells += [f"{step:.1f}", difference(step, paper[kind]) if kind in paper else ""]
            table.add_row(kind, str(paper.get(kind, "")), *cells)
        yield table
    CONSOLE.print("Tensor parallelism (the paper's tp-heavy) is not costed here.")


def ablation() -> Iterator[Table]:
    """Qwen2.5-32B without each mechanism, at both ZeRO stages and for smaller batches."""
    switched = {
        "nothing": {},
        "forward recovery": {"recovery": "backward"},
        "update-prefetch": {"update_prefetch": False},
        "layerwise state": {"layerwise_state": False, "update_prefetch": False},
    }
    for zero in (1, 2):
        table = Table(
            "without",
            "paper step",
            "tail",
            *(f"m={m}: step, tail" for m in (8, 32, 256)),
            title=f"zero={zero}",
        )
        rows: dict[str, list[str]] = {name: [] for name in ABLATION}
        for m in (8, 32, 256):
            # 16 stages of 16 clusters, as far as the published depth and number of clusters go.
            work = work_of("qwen2.5-32b", 16 * m)
            base = Configuration(
                stages=16, data_parallel=16, rows=1, microbatches=m, zero=zero, recovery="forward"
            )
            steps = {}
            for name, change in switched.items():
                chosen = dataclasses.replace(base, **change)
                steps[name] = look_at(chosen, work.table(1), MACHINE, 10**12).seconds
            full = steps["nothing"]
            assert full is not None
            for name, found in steps.items():
                assert found is not None
                rows[name].append(f"{found.step / full.step:.3f}, {found.tail / full.tail:.2f}")
        for name, cells in rows.items():
            step, tail = ABLATION[name]
            table.add_row(name, f"{step:.2f}", f"{tail:.2f}", *cells)
        yield table
    CONSOLE.print(
        "1.33 would be the gain if recovery were free; ahead of the gradient it only hides in the pipeline's bubble, so"
        " that the gain is (m+P-1)·4/(4m+3(P-1)) at forward 1, backward 2, recovery 1. Without update-prefetch our program"
        " still gathers each view only before the block that reads it; the paper waits for a stage's last one, hence its"
        " longer tails. Memory limits are left out here."
    )


def sequences() -> Iterator[Table]:
    """LLaMA-2-7B at 256 clusters by the length of the examples; model FLOPs are 6 a parameter and token."""
    table = Table("sequence", "step s", "µs a token", "model FLOPs, of 8.1 TFLOPS")
    for length in (512, 1024, 2048, 3072, 4096):
        batch = 2**22 // length // 256 * 256
        work = work_of("llama2-7b", batch, length)
        found = best(work, 256, recoveries=("auto",))
        if found is None or found.seconds is None:
            table.add_row(str(length), "does not fit", "", "")
            continue
        tokens = batch * length
        flops = 6 * load_config("llama2-7b").parameters * tokens
        share = flops / 256 / 8.11e12 / found.seconds.step
        step = found.seconds.step
        table.add_row(str(length), f"{step:.1f}", f"{1e6 * step / tokens:.2f}", f"{share:.1%}")
    yield table
    CONSOLE.print(
        "The paper: better from 512 to 2048, then slightly worse at 3072 and 4096 (shape only)."
    )


def attention() -> Iterator[Table]:
    """Backward of LLaMA-2-7B's attention: scores kept on chip, or staged through DDR."""
    table = Table(
        "sequence", "on chip ms", "through DDR ms", "speed-up", "DDR MB on chip", "staged"
    )
    for length in (512, 1024, 2048, 4096):
        call = Attention(1, 32, 32, length, length, 128, causal=True)
        resident = cost_attention(call, MACHINE, "backward")
        staged = cost_attention(call, MACHINE, "staged")
        table.add_row(
            str(length),
            f"{1e3 * resident.seconds:.2f}",
            f"{1e3 * staged.seconds:.2f}",
            f"{staged.seconds / resident.seconds:.2f}",
            f"{resident.ddr_bytes / 1e6:,.0f}",
            f"{staged.ddr_bytes / 1e6:,.0f}",
        )
    yield table


TABLES = {
    "minimum": minimum_clusters,
    "scaling": scaling,
    "strategies": strategies,
    "ablation": ablation,
    "sequences": sequences,
    "attention": attention,
}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", choices=TABLES, help="print one table")
    only = parser.parse_args().only
    for name, make in TABLES.items():
        if only in (None, name):
            CONSOLE.rule((make.__doc__ or name).splitlines()[0])
            for table in make():
                CONSOLE.print(table)


if __name__ == "__main__":
    main()
