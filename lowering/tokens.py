"""Reading a line token by token: what the text form of a program is parsed with.

A token is a JSON string, a parenthesis, or a run of other characters without blanks. What stands
in braces is a note, and `#` begins a comment; both are passed over. Every error is a
`ProgramFormatError` with the number of the line, what was expected there and what stood there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final, NoReturn

from ratrain_jax.errors import ProgramFormatError

from .program import ArrayType, itemsize

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[()]|\{[^}]*\}|#.*|[^\s()"#{]+|["{]')
_PASSED_OVER = ("#", "{")
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./'\[\]:+-]*")
INT = re.compile(r"-?[0-9]{1,40}")
_SHOWN: Final = 60  # characters of a faulty text that a message repeats

_SHORT_DTYPES: Final = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint64": "u64",
    "uint32": "u32",
    "uint16": "u16",
    "uint8": "u8",
}
_LONG_DTYPES: Final = {short: name for name, short in _SHORT_DTYPES.items()}
_DTYPE = re.compile(r"bool|u?int[0-9]+|b?float[0-9]+(_[a-z0-9]+)?|complex[0-9]+|key<[a-z0-9_]+>")
_ARRAY = re.compile(r"([A-Za-z0-9_<>]+)\[((?:-?[0-9]{1,40}(?:,-?[0-9]{1,40})*)?)\]")


def quoted(name: str) -> str:
    """A name as one token: itself where that is plain, else a JSON string."""
    return name if _PLAIN.fullmatch(name) else json.dumps(name)


def array_token(array: ArrayType) -> str:
    """An array's type as one token.

    Example:
        >>> array_token(ArrayType((2, 16), "float32"))
        'f32[2,16]'
    """
    dtype = _SHORT_DTYPES.get(array.dtype, array.dtype)
    return f"{dtype}[{','.join(map(str, array.shape))}]"


def known_dtype(name: str) -> bool:
    """Whether there is a dtype of this name for arrays on a device."""
    if not _DTYPE.fullmatch(name):
        return False
    try:
        return itemsize(name) > 0
    except TypeError:
        return False


class Cursor:
    """A place in the tokens of one line.

    Args:
        text: the line.
        line: its number, from 1.
    """

    __slots__ = ("line", "place", "tokens")

    def __init__(self, text: str, line: int) -> None:
        self.line = line
        self.place = 0
        self.tokens: Sequence[str] = [
            token for token in _TOKEN.findall(text) if not token.startswith(_PASSED_OVER)
        ]

    @property
    def peek(self) -> str:
        """The next token; empty at the end of the line."""
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def fail(self, expected: str) -> NoReturn:
        """Raises the error that says what was expected here."""
        found = self.peek[:_SHOWN]
        found = f"found {found!r}" if found else "the line ends"
        raise ProgramFormatError(f"line {self.line}: expected {expected}, but {found}.")

    def take(self, expected: str) -> str:
        """Takes the next token, whatever it is."""
        token = self.peek
        if not token:
            self.fail(expected)
        self.place += 1
        return token

    def accept(self, word: str) -> bool:
        """Takes the next token if it is this word."""
        if self.peek != word:
            return False
        self.place += 1
        return True

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Takes the next token if the whole of it matches."""
        found = pattern.fullmatch(self.peek)
        if found is not None:
            self.place += 1
        return found

    def expect(self, pattern: re.Pattern[str], expected: str) -> re.Match[str]:
        """Takes the next token, which must match."""
        found = self.match(pattern)
        if found is None:
            self.fail(expected)
        return found

    def word(self, word: str) -> None:
        """Takes this very word."""
        if not self.accept(word):
            self.fail(f"{word!r}")

    def choice(self, words: Sequence[str]) -> str:
        """Takes one of these words."""
        if self.peek not in words:
            self.fail("one of " + ", ".join(words))
        return self.take("a word")

    def integer(self, expected: str) -> int:
        """Takes a whole number."""
        return int(self.expect(INT, expected)[0])

    def prefixed(self, pattern: re.Pattern[str], expected: str) -> int:
        """Takes a number behind a prefix; the pattern's group holds the digits."""
        return int(self.expect(pattern, expected)[1])

    def many(self, pattern: re.Pattern[str]) -> tuple[int, ...]:
        """Takes numbers behind a prefix as long as there are any."""
        found = []
        while (match := self.match(pattern)) is not None:
            found.append(int(match[1]))
        return tuple(found)

    def name(self, expected: str) -> str:
        """Takes a name, plain or quoted."""
        token = self.peek
        if _PLAIN.fullmatch(token):
            self.place += 1
            return token
        if len(token) < 2 or token[0] != '"':
            self.fail(expected)
        try:
            name = json.loads(token)
        except ValueError:
            self.fail(f"{expected} as a valid JSON string")
        self.place += 1
        return name

    def array(self) -> ArrayType | None:
        """Takes an array's type if one comes next."""
        found = _ARRAY.fullmatch(self.peek)
        if found is None:
            return None
        dtype = _LONG_DTYPES.get(found[1], found[1])
        if not known_dtype(dtype):
            self.fail("an array of a known dtype, such as f32[2,16]")
        self.place += 1
        return ArrayType(tuple(int(size) for size in found[2].split(",") if size), dtype)

    def end(self) -> None:
        """Nothing may follow."""
        if self.peek:
            self.fail("the end of the line")
