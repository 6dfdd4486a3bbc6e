"""Steps, states and batches in users' modules.

Terms.
    A **source** is a step with the types of its arguments, and a way to make them.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import os
import pathlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ratrain_jax.cli.options import Asked
from ratrain_jax.errors import OptionError


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A step with its arguments.

    Attributes:
        step: decorated or not.
        types: of its arguments.
        values: makes its arguments.
    """

    step: Callable[..., Any]
    types: tuple[Any, ...]
    values: Callable[[], tuple[Any, ...]]


def load(name: str, what: str) -> Any:
    """The attribute of a module.

    Args:
        name: `module:attribute` or `path/to/file.py:attribute`. Modules are looked for in the working directory too, and
            what a file imports also beside it, as if Python ran it.
        what: what messages call it.

    Raises:
        OptionError: there is no such module or attribute, or importing fails.
    """
    module_name, colon, attribute = name.rpartition(":")
    if not colon or not module_name or not attribute:
        raise OptionError(
            f"{what} is given as {name!r}; write module:name or path/to/file.py:name."
        )
    module = _module(module_name)
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise OptionError(f"module {module_name!r} has no {attribute!r}; name {what} in it.")
        found = getattr(found, part)
    return found


def source_of(asked: Asked, step: Any) -> Source:
    """A step of a module with its arguments, from where the options or the usual names say.

    Args:
        asked: what the options say.
        step: the step.

    Raises:
        OptionError: it is no step, its state or batch is not to be found, or it takes another number of arguments.
    """
    assert asked.target is not None
    if not callable(step):
        raise OptionError(
            f"{asked.target} is of type {type(step).__name__}; name a step, or what its lower() or rt.plan gave."
        )
    home = asked.target.rpartition(":")[0]
    places = [_argument(asked.state, home, "state")]
    places += [_argument(batch, home, "batch") for batch in asked.batch or (None,)]
    _check_arguments(asked.target, step, [name for name, _ in places])
    types = tuple(_types(name, place) for name, place in places)

    def values() -> tuple[Any, ...]:
        made = (_values(name, place) for name, place in places)
        return tuple(_like(tree, value) for tree, value in zip(types, made, strict=True))

    return Source(step, types, values)


def _module(name: str) -> ModuleType:
    try:
        if not name.endswith(".py"):
            _look_in(os.getcwd())
            return importlib.import_module(name)
        path = pathlib.Path(name).resolve()
        known = sys.modules.get(path.stem)
        if known is not None and getattr(known, "__file__", None) == str(path):
            return known
        _look_in(str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    except (ImportError, OSError, SyntaxError) as error:
        raise OptionError(
            f"cannot import {name!r}: {error}; give a module or a .py file that Python can import here."
        ) from error
    except SystemExit as error:
        raise OptionError(
            f'{name!r} ends Python when it is imported; let it do so only under `if __name__ == "__main__":`.'
        ) from error


def _look_in(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _argument(given: str | None, home: str, what: str) -> tuple[str, Any]:
    """Where an argument comes from, and what is there."""
    if given is not None:
        name = given if ":" in given else f"{home}:{given}"
        return name, load(name, f"the {what}")
    module = _module(home)
    for name in (what, f"make_{what}"):
        if hasattr(module, name):
            return f"{home}:{name}", getattr(module, name)
    raise OptionError(
        f"the types of the {what} are not known: {home!r} has neither '{what}' nor 'make_{what}'; name one with"
        f" --{what}, a value or a function without arguments."
    )


def _check_arguments(target: str, step: Callable[..., Any], given: list[str]) -> None:
    try:
        signature = inspect.signature(step)
        signature.bind(*given)
    except ValueError:  # some callables of C have no signature
        return
    except TypeError as error:
        raise OptionError(
            f"{target} takes {signature}, and is given {', '.join(given)}; give --batch once for each argument behind"
            " the state."
        ) from error


def _types(name: str, place: Any) -> Any:
    """The types of an argument; nothing of it is computed."""
    import jax

    if not _is_function(name, place):
        return place
    try:
        return jax.eval_shape(place)
    except jax.errors.JAXTypeError as error:
        raise OptionError(
            f"{name} cannot be traced ({type(error).__name__}); name what holds the values instead."
        ) from error


def _values(name: str, place: Any) -> Any:
    """An argument itself."""
    import jax

    value = place() if _is_function(name, place) else place
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(value)):
        raise OptionError(
            f"{name} holds types alone, and the step is to be run; give arrays, or a function that makes them."
        )
    return value


def _like(types: Any, value: Any) -> Any:
    """An argument in the very structure of its types: each call of a function makes static fields (an optimizer) anew."""
    import jax

    leaves, tree = jax.tree.flatten(value)
    wanted = jax.tree.structure(types)
    return wanted.unflatten(leaves) if wanted.num_leaves == tree.num_leaves else value


def _is_function(name: str, place: Any) -> bool:
    if not isinstance(place, Callable) or isinstance(place, type):
        return False
    try:
        inspect.signature(place).bind()
    except TypeError:
        raise OptionError(
            f"{name} takes arguments; give a value, or a function without arguments."
        ) from None
    return True
