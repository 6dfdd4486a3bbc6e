"""What follows from a program's tables: blocks, bundles, readers, and the units of Backward.

A **bundle** is what a stage holds of an owning layer's parameters: a view, and gradients of its
own. A layer has a bundle at home and one on each other stage that borrows from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ratrain_jax.lowering.program import Backward, Kind, Program

Range = tuple[int, int]


@dataclasses.dataclass(slots=True)
class Shape:
    """Tables derived from a program of good form.

    Attributes:
        program: the program.
        blocks: the blocks of each stage, ascending.
        block_of: the block of each layer.
        owners: the layers whose parameters each layer reads, its own included, ascending.
        bundles: the owners that each stage holds something of, ascending.
        borrowers: the stages that borrow from each layer, ascending.
        results: the loss and auxiliary variables, ascending.
        operand_stages: the stages that read each operand, ascending.
        optimizers: layers that have optimizer state.
        replicated: stages that have replicated state.
        units: the Backward units of (stage, microbatch), last layer first.
    """

    program: Program
    blocks: list[list[Range]]
    block_of: list[Range]
    owners: list[tuple[int, ...]]
    bundles: list[list[int]]
    borrowers: list[list[int]]
    results: list[int]
    operand_stages: list[list[int]]
    optimizers: set[int]
    replicated: set[int]
    units: dict[tuple[int, int], tuple[Range, ...]]

    def stage(self, layer: int) -> int:
        """The stage of a layer."""
        return self.program.layers[layer].stage

    def is_last_unit_of_run(self, layers: Range) -> bool:
        """Whether no later layer of the stage is in the same run of recovered layers."""
        layers_table = self.program.layers
        if layers[1] == len(layers_table):
            return True
        after = layers_table[layers[1]]
        return after.stage != layers_table[layers[0]].stage or not after.recovered

    def holders(self, variable: int) -> list[int]:
        """The stages that a variable passes on its way forward: its producer's, then readers'."""
        entry = self.program.variables[variable]
        return sorted({self.stage(layer) for layer in (entry.producer, *entry.readers)})

    def givers(self, variable: int) -> list[int]:
        """The stages that its cotangent passes on its way back: its last reader's first."""
        entry = self.program.variables[variable]
        stages = [self.stage(layer) for layer in (*reversed(entry.readers), entry.producer)]
        return [s for n, s in enumerate(stages) if n == 0 or s != stages[n - 1]]


def shape_of(program: Program) -> Shape:
    """Derives the tables."""
    layers = program.layers
    owners = [
        tuple(sorted({*((n,) if layer.parameters else ()), *(o for o, _ in layer.borrows)}))
        for n, layer in enumerate(layers)
    ]
    bundles: list[set[int]] = [set() for _ in program.order]
    borrowers: list[set[int]] = [set() for _ in layers]
    operand_stages: list[set[int]] = [set() for _ in program.operands]
    for n, layer in enumerate(layers):
        bundles[layer.stage].update(owners[n])
        for owner in owners[n]:
            if layers[owner].stage != layer.stage:
                borrowers[owner].add(layer.stage)
        for operand in layer.operands:
            operand_stages[operand].add(layer.stage)
    entry = [program.values[number] for number in program.inputs]
    blocks, block_of = _blocks(program)
    return Shape(
        program=program,
        blocks=blocks,
        block_of=block_of,
        owners=owners,
        bundles=_sorted(bundles),
        borrowers=_sorted(borrowers),
        results=[n for n, v in enumerate(program.variables) if v.role != "boundary"],
        operand_stages=_sorted(operand_stages),
        optimizers={v.layer for v in entry if v.kind is Kind.OPTIMIZER and v.layer is not None},
        replicated={v.stage for v in entry if v.kind is Kind.REPLICATED},
        units=_units(program),
    )


def _sorted(sets: Iterable[set[int]]) -> list[list[int]]:
    return [sorted(items) for items in sets]


def _blocks(program: Program) -> tuple[list[list[Range]], list[Range]]:
    blocks: list[list[Range]] = [[] for _ in program.order]
    keys = [(layer.stage, layer.block) for layer in program.layers]
    starts = [n for n, key in enumerate(keys) if n == 0 or key != keys[n - 1]]
    for first, last in zip(starts, [*starts[1:], len(keys)], strict=True):
        blocks[keys[first][0]].append((first, last))
    block_of = [block for stage in blocks for block in stage for _ in range(*block)]
    return blocks, block_of


def _units(program: Program) -> dict[tuple[int, int], tuple[Range, ...]]:
    found: dict[tuple[int, int], list[Range]] = {}
    for ops in program.order:
        for op in ops:
            if isinstance(op, Backward):
                found.setdefault((op.stage, op.microbatch), []).append(op.layers)
    return {key: tuple(sorted(units, reverse=True)) for key, units in found.items()}
