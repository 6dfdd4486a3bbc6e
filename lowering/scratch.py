"""Estimates the scratch memory of a program: what it holds for a while beside its inputs and results.

What elementwise code hands on is fused and never stored (see `cost`); everything else stands in memory from the equation
that makes it to the last that reads it. It is an estimate: a compiler may reuse buffers in another way, or make copies
of its own. XLA's CPU compiler needs half to 1.8 times as much for the layers of a GPT.
"""

from __future__ import annotations

from collections.abc import Callable

from jax.extend import core as jex

from ratrain_jax import compat
from ratrain_jax.lowering.cost import aval_bytes, stored_variables
from ratrain_jax.lowering.graph import Var, is_var


def scratch_bytes(
    closed: jex.ClosedJaxpr, size: Callable[[Var], float] = lambda var: aval_bytes(var.aval)
) -> int:
    """The most bytes of intermediate results that are live at once.

    Args:
        closed: a program; of an equation that holds code (a loop, a branch) the largest part counts where it stands.
        size: bytes of a result of one of its equations.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> both = jax.make_jaxpr(lambda x: (x @ x) @ x)(jnp.ones((4, 4)))
        >>> scratch_bytes(both)  # the first product
        64
    """
    jaxpr = closed.jaxpr
    outside = {*jaxpr.invars, *jaxpr.constvars, *filter(is_var, jaxpr.outvars)}
    stored = stored_variables(jaxpr.eqns, jaxpr.outvars) - outside
    last: dict[Var, int] = {}
    for place, eqn in enumerate(jaxpr.eqns):
        last.update((atom, place) for atom in eqn.invars if is_var(atom) and atom in stored)
    dying: dict[int, list[Var]] = {}
    for var, place in last.items():
        dying.setdefault(place, []).append(var)
    live = most = 0.0
    for place, eqn in enumerate(jaxpr.eqns):
        live += sum(size(var) for var in eqn.outvars if var in stored)
        inner = max((scratch_bytes(part) for _, part in compat.sub_jaxprs(eqn)), default=0)
        most = max(most, live + inner)
        live -= sum(map(size, dying.get(place, ())))
    return int(most)
