"""A stage's ops as one row of cells, short enough to read however many microbatches there are.

Terms.
    A **cell** is an op in few letters: `F3`, `R3` and `B3` are Forward, Recover and Backward of microbatch 3; `F3b` is of
    the stage's second block, `B3:7` of layer 7 alone. **State ops** are marked by a plus: `+GS7` `+U7` `+PV7` `+BO7`
    of layer 7, `+GS7/3` of layer 7 and microbatch 3 (ZeRO-2), `+U*` of state that belongs to no layer, `+GR1` the global
    reduction of phase 1. Sends and frees have no cell: the rows show what a stage does, and the program's text has all.

    A **repeat** is cells that come again and again with every number going on by the same amount: `F0..F47` or
    `F3a..F3h`, or, of more than one cell, `(B0 F4)x58`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from ratrain_jax.lowering.mnemonics import SHORT_NAMES
from ratrain_jax.lowering.program import (
    Backward,
    Borrow,
    Forward,
    GlobalReduce,
    GradSync,
    Metrics,
    Op,
    PrefetchView,
    Program,
    Prologue,
    Recover,
    UpdateShard,
    Validate,
)

_COMPUTE: Final = (Forward, Recover, Backward)
_OF_LAYERS: Final = (GradSync, UpdateShard, PrefetchView, Borrow, Validate)
_STATE: Final = (*_OF_LAYERS, GlobalReduce)
_LONGEST: Final = 96
"""Cells of a repeat that are looked for at most."""
_LEAST: Final = 3
"""Times that cells must come to be written as a repeat."""


class Letter(int):
    """The number of a block of a stage, written as a letter."""

    def __str__(self) -> str:
        return chr(ord("a") + self) if self < 26 else f".{int(self)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """An op in few letters.

    Attributes:
        form: the letters, with `{}` where numbers stand.
        numbers: the numbers.
        kind: the class of the op.
    """

    form: str
    numbers: tuple[int, ...]
    kind: type[Op]

    @property
    def state(self) -> bool:
        """Whether it is a state op."""
        return self.kind in _STATE

    def __str__(self) -> str:
        return self.form.format(*self.numbers)


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Cells, and how often they come.

    Attributes:
        cells: those of the first time.
        times: how often; 1 for cells that are not repeated.
        last: the cells of the last time.
    """

    cells: tuple[Cell, ...]
    times: int
    last: tuple[Cell, ...]

    def __str__(self) -> str:
        if self.times == 1:
            return " ".join(map(str, self.cells))
        if len(self.cells) == 1:
            return f"{self.cells[0]}..{self.last[0]}"
        # Within the repeat only ranges: a repeat within a repeat would be hard to read.
        return f"({' '.join(map(str, fold(self.cells, longest=1)))})x{self.times}"


def schedule_cells(program: Program) -> tuple[tuple[Cell, ...], ...]:
    """The cells of every stage, in the order of its list.

    Args:
        program: the program.

    Returns:
        One tuple a stage.
    """
    sizes = Counter((layer.stage, layer.block) for layer in program.layers)
    blocks: dict[int, list[int]] = {}
    for stage, block in sorted(sizes):
        blocks.setdefault(stage, []).append(block)
    rows = []
    for stage, ops in enumerate(program.order):
        here = blocks.get(stage, [])
        rows.append(tuple(_cell(program, sizes, here, op) for op in ops if _shown(op)))
    return tuple(rows)


def fold(cells: Sequence[Cell], longest: int = _LONGEST) -> tuple[Run, ...]:
    """Finds what repeats in a row of cells.

    Args:
        cells: the cells.
        longest: cells of a repeat that are looked for at most.

    Returns:
        Runs that, written out one after another, give the cells back.

    Example:
        >>> row = [Cell(f"{letter}{{}}", (n,), Forward) for n in range(9) for letter in "FB"]
        >>> [str(run) for run in fold(row)]
        ['(F0 B0)x9']
    """
    runs, plain, at = [], [], 0
    while at < len(cells):
        period, times = _repeat(cells, at, longest)
        if times < _LEAST:
            plain.append(cells[at])
            at += 1
            continue
        if plain:
            runs.append(Run(tuple(plain), 1, tuple(plain)))
            plain = []
        end = at + period * times
        runs.append(Run(tuple(cells[at : at + period]), times, tuple(cells[end - period : end])))
        at = end
    if plain:
        runs.append(Run(tuple(plain), 1, tuple(plain)))
    return tuple(runs)


