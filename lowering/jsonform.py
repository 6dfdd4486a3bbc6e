"""The JSON form of a program: versioned, one table row or op a line, read back to an equal program.

The fields of each object are those of the dataclasses in `program`, and an op is an object with its
short name under `op`. Fields that stand at their default may be left out.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ratrain_jax.errors import ProgramFormatError

from .mnemonics import OPS_BY_SHORT_NAME, SHORT_NAMES
from .program import ArrayType, Op, Program
from .records import Decoder, Form, Problem, read, record, teach
from .tokens import known_dtype

FORMAT: Final = "ratrain-program"
VERSION: Final = 1
_FORM: Final = Form(FORMAT, VERSION, "program", ProgramFormatError)


def to_json(program: Program) -> str:
    """Writes a program as JSON.

    Args:
        program: the program.

    Returns:
        JSON that `from_json` reads back to an equal program.
    """
    return "\n".join(_lines(program)) + "\n"


def from_json(text: str) -> Program:
    """Reads a program from its JSON form.

    Args:
        text: what `to_json` writes.

    Returns:
        The program; it is not verified.

    Raises:
        ProgramFormatError: if the text is no JSON, of another version, or not of this form; the
            message has the line, or the path to the spot, and what was expected there.
    """
    return read(Program, text, _FORM)


def _lines(program: Program) -> Iterator[str]:
    head = {**_FORM.head, "fingerprint": program.fingerprint}
    yield "{" + _compact(head)[1:-1] + ","
    yield f'"settings": {_compact(_plain(program.settings))},'
    for name in ("layers", "variables", "operands", "reductions", "values"):
        yield f'"{name}": ['
        yield from _rows(getattr(program, name))
        yield "],"
    yield f'"inputs": {_compact(program.inputs)},'
    yield f'"outputs": {_compact(program.outputs)},'
    yield '"order": ['
    for stage, ops in enumerate(program.order):
        yield "["
        yield from _rows(ops)
        yield "]" if stage == len(program.order) - 1 else "],"
    yield "]}"


def _rows(items: tuple[Any, ...]) -> Iterator[str]:
    for number, item in enumerate(items):
        comma = "" if number == len(items) - 1 else ","
        yield f" {_compact(_plain(item))}{comma}"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _plain(item: Any) -> dict[str, Any]:
    """The fields of a dataclass; those of an op only where they differ from their default."""
    table: dict[str, Any] = {}
    is_op = isinstance(item, Op)
    if is_op:
        table["op"] = SHORT_NAMES[type(item)]
    for field in dataclasses.fields(item):
        value = getattr(item, field.name)
        if not (is_op and value == field.default):
            table[field.name] = _plain_value(value)
    return table


def _plain_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain_value(item) for item in value]
    if isinstance(value, ArrayType):
        return _plain(value)
    return value


_RECORDS: Final[dict[str, Decoder]] = {}


def _op(value: Any) -> Op:
    name = value.get("op") if isinstance(value, Mapping) else None
    if not isinstance(name, str) or name not in OPS_BY_SHORT_NAME:
        raise Problem("an object whose op is one of " + ", ".join(OPS_BY_SHORT_NAME), value)
    if name not in _RECORDS:
        _RECORDS[name] = record(OPS_BY_SHORT_NAME[name], extra=("op",))
    return _RECORDS[name](value)


_ARRAY: Final = record(ArrayType)


def _array(value: Any) -> ArrayType:
    array = _ARRAY(value)
    if not known_dtype(array.dtype):
        problem = Problem("the name of a dtype", array.dtype)
        problem.path.append(".dtype")
        raise problem
    return array


teach(Op, _op)
teach(ArrayType, _array)
