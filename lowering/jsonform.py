"""The JSON form of a program: versioned, one table row or op a line, read back to an equal program.

The fields of each object are those of the dataclasses in `program`, and an op is an object with its
short name under `op`. Fields that stand at their default may be left out.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NoReturn

from ratrain_jax.errors import ProgramFormatError

from .mnemonics import OPS_BY_SHORT_NAME, SHORT_NAMES
from .program import ArrayType, Op, Program
from .tokens import known_dtype

FORMAT: Final = "ratrain-program"
VERSION: Final = 1

_Decoder = Callable[[Any], Any]


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
    try:
        table = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ProgramFormatError(f"line {error.lineno}: not valid JSON: {error.msg}.") from error
    except (ValueError, RecursionError) as error:
        raise ProgramFormatError(f"not a program in JSON: {error}.") from error
    try:
        return _program(table)
    except _Problem as problem:
        path = "".join(reversed(problem.path)).lstrip(".") or "the whole"
        raise ProgramFormatError(f"{path}: expected {problem.expected}.") from None


def _lines(program: Program) -> Iterator[str]:
    head = {"format": FORMAT, "version": VERSION, "fingerprint": program.fingerprint}
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


class _Problem(Exception):
    """Something unexpected, with the path to it, innermost part first."""

    def __init__(self, expected: str, found: Any) -> None:
        self.expected = f"{expected}, found {_shown(found)}"
        self.path: list[str] = []


def _shown(found: Any) -> str:
    if isinstance(found, dict):
        return "an object"
    if isinstance(found, list):
        return f"a list of {len(found)}"
    shown = json.dumps(found)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _program(table: Any) -> Program:
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise ProgramFormatError(f"the whole: expected an object whose format is {FORMAT!r}.")
    version = table.get("version")
    if version != VERSION or isinstance(version, bool):
        raise ProgramFormatError(
            f"version: expected {VERSION}, found {_shown(version)}; write the program again with"
            " this version of ratrain_jax."
        )
    rest = {key: value for key, value in table.items() if key not in ("format", "version")}
    return _decoder(Program)(rest)


def _scalar(kind: type, expected: str) -> _Decoder:
    def decode(value: Any) -> Any:
        if type(value) is not kind:
            raise _Problem(expected, value)
        return value

    return decode


def _real(value: Any) -> float:
    if type(value) not in (int, float) or abs(value) > 1e300:
        raise _Problem("a number", value)
    return float(value)


_SCALARS: Final[dict[Any, _Decoder]] = {
    int: _scalar(int, "a whole number"),
    str: _scalar(str, "a string"),
    bool: _scalar(bool, "true or false"),
    float: _real,
}

_DECODERS: dict[Any, _Decoder] = dict(_SCALARS)


def _decoder(hint: Any) -> _Decoder:
    """The function that reads a value of this type; made once a type."""
    if hint not in _DECODERS:
        _DECODERS[hint] = _new_decoder(hint)
    return _DECODERS[hint]


def _new_decoder(hint: Any) -> _Decoder:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Op:
        return _op
    if hint is ArrayType:
        return _array
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _enumeration(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _record(hint)
    if origin in (types.UnionType, typing.Union):
        inner = _decoder(next(item for item in arguments if item is not types.NoneType))
        return lambda value: None if value is None else inner(value)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return _sequence(_decoder(arguments[0]))
    return _fixed([_decoder(item) for item in arguments])


def _enumeration(kind: type[enum.Enum]) -> _Decoder:
    members = {member.value: member for member in kind}

    def decode(value: Any) -> Any:
        if not isinstance(value, str) or value not in members:
            raise _Problem("one of " + ", ".join(members), value)
        return members[value]

    return decode


def _sequence(inner: _Decoder) -> _Decoder:
    def decode(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _Problem("a list", value)
        return _items(value, [inner] * len(value))

    return decode


def _fixed(inners: list[_Decoder]) -> _Decoder:
    def decode(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(inners):
            raise _Problem(f"a list of {len(inners)}", value)
        return _items(value, inners)

    return decode


def _items(values: list[Any], inners: list[_Decoder]) -> tuple[Any, ...]:
    items = []
    try:
        for inner, value in zip(inners, values, strict=True):
            items.append(inner(value))
    except _Problem as problem:
        problem.path.append(f"[{len(items)}]")
        raise
    return tuple(items)


def _record(cls: type, extra: tuple[str, ...] = ()) -> _Decoder:
    """Reads an object with the fields of a dataclass."""
    hints = typing.get_type_hints(cls)
    fields = {field.name: _decoder(hints[field.name]) for field in dataclasses.fields(cls)}
    required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]

    def decode(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _Problem("an object", value)
        ready = {}
        for key, item in value.items():
            if key in fields:
                ready[key] = _at(key, fields[key], item)
            elif key not in extra:
                raise _Problem(f"only the fields {', '.join(fields)}", key)
        for key in required:
            if key not in ready:
                raise _Problem(f"a field {key!r}", list(value))
        return cls(**ready)

    return decode


def _at(key: str, inner: _Decoder, value: Any) -> Any:
    try:
        return inner(value)
    except _Problem as problem:
        problem.path.append(f".{key}")
        raise


_RECORDS: Final[dict[str, _Decoder]] = {}


def _op(value: Any) -> Op:
    name = value.get("op") if isinstance(value, Mapping) else None
    if not isinstance(name, str) or name not in OPS_BY_SHORT_NAME:
        raise _Problem("an object whose op is one of " + ", ".join(OPS_BY_SHORT_NAME), value)
    if name not in _RECORDS:
        _RECORDS[name] = _record(OPS_BY_SHORT_NAME[name], extra=("op",))
    return _RECORDS[name](value)


_ARRAY: Final = _record(ArrayType)


def _array(value: Any) -> ArrayType:
    array = _ARRAY(value)
    if not known_dtype(array.dtype):
        problem = _Problem("the name of a dtype", array.dtype)
        problem.path.append(".dtype")
        raise problem
    return array
