"""Takes concatenations of several layers' arrays apart again.

A step may flatten and join all gradients to take one norm, or work on the joined vector and split it. Arrays of
several layers must not meet, so what is done to the joined array is done to each piece: elementwise work piece by piece,
a reduction by pieces and then over them, a slice by handing out pieces. Anything else needs the joined array.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jax import lax

from ratrain_jax.lowering.graph import Atom, Eqn, Var, is_var
from ratrain_jax.lowering.opening import emit
from ratrain_jax.lowering.shard_rules import ELEMENTWISE, REDUCTIONS

JOINS = frozenset({"concatenate", "stack"})
"""Primitives that join arrays along an axis."""

FOLDS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lax.add,
    "max": lax.max,
    "min": lax.min,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
}
"""What joins two results of a reduction."""


@dataclasses.dataclass(frozen=True, slots=True)
class Joined:
    """An array that is known by its pieces.

    Attributes:
        pieces: what was concatenated.
        axis: along which axis.
        source: where in the user's code they were joined.
    """

    pieces: tuple[Atom, ...]
    axis: int
    source: Any

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each piece along the axis."""
        return tuple(piece.aval.shape[self.axis] for piece in self.pieces)

    def between(self, start: int, stop: int) -> tuple[Atom, ...] | None:
        """The pieces that make up a stretch, or None if it cuts one."""
        ends = [0, *itertools.accumulate(self.sizes)]
        if start not in ends or stop not in ends or stop <= start:
            return None
        return self.pieces[ends.index(start) : ends.index(stop)]


def take_apart(
    eqns: Sequence[Eqn], outvars: Sequence[Atom], joins: Collection[Var]
) -> tuple[list[Eqn], list[Atom]]:
    """Works on the pieces of some concatenations.

    Args:
        eqns: equations, in order.
        outvars: the atoms that are wanted.
        joins: the results of the equations to take apart, each of one of `JOINS`.

    Returns:
        The equations, and the atoms that stand for `outvars`.
    """
    apart = _Apart(joins)
    for eqn in eqns:
        apart.visit(eqn)
    return apart.eqns, [apart.whole(atom) for atom in outvars]


