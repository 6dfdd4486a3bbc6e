"""Moves the cast of a parameter to the compute dtype out of the loss.

Many models keep their parameters in float32 and cast them to a shorter dtype wherever they are
used. If a parameter is used in no other way, the loss may as well take it in the shorter dtype:
then the cast comes before the gather of the parameter's shards, and its view has half the bytes, in
memory and on the link.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from ratrain_jax import compat
from ratrain_jax.lowering.graph import Atom, Eqn, Graph, Var, is_var


def hoist_casts(loss: Graph, params: int) -> tuple[Graph, tuple[Any, ...]]:
    """Gives a loss its parameters in the dtype to which it casts them, where it does nothing else.

    Only a cast to fewer bytes moves: another would make the view larger.

    Args:
        loss: a loss whose first inputs are the parameters.
        params: how many they are.

    Returns:
        The loss without these casts, and the dtype in which it takes each parameter.
    """
    casts = _casts(loss, set(loss.invars[:params]))
    invars = list(loss.invars)
    renamed: dict[Var, Var] = {}
    for number, param in enumerate(loss.invars[:params]):
        if casts.get(param):
            invars[number] = compat.new_var(casts[param][0].outvars[0].aval)
            renamed.update((eqn.outvars[0], invars[number]) for eqn in casts[param])

    def read(atom: Atom) -> Atom:
        return renamed.get(atom, atom) if is_var(atom) else atom

    eqns = [
        eqn.replace(invars=[read(atom) for atom in eqn.invars])
        for eqn in loss.eqns
        if eqn.outvars[0] not in renamed
    ]
    hoisted = dataclasses.replace(
        loss,
        invars=tuple(invars),
        outvars=tuple(read(atom) for atom in loss.outvars),
        eqns=tuple(eqns),
        checkpointed=loss.checkpointed - renamed.keys(),
    )
    return hoisted, tuple(getattr(var.aval, "dtype", None) for var in invars[:params])


def _casts(loss: Graph, params: set[Var]) -> dict[Var, list[Eqn]]:
    """The casts to one shorter dtype of each parameter that is read in no other way."""
    casts: dict[Var, list[Eqn]] = {param: [] for param in params}
    for eqn in loss.eqns:
        for atom in eqn.invars:
            if not is_var(atom) or atom not in casts:
                continue
            others = casts[atom]
            if _shortens(eqn) and (not others or _same_type(others[0], eqn)):
                others.append(eqn)
            else:
                del casts[atom]
    for atom in loss.outvars:
        if is_var(atom):
            casts.pop(atom, None)
    return casts


def _shortens(eqn: Eqn) -> bool:
    if eqn.primitive.name != "convert_element_type":
        return False
    source, target = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (source, target))
    return floats and target.itemsize < source.itemsize


def _same_type(first: Eqn, second: Eqn) -> bool:
    return first.outvars[0].aval.dtype == second.outvars[0].aval.dtype
