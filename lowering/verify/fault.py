"""How a wrong program is refused: what is wrong, what to do, and the ops around the spot."""

from __future__ import annotations

from typing import Final, NoReturn

from ratrain_jax.errors import VerificationError
from ratrain_jax.lowering.grid import grid_around
from ratrain_jax.lowering.mnemonics import ids, op_label, op_line
from ratrain_jax.lowering.program import Free, Op, Program

Place = tuple[int, int]
"""A stage, and the index of an op in its list."""

_AROUND: Final = 3


def refuse(program: Program, what: str, remedy: str, at: Place | None = None) -> NoReturn:
    """Raises the error that shows a fault.

    Args:
        program: the program.
        what: the fault, as a sentence.
        remedy: what to do about it, as a sentence.
        at: the op that is wrong, if one is.
    """
    lines = [f"{what} {remedy}"]
    if at is not None:
        lines += ["", grid_around(program, at), "", excerpt(program, at)]
    raise VerificationError("\n".join(lines))


def excerpt(program: Program, at: Place) -> str:
    """The ops around one in its stage's list, that one marked with `>`."""
    stage, index = at
    ops = program.order[stage]
    first = max(0, index - _AROUND)
    last = min(len(ops), index + _AROUND + 1)
    width = len(str(last))
    rows = [f"stage {stage}, ops {first} to {last - 1} of {len(ops)}:"]
    for number in range(first, last):
        mark = ">" if number == index else " "
        rows.append(f"{mark} {number:>{width}}  {_clipped(op_line(ops[number], stage))}")
    return "\n".join(rows)


def named_op(op: Op) -> str:
    """An op in a sentence: `GradSync (GS L3) on stage 0`."""
    label = f"{op_label(op)} {ids(op.reads)}" if isinstance(op, Free) else op_label(op)
    return f"{type(op).__name__} ({label}) on stage {op.stage}"


def named_layer(program: Program, layer: int) -> str:
    """A layer in a sentence."""
    return f"L{layer} ({program.layers[layer].name})"


def named_value(program: Program, number: int) -> str:
    """A value in a sentence."""
    value = program.values[number]
    microbatch = "" if value.microbatch is None else f" of microbatch {value.microbatch}"
    return f"%{number} ({value.kind.value} {value.name}{microbatch} on stage {value.stage})"


def _clipped(line: str, width: int = 72) -> str:
    return line if len(line) <= width else line[: width - 4] + " ..."
