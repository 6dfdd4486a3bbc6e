"""Machine descriptions in TOML: the built-in ones and a user's own.

A file has the fields of `Machine` as keys: `[[memories]]`, `[[links]]` and `[[overlaps]]` are lists
of tables, `[peak_flops]` maps dtype names to FLOP/s, `[accelerator]` with `[accelerator.latencies]`
is optional. `assumed` lists keys of the file, dotted, whose value has no source.
"""

import functools
import importlib.resources
import os
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any, Final

from ratrain_jax.errors import MachineError
from ratrain_jax.kernels.machine import Accelerator, Latencies, Link, Machine, Memory, Overlap
from ratrain_jax.kernels.schema import read, shown

_PACKAGE: Final = "ratrain_jax.kernels"
_LISTS: Final = {"memories": Memory, "links": Link, "overlaps": Overlap}


def builtin_machines() -> tuple[str, ...]:
    """Returns the names of the machines that come with the package.

    Example:
      >>> "mt3000" in builtin_machines()
      True
    """
    files = importlib.resources.files(_PACKAGE).joinpath("data").iterdir()
    names = (file.name for file in files)
    return tuple(sorted(name[: -len(".toml")] for name in names if name.endswith(".toml")))


def load_machine(name_or_path: str | os.PathLike[str]) -> Machine:
    """Loads a machine by the name of a built-in one or from a TOML file.

    Args:
      name_or_path: A name out of `builtin_machines()`, or the path of a file ending in ".toml".

    Returns:
      The checked machine.

    Raises:
      MachineError: If there is no such machine, or its description is malformed; the message names
        the key, its unit and its range.

    Example:
      >>> load_machine("mt3000").accelerator.cores
      24
    """
    text = os.fspath(name_or_path)
    if not text.endswith(".toml"):
        return _builtin(text)
    try:
        source = pathlib.Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MachineError(f"cannot read machine file {text!r}: {error}.") from error
    return parse_machine(source, text)


def machine_of(machine: str | Machine) -> Machine:
    """Returns a machine given as such, by the name of a built-in one, or by the path of its file.

    Raises:
      MachineError: See `load_machine`.

    Example:
      >>> machine_of(machine_of("mt3000")).name
      'mt3000'
    """
    return load_machine(machine) if isinstance(machine, str) else machine


@functools.cache
def _builtin(name: str) -> Machine:
    if name not in builtin_machines():
        known = ", ".join(builtin_machines())
        raise MachineError(
            f"no built-in machine {name!r}; use one of {known}, or the path of a .toml file."
        )
    file = importlib.resources.files(_PACKAGE).joinpath("data", f"{name}.toml")
    return parse_machine(file.read_text(encoding="utf-8"), f"{name}.toml")


def parse_machine(source: str, origin: str = "<string>") -> Machine:
    """Reads a machine from TOML text.

    Args:
      source: The text.
      origin: Where it came from, for messages.

    Returns:
      The checked machine.

    Raises:
      MachineError: If the text is not TOML or describes no valid machine.
    """
    try:
        table = tomllib.loads(source)
    # Beside its own error tomllib gives those of numbers of too many digits and of brackets nested too deep.
    except (ValueError, RecursionError) as error:
        raise MachineError(f"{origin} is not valid TOML: {error}.") from error
    try:
        return _machine(table)
    except MachineError as error:
        raise MachineError(f"{origin}: {error}") from None


def _machine(table: Mapping[str, Any]) -> Machine:
    ready: dict[str, Any] = {}
    for key, cls in _LISTS.items():
        if key in table:
            ready[key] = _list_of(cls, key, table[key])
    if "peak_flops" in table:
        if not isinstance(table["peak_flops"], Mapping):
            raise MachineError("peak_flops must be a table from dtype names to FLOP/s.")
        ready["peak_flops"] = tuple(table["peak_flops"].items())
    if "accelerator" in table:
        ready["accelerator"] = _accelerator(table["accelerator"])
    if "assumed" in table:
        ready["assumed"] = _strings("assumed", table["assumed"])
    machine = read(Machine, table, "", **ready)
    for key in machine.assumed:
        _check_present(table, key)
    return machine


def _list_of(cls: type, key: str, tables: Any) -> tuple[Any, ...]:
    if not isinstance(tables, list):
        raise MachineError(f"{key} must be a list of tables; write [[{key}]] above each.")
    items = []
    for index, entry in enumerate(tables):
        name = entry.get("name", index) if isinstance(entry, Mapping) else index
        ready = {}
        for field in ("lanes", "slowdown"):
            if isinstance(entry, Mapping) and isinstance(entry.get(field), list):
                ready[field] = tuple(entry[field])
        items.append(read(cls, entry, f"{key}.{name}", **ready))
    return tuple(items)


def _accelerator(table: Any) -> Accelerator:
    ready: dict[str, Any] = {}
    if isinstance(table, Mapping):
        if "latencies" in table:
            ready["latencies"] = read(Latencies, table["latencies"], "accelerator.latencies")
        if "dma_modes" in table:
            ready["dma_modes"] = _strings("accelerator.dma_modes", table["dma_modes"])
    return read(Accelerator, table, "accelerator", **ready)


def _strings(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise MachineError(f"{key} is {shown(value)}; make it a list of strings.")
    return tuple(value)


def _check_present(table: Mapping[str, Any], key: str) -> None:
    """An assumption about a key that is not there would be a promise about nothing."""
    node: Any = table
    for part in key.split("."):
        if isinstance(node, list):
            node = {entry.get("name"): entry for entry in node if isinstance(entry, Mapping)}
        if not isinstance(node, Mapping) or part not in node:
            raise MachineError(
                f"assumed names {shown(key)}, which is no key of this file; correct it."
            )
        node = node[part]
