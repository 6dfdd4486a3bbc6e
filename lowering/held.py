"""Finds the parameters that a loss reads without being differentiated by them.

The base weights under adapters, a reference model, a teacher, a moving average of the parameters: leaves of the state that
the loss takes as they are. They are **held**: they lie with the layer that reads them, as trained parameters do, but have no
gradient. Two kinds are:
    one that **follows** a parameter: its new value is made from that parameter's arrays and from no other's. It has that
    parameter's path, and so lies in its layer, where its update needs it;
    one that never changes, of a tree with a matrix among such leaves (a tree is a child of the state). Its path is what is
    left of its path in the state when what all these leaves have in common is taken away, so that trees of equal models
    have equal layers. A tree of vectors (a table of noise levels) stays on every stage: it is small, and no model.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ratrain_jax import compat
from ratrain_jax.lowering.graph import Eqn, Graph, Var, inline, is_var, needed
from ratrain_jax.lowering.labels import is_small
from ratrain_jax.lowering.opening import open_calls
from ratrain_jax.lowering.regions import loss_region_p, parameters_of
from ratrain_jax.lowering.trace import Trace

Path = tuple[str, ...]


def hold(trace: Trace) -> Trace:
    """Says in a step's loss which leaves of the state it holds.

    Args:
        trace: the step, as the user wrote it.

    Returns:
        The step, whose equation of the loss names them in `held`; as it was if there are none.
    """
    step = inline(trace.whole)
    region = one_region(step)
    if region is None or region.params["held"]:
        return trace
    number = {var: leaf for leaf, var in enumerate(step.invars[: trace.states])}
    read = {
        i: number[var]
        for i, var in enumerate(region.invars)
        if is_var(var) and var in number and i not in region.params["diff"]
    }
    read = {i: leaf for i, leaf in read.items() if region.invars.count(step.invars[leaf]) == 1}
    paths = _paths(trace, step, region, read.values())
    held = tuple(i for i, leaf in read.items() if leaf in paths)
    if not held:
        return trace
    added = tuple(paths[read[i]] for i in held)
    whole = small = _with_held(step, region, held, added)
    if trace.small is not trace.whole:
        graph = inline(trace.small)
        other = one_region(graph)
        if other is None:
            return trace
        small = _with_held(graph, other, held, added)
    return dataclasses.replace(trace, whole=whole, small=small)


def parameter_paths(trace: Trace) -> list[tuple[int, Path]] | None:
    """The leaves of a train step's state that live with layers as parameters do, with their paths.

    Those that its loss is differentiated by, those that it holds, and those that follow a parameter (a moving average
    that only an evaluation reads).

    Args:
        trace: the step, as the user wrote it.

    Returns:
        None if the step has not just one loss.
    """
    held = hold(trace)
    step = inline(held.whole)
    region = one_region(step)
    if region is None:
        return None
    number = {var: leaf for leaf, var in enumerate(step.invars)}
    params = [number[region.invars[i]] for i in parameters_of(region)]
    paths = dict(zip(params, region.params["paths"], strict=True))
    for leaf, n in followers(held, step, region).items():
        paths.setdefault(leaf, region.params["paths"][n])
    return list(paths.items())


def one_region(graph: Graph) -> Any:
    """The loss region, if a step has just one; what else there may be is refused later, by name."""
    found = [eqn for eqn in graph.eqns if eqn.primitive is loss_region_p]
    return found[0] if len(found) == 1 else None


def followers(trace: Trace, step: Graph, region: Eqn) -> dict[int, int]:
    """The leaves of the state whose new value is made from one parameter's arrays, with that parameter.

    Args:
        trace: the step.
        step: its equations.
        region: that of its loss.

    Returns:
        For each such leaf the place of the parameter among those that the loss is differentiated by.
    """
    count = len(region.params["diff"])
    behind: dict[Var, frozenset[int]] = {}
    for n, i in enumerate(region.params["diff"]):
        behind[region.invars[i]] = behind[region.outvars[n - count]] = frozenset({n})
    outs = {leaf: step.outvars[out] for leaf, out in enumerate(trace.state_out) if out is not None}
    given = [*step.invars, *region.outvars]
    opened = open_calls(needed(step.eqns, outs.values(), given)[0])
    for eqn in opened.eqns:
        found = _behind(eqn, behind)
        if found:
            behind.update((var, found) for var in eqn.outvars)
    new = {leaf: opened.read(atom) for leaf, atom in outs.items()}
    return {
        leaf: min(behind[atom])
        for leaf, atom in new.items()
        if is_var(atom) and len(behind.get(atom, ())) == 1 and step.invars[leaf] not in behind
    }


def _behind(eqn: Eqn, behind: Mapping[Var, frozenset[int]]) -> frozenset[int]:
    """The parameters whose arrays an equation's result is made from; a norm, or what else is a scalar of many, is not."""
    small = all(map(is_small, eqn.outvars))
    found: frozenset[int] = frozenset()
    for atom in eqn.invars:
        if is_var(atom) and atom in behind and is_small(atom) == small:
            found |= behind[atom]
    return found


def _paths(trace: Trace, step: Graph, region: Eqn, read: Any) -> dict[int, Path]:
    """The path of each leaf, of those that the loss reads, that is held."""
    if not read:
        return {}
    trained = region.params["paths"]
    leader = followers(trace, step, region)
    paths = {leaf: trained[leader[leaf]] for leaf in read if leaf in leader}
    fixed = [leaf for leaf in read if _is_fixed(trace, step, leaf)] if trace.paths else []
    trees: dict[str, list[int]] = {}
    for leaf in fixed:
        trees.setdefault(trace.paths[leaf][0] if trace.paths[leaf] else "", []).append(leaf)
    for leaves in trees.values():
        if any(_is_matrix(step.invars[leaf].aval) for leaf in leaves):
            paths.update(_aligned({leaf: trace.paths[leaf] for leaf in leaves}, trained))
    return paths


def _is_fixed(trace: Trace, step: Graph, leaf: int) -> bool:
    out, var = trace.state_out[leaf], step.invars[leaf]
    return not compat.is_extended(var.aval.dtype) and (out is None or step.outvars[out] is var)


def _is_matrix(aval: Any) -> bool:
    return sum(size > 1 for size in aval.shape) > 1


def _aligned(leaves: Mapping[int, Path], trained: Sequence[Path]) -> dict[int, Path]:
    """Paths of one tree's leaves among those by which the loss is differentiated, from those in the state."""
    known = set(trained)
    flax = ("params",) if all(len(p) > 1 and p[0] == "params" for p in trained) else ()
    columns = zip(*leaves.values(), strict=False)
    shared = len(list(itertools.takewhile(lambda keys: len(set(keys)) == 1, columns)))
    found = {}
    for leaf, path in leaves.items():
        ends = (path[n:] for n in range(len(path)) if path[n:] in known)
        found[leaf] = next(ends, None) or (
            *flax,
            *_without_flax(path[min(shared, len(path) - 1) :]),
        )
    return found


def _without_flax(path: Path) -> Path:
    """A path without the key under which Flax keeps all parameters."""
    return path[1:] if path[0] == "params" and len(path) > 1 else path


def _with_held(graph: Graph, region: Eqn, held: tuple[int, ...], paths: tuple[Path, ...]) -> Any:
    params = {**region.params, "held": held, "paths": (*region.params["paths"], *paths)}
    marked = region.replace(params=params)
    eqns = [marked if eqn is region else eqn for eqn in graph.eqns]
    return compat.closed(
        graph.invars, graph.outvars, eqns, list(graph.consts), list(graph.consts.values())
    )
