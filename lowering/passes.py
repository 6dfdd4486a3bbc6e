"""Puts a second pass through the same layers beside the first.

A loss may run its network more than once on inputs that do not need each other: two views of an image, a chosen and a
rejected answer, two steps of a recurrent net with several layers. As traced, the second pass comes after the first, and
so would all stand in the last layer, far from its parameters. Here each of its equations goes as early as what it reads
allows, to the layer that owns its parameters.

Terms.
    A parameter has the **rank** of its first read: its place, or its layer where it is known where layers begin. A value
    has the highest rank among what it is made from. An equation is **behind** if its value's rank is lower than that of an
    equation before it. An equation **returns** if it is behind and multiplies by parameters (or reads some further down
    from one that does), or if one that returns needs its result. Only those move: what is behind otherwise (a skip
    connection, a decoder's lookup in the encoder's embedding) stands where it is read.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

from ratrain_jax import compat
from ratrain_jax.kernels.primitives import KERNELS
from ratrain_jax.lowering.dependence import Flow
from ratrain_jax.lowering.graph import Eqn, Var, is_var

Path = tuple[str, ...]

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})


def together(flow: Flow, paths: Sequence[Path], trained: int | None = None) -> Flow:
    """Moves the equations that return to where they can first be computed.

    Args:
        flow: the equations of a loss.
        paths: the path of each parameter; those of equal paths count as one.
        trained: how many parameters the loss is differentiated by, the first ones; all unless given.

    Returns:
        The same equations; the main ones in an order in which every value is still made before it is read.
    """
    places = range(len(flow.main))
    goals = _goals(flow, paths, trained, places, kept=False)
    return flow if goals is None else _ordered(flow, goals)


def together_between(
    flow: Flow, paths: Sequence[Path], trained: int | None, starts: Sequence[int]
) -> tuple[Flow, list[int]]:
    """As `together`, where it is given where layers begin: an equation that returns goes to the end of one.

    Args:
        flow: the equations of a loss.
        paths: the path of each parameter.
        trained: how many parameters the loss is differentiated by; all if None.
        starts: the main equations with which layers begin, ascending.

    Returns:
        The equations in their new order, and where the layers begin in it.
    """
    layers = [bisect.bisect_right(starts, place) for place in range(len(flow.main))]
    goals = _goals(flow, paths, trained, layers, kept=True)
    if goals is None:
        return flow, list(starts)
    return _ordered(flow, goals), [
        sum(goal <= number for goal in goals) for number in range(len(starts))
    ]


def _ordered(flow: Flow, goals: Sequence[int]) -> Flow:
    """Equations by their goals, those of one goal as they were traced."""
    order = sorted(range(len(goals)), key=goals.__getitem__)
    return dataclasses.replace(
        flow,
        main=tuple(flow.main[n] for n in order),
        reads=tuple(flow.reads[n] for n in order),
        places=tuple(flow.places[n] for n in order),
    )


def _goals(
    flow: Flow, paths: Sequence[Path], trained: int | None, at: Sequence[int], kept: bool
) -> list[int] | None:
    """Where each main equation goes; None if none moves.

    Args:
        flow: the equations.
        paths: the path of each parameter.
        trained: how many parameters the loss is differentiated by.
        at: where each main equation is: its place, or its layer.
        kept: whether the others stay where they are; else they stand with the highest rank before them.
    """
    if any(eqn.effects for eqn in flow.main):
        return None  # they stay in the order in which they were written
    ranks = _ranks(flow, paths, set(paths[:trained]), at)
    reached = list(itertools.accumulate(ranks, max))
    returning = _returning(flow, [rank < high for rank, high in zip(ranks, reached, strict=True)])
    if not any(returning):
        return None
    goals: list[int] = []
    of: dict[Var, int] = {}
    for eqn, goal, rank, returns in zip(
        flow.main, at if kept else reached, ranks, returning, strict=True
    ):
        if returns:
            goal = max([rank, *(of.get(atom, 0) for atom in eqn.invars if is_var(atom))])
        goals.append(goal)
        of.update((var, goal) for var in eqn.outvars)
    return goals


def _ranks(flow: Flow, paths: Sequence[Path], trained: set[Path], at: Sequence[int]) -> list[int]:
    """The rank of each main equation's value."""
    begun: dict[Path, int] = {}  # where a parameter, or a node of the tree, is first read
    of: dict[Var, int] = {}
    nodes = {path[:-1] for path in trained}

    def rank(number: int, place: int) -> int:
        path = paths[number]
        node = path[:-1]
        own, around = begun.setdefault(path, place), begun.setdefault(node, place)
        # What one net has and the other has not (a frozen norm's mean) counts as what both have beside it.
        alone = path not in trained and node in nodes
        outermost = len(path) - (path[:1] == ("params",)) < 2  # where neighbours are other layers
        return around if alone and not outermost else own

    ranks = []
    for place, eqn, numbers in zip(at, flow.main, flow.reads, strict=True):
        own = [rank(number, place) for number in numbers]
        highest = max([*own, *(of.get(atom, 0) for atom in eqn.invars if is_var(atom))], default=0)
        of.update((var, highest) for var in eqn.outvars)
        ranks.append(highest)
    return ranks


def _returning(flow: Flow, behind: Sequence[bool]) -> list[bool]:
    """Which equations return."""
    ends = [False] * len(behind)
    made: set[Var] = set()
    for n, eqn in enumerate(flow.main):
        if not behind[n]:
            continue
        follows = not made.isdisjoint(filter(is_var, eqn.invars))
        ends[n] = bool(flow.reads[n]) and (follows or _multiplies(eqn))
        if follows or ends[n]:
            made.update(eqn.outvars)
    found = [False] * len(behind)
    wanted: set[Var] = set()
    for n in reversed(range(len(behind))):
        eqn = flow.main[n]
        if behind[n] and (ends[n] or not wanted.isdisjoint(eqn.outvars)):
            found[n] = True
            wanted.update(atom for atom in eqn.invars if is_var(atom))
    return found


def _multiplies(eqn: Eqn) -> bool:
    """Whether an equation is a product, or a loop or call that may hold some."""
    name = eqn.primitive.name
    return name in _PRODUCTS or name in KERNELS or any(True for _ in compat.sub_jaxprs(eqn))
