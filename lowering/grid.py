"""A program drawn as a grid of slots: one row a stage, and under it its link lane's state ops.

A compute op takes one slot, the Backward of a whole block two (the second drawn `=`); idle slots
are dots. Slots come from a run in which ops wait for the values that they read, but nothing is
weighed: sends take no slot, every state op on the link takes one.

    F3 R3 B3   Forward, Recover, Backward of microbatch 3; `F3b` of the stage's second block,
               `B3:7` of layer 7 alone
    GS7 U7 PV7 BO7   GradSync, UpdateShard, PrefetchView, Borrow of layer 7; `U*` replicated state
    V7         Validate of layer 7
    GR1 P M    GlobalReduce of phase 1, Prologue, Metrics
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from .mnemonics import SHORT_NAMES
from .program import (
    Backward,
    Borrow,
    Forward,
    GlobalReduce,
    GradSync,
    Lane,
    Metrics,
    Op,
    PrefetchView,
    Program,
    Prologue,
    Recover,
    Send,
    UpdateShard,
    Validate,
    ZeroGradient,
)
from .progress import run

WIDTH: Final = 80
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"


@dataclasses.dataclass(slots=True)
class _Row:
    """One row: its name, what stands in idle slots, and its cells by slot."""

    name: str
    idle: str
    cells: dict[int, str] = dataclasses.field(default_factory=dict)


def grid(program: Program, mark: tuple[int, int] | None = None) -> str:
    """Draws the schedule of a program, folded to 80 columns.

    Args:
        program: the program; it need not be right.
        mark: stage and index of an op to put in brackets; of an op without a cell of its own, the
            cell before it.

    Returns:
        The grid, several bands below each other if it is long.
    """
    return "\n\n".join(band for band, _ in _bands(program, mark, range(len(program.order))))


def grid_around(program: Program, mark: tuple[int, int], neighbours: int = 2) -> str:
    """Draws the band of a program's grid that holds one op.

    Args:
        program: the program; it need not be right.
        mark: stage and index of the op.
        neighbours: how many stages to each side are drawn.

    Returns:
        The band, with the op in brackets.
    """
    first = max(0, mark[0] - neighbours)
    stages = range(first, min(len(program.order), mark[0] + neighbours + 1))
    bands = list(_bands(program, mark, stages))
    return next((band for band, marked in bands if marked), bands[0][0] if bands else "")


def _bands(
    program: Program, mark: tuple[int, int] | None, stages: Iterable[int]
) -> Iterator[tuple[str, bool]]:
    """The grid cut into bands that fit the width, each with whether the mark is in it."""
    rows, marked = _rows(program, mark, stages)
    count = 1 + max((max(row.cells, default=-1) for row in rows), default=-1)
    head = max((len(row.name) for row in rows), default=0)
    widths = [
        max(len(str(slot)), *(len(row.cells.get(slot, "")) for row in rows))
        for slot in range(count)
    ]
    for band in _fold(widths, WIDTH - head):
        text = [_line("slot", head, ((str(slot), widths[slot]) for slot in band))]
        for row in rows:
            if row.idle or any(slot in row.cells for slot in band):
                cells = ((row.cells.get(slot, row.idle), widths[slot]) for slot in band)
                text.append(_line(row.name, head, cells))
        yield "\n".join(text), marked in band


def _fold(widths: Sequence[int], room: int) -> Iterator[range]:
    start = used = 0
    for slot, width in enumerate(widths):
        if used + width + 1 > room and slot > start:
            yield range(start, slot)
            start, used = slot, 0
        used += width + 1
    if start < len(widths):
        yield range(start, len(widths))


def _line(name: str, head: int, cells: Iterable[tuple[str, int]]) -> str:
    return (name.ljust(head) + "".join(" " + cell.ljust(width) for cell, width in cells)).rstrip()


def _rows(
    program: Program, mark: tuple[int, int] | None, stages: Iterable[int]
) -> tuple[list[_Row], int]:
    """Two rows a stage, and the slot of the mark (-1 if there is none)."""
    label = _Labels(program)
    starts = run(program, label.slots, _grid_lane, force=True).starts
    rows: list[_Row] = []
    marked = -1
    for stage in stages:
        lanes = {Lane.COMPUTE: _Row(f"stage {stage}", "."), Lane.LINK: _Row("  link", "")}
        rows.extend(lanes.values())
        before: tuple[_Row, int] | None = None
        for index, op in enumerate(program.order[stage]):
            text = label(op)
            if text:
                before = lanes[op.lane], starts[stage][index]
                before[0].cells[before[1]] = text
                if label.double(op):
                    before[0].cells[before[1] + 1] = "="
            if mark == (stage, index) and before is not None:
                row, marked = before
                row.cells[marked] = f"[{row.cells[marked]}]"
    return rows, marked


def _grid_lane(op: Op) -> Lane:
    return Lane.NONE if isinstance(op, Send) else op.lane


class _Labels:
    """The text of an op's cell; empty for an op without one.

    Args:
        program: the program, whose blocks name the cells.
    """

    def __init__(self, program: Program) -> None:
        self._layers = program.layers
        self._sizes = Counter((layer.stage, layer.block) for layer in program.layers)
        self._blocks: dict[int, list[int]] = {}
        for stage, block in sorted(self._sizes):
            self._blocks.setdefault(stage, []).append(block)

    def __call__(self, op: Op) -> str:
        make = _LABELS.get(type(op))
        return "" if make is None else SHORT_NAMES[type(op)] + make(self, op)

    def double(self, op: Op) -> bool:
        """Whether an op is the Backward of a whole block."""
        if not isinstance(op, Backward):
            return False
        block = self._block(op)
        return block is not None and op.layers[1] - op.layers[0] == self._sizes[block]

    def slots(self, op: Op) -> int:
        """How many slots an op takes."""
        if isinstance(op, (Send, ZeroGradient)):
            return 0
        return 2 if self.double(op) else 1

    def unit(self, op: Any) -> str:
        """Microbatch, and block or layer where they are needed to tell cells apart."""
        block = self._block(op)
        if isinstance(op, Backward) and not self.double(op):
            return f"{op.microbatch}:{op.layers[0]}"
        blocks = self._blocks.get(op.stage, [])
        if len(blocks) < 2 or block is None:
            return f"{op.microbatch}"
        place = blocks.index(block[1]) if block[1] in blocks else 0
        return f"{op.microbatch}{_LETTERS[place]}" if place < 26 else f"{op.microbatch}.{place}"

    def _block(self, op: Any) -> tuple[int, int] | None:
        first = op.layers[0]
        if not 0 <= first < len(self._layers):
            return None
        return self._layers[first].stage, self._layers[first].block


def _of_layer(_: _Labels, op: Any) -> str:
    return "*" if op.layer is None else str(op.layer)


_LABELS: Final[dict[type[Op], Callable[[_Labels, Any], str]]] = {
    Forward: _Labels.unit,
    Recover: _Labels.unit,
    Backward: _Labels.unit,
    GradSync: _of_layer,
    UpdateShard: _of_layer,
    PrefetchView: _of_layer,
    Borrow: _of_layer,
    Validate: _of_layer,
    GlobalReduce: lambda _, op: str(op.phase),
    Prologue: lambda *_: "",
    Metrics: lambda *_: "",
}
