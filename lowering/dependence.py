"""Sorts the equations of a loss by what they depend on.

Terms.
    A **main** equation depends on both parameters and the batch: the path from the batch to the
    loss. A **side** equation depends on one of the two at most (masks, positions, keys, a
    transposed table, weights scaled by a number of the state); its results are **side values**. A
    main equation **reads** a parameter if it takes it as it is, or a side value made from it. Where
    nothing depends on both, everything that the results need is main.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ratrain_jax import compat
from ratrain_jax.errors import StepError, UnsupportedError
from ratrain_jax.lowering.graph import Atom, Eqn, Graph, Var, is_var, needed, reached
from ratrain_jax.lowering.marks import layer_mark_p


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """A place where `layer` was called.

    Attributes:
        name: the layer that begins there.
        place: how many equations stand before it.
    """

    name: str
    place: int


@dataclasses.dataclass(frozen=True, slots=True)
class Flow:
    """The equations that a loss needs, sorted.

    Attributes:
        main: main equations, in order.
        sides: side equations, in order.
        maker: the side equation that makes each side value.
        moving: the parameters that the loss is differentiated by, and all that depends on them.
        behind: numbers of the parameters that each parameter or side value is made from.
        reads: numbers of the parameters that each main equation reads.
        places: how many equations of the loss stand before each main one.
    """

    main: tuple[Eqn, ...]
    sides: tuple[Eqn, ...]
    maker: Mapping[Var, Eqn]
    moving: frozenset[Var]
    behind: Mapping[Var, frozenset[int]]
    reads: tuple[frozenset[int], ...]
    places: tuple[int, ...]

    def moves(self, eqn: Eqn) -> bool:
        """Whether an equation's results depend on what the loss is differentiated by."""
        return any(var in self.moving for var in eqn.outvars)


def strip_marks(loss: Graph) -> tuple[Graph, tuple[Mark, ...]]:
    """Takes the marks out of a loss, so that equal layers of different names have equal code.

    Args:
        loss: a loss as traced.

    Returns:
        The loss without marks, and where they stood.

    Raises:
        UnsupportedError: a mark stands inside a loop, a branch or a custom rule.
    """
    eqns: list[Eqn] = []
    marks: list[Mark] = []
    renamed: dict[Var, Atom] = {}

    def read(atom: Atom) -> Atom:
        return renamed.get(atom, atom) if is_var(atom) else atom

    for eqn in loss.eqns:
        if eqn.primitive is layer_mark_p:
            marks.append(Mark(eqn.params["name"], len(eqns)))
            renamed.update(zip(eqn.outvars, map(read, eqn.invars), strict=True))
            continue
        hidden = _hidden_mark(eqn)
        if hidden is not None:
            raise UnsupportedError(
                f"layer {hidden!r} begins inside a `{eqn.primitive.name}`, which is not cut."
                " Call ratrain_jax.layer outside of it."
            )
        eqns.append(eqn.replace(invars=[read(atom) for atom in eqn.invars]))
    outvars = tuple(read(atom) for atom in loss.outvars)
    return dataclasses.replace(loss, eqns=tuple(eqns), outvars=outvars), tuple(marks)


def _hidden_mark(eqn: Eqn) -> str | None:
    for _, closed in compat.sub_jaxprs(eqn):
        for inner in closed.jaxpr.eqns:
            name = inner.params["name"] if inner.primitive is layer_mark_p else _hidden_mark(inner)
            if name is not None:
                return name
    return None


def sort_equations(
    loss: Graph, params: int, trained: int | None = None, batch: Sequence[int] | None = None
) -> Flow:
    """Finds the main and the side equations of a loss.

    Args:
        loss: a loss without marks; its first inputs are the parameters, the others the operands.
        params: how many parameters there are.
        trained: how many of them, the first ones, the loss is differentiated by; all unless given.
        batch: the operands that are made from the batch; all unless given, or where there are none.

    Returns:
        The equations that its results need, sorted.

    Raises:
        StepError: they need none.
    """
    operands = loss.invars[params:]
    live = needed(loss.eqns, loss.outvars, loss.invars)[0]
    if not live:
        raise StepError(
            "the loss computes nothing, so it cannot depend on both the parameters and the batch."
            " Compute it from them inside the function that ratrain_jax.value_and_grad takes."
        )
    moving = reached(live, loss.invars[: params if trained is None else trained])
    from_batch = reached(live, [operands[i] for i in batch] if batch else operands)
    both = from_batch & reached(live, loss.invars[:params])
    is_main = [not both or eqn.outvars[0] in both for eqn in live]
    main = tuple(eqn for eqn, yes in zip(live, is_main, strict=True) if yes)
    sides = tuple(eqn for eqn, yes in zip(live, is_main, strict=True) if not yes)
    place = {eqn.outvars[0]: number for number, eqn in enumerate(loss.eqns) if eqn.outvars}
    behind = _parameters_behind(loss.invars[:params], sides)
    return Flow(
        main=main,
        sides=sides,
        maker={var: eqn for eqn in sides for var in eqn.outvars},
        moving=frozenset(moving),
        behind=behind,
        reads=tuple(_union(behind, eqn) for eqn in main),
        places=tuple(place[eqn.outvars[0]] for eqn in main),
    )


def _parameters_behind(params: Sequence[Var], sides: Sequence[Eqn]) -> dict[Var, frozenset[int]]:
    behind = {var: frozenset({number}) for number, var in enumerate(params)}
    for eqn in sides:
        numbers = _union(behind, eqn)
        behind.update((var, numbers) for var in eqn.outvars)
    return behind


def _union(behind: Mapping[Var, frozenset[int]], eqn: Eqn) -> frozenset[int]:
    found = (behind.get(atom) for atom in eqn.invars if is_var(atom))
    return frozenset().union(*(numbers for numbers in found if numbers))


def live_bytes(main: Sequence[Eqn], sizes: Mapping[Var, int]) -> list[int]:
    """Bytes of main values that live across each place between main equations.

    Args:
        main: the main equations.
        sizes: bytes of each value that they make.

    Returns:
        One number a place, from before the first equation (none) to after the last (none).
    """
    last: dict[Var, int] = {}
    for number, eqn in enumerate(main):
        last.update((atom, number) for atom in eqn.invars if is_var(atom) and atom in sizes)
    change = [0] * (len(main) + 1)
    for number, eqn in enumerate(main):
        for var in eqn.outvars:
            if var in last:
                change[number + 1] += sizes[var]
                change[last[var] + 1] -= sizes[var]
    live, total = [], 0
    for step in change:
        total += step
        live.append(total)
    return live
