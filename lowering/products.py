"""Which equations multiply matrices, at which rate, and how many products they hold.

A **product** is a matrix product, a convolution or a kernel, which a machine runs at another share of its peak than
elementwise work, and the slower the smaller it is (`ratrain_jax.kernels.Machine.compute_seconds`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp

from ratrain_jax import compat
from ratrain_jax.kernels.primitives import KERNELS
from ratrain_jax.lowering.graph import Eqn


def compute_dtype(eqn: Eqn) -> str:
    """The dtype that sets the arithmetic rate: of the first product's operands, else of the inputs."""
    for atom in (_first_product(eqn) or eqn).invars:
        dtype = getattr(atom.aval, "dtype", None)
        if dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
            return dtype.name
    return "float32"


def product_count(eqn: Eqn) -> int:
    """How many products an equation runs.

    A batch of equal products in one equation is one product, for one program of the device computes it. A scan runs its
    body `length` times, a `cond` the branch with most, a `while` its condition and body once, as FLOPs are counted.

    Args:
        eqn: an equation of a jaxpr.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jaxpr = jax.make_jaxpr(lambda x: jax.lax.scan(lambda x, _: (x @ x, None), x, length=3))(jnp.ones((2, 2)))
        >>> [product_count(eqn) for eqn in jaxpr.eqns]
        [3]
    """
    if is_product(eqn):
        return 1
    parts = [sum(map(product_count, closed.jaxpr.eqns)) for _, closed in compat.sub_jaxprs(eqn)]
    return _CONTROL.get(eqn.primitive.name, _sequence)(eqn, parts)


def kernel_of(eqn: Eqn) -> Eqn | None:
    """The kernel that an equation is, or that it wraps in a custom rule."""
    if eqn.primitive.name in KERNELS:
        return eqn
    if not eqn.primitive.name.startswith("custom_"):
        return None
    inner = (found for _, closed in compat.sub_jaxprs(eqn) for found in closed.jaxpr.eqns)
    return next((kernel for kernel in map(kernel_of, inner) if kernel is not None), None)


def _first_product(eqn: Eqn) -> Eqn | None:
    if is_product(eqn):
        return eqn
    inner = (found for _, closed in compat.sub_jaxprs(eqn) for found in closed.jaxpr.eqns)
    return next((dot for dot in map(_first_product, inner) if dot is not None), None)


def is_product(eqn: Eqn) -> bool:
    """Whether an equation itself is a product; one that only holds some is not."""
    return eqn.primitive.name in KERNELS or eqn.primitive.name in _PRODUCTS


def _sequence(eqn: Eqn, parts: Sequence[int]) -> int:
    return sum(parts)


def _scan(eqn: Eqn, parts: Sequence[int]) -> int:
    return sum(parts) * eqn.params["length"]


def _most(eqn: Eqn, parts: Sequence[int]) -> int:
    return max(parts, default=0)


_PRODUCTS = frozenset({"conv_general_dilated", "dot_general", "ragged_dot", "ragged_dot_general"})
"""The primitives of JAX that are products."""

_CONTROL: dict[str, Callable[[Eqn, Sequence[int]], int]] = {"cond": _most, "scan": _scan}
"""How the products of its parts make those of an equation, by primitive."""
