"""The text form of a program: made to be read, and parsed back to an equal program.

It has a header with the settings, the tables (layers, variables, operands, reductions, values with
their bytes), the inputs and outputs, then one section a stage with one op a line in the form that
`mnemonics` defines. `#` begins a comment, and `{…}` is one; layers are written `L2`, variables
`x3`, operands `o1`, values `%17`, microbatches `i4`, phases `k1`, stages `s0`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from .mnemonics import ids, op_line
from .program import LayerInfo, OperandInfo, Program, Reduction, Settings, Value, Variable
from .text_parser import HEADER, parse
from .tokens import array_token, quoted

__all__ = ["as_text", "parse"]

_IDS_PER_LINE: Final = 16


def as_text(program: Program) -> str:
    """Writes a program as text.

    Args:
        program: the program.

    Returns:
        Text that `parse` reads back to an equal program.

    Example:
        >>> empty = Program(Settings(1, 1, 1), (), (), (), (), (), ((),), (), ())
        >>> parse(as_text(empty)) == empty
        True
    """
    return "\n".join(_lines(program)) + "\n"


def _lines(program: Program) -> Iterator[str]:
    yield HEADER
    yield f"fingerprint {quoted(program.fingerprint)}"
    yield from _section("settings", _settings(program.settings))
    yield from _section("layers", _table(_LAYER_HEAD, map(_layer, *_numbered(program.layers))))
    yield from _section(
        "variables", _table(_VARIABLE_HEAD, map(_variable, *_numbered(program.variables)))
    )
    yield from _section(
        "operands", _table(_OPERAND_HEAD, map(_operand, *_numbered(program.operands)))
    )
    yield from _section("reductions", [_reduction(item) for item in program.reductions])
    yield from _section("values", _table(_VALUE_HEAD, map(_value, program.values)))
    yield from _section("inputs", _id_lines(program.inputs))
    yield from _section("outputs", _id_lines(program.outputs))
    for stage, ops in enumerate(program.order):
        yield from _section(f"stage {stage}", [op_line(op, stage) for op in ops])


def _section(name: str, lines: Iterable[str]) -> Iterator[str]:
    yield ""
    yield name
    yield from (f"  {line}" for line in lines)


def _numbered(items: Sequence[Any]) -> tuple[range, Sequence[Any]]:
    return range(len(items)), items


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Rows under a comment with the columns' names; all columns but the last are aligned."""
    rows = [("# " + head[0], *head[1:]), *rows]
    if len(rows) == 1:
        return
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows), strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True))
        yield "  ".join((*cells, row[-1])).rstrip()


def _settings(settings: Settings) -> Iterator[str]:
    width = max(len(field.name) for field in dataclasses.fields(settings))
    for field in dataclasses.fields(settings):
        yield f"{field.name:<{width}}  {_setting(getattr(settings, field.name))}"


def _setting(value: Any) -> str:
    match value:
        case bool():
            return "on" if value else "off"
        case tuple():
            return " ".join(map(str, value)) or "none"
        case str():
            return quoted(value)
    return "none" if value is None else str(value)


_LAYER_HEAD = (
    *("layer", "name", "stage", "block", "phase", "residuals", "flops", "seconds", "fingerprint"),
    "variables and parameters",
)


def _layer(number: int, layer: LayerInfo) -> tuple[str, ...]:
    return (
        f"L{number}",
        quoted(layer.name),
        f"s{layer.stage}",
        f"b{layer.block}",
        f"k{layer.update_phase}" + ("" if layer.early is None else f" early k{layer.early}"),
        "recovered" if layer.recovered else "saved",
        str(layer.flops),
        repr(layer.seconds),
        quoted(layer.fingerprint),
        " ".join(_clauses(layer)),
    )


def _clauses(layer: LayerInfo) -> Iterator[str]:
    lists = (
        ("reads", layer.inputs, layer.operands),
        ("makes", layer.outputs, ()),
        ("backward", layer.backward_inputs, layer.backward_operands),
    )
    for word, variables, operands in lists:
        items = [*(f"x{number}" for number in variables), *(f"o{number}" for number in operands)]
        if items:
            yield f"{word}({' '.join(items)})"
    for owner, names in layer.borrows:
        yield f"borrows({' '.join((f'L{owner}', *map(quoted, names)))})"
    if layer.parameters:
        yield f"owns({' '.join(map(quoted, layer.parameters))})"


_VARIABLE_HEAD = ("variable", "array", "role", "join", "gradient", "from -> to")


def _variable(number: int, variable: Variable) -> tuple[str, ...]:
    readers = "".join(f" L{reader}" for reader in variable.readers)
    return (
        f"x{number}",
        array_token(variable.array),
        quoted(variable.role),
        quoted(variable.join),
        "differentiable" if variable.differentiable else "constant",
        f"L{variable.producer} ->{readers}",
    )


_OPERAND_HEAD = ("operand", "array", "rows", "origin", "name")


def _operand(number: int, operand: OperandInfo) -> tuple[str, ...]:
    return (
        f"o{number}",
        array_token(operand.array),
        "split" if operand.split else "whole",
        "prologue" if operand.prologue else "given",
        quoted(operand.name),
    )


def _reduction(reduction: Reduction) -> str:
    layers = "".join(f" L{layer}" for layer in reduction.layers)
    stages = "".join(f" s{stage}" for stage in reduction.stages)
    loss = " loss" if reduction.loss else ""
    return f"k{reduction.phase}  from{layers}{loss} ->{stages}"


_VALUE_HEAD = ("value", "kind", "name", "home", "layer", "microbatch", "bytes", "arrays")


def _value(value: Value) -> tuple[str, ...]:
    runs = ((array_token(a), len(list(same))) for a, same in itertools.groupby(value.arrays))
    arrays = " ".join(token if count == 1 else f"{token} x {count}" for token, count in runs)
    aliased = f" aliased {value.aliased}" if value.aliased else ""
    return (
        f"%{value.id}",
        value.kind.value,
        quoted(value.name),
        f"s{value.stage}",
        "-" if value.layer is None else f"L{value.layer}",
        "-" if value.microbatch is None else f"i{value.microbatch}",
        f"{{{readable_bytes(value.bytes)}}}",
        f"{arrays}{aliased}".lstrip(),
    )


def _id_lines(values: Sequence[int]) -> list[str]:
    starts = range(0, len(values), _IDS_PER_LINE)
    return [ids(values[start : start + _IDS_PER_LINE]) for start in starts]


def readable_bytes(count: int) -> str:
    """Bytes in the largest binary unit that keeps the number at 1 or above.

    Example:
        >>> readable_bytes(2560), readable_bytes(7)
        ('2.5 KiB', '7 B')
    """
    if abs(count) < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        size /= 1024
        if abs(size) < 1023.95 or unit == "PiB":
            break
    return f"{size:.1f} {unit}"
