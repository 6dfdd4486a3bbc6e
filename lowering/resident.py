"""What is resident on a stage at its peak: the values behind each figure of the memory report."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from .liveness import beyond, bytes_by_kind
from .mnemonics import op_label
from .program import Free, Kind, Program, Value
from .text import readable_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Resident:
    """Values of one kind and size that are live at once, such as the residuals of a layer for several microbatches.

    Attributes:
        kind: what they are.
        name: of what.
        copies: how many.
        bytes: of each.
    """

    kind: Kind
    name: str
    copies: int
    bytes: int

    def __str__(self) -> str:
        times = f"{self.copies} × " if self.copies > 1 else ""
        return f"{times}{readable_bytes(self.bytes)} {self.name}"


def residents(program: Program, stage: int, index: int) -> tuple[Resident, ...]:
    """What is live on each device of a stage at an op, with what the op writes beyond the buffers that it takes over.

    Args:
        program: a verified program.
        stage: the stage.
        index: place of the op in the stage's list.

    Returns:
        The residents, by kind and then by bytes, most first; their bytes times copies add up to what
        `memory_analysis` has for that op.
    """
    ops = program.order[stage]
    live = {v for v in program.inputs if program.values[v].stage == stage}
    for op in ops[:index]:
        live.update(v for v in op.writes if program.values[v].stage == stage)
        live.difference_update(op.reads if isinstance(op, Free) else op.donates)
    found: dict[tuple[Kind, str, int], int] = {}
    for value in map(program.values.__getitem__, live):
        key = (value.kind, _name(program, value), value.bytes)
        found[key] = found.get(key, 0) + 1
    written = bytes_by_kind(program, stage, ops[index].writes)
    donated = bytes_by_kind(program, stage, ops[index].donates)
    for kind, size in (beyond(written, donated) if donated else written).items():
        found[kind, f"written by {op_label(ops[index])}", size] = 1
    shown = [Resident(kind, name, n, size) for (kind, name, size), n in found.items() if size]
    kinds = list(Kind)
    shown.sort(key=lambda r: (kinds.index(r.kind), -r.bytes * r.copies, r.name))
    return tuple(shown)


def _name(program: Program, value: Value) -> str:
    return value.name if value.layer is None else program.layers[value.layer].name


def formulas(program: Program, stage: int, index: int, most: int = 6) -> Iterator[str]:
    """The figures of a stage's peak as sums of what is resident, a kind a paragraph.

    Args:
        program: a verified program.
        stage: the stage.
        index: place of the op at the peak in the stage's list.
        most: how many terms of a kind are shown; the rest is one.
    """
    everything = residents(program, stage, index)
    for kind in dict.fromkeys(r.kind for r in everything):
        mine = [r for r in everything if r.kind == kind]
        total = sum(r.copies * r.bytes for r in mine)
        yield f"{kind} {readable_bytes(total)}"
        for sign, resident in zip(["="] + ["+"] * most, mine[:most], strict=False):
            yield f"    {sign} {resident}"
        rest = mine[most:]
        if rest:
            left = sum(r.copies * r.bytes for r in rest)
            yield f"    + {readable_bytes(left)} in {sum(r.copies for r in rest)} more"