class _Apart:
    """Collects equations; `joined` holds the arrays known by their pieces, `env` what stands for other variables."""

    def __init__(self, joins: Collection[Var]) -> None:
        self.joins = joins
        self.eqns: list[Eqn] = []
        self.joined: dict[Var, Joined] = {}
        self.env: dict[Var, Atom] = {}
        self.makers: dict[Var, Eqn] = {}
        self.source: Any = None

    def visit(self, eqn: Eqn) -> None:
        eqn = eqn.replace(invars=[self.env.get(a, a) if is_var(a) else a for a in eqn.invars])
        self.source, out = eqn.source_info, eqn.outvars[0]
        if out in self.joins:
            self.joined[out] = self.join(eqn)
            return
        if any(is_var(atom) and atom in self.joined for atom in eqn.invars):
            made = self.by_pieces(eqn)
            if made is not None:
                for var, result in zip(eqn.outvars, made, strict=True):
                    if isinstance(result, Joined):
                        self.joined[var] = result
                    else:
                        self.env[var] = result
                return
            eqn = eqn.replace(invars=[self.whole(atom) for atom in eqn.invars])
        self.add(eqn)

    def join(self, eqn: Eqn) -> Joined:
        pieces, axis = [self.whole(atom) for atom in eqn.invars], eqn.params.get("axis")
        if axis is None:
            return Joined(tuple(pieces), eqn.params["dimension"], eqn.source_info)
        expand = lambda x: lax.expand_dims(x, [axis])  # noqa: E731
        apart = tuple(self.make(expand, piece) for piece in pieces)
        return Joined(apart, axis, eqn.source_info)

    def add(self, eqn: Eqn) -> None:
        self.eqns.append(eqn)
        self.makers.update((var, eqn) for var in eqn.outvars)

    def make(self, fun: Callable[..., Any], *atoms: Atom) -> Atom:
        """What a function gives, said to come from where the equation at hand was written."""
        eqns, (result,) = emit(fun, atoms)
        for eqn in eqns:
            self.add(eqn.replace(source_info=self.source))
        return result

    def whole(self, atom: Atom) -> Atom:
        """The atom that stands for another; a joined array is concatenated after all."""
        if is_var(atom) and atom in self.joined:
            parts = self.joined.pop(atom)
            eqns, _ = emit(lambda *p: lax.concatenate(p, parts.axis), parts.pieces)
            self.add(eqns[-1].replace(outvars=[atom], source_info=parts.source))
        return self.env.get(atom, atom) if is_var(atom) else atom

    def by_pieces(self, eqn: Eqn) -> list[Atom | Joined] | None:
        """The results of an equation on the pieces of its operands, or None if it needs them joined."""
        name = eqn.primitive.name
        first = next(self.joined[a] for a in eqn.invars if is_var(a) and a in self.joined)
        if name in ELEMENTWISE:
            return self.elementwise(eqn, first)
        if name in REDUCTIONS and first.axis in eqn.params["axes"]:
            return [self.folded(eqn, [first.pieces], REDUCTIONS[name])]
        if (
            name == "dot_general"
            and not eqn.outvars[0].aval.shape
            and len(eqn.invars[0].aval.shape) == 1
        ):
            operands = [self.pieces_of(atom, first) for atom in eqn.invars]
            return [self.folded(eqn, operands, "sum")]
        if name == "slice" and eqn.params["strides"] is None:
            starts, stops = eqn.params["start_indices"], eqn.params["limit_indices"]
            size = stops[first.axis] - starts[first.axis]
            others = [n for i, n in enumerate(eqn.invars[0].aval.shape) if i != first.axis]
            kept = [n for i, n in enumerate(eqn.outvars[0].aval.shape) if i != first.axis]
            return None if others != kept else self.handed_out(first, [size], starts[first.axis])
        if name == "split" and eqn.params["axis"] == first.axis:
            return self.handed_out(first, list(map(int, eqn.params["sizes"])), 0)
        if name == "unstack" and eqn.params["axis"] == first.axis and set(first.sizes) == {1}:
            return [self.make(lambda x: lax.squeeze(x, [first.axis]), p) for p in first.pieces]
        return None

    def handed_out(
        self, joined: Joined, sizes: Sequence[int], start: int
    ) -> list[Atom | Joined] | None:
        results: list[Atom | Joined] = []
        for size in sizes:
            pieces = joined.between(start, start + size)
            if pieces is None:
                return None
            results.append(
                pieces[0] if len(pieces) == 1 else dataclasses.replace(joined, pieces=pieces)
            )
            start += size
        return results

    def elementwise(self, eqn: Eqn, like: Joined) -> list[Atom | Joined] | None:
        shape = eqn.outvars[0].aval.shape
        if any(atom.aval.shape not in ((), shape) for atom in eqn.invars):
            return None
        operands = [self.pieces_of(atom, like) for atom in eqn.invars]
        made = tuple(self.one(eqn, taken) for taken in zip(*operands, strict=True))
        return [dataclasses.replace(like, pieces=made)]

    def one(self, eqn: Eqn, taken: Sequence[Atom]) -> Atom:
        """An equation on one piece."""
        return self.make(lambda *args: eqn.primitive.bind(*args, **eqn.params), *taken)

    def folded(self, eqn: Eqn, operands: Sequence[Sequence[Atom]], combine: str) -> Atom:
        """A reduction of each piece, then of the results in order."""
        parts = [self.one(eqn, taken) for taken in zip(*operands, strict=True)]
        total = parts[0]
        for part in parts[1:]:
            total = self.make(FOLDS[combine], total, part)
        return total

    def pieces_of(self, atom: Atom, like: Joined) -> Sequence[Atom]:
        """An operand in pieces as large as those of another."""
        if not atom.aval.shape:
            return [atom] * len(like.pieces)
        joined = self.joined.get(atom)
        if joined is not None and (joined.axis, joined.sizes) == (like.axis, like.sizes):
            return joined.pieces
        maker = self.makers.get(atom)
        if maker is not None and maker.primitive.name == "broadcast_in_dim":
            (scalar, *_) = maker.invars
            if not scalar.aval.shape:
                return [
                    self.make(lambda x, s=piece.aval.shape: lax.broadcast(x, s), scalar)
                    for piece in like.pieces
                ]
        atom, start, parts = self.whole(atom), 0, []
        for size in like.sizes:
            stop = start + size
            parts.append(
                self.make(
                    lambda x, a=start, b=stop: lax.slice_in_dim(x, a, b, axis=like.axis), atom
                )
            )
            start = stop
        return parts