def _repeat(cells: Sequence[Cell], at: int, longest: int) -> tuple[int, int]:
    """Length and times of the repeat from a place on that covers most; of equal ones the shortest."""
    best, covered = (1, 1), 1
    for period in range(1, min(longest, (len(cells) - at) // _LEAST) + 1):
        times = 1 + _goes_on(cells, at, period)
        if times >= _LEAST and times * period > covered:
            best, covered = (period, times), times * period
    return best


def _goes_on(cells: Sequence[Cell], at: int, period: int) -> int:
    """How often `period` cells come again behind themselves, their numbers always going on alike."""
    steps: list[tuple[int, ...]] = []
    place = at + period
    while place < len(cells):
        before, here = cells[place - period], cells[place]
        if before.form != here.form:
            break
        step = tuple(b - a for a, b in zip(before.numbers, here.numbers, strict=True))
        offset = place - at - period
        if offset < period:
            steps.append(step)
        elif step != steps[offset % period]:
            break
        place += 1
    if period == 1 and not all(sum(map(abs, step)) <= 1 for step in steps):
        return 0  # `F0..F8` says nothing of a stride, nor `F0a..F8i` of two numbers that go on
    return (place - at - period) // period


def _shown(op: Op) -> bool:
    return isinstance(op, (*_COMPUTE, *_STATE, Prologue, Metrics))


def _cell(program: Program, sizes: Counter[tuple[int, int]], blocks: Sequence[int], op: Op) -> Cell:
    name, kind = SHORT_NAMES[type(op)], type(op)
    if isinstance(op, _COMPUTE):
        return _unit(program, sizes, blocks, op, name)
    if isinstance(op, GradSync) and op.microbatch is not None:
        return Cell(f"+{name}{{}}/{{}}", (op.layer, op.microbatch), kind)
    if isinstance(op, GlobalReduce):
        return Cell(f"+{name}{{}}", (op.phase,), kind)
    if isinstance(op, _OF_LAYERS):
        layer = op.layer
        return (
            Cell(f"+{name}*", (), kind) if layer is None else Cell(f"+{name}{{}}", (layer,), kind)
        )
    return Cell(name, (), kind)


def _unit(
    program: Program, sizes: Counter[tuple[int, int]], blocks: Sequence[int], op: Any, name: str
) -> Cell:
    """Microbatch, and block or layer where they are needed to tell cells apart."""
    first, last = op.layers
    layer = program.layers[first]
    if last - first < sizes[layer.stage, layer.block]:
        return Cell(f"{name}{{}}:{{}}", (op.microbatch, first), type(op))
    place = blocks.index(layer.block)
    if len(blocks) == 1:
        return Cell(f"{name}{{}}", (op.microbatch,), type(op))
    return Cell(f"{name}{{}}{{}}", (op.microbatch, Letter(place)), type(op))


def row_lines(runs: Sequence[str], width: int) -> Iterator[str]:
    """Runs as words, in lines of at most some width; a repeat is broken only where it is longer than a line.

    Args:
        runs: runs, written.
        width: characters of a line.

    Example:
        >>> list(row_lines(["F0..F3", "(B0 F4)x9", "B9 B10"], 16))
        ['F0..F3 (B0 F4)x9', 'B9 B10']
    """
    line = ""
    for word in _words(runs, width):
        if line and len(line) + 1 + len(word) > width:
            yield line
            line = ""
        line = f"{line} {word}" if line else word
    if line:
        yield line


def _words(runs: Sequence[str], width: int) -> Iterator[str]:
    for run in runs:
        if run.startswith("(") and len(run) <= width:
            yield run
        else:
            yield from run.split(" ")
