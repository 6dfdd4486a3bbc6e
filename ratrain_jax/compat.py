"""Whatever differs between the versions of JAX that are taken (0.10 to 0.12), in one place.

Everything here is built on public names (`jax.extend.core`, `jax.interpreters`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy
from jax.extend import core as jex

_DEBUG_INFO = jex.DebugInfo("ratrain", "slice", None, None)

CALL_PRIMITIVES: dict[str, str] = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}
"""Primitives that only call one jaxpr, and the parameter that holds it."""

CUSTOM_CALLS: dict[str, str] = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}
"""Calls with differentiation rules, and the parameter that holds the code."""

CHECKPOINT_PRIMITIVES = frozenset({"remat", "remat2", "checkpoint"})


def closed(
    invars: Sequence[Any],
    outvars: Sequence[Any],
    eqns: Sequence[Any],
    constvars: Sequence[Any] = (),
    consts: Sequence[Any] = (),
) -> jex.ClosedJaxpr:
    """Builds a closed jaxpr from equations."""
    effects = frozenset().union(*(eqn.effects for eqn in eqns)) if eqns else frozenset()
    jaxpr = jex.Jaxpr(
        list(constvars), list(invars), list(outvars), list(eqns), effects, debug_info=_DEBUG_INFO
    )
    return jex.ClosedJaxpr(jaxpr, list(consts))


def as_closed(jaxpr: Any) -> jex.ClosedJaxpr:
    """A jaxpr found in an equation's parameters, closed: 0.10 and 0.12 differ in which kind stands where."""
    consts = getattr(jaxpr, "consts", None)
    if consts is not None and hasattr(jaxpr, "jaxpr"):
        return jaxpr
    return jex.ClosedJaxpr(jaxpr, [])


def called_jaxpr(eqn: Any) -> jex.ClosedJaxpr | None:
    """The jaxpr that a plain call runs, or None if the equation is no plain call."""
    key = CALL_PRIMITIVES.get(eqn.primitive.name)
    if key is None or key not in eqn.params:
        return None
    return as_closed(eqn.params[key])


def sub_jaxprs(eqn: Any) -> Iterator[tuple[str, jex.ClosedJaxpr]]:
    """The jaxprs in an equation's parameters, each with the parameter's name."""
    for key in sorted(eqn.params):
        param = eqn.params[key]
        for item in param if isinstance(param, (tuple, list)) else (param,):
            if isinstance(item, (jex.Jaxpr, jex.ClosedJaxpr)):
                yield key, as_closed(item)


def new_var(aval: Any) -> jex.Var:
    """A fresh variable."""
    return jex.Var(aval)


_KEY_IMPLEMENTATIONS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


def is_tracer(leaf: Any) -> bool:
    """Whether a value is being traced."""
    return isinstance(leaf, jax.core.Tracer)


def is_extended(dtype: Any) -> bool:
    """Whether a dtype is one of JAX's own, such as that of typed keys."""
    return jax.numpy.issubdtype(dtype, jax.dtypes.extended)


def dtype_named(name: str) -> Any:
    """The dtype of a name, typed keys included."""
    if name in _KEY_IMPLEMENTATIONS:
        return jax.eval_shape(lambda: jax.random.key(0, impl=_KEY_IMPLEMENTATIONS[name])).dtype
    return jax.numpy.dtype(name)


def key_implementation(dtype: Any) -> str:
    """The name of a typed key's implementation."""
    return _KEY_IMPLEMENTATIONS[str(dtype)]


def key_data_type(keys: Any) -> jax.ShapeDtypeStruct:
    """The type of the data of typed keys; of the keys themselves, only shape and dtype are asked for."""
    found = jax.ShapeDtypeStruct(keys.shape, keys.dtype)
    return jax.eval_shape(jax.random.key_data, found)


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many constants and how many carried values a `scan` has; versions name them differently.

    What is stacked has one axis more outside of the body than inside.
    """
    body = as_closed(eqn.params["jaxpr"]).jaxpr
    stacked = [
        len(outer.aval.shape) > len(inner.aval.shape)
        for outer, inner in zip(eqn.invars, body.invars, strict=True)
    ]
    carried = [
        len(outer.aval.shape) == len(inner.aval.shape)
        for outer, inner in zip(eqn.outvars, body.outvars, strict=True)
    ]
    return stacked.count(False) - sum(carried), sum(carried)


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """Sets the mesh of `jax.set_mesh` aside, if there is one; also a decorator.

    What is traced and run within has no mesh, or one of its own.
    """
    if jax.sharding.get_abstract_mesh().empty:
        yield
        return
    with jax.set_mesh(None):
        yield


def found_by_debug_nans(error: BaseException) -> str | None:
    """What `jax_debug_nans` or `jax_debug_infs` found in a compiled function, if that is what an error says.

    `jax.jit` turns this error, whose class is not public, into a `FloatingPointError`; what was compiled ahead does not.
    """
    return error.args[-1] if type(error).__name__ == "InternalFloatingPointError" else None
