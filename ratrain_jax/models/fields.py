"""What each number of a model's configuration may be.

One table serves configurations made in code and those read from files: `check` takes the fields' values, and the name
that each has where it came from, so that a message names the key that its reader wrote.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ratrain_jax.errors import ModelConfigError

POSITIONS = ("rotary", "alibi")
"""How positions are told apart."""


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """What a number may be.

    Attributes:
        low: The least value.
        high: The greatest value.
        whole: Whether only integers are taken.
    """

    low: float
    high: float
    whole: bool = True

    def takes(self, value: Any) -> bool:
        """Whether a value is such a number."""
        kinds = int if self.whole else (int, float)
        return (
            isinstance(value, kinds)
            and not isinstance(value, bool)
            and self.low <= value <= self.high
        )

    def __str__(self) -> str:
        if self.whole:
            return f"a whole number from {int(self.low)} to {int(self.high)}"
        return f"a number from {self.low:g} to {self.high:g}"


# Far above any model; they keep a slip of the keyboard from becoming a day of tracing.
_WIDTH = Range(1, 2**24)
RANGES: Mapping[str, Range] = {
    "layers": Range(1, 10_000),
    "hidden": _WIDTH,
    "ffn": _WIDTH,
    "heads": Range(1, 2**16),
    "kv_heads": Range(1, 2**16),
    "head_dim": Range(1, 2**16),
    "vocab": Range(1, 2**31 - 1),  # tokens are int32
    "rope_theta": Range(1.0, 1e15, whole=False),
    "norm_eps": Range(1e-30, 1.0, whole=False),
    "max_positions": Range(1, 2**31 - 1),
}
"""The fields that hold numbers."""


def shown(value: Any) -> str:
    """A value as a message shows it: short, whatever it is."""
    try:
        text = repr(value)
    except (
        Exception
    ):  # a number of thousands of digits, a list in itself: anything can be in a file
        return f"of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:56]} ..."


def is_name(value: Any) -> bool:
    """Whether a value can be a model's name: text that can be printed."""
    return isinstance(value, str) and value != "" and value.isprintable()


def number(key: str, value: Any, allowed: Range) -> Any:
    """The value, if it is a number in range.

    Raises:
        ModelConfigError: It is not.
    """
    # A comparison with NaN is false, so NaN is in no range.
    if not allowed.takes(value):
        raise ModelConfigError(f"{key} is {shown(value)}; make it {allowed}.")
    return value


def flag(key: str, value: Any) -> bool:
    """The value, if it is true or false.

    Raises:
        ModelConfigError: It is not.
    """
    if not isinstance(value, bool):
        raise ModelConfigError(f"{key} is {shown(value)}; make it true or false.")
    return value


def check(values: Mapping[str, Any], names: Mapping[str, str] | None = None) -> None:
    """Tests a configuration.

    Args:
        values: The fields of `ModelConfig` by name.
        names: What a field is called where its value came from, if not by its own name.

    Raises:
        ModelConfigError: A value is of the wrong kind or out of range, or two contradict each other.
    """
    named = {key: (names or {}).get(key, key) for key in values}
    if not is_name(values["name"]):
        raise ModelConfigError(f"name is {shown(values['name'])}; make it a printable string.")
    for key, allowed in RANGES.items():
        number(named[key], values[key], allowed)
    for key in ("qkv_bias", "tied_embeddings"):
        flag(named[key], values[key])
    if values["positions"] not in POSITIONS:
        choices = " or ".join(map(repr, POSITIONS))
        raise ModelConfigError(
            f"{named['positions']} is {shown(values['positions'])}; make it {choices}."
        )
    if values["heads"] % values["kv_heads"]:
        raise ModelConfigError(
            f"{named['heads']}={values['heads']} is no multiple of {named['kv_heads']}={values['kv_heads']};"
            " equally many query heads must share each key head, so change one of them."
        )
    if values["positions"] == "rotary" and values["head_dim"] % 2:
        raise ModelConfigError(
            f"{named['head_dim']}={values['head_dim']} is odd, but rotary positions turn pairs of features;"
            " make it even."
        )


def default_head_dim(hidden: Any, heads: Any, names: Mapping[str, str] | None = None) -> int:
    """Features of a head where nothing is said: all heads together are as wide as the model.

    Raises:
        ModelConfigError: The heads do not divide the width, or one of the two is no such number.
    """
    names = names or {}
    named = {key: names.get(key, key) for key in ("hidden", "heads")}
    number(named["hidden"], hidden, RANGES["hidden"])
    number(named["heads"], heads, RANGES["heads"])
    if hidden % heads:
        raise ModelConfigError(
            f"{named['hidden']}={hidden} is no multiple of {named['heads']}={heads}; change one of them, or give head_dim."
        )
    return hidden // heads
