"""Parses the text form of a program, section by section and line by line."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, TypeVar

from ratrain_jax.errors import ProgramFormatError

from .mnemonics import FIELDS, OPS_BY_SHORT_NAME
from .program import (
    Kind,
    LayerInfo,
    Op,
    OperandInfo,
    Program,
    Reduction,
    Settings,
    Value,
    Variable,
)
from .tokens import Cursor

HEADER: Final = "ratrain program 1"

_T = TypeVar("_T")

_NUMBER = "(-?[0-9]{1,40})"
_ID = re.compile("%" + _NUMBER)
_READ = re.compile("%" + _NUMBER + "(!?)")
_LAYER = re.compile("L" + _NUMBER)
_VARIABLE = re.compile("x" + _NUMBER)
_OPERAND = re.compile("o" + _NUMBER)
_STAGE = re.compile("s" + _NUMBER)
_BLOCK = re.compile("b" + _NUMBER)
_PHASE = re.compile("k" + _NUMBER)
_MICROBATCH = re.compile("i" + _NUMBER)
_AT = re.compile("@" + _NUMBER)
_FLOAT = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|inf)")
_MAX_DIGITS: Final = 400  # more are no floating-point number
_MOST_ARRAYS: Final = 1_000_000  # a typing error must not fill the memory


def parse(text: str) -> Program:
    """Reads a program from its text form.

    Args:
        text: what `as_text` writes; blank lines, comments and spacing are free.

    Returns:
        The program; it is not verified.

    Raises:
        ProgramFormatError: if the text is not of this form; the message has the line's number and
            what was expected there.
    """
    reader = _Reader(text)
    if reader.text != HEADER:
        reader.fail(f"{HEADER!r}")
    reader.advance()
    fingerprint = reader.one("fingerprint", _fingerprint)
    settings = _settings(reader)
    return Program(
        settings=settings,
        layers=reader.section("layers", _numbered("L", _layer)),
        variables=reader.section("variables", _numbered("x", _variable)),
        operands=reader.section("operands", _numbered("o", _operand)),
        reductions=reader.section("reductions", _reduction),
        values=reader.section("values", _value),
        inputs=_flat(reader.section("inputs", _id_list)),
        outputs=_flat(reader.section("outputs", _id_list)),
        order=_stages(reader),
        fingerprint=fingerprint,
    )


class _Reader:
    """The lines that say something, one after the other."""

    def __init__(self, text: str) -> None:
        lines = ((number, line.strip()) for number, line in enumerate(text.split("\n"), start=1))
        self._lines = [(number, line) for number, line in lines if line and line[0] != "#"]
        self._end = text.count("\n") + 1
        self._next = 0

    @property
    def line(self) -> int:
        return self._lines[self._next][0] if self._next < len(self._lines) else self._end

    @property
    def text(self) -> str:
        return self._lines[self._next][1] if self._next < len(self._lines) else ""

    def advance(self) -> None:
        self._next += 1

    def fail(self, expected: str) -> NoReturn:
        found = f"found {self.text[:60]!r}" if self.text else "the text ends"
        raise ProgramFormatError(f"line {self.line}: expected {expected}, but {found}.")

    def one(self, word: str, read: Callable[[Cursor], _T]) -> _T:
        """Reads a line that begins with this word."""
        if self.text.split(maxsplit=1)[:1] != [word]:
            self.fail(f"a line {word!r}")
        cursor = Cursor(self.text, self.line)
        cursor.word(word)
        result = read(cursor)
        cursor.end()
        self.advance()
        return result

    def heading(self, name: str) -> None:
        if self.text.split() != name.split():
            self.fail(f"the section {name!r}")
        self.advance()

    def section(self, name: str, read: Callable[[Cursor, int], _T]) -> tuple[_T, ...]:
        """Reads a heading and every line up to the next heading."""
        self.heading(name)
        items: list[_T] = []
        while self.text and not self._at_heading():
            cursor = Cursor(self.text, self.line)
            items.append(read(cursor, len(items)))
            cursor.end()
            self.advance()
        return tuple(items)

    def _at_heading(self) -> bool:
        return self.text in _HEADINGS or self.text.startswith("stage ")


_HEADINGS: Final = frozenset(
    ("settings", "layers", "variables", "operands", "reductions", "values", "inputs", "outputs")
)


def _fingerprint(cursor: Cursor) -> str:
    return cursor.name("a fingerprint")


def _numbered(prefix: str, read: Callable[[Cursor], _T]) -> Callable[[Cursor, int], _T]:
    """A row that begins with its own number."""

    def numbered(cursor: Cursor, number: int) -> _T:
        cursor.word(f"{prefix}{number}")
        return read(cursor)

    return numbered


def _switch(cursor: Cursor) -> bool:
    return cursor.choice(("on", "off")) == "on"


def _count(cursor: Cursor) -> int:
    return cursor.integer("a whole number")


def _count_or_none(cursor: Cursor) -> int | None:
    return None if cursor.accept("none") else cursor.integer("a whole number or 'none'")


def _counts(cursor: Cursor) -> tuple[int, ...]:
    if cursor.accept("none"):
        return ()
    counts = [cursor.integer("whole numbers or 'none'")]
    while cursor.peek:
        counts.append(cursor.integer("a whole number"))
    return tuple(counts)


def _word(cursor: Cursor) -> str:
    return cursor.name("a word")


_SETTINGS: Final[dict[str, Callable[[Cursor], Any]]] = {
    "stages": _count,
    "data_parallel": _count,
    "microbatches": _count,
    "schedule": _word,
    "zero": _count,
    "recovery": _word,
    "layerwise_state": _switch,
    "update_prefetch": _switch,
    "window_layers": _count,
    "window_bytes": _count_or_none,
    "window_microbatches": _count,
    "memory_limit": _counts,
    "validation": _word,
}


def _settings(reader: _Reader) -> Settings:
    reader.heading("settings")
    return Settings(**{name: reader.one(name, read) for name, read in _SETTINGS.items()})


def _layer(cursor: Cursor) -> LayerInfo:
    name = cursor.name("the layer's name")
    stage = cursor.prefixed(_STAGE, "a stage such as s0")
    block = cursor.prefixed(_BLOCK, "a block such as b0")
    phase = cursor.prefixed(_PHASE, "an update phase such as k0")
    early = cursor.prefixed(_PHASE, "a phase such as k0") if cursor.accept("early") else None
    recovered = cursor.choice(("saved", "recovered")) == "recovered"
    flops = cursor.integer("floating-point operations")
    seconds = _seconds(cursor)
    fingerprint = cursor.name("a fingerprint")
    inputs, operands = _clause(cursor, "reads", _mixed) or ((), ())
    outputs = _clause(cursor, "makes", lambda inner: inner.many(_VARIABLE))
    needed = _clause(cursor, "backward", _mixed) or ((), ())
    borrows = []
    while (borrow := _clause(cursor, "borrows", _borrow)) is not None:
        borrows.append(borrow)
    parameters = _clause(cursor, "owns", _names)
    return LayerInfo(
        name=name,
        stage=stage,
        block=block,
        parameters=parameters or (),
        borrows=tuple(borrows),
        inputs=inputs,
        outputs=outputs or (),
        operands=operands,
        backward_inputs=needed[0],
        backward_operands=needed[1],
        update_phase=phase,
        flops=flops,
        seconds=seconds,
        recovered=recovered,
        fingerprint=fingerprint,
        early=early,
    )


def _seconds(cursor: Cursor) -> float:
    if len(cursor.peek) > _MAX_DIGITS:
        cursor.fail("seconds such as 1.5e-05")
    return float(cursor.expect(_FLOAT, "seconds such as 1.5e-05")[0])


def _clause(cursor: Cursor, word: str, read: Callable[[Cursor], _T]) -> _T | None:
    """Reads `word(…)` if it comes next."""
    if not cursor.accept(word):
        return None
    cursor.word("(")
    result = read(cursor)
    cursor.word(")")
    return result


def _names(cursor: Cursor) -> tuple[str, ...]:
    names = []
    while cursor.peek not in ("", ")"):
        names.append(cursor.name("a parameter's name"))
    return tuple(names)


def _borrow(cursor: Cursor) -> tuple[int, tuple[str, ...]]:
    return cursor.prefixed(_LAYER, "the owning layer such as L0"), _names(cursor)


def _mixed(cursor: Cursor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return cursor.many(_VARIABLE), cursor.many(_OPERAND)


def _variable(cursor: Cursor) -> Variable:
    array = cursor.array() or cursor.fail("an array such as f32[2,16]")
    role, join = cursor.name("a role"), cursor.name("a join")
    differentiable = cursor.choice(("differentiable", "constant")) == "differentiable"
    producer = cursor.prefixed(_LAYER, "the layer that makes it, such as L0")
    cursor.word("->")
    return Variable(array, producer, cursor.many(_LAYER), differentiable, role, join)


def _operand(cursor: Cursor) -> OperandInfo:
    array = cursor.array() or cursor.fail("an array such as f32[2,16]")
    split = cursor.choice(("split", "whole")) == "split"
    prologue = cursor.choice(("prologue", "given")) == "prologue"
    return OperandInfo(cursor.name("the operand's name"), array, split, prologue)


def _reduction(cursor: Cursor, _number: int) -> Reduction:
    phase = cursor.prefixed(_PHASE, "a phase such as k1")
    cursor.word("from")
    layers = cursor.many(_LAYER)
    loss = cursor.accept("loss")
    cursor.word("->")
    return Reduction(phase, layers, loss, cursor.many(_STAGE))


_KINDS: Final = [kind.value for kind in Kind]


def _value(cursor: Cursor, _number: int) -> Value:
    number = cursor.prefixed(_ID, "a value such as %0")
    kind = Kind(cursor.choice(_KINDS))
    name = cursor.name("the value's name")
    stage = cursor.prefixed(_STAGE, "a stage such as s0")
    layer = None if cursor.accept("-") else cursor.prefixed(_LAYER, "a layer such as L0, or -")
    microbatch = (
        None
        if cursor.accept("-")
        else cursor.prefixed(_MICROBATCH, "a microbatch such as i0, or -")
    )
    arrays = []
    while (array := cursor.array()) is not None:
        count = cursor.integer("how many such arrays") if cursor.accept("x") else 1
        if count > _MOST_ARRAYS:
            cursor.fail(f"at most {_MOST_ARRAYS} arrays of a kind before here")
        arrays.extend([array] * count)
    aliased = cursor.integer("aliased bytes") if cursor.accept("aliased") else 0
    return Value(number, kind, name, tuple(arrays), stage, layer, microbatch, aliased)


def _id_list(cursor: Cursor, _number: int) -> tuple[int, ...]:
    return cursor.many(_ID) or cursor.fail("values such as %0")


def _flat(lines: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(number for line in lines for number in line)


def _stages(reader: _Reader) -> tuple[tuple[Op, ...], ...]:
    stages = []
    while reader.text:
        stage = len(stages)
        stages.append(reader.section(f"stage {stage}", lambda cursor, _, s=stage: _op(cursor, s)))
    return tuple(stages)


def _op(cursor: Cursor, stage: int) -> Op:
    op_type = OPS_BY_SHORT_NAME.get(cursor.peek)
    if op_type is None:
        cursor.fail("an op: one of " + ", ".join(OPS_BY_SHORT_NAME))
    cursor.place += 1
    attributes: dict[str, Any] = {}
    for field in FIELDS[op_type]:
        match = cursor.match(field.pattern)
        if match is not None:
            attributes[field.name] = field.decode(match)
        elif field.optional:
            attributes[field.name] = None
        else:
            cursor.fail(field.expected)
    reads, donates = _reads(cursor)
    writes = cursor.many(_ID) if cursor.accept("->") else ()
    waits = cursor.many(_ID) if cursor.accept("after") else ()
    if cursor.accept("donates"):
        donates = cursor.many(_ID)
    home = cursor.match(_AT)
    stage = stage if home is None else int(home[1])
    return op_type(stage, reads, writes, donates, waits, **attributes)


def _reads(cursor: Cursor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Values read, and those of them marked as donated."""
    reads, donates = [], []
    while (match := cursor.match(_READ)) is not None:
        reads.append(int(match[1]))
        if match[2]:
            donates.append(reads[-1])
    return tuple(reads), tuple(donates)
