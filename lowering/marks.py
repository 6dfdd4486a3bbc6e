"""Marks that a model can leave in its trace: where a layer begins."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from ratrain_jax.errors import OptionError

Tree = TypeVar("Tree")

layer_mark_p = jex.Primitive("ratrain_layer")
layer_mark_p.multiple_results = True
layer_mark_p.def_impl(lambda *args, name: list(args))
layer_mark_p.def_abstract_eval(lambda *avals, name: list(avals))
mlir.register_lowering(
    layer_mark_p, mlir.lower_fun(lambda *args, name: list(args), multiple_results=True)
)


def _jvp(primals: Any, tangents: Any, *, name: str) -> tuple[Any, Any]:
    return layer_mark_p.bind(*primals, name=name), list(tangents)


def _batch(args: Any, dims: Any, *, name: str) -> tuple[Any, Any]:
    return layer_mark_p.bind(*args, name=name), list(dims)


ad.primitive_jvps[layer_mark_p] = _jvp
batching.primitive_batchers[layer_mark_p] = _batch


def layer(x: Tree, name: str) -> Tree:
    """Says that `x` begins the layer `name`. It computes nothing.

    Where a loss has marks, they replace the layers that would be found by themselves: a layer runs from its mark
    to the next one. What comes before the first mark is a layer of its own. Where a network with marks runs more than once in a
    loss, on inputs that do not need each other, the marks of the first pass say where its layers begin; the other
    passes run beside it.

    Args:
        x: an array or a tree of arrays, as it enters the layer.
        name: the layer's name; that of another layer only in another pass through it.

    Returns:
        `x`, unchanged.

    Raises:
        OptionError: the name is empty or no string.

    Example:
        >>> import jax.numpy as jnp
        >>> from ratrain_jax.lowering.marks import layer
        >>> float(layer(jnp.float32(2.0), "mlp"))
        2.0
    """
    if not isinstance(name, str) or not name:
        raise OptionError(f"layer name must be a string that is not empty, got {name!r}.")
    leaves, tree = jax.tree.flatten(x)
    return tree.unflatten(layer_mark_p.bind(*leaves, name=name))
