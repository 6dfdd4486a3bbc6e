"""Checked dataclasses: one description of each number serves code, files and error messages.

A *quantity* is a dataclass field that holds a number with a unit and a range, and a *choice* is one
that holds a word out of a few. Both are declared once, on the field. `check` tests an instance
against its declarations, and `read` builds an instance from a table of a TOML file, so that a bad
value gives the same message whether it came from a file or from code.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ratrain_jax.errors import MachineError

T = TypeVar("T")
_REQUIRED = dataclasses.MISSING
_SHOWN = 60


def quantity(
    unit: str, low: float, high: float, *, default: Any = _REQUIRED, whole: bool = False
) -> Any:
    """Declares a field that holds a number.

    Args:
      unit: What the number counts, as it is printed in messages.
      low: The least value taken.
      high: The greatest value taken.
      default: The value where none is given; without it the field is required.
      whole: Whether only integers are taken.

    Returns:
      A dataclass field.
    """
    meta = {"unit": unit, "low": low, "high": high, "whole": whole}
    return dataclasses.field(default=default, metadata=meta)


def choice(options: Sequence[str], *, default: Any = _REQUIRED) -> Any:
    """Declares a field that holds one of a few words."""
    return dataclasses.field(default=default, metadata={"options": tuple(options)})


def check(instance: Any, where: str = "") -> None:
    """Tests every declared field of a dataclass instance.

    Args:
      instance: A dataclass instance with fields made by `quantity` and `choice`.
      where: The path of the instance inside its file, for messages.

    Raises:
      MachineError: If a value is not of its kind or out of its range.
    """
    for field in dataclasses.fields(instance):
        key = _join(where, field.name)
        value = getattr(instance, field.name)
        if "unit" in field.metadata:
            _check_number(key, value, field.metadata)
        elif "options" in field.metadata and value not in field.metadata["options"]:
            words = ", ".join(repr(word) for word in field.metadata["options"])
            raise MachineError(f"{key} is {shown(value)}; set it to one of {words}.")
        elif field.type is str and not isinstance(value, str):
            raise MachineError(f"{key} is {shown(value)}; make it a string.")


def shown(value: Any) -> str:
    """A value as a message shows it: short, whatever it is."""
    try:
        text = repr(value)
    except ValueError:  # a number of thousands of digits
        return "a very large number"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 4]} ..."


def check_number(
    key: str, value: Any, unit: str, low: float, high: float, *, whole: bool = False
) -> None:
    """Tests one number that is not a field of its own, such as an entry of a table."""
    _check_number(key, value, {"unit": unit, "low": low, "high": high, "whole": whole})


def _check_number(key: str, value: Any, meta: Mapping[str, Any]) -> None:
    kind = "a whole number" if meta["whole"] else "a number"
    wanted = f"{kind} of {meta['unit']} from {meta['low']:g} to {meta['high']:g}"
    good = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared before it is converted: a whole number may be larger than any float.
    if good and not meta["low"] <= value <= meta["high"]:
        raise MachineError(f"{key} is {shown(value)}, out of range; give {wanted}.")
    if not good or (meta["whole"] and not float(value).is_integer()):
        raise MachineError(f"{key} is {shown(value)}, which is not {kind}; give {wanted}.")


def read(cls: type[T], table: Any, where: str = "", **ready: Any) -> T:
    """Builds a checked dataclass from a table of a file.

    Args:
      cls: The dataclass to build.
      table: The table: a mapping from field names to values.
      where: The path of the table inside its file, for messages.
      **ready: Fields that the caller has already built from entries of the table.

    Returns:
      An instance of `cls`.

    Raises:
      MachineError: If a key is missing, unknown, or has a bad value.
    """
    if not isinstance(table, Mapping):
        raise MachineError(f"{where or 'the file'} is {shown(table)}; make it a table of keys.")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # pyright: ignore
    unknown = [key for key in table if key not in fields]
    if unknown:
        raise MachineError(_unknown_key(_join(where, unknown[0]), unknown[0], fields))
    for name, field in fields.items():
        required = field.default is _REQUIRED and field.default_factory is _REQUIRED
        if required and name not in table and name not in ready:
            raise MachineError(f"{_join(where, name)} is missing; add it{_hint(field)}.")
    values = {key: value for key, value in table.items() if key not in ready}
    probe = {**values, **ready}
    for name, value in values.items():
        meta = fields[name].metadata
        if "unit" in meta:
            _check_number(_join(where, name), value, meta)
            probe[name] = int(value) if meta["whole"] else value
    return cls(**probe)


def _unknown_key(key: str, name: str, fields: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, list(fields), n=1)
    guess = f" did you mean {near[0]!r}?" if near else f" known keys: {', '.join(sorted(fields))}."
    return f"{key} is not a known key;{guess}"


def _hint(field: Any) -> str:
    meta = field.metadata
    if "unit" in meta:
        return f", in {meta['unit']}, from {meta['low']:g} to {meta['high']:g}"
    if "options" in meta:
        return f", one of {', '.join(meta['options'])}"
    return ""


def _join(where: str, name: str) -> str:
    key = f"{where}.{name}" if where else name
    return key if len(key) <= 2 * _SHOWN else f"{key[: 2 * _SHOWN]} ..."
