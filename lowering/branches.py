"""Splits a `cond` around the whole update into one a layer, where a branch holds heavy work.

Opening a `cond` computes all of its branches, which is cheap for elementwise work. A branch that holds a product of matrices
or a loop (an orthogonalised update that is applied only every few steps) would be paid for in vain; so a
`cond` for each layer's results is put in its place, with branches that compute these results alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from jax.extend import core as jex

from ratrain_jax import compat
from ratrain_jax.lowering.graph import Eqn, Var, is_var, needed
from ratrain_jax.lowering.opening import is_heavy


def has_heavy_branch(eqn: Eqn) -> bool:
    """Whether an equation is a `cond`, decided when it runs, with a branch that must not run in vain."""
    return (
        eqn.primitive.name == "cond"
        and is_var(eqn.invars[0])
        and any(is_heavy(compat.as_closed(branch)) for branch in eqn.params["branches"])
    )


def split_branches(
    eqns: Sequence[Eqn], group_of: Callable[[Var], Hashable]
) -> tuple[list[Eqn], set[Var]]:
    """Puts several `cond`s in the place of each one that has a heavy branch.

    Args:
        eqns: equations, in order.
        group_of: says of each result of a `cond` which other results it goes with.

    Returns:
        The equations, and the results of the new `cond`s that still have a heavy branch.
    """
    split: list[Eqn] = []
    heavy: set[Var] = set()
    for eqn in eqns:
        if not has_heavy_branch(eqn):
            split.append(eqn)
            continue
        groups: dict[Any, list[int]] = {}
        for i, var in enumerate(eqn.outvars):
            groups.setdefault(group_of(var), []).append(i)
        for chosen in groups.values():
            part = _choose(eqn, chosen)
            split.append(part)
            if has_heavy_branch(part):
                heavy.update(part.outvars)
    return split, heavy


def _choose(eqn: Eqn, chosen: Sequence[int]) -> Eqn:
    """A `cond` that makes some results of another, and reads no more than they need."""
    index, *operands = eqn.invars
    parts = [_needed_part(compat.as_closed(b), chosen) for b in eqn.params["branches"]]
    used = sorted(set().union(*(reads for _, reads in parts)))
    branches = tuple(
        compat.closed(
            [branch.jaxpr.invars[i] for i in used],
            [branch.jaxpr.outvars[i] for i in chosen],
            kept,
            branch.jaxpr.constvars,
            branch.consts,
        )
        for branch, kept in (part for part, _ in parts)
    )
    return eqn.replace(
        invars=[index, *(operands[i] for i in used)],
        outvars=[eqn.outvars[i] for i in chosen],
        params={**eqn.params, "branches": branches},
    )


def _needed_part(
    branch: jex.ClosedJaxpr, chosen: Sequence[int]
) -> tuple[tuple[jex.ClosedJaxpr, list[Eqn]], set[int]]:
    """A branch, the equations that some of its results need, and the inputs that these read."""
    jaxpr = branch.jaxpr
    kept, free = needed(jaxpr.eqns, [jaxpr.outvars[i] for i in chosen])
    return (branch, kept), {i for i, var in enumerate(jaxpr.invars) if var in free}
