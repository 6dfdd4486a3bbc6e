"""Gives the parameters that a loss holds a place among those by which it is differentiated.

A tree of held parameters is **beside** the others if its layers have the names of theirs and are read where theirs are:
base weights and their adapters, a reference model and its policy. Layer for layer they then make one layer. Where the
names are the same by chance (two nets that Flax numbered alike, one behind the other, or of other sizes), the tree stands
**apart**: the names of its layers begin with its own.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence

from ratrain_jax.lowering.cost import aval_bytes
from ratrain_jax.lowering.cuts import shared_keys
from ratrain_jax.lowering.dependence import Flow, sort_equations, strip_marks
from ratrain_jax.lowering.graph import Graph, Var, is_var
from ratrain_jax.lowering.passes import together
from ratrain_jax.lowering.sides import MUCH_SMALLER

Path = tuple[str, ...]

FLAX = "params"
"""The key under which Flax keeps all parameters."""


def aligned(leaves: Mapping[int, Path], trained: Sequence[Path]) -> dict[int, Path]:
    """The paths of one tree's leaves without what is the tree's own.

    Two keys are left of each at least, where it has them: with one alone, `kernel`, it would be any layer's.

    Args:
        leaves: their paths in the state.
        trained: the paths by which the loss is differentiated.

    Example:
        >>> state = {0: ("base", "params", "up", "kernel"), 1: ("base", "params", "down", "kernel")}
        >>> aligned(state, [("up", "lora"), ("down", "lora")])
        {0: ('up', 'kernel'), 1: ('down', 'kernel')}
    """
    known = set(trained)
    flax = _in_flax(trained)
    heads = {path[1] if flax else path[0] for path in trained if path}
    shared = shared_keys(list(leaves.values()))
    found = {}
    for leaf, path in leaves.items():
        ends = (path[n:] for n in range(len(path)) if path[n:] in known)
        of_head = (path[n:] for n in range(len(path) - 1) if path[n] in heads)
        inner = path[max(0, min(shared, len(path) - 2)) :]
        inner = inner[1:] if len(inner) > 2 and inner[0] == FLAX else inner
        inner = next(of_head, inner)
        found[leaf] = next(ends, None) or ((FLAX, *inner) if flax else inner)
    return found


def _in_flax(paths: Sequence[Path]) -> bool:
    return bool(paths) and all(len(path) > 1 and path[0] == FLAX for path in paths)


def settled(
    loss: Graph,
    batch: Sequence[int],
    trained: Sequence[Path],
    held: Sequence[Path],
    trees: Sequence[str | None],
) -> list[Path]:
    """The paths of held parameters, with those trees apart where that leaves fewer parameters to be borrowed.

    Args:
        loss: its inputs are the parameters, those that are held last, and then the operands.
        batch: the operands that are made from the batch.
        trained: the paths by which it is differentiated.
        held: the aligned paths of those that it holds.
        trees: the tree of each; None for one whose path is not to be changed.
    """
    count = len(trained) + len(held)
    flow = sort_equations(strip_marks(loss)[0], count, len(trained), batch)
    flow = dataclasses.replace(flow, reads=_far_reads(flow, loss.invars[:count]))

    def borrowed(held: Sequence[Path]) -> int:
        return _borrowed([*trained, *held], len(trained), flow)

    paths, fewest = list(held), borrowed(held)
    for tree in dict.fromkeys(filter(None, trees)):
        moved = [apart(p, of) if of == tree else p for p, of in zip(paths, trees, strict=True)]
        if (count := borrowed(moved)) < fewest:
            paths, fewest = moved, count
    return paths


def _far_reads(flow: Flow, params: Sequence[Var]) -> tuple[frozenset[int], ...]:
    """The parameters that main equations read, but for those behind a value small enough to be made at home."""
    sizes = [aval_bytes(var.aval) for var in params]
    near = {
        var
        for var in flow.maker
        if MUCH_SMALLER * aval_bytes(var.aval) <= sum(sizes[n] for n in flow.behind[var])
    }
    return tuple(
        frozenset(
            number
            for atom in eqn.invars
            if is_var(atom) and atom not in near
            for number in flow.behind.get(atom, ())
        )
        for eqn in flow.main
    )


def _borrowed(paths: Sequence[Path], trained: int, flow: Flow) -> int:
    """How many parameters are read where a group has begun that comes after their own."""
    reads: dict[int, list[int]] = {}
    for place, numbers in enumerate(together(flow, paths, trained).reads):
        for number in numbers:
            reads.setdefault(number, []).append(place)
    if not reads:
        return 0
    depth = shared_keys([paths[number] for number in reads]) + 1
    starts: dict[Path, int] = {}
    for number, (first, *_) in reads.items():
        group = paths[number][:depth]
        starts[group] = min(first, starts.get(group, first))
    order = sorted(set(starts.values()))

    def is_borrowed(number: int) -> bool:
        following = bisect.bisect_right(order, starts[paths[number][:depth]])
        return following < len(order) and reads[number][-1] >= order[following]

    return sum(map(is_borrowed, reads))


def apart(path: Path, tree: str | None) -> Path:
    """The path of a leaf of a tree that stands apart."""
    flax = path[:1] if len(path) > 1 and path[0] == FLAX else ()
    inner = path[len(flax) :]
    return (*flax, "/".join([f"{tree}", *inner[:1]]), *inner[1:])
