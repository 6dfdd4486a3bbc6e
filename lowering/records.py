"""Frozen dataclasses read back from JSON: as data only, with the path to whatever is not as expected.

A file's outermost object has `format` and `version` beside the fields of a dataclass. The fields' type hints say what is
read where; fields that have a default may be left out.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeVar

from ratrain_jax.errors import RATrainError

T = TypeVar("T")
Decoder = Callable[[Any], Any]


class Problem(Exception):
    """Something unexpected, with the path to it, innermost part first."""

    def __init__(self, expected: str, found: Any) -> None:
        self.expected = f"{expected}, found {_shown(found)}"
        self.path: list[str] = []


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """A kind of file.

    Attributes:
        name: what its `format` says.
        version: what its `version` says.
        holds: what messages call its content.
        error: what is raised where a text is not of this form.
    """

    name: str
    version: int
    holds: str
    error: type[RATrainError]

    @property
    def head(self) -> dict[str, Any]:
        """The first fields of such a file."""
        return {"format": self.name, "version": self.version}


def read(cls: type[T], text: str, form: Form) -> T:
    """Reads a dataclass from a text of some form.

    Args:
        cls: the dataclass.
        text: what the file holds.
        form: what it must be.

    Returns:
        The dataclass.

    Raises:
        RATrainError: the form's error: no JSON, another version, or not of this form; the message has the line, or the
            path to the spot, and what was expected there.
    """
    try:
        table = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise form.error(f"line {error.lineno}: not valid JSON: {error.msg}.") from error
    except (ValueError, RecursionError) as error:
        raise form.error(f"not a {form.holds} in JSON: {error}.") from error
    if not isinstance(table, dict) or table.get("format") != form.name:
        raise form.error(f"the whole: expected an object whose format is {form.name!r}.")
    version = table.get("version")
    if version != form.version or isinstance(version, bool):
        raise form.error(
            f"version: expected {form.version}, found {_shown(version)}; write the {form.holds} again with"
            " this version of ratrain_jax."
        )
    rest = {key: value for key, value in table.items() if key not in ("format", "version")}
    try:
        return decoder(cls)(rest)
    except Problem as problem:
        path = "".join(reversed(problem.path)).lstrip(".") or "the whole"
        raise form.error(f"{path}: expected {problem.expected}.") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _shown(found: Any) -> str:
    if isinstance(found, dict):
        return "an object"
    if isinstance(found, list):
        return f"a list of {len(found)}"
    shown = json.dumps(found)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _scalar(kind: type, expected: str) -> Decoder:
    def decode(value: Any) -> Any:
        if type(value) is not kind:
            raise Problem(expected, value)
        return value

    return decode


def _real(value: Any) -> float:
    if type(value) not in (int, float) or abs(value) > 1e300:
        raise Problem("a number", value)
    return float(value)


_DECODERS: Final[dict[Any, Decoder]] = {
    int: _scalar(int, "a whole number"),
    str: _scalar(str, "a string"),
    bool: _scalar(bool, "true or false"),
    float: _real,
}


def teach(hint: Any, decode: Decoder) -> None:
    """Says how a type is read that its fields alone do not tell."""
    _DECODERS[hint] = decode


def decoder(hint: Any) -> Decoder:
    """The function that reads a value of this type; made once a type."""
    if hint not in _DECODERS:
        _DECODERS[hint] = _new_decoder(hint)
    return _DECODERS[hint]


def _new_decoder(hint: Any) -> Decoder:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _enumeration(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return record(hint)
    if origin in (types.UnionType, typing.Union):
        inner = decoder(next(item for item in arguments if item is not types.NoneType))
        return lambda value: None if value is None else inner(value)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return _sequence(decoder(arguments[0]))
    return _fixed([decoder(item) for item in arguments])


def _enumeration(kind: type[enum.Enum]) -> Decoder:
    members = {member.value: member for member in kind}

    def decode(value: Any) -> Any:
        if not isinstance(value, str) or value not in members:
            raise Problem("one of " + ", ".join(members), value)
        return members[value]

    return decode


def _sequence(inner: Decoder) -> Decoder:
    def decode(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise Problem("a list", value)
        return _items(value, [inner] * len(value))

    return decode


def _fixed(inners: list[Decoder]) -> Decoder:
    def decode(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(inners):
            raise Problem(f"a list of {len(inners)}", value)
        return _items(value, inners)

    return decode


def _items(values: list[Any], inners: list[Decoder]) -> tuple[Any, ...]:
    items = []
    try:
        for inner, value in zip(inners, values, strict=True):
            items.append(inner(value))
    except Problem as problem:
        problem.path.append(f"[{len(items)}]")
        raise
    return tuple(items)


def record(cls: type, extra: tuple[str, ...] = ()) -> Decoder:
    """Reads an object with the fields of a dataclass, and maybe `extra` ones, which are skipped."""
    hints = typing.get_type_hints(cls)
    fields = {field.name: decoder(hints[field.name]) for field in dataclasses.fields(cls)}
    required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]

    def decode(value: Any) -> Any:
        if not isinstance(value, dict):
            raise Problem("an object", value)
        ready = {}
        for key, item in value.items():
            if key in fields:
                ready[key] = _at(key, fields[key], item)
            elif key not in extra:
                raise Problem(f"only the fields {', '.join(fields)}", key)
        for key in required:
            if key not in ready:
                raise Problem(f"a field {key!r}", list(value))
        return cls(**ready)

    return decode


def _at(key: str, inner: Decoder, value: Any) -> Any:
    try:
        return inner(value)
    except Problem as problem:
        problem.path.append(f".{key}")
        raise
