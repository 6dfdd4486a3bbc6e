"""The short names of ops, and the form of one op on a line.

One op a line, in the text form of a program and in the messages about one:

    F   L0:3 i2    %12 %13! -> %20 %21  after %9

    short name; what it is for (layers `L`, microbatch `i`, target `>`, phase `k`, group `g`);
    values read, `!` behind those that are donated; `->` and values written; `after` and values
    that must exist first. `donates` and `@` stand only where an op departs from the usual: ids
    donated that the marks cannot show, and a stage other than the one whose list it stands in.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

from .program import (
    Backward,
    Borrow,
    Forward,
    Free,
    GlobalReduce,
    GradSync,
    Metrics,
    Op,
    PrefetchView,
    Prologue,
    Recover,
    SendActivation,
    SendGradient,
    UpdateShard,
    Validate,
    ZeroGradient,
)

SHORT_NAMES: Final[dict[type[Op], str]] = {
    Prologue: "P",
    Forward: "F",
    Recover: "R",
    Backward: "B",
    ZeroGradient: "Z",
    SendActivation: "SA",
    SendGradient: "SG",
    Borrow: "BO",
    GradSync: "GS",
    GlobalReduce: "GR",
    UpdateShard: "U",
    PrefetchView: "PV",
    Validate: "V",
    Metrics: "M",
    Free: "X",
}

OPS_BY_SHORT_NAME: Final[dict[str, type[Op]]] = {name: op for op, name in SHORT_NAMES.items()}

_INT = r"-?[0-9]{1,40}"


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """How one field of an op is written.

    Attributes:
        name: the field.
        pattern: what its token looks like; its groups hold the digits.
        encode: from the field's value to the token.
        decode: from the groups of a match to the field's value.
        expected: the token in words, for messages.
        optional: whether None is written as nothing.
    """

    name: str
    pattern: re.Pattern[str]
    encode: Callable[[Any], str]
    decode: Callable[[re.Match[str]], Any]
    expected: str
    optional: bool = False


def _number(name: str, prefix: str, optional: bool = False) -> Field:
    return Field(
        name,
        re.compile(f"{prefix}({_INT})"),
        lambda value: f"{prefix}{value}",
        lambda match: int(match[1]),
        f"{name} such as {prefix}2",
        optional,
    )


_LAYERS = Field(
    "layers",
    re.compile(f"L({_INT}):({_INT})"),
    lambda value: f"L{value[0]}:{value[1]}",
    lambda match: (int(match[1]), int(match[2])),
    "layers such as L0:3",
)
_GROUP = Field(
    "group",
    re.compile(f"g((?:{_INT}(?:,{_INT})*)?)"),
    lambda value: "g" + ",".join(map(str, value)),
    lambda match: tuple(int(part) for part in match[1].split(",") if part),
    "group such as g0,1",
)
_UNIT = (_LAYERS, _number("microbatch", "i"))
_SEND = (_number("target", ">"), _number("microbatch", "i", optional=True))

FIELDS: Final[dict[type[Op], tuple[Field, ...]]] = {
    Prologue: (),
    Forward: _UNIT,
    Recover: _UNIT,
    Backward: _UNIT,
    ZeroGradient: (_number("layer", "L"),),
    SendActivation: _SEND,
    SendGradient: _SEND,
    Borrow: (_number("layer", "L"), _number("target", ">")),
    GradSync: (_number("layer", "L"), _number("microbatch", "i", optional=True)),
    GlobalReduce: (_number("phase", "k"), _GROUP),
    UpdateShard: (_number("layer", "L", optional=True), _number("phase", "k")),
    PrefetchView: (_number("layer", "L"),),
    Validate: (_number("layer", "L"), _number("phase", "k")),
    Metrics: (),
    Free: (),
}


def op_label(op: Op) -> str:
    """What an op is and is for, without its values.

    Example:
        >>> op_label(Forward(0, layers=(0, 3), microbatch=2))
        'F L0:3 i2'
    """
    return " ".join((SHORT_NAMES[type(op)], *_attributes(op)))


def op_line(op: Op, stage: int) -> str:
    """One op as a line of a stage's list.

    Args:
        op: the op.
        stage: the stage in whose list it stands.

    Returns:
        The line, without indentation.

    Example:
        >>> op_line(Forward(0, (4, 5), (7,), layers=(0, 1), microbatch=2), 0)
        'F   L0:1 i2    %4 %5 -> %7'
    """
    head = f"{SHORT_NAMES[type(op)]:<3} {' '.join(_attributes(op)):<10}"
    donated = set(op.donates)
    marked = tuple(read for read in op.reads if read in donated) == op.donates
    parts = [head]
    if op.reads:
        parts.append(" ".join(f"%{i}{'!' if marked and i in donated else ''}" for i in op.reads))
    if op.writes:
        parts.append("-> " + ids(op.writes))
    if op.waits:
        parts.append(" after " + ids(op.waits))
    if not marked:
        parts.append(" donates " + ids(op.donates))
    if op.stage != stage:
        parts.append(f" @{op.stage}")
    return " ".join(parts).rstrip()


def ids(values: Iterable[int]) -> str:
    """Numbers of values as the text form writes them."""
    return " ".join(f"%{value}" for value in values)


def _attributes(op: Op) -> list[str]:
    values = ((field, getattr(op, field.name)) for field in FIELDS[type(op)])
    return [field.encode(value) for field, value in values if value is not None]
