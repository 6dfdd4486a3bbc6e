"""What a step says of other ways to lie or run on devices: dropped where it only says where values lie, else refused.

A sharding constraint changes no number, and each value of a program lies where its stage is. Mapped code has devices of its
own, which the stages' devices are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
from jax.extend import core as jex

from ratrain_jax import compat
from ratrain_jax.errors import UnsupportedError
from ratrain_jax.lowering.graph import Atom, Var, is_var

_PLACEMENTS = frozenset({"sharding_constraint", "layout_constraint"})
_MAPS = frozenset({"shard_map", "xla_pmap"})
_JAXPRS = (jex.Jaxpr, jex.ClosedJaxpr)


def without_placements(closed: jex.ClosedJaxpr, where: str = "") -> jex.ClosedJaxpr:
    """Drops sharding constraints at any depth, and the meshes that they gave to types.

    Args:
        closed: a traced step.
        where: its name, file and line, for messages.

    Raises:
        UnsupportedError: it holds a `jax.shard_map` or `jax.pmap`.
    """
    return _rebuilt(closed) if _placed(closed, where) else closed


def _placed(closed: jex.ClosedJaxpr, where: str) -> bool:
    """Whether there is a placement at any depth."""
    found = False
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name in _MAPS:
            raise UnsupportedError(
                f"the step{where} maps a function over devices of its own (jax.shard_map or jax.pmap). Take the map away:"
                " data_parallel= and stages= say over which devices the step runs."
            )
        found |= eqn.primitive.name in _PLACEMENTS
        for _, inner in compat.sub_jaxprs(eqn):
            found |= _placed(inner, where)
    return found


def _rebuilt(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The jaxpr with variables of its own, without placements."""
    jaxpr = closed.jaxpr
    stands_for: dict[Var, Atom] = {}

    def fresh(variables: Sequence[Var]) -> list[Var]:
        made = [compat.new_var(_without_mesh(var.aval)) for var in variables]
        stands_for.update(zip(variables, made, strict=True))
        return made

    def read(atoms: Sequence[Atom]) -> list[Atom]:
        return [stands_for[atom] if is_var(atom) else atom for atom in atoms]

    constvars, invars = fresh(jaxpr.constvars), fresh(jaxpr.invars)
    eqns = []
    for eqn in jaxpr.eqns:
        inputs = read(eqn.invars)
        if eqn.primitive.name in _PLACEMENTS:
            stands_for[eqn.outvars[0]] = inputs[0]
            continue
        params = {name: _rebuilt_param(param) for name, param in eqn.params.items()}
        eqns.append(eqn.replace(invars=inputs, outvars=fresh(eqn.outvars), params=params))
    outvars = read(jaxpr.outvars)
    made = jaxpr.replace(constvars=constvars, invars=invars, eqns=eqns, outvars=outvars)
    return jex.ClosedJaxpr(made, closed.consts)


def _rebuilt_param(param: Any) -> Any:
    if isinstance(param, (tuple, list)) and any(isinstance(item, _JAXPRS) for item in param):
        return type(param)(map(_rebuilt_param, param))
    if not isinstance(param, _JAXPRS):
        return param
    made = _rebuilt(compat.as_closed(param))
    return made if isinstance(param, jex.ClosedJaxpr) else made.jaxpr


def _without_mesh(aval: Any) -> Any:
    if not isinstance(aval, jax.core.ShapedArray):
        return aval
    return jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)
