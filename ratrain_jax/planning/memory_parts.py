"""The formula of each term of a stage's predicted memory: sums of a count times bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from ratrain_jax.planning.layer_table import LayerRow
from ratrain_jax.planning.leaves import shard_bytes
from ratrain_jax.planning.stage_costs import Stage, StageCosts


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryPart:
    """A part of a term: so many times so many bytes.

    Attributes:
        term: the field of `StageMemory` that it is a part of.
        times: how many there are.
        bytes: of each; less than 0 for what the formula takes off.
        what: what they are.
    """

    term: str
    times: int
    bytes: int
    what: str


def memory_parts(costs: StageCosts, number: int, stage: Stage) -> tuple[MemoryPart, ...]:
    """Splits every term of a stage's memory into parts; those of a term add up to it.

    Args:
        costs: of the layers, under a configuration.
        number: the stage's number.
        stage: the stage, as `StageCosts.stage` costed it.
    """
    return tuple(part for part in _parts(costs, number, stage) if part.times * part.bytes)


def _parts(costs: StageCosts, number: int, stage: Stage) -> Iterator[MemoryPart]:
    first, end = stage.layers
    c, rows = costs.configuration, costs.table.rows
    devices, every = c.data_parallel, range(first, end)
    alone = devices == 1
    leaves = [leaf for n in every for leaf in rows[n].parameters]
    sharded_at_all = any(leaf.shard_bytes(devices) < leaf.bytes for leaf in leaves)
    shard = (
        "" if alone else f", 1/{devices} each" if sharded_at_all else f", whole on all {devices}"
    )
    borrowed_view, borrowed_gradients = costs.borrowed(first, end) if c.zero < 3 else (0, 0)

    def each(term: str, of: Callable[[LayerRow], int], note: str = "") -> Iterator[MemoryPart]:
        return _by_kind(term, rows, every, of, note)

    yield from each("parameters", lambda row: shard_bytes(row.parameters, devices), shard)
    yield from each("optimizer", lambda row: shard_bytes(row.optimizer, devices), shard)
    if c.zero < 3:
        yield from each("view", lambda row: row.copied(devices))
        yield MemoryPart("view", 1, borrowed_view, "borrowed of other stages")
    else:
        yield MemoryPart("view", 1, stage.memory.view, "of two layers at a time")
    if c.zero == 1:
        yield from each("gradients", lambda row: sum(leaf.bytes for leaf in row.gradients))
        whole = 0
    else:
        yield from each("gradients", lambda row: shard_bytes(row.gradients, devices), shard)
        sharded = costs.sums.sharded[end] - costs.sums.sharded[first]
        whole = stage.memory.gradients - borrowed_gradients - sharded
    yield MemoryPart("gradients", 1, whole, "whole, before they are synchronised")
    yield MemoryPart("gradients", 1, borrowed_gradients, "of what is borrowed")
    yield from _activations(costs, number, stage)
    for cut in (first - 1, end - 1):
        if 0 <= cut < costs.count - 1:
            side = "comes in" if cut < first else "goes out"
            yield MemoryPart("boundaries", 2, costs.table.cuts[cut], f"what {side}, each way")
    for n in every:
        note = f"{rows[n].name} reads of the batch"
        yield MemoryPart("operands", c.microbatches, costs.table.operands[n], note)
    largest = max(every, key=lambda n: rows[n].scratch)
    yield MemoryPart("scratch", 1, rows[largest].scratch, f"within {rows[largest].name}")


def _activations(costs: StageCosts, number: int, stage: Stage) -> Iterator[MemoryPart]:
    """Residuals, kept and recovered, and checkpoints."""
    first, end = stage.layers
    rows, flying = costs.table.rows, costs.configuration.in_flight(number)
    runs = costs.recovered_runs(first, end, stage.prefix)
    again = [n for start, stop in runs for n in range(start, stop)]
    kept = [n for n in range(first, end) if n not in set(again)]
    note = f", of each of {flying} microbatches" if flying > 1 else ""
    yield from _by_kind("residuals", rows, kept, lambda row: row.residuals, note, flying)
    yield from _by_kind("residuals", rows, again, lambda row: row.residuals, ", recovered")
    for start, _ in runs:
        incoming = costs.table.cuts[start - 1] if start else 0
        yield MemoryPart("residuals", 1, -incoming, f"checkpoint before {rows[start].name}")
        yield MemoryPart("checkpoints", flying, incoming, f"what comes into {rows[start].name}")


def _by_kind(
    term: str,
    rows: Sequence[LayerRow],
    layers: Sequence[int],
    of: Callable[[LayerRow], int],
    note: str = "",
    times: int = 1,
) -> Iterator[MemoryPart]:
    """A part for each kind of layer."""
    kinds: dict[tuple[int, int], list[int]] = {}
    for n in layers:
        kinds.setdefault((rows[n].kind, of(rows[n])), []).append(n)
    for (_, count), alike in kinds.items():
        more = f" and {len(alike) - 1} like it" if len(alike) > 1 else ""
        yield MemoryPart(term, times * len(alike), count, f"{rows[alike[0]].name}{more}{note}")
