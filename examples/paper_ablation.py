"""What a step without one of the paper's mechanisms takes, for `reproduce_paper.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from paper_planning import ABLATION, LIMIT, OUT_OF_MEMORY
from paper_tables import Figure

from ratrain_jax.kernels import Machine
from ratrain_jax.planning.configuration import Configuration
from ratrain_jax.planning.layer_table import LayerTable
from ratrain_jax.planning.search import Candidate, look_at, simulated
from ratrain_jax.planning.simulated import costs_of
from ratrain_jax.planning.step_tasks import StepSeconds

SWITCHED: dict[str, dict[str, str | bool]] = {
    "forward recovery": {"recovery": "backward"},
    "update-prefetch": {"update_prefetch": False},
    "layerwise state": {"layerwise_state": False, "update_prefetch": False},
}
DEPTH = 16
"""Pipeline stages of Qwen2.5-32B: the published depth of its smallest allocation."""
MICROBATCHES = (8, 32, 256)
NO_LIMIT = 10**12


def ablated(
    base: Configuration, tables: Sequence[LayerTable], machines: Sequence[Machine]
) -> list[Figure]:
    """Rows of one number of microbatches: each mechanism off, all else kept, the split of the layers too.

    Args:
        base: the full system.
        tables: the layers, on each machine.
        machines: what it runs on.
    """
    pairs = list(zip(tables, machines, strict=True))
    full = [look_at(base, table, machine, NO_LIMIT) for table, machine in pairs]
    m = base.microbatches
    figures = []
    for name, change in SWITCHED.items():
        chosen = dataclasses.replace(base, **change)  # pyright: ignore[reportArgumentType]
        found = [
            simulated(dataclasses.replace(one, configuration=chosen), *pair)
            for one, pair in zip(full, pairs, strict=True)
        ]
        step, tail = ABLATION[name]
        steps = _ratios(found, full, lambda one: _seconds(one).step)
        tails = _ratios(found, full, lambda one: _seconds(one).tail)
        figures.append(Figure(f"m={m}: {name}, step", step, steps, f"{name}, step", ".3f"))
        if name == "forward recovery":
            gain = (m + DEPTH - 1) * 4 / (4 * m + 3 * (DEPTH - 1))
            figures.append(
                Figure("  by the closed form", step, (gain,) * 3, f"{name}, step", ".3f")
            )
        figures.append(Figure("  tail", tail, tails, f"{name}, tail", ".2f"))
        if name != "forward recovery":
            last = tuple(
                _tail_to_the_last_view(chosen, one, *pair)
                for one, pair in zip(full, pairs, strict=True)
            )
            figures.append(Figure("  tail, to the last view", tail, last, "layers", ".2f"))
    auto = dataclasses.replace(base, recovery="auto")
    saved = [look_at(auto, table, machine, LIMIT) for table, machine in pairs]
    steps = _ratios(saved, full, lambda one: one.seconds.step if one.seconds else OUT_OF_MEMORY)
    return [*figures, Figure("  nothing, auto: step", None, steps, "", ".3f")]


def _ratios(
    ours: Sequence[Candidate], full: Sequence[Candidate], of: Callable[[Candidate], float]
) -> tuple[float, ...]:
    return tuple(of(one) / of(whole) for one, whole in zip(ours, full, strict=True))


def _seconds(candidate: Candidate) -> StepSeconds:
    assert candidate.seconds is not None
    return candidate.seconds


def _tail_to_the_last_view(
    chosen: Configuration, full: Candidate, table: LayerTable, machine: Machine
) -> float:
    """The pacing stage's tail over the full system's, were its first forward to wait for all its views, as the paper's does.

    In closed form: the full system's tail is the chain of the first layer.
    """
    assert full.split is not None
    layers = slice(*full.split.stages[_seconds(full).stage].layers)
    states = costs_of(table, full.configuration, machine).state[layers]
    rest = sum(state.update + state.gather for state in states)
    syncs = states[0].sync if chosen.layerwise else sum(state.sync for state in states)
    return (syncs + rest) / (states[0].sync + states[0].update + states[0].gather)
