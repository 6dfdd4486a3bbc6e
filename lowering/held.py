"""Finds the parameters that a loss reads without being differentiated by them.

The base weights under adapters, a reference model, a teacher, a moving average of the parameters: leaves of the state that
the loss takes as they are. They are **held**: they lie with the layer that reads them, as trained parameters do, but have no
gradient. Two kinds are:
    one that **follows** a parameter: its new value is made from that parameter's arrays and from no other's. It has that
    parameter's path, and so lies in its layer, where its update needs it;
    one that never changes, of a tree with a matrix among such leaves (a tree is a child of the state); `held_paths` finds
    its path. A tree of vectors (a table of noise levels) stays on every stage: it is small, and no model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ratrain_jax import compat
from ratrain_jax.lowering.graph import Eqn, Graph, Var, inline, is_var, needed
from ratrain_jax.lowering.held_paths import aligned, apart, settled
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
    paths = _paths(trace, step, region, read)
    if not paths:
        return trace
    held, added = tuple(paths), tuple(paths.values())
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


def _paths(trace: Trace, step: Graph, region: Eqn, read: Mapping[int, int]) -> dict[int, Path]:
    """The path of each input of the loss, of those that are leaves of the state, that is held."""
    trained = region.params["paths"]
    leader = followers(trace, step, region) if read else {}
    paths = {i: trained[leader[leaf]] for i, leaf in read.items() if leaf in leader}
    grown: dict[str, dict[int, Path]] = {}
    for i, leaf in read.items():
        if trace.paths and i not in paths and _is_fixed(trace, step, leaf):
            path = trace.paths[leaf] or ("state",)
            grown.setdefault(path[0], {})[i] = path
    types = [var.aval for var in region.invars]
    shapes = {p: types[i].shape for i, p in zip(region.params["diff"], trained, strict=True)}
    trees: dict[int, str] = {}
    for name, tree in grown.items():
        if not any(_is_matrix(types[i]) for i in tree):
            continue
        found = aligned(tree, trained)
        if all(
            shapes.setdefault(path, types[i].shape) == types[i].shape for i, path in found.items()
        ):
            paths.update(found)
            trees.update(dict.fromkeys(tree, name))
        else:
            paths.update({i: apart(path, name) for i, path in found.items()})
    if not trees:
        return paths
    loss = inline(region.params["loss"])
    params = (*region.params["diff"], *paths)
    others = [i for i in range(len(loss.invars)) if i not in params]
    graph = dataclasses.replace(loss, invars=tuple(loss.invars[i] for i in (*params, *others)))
    found = settled(graph, trained, list(paths.values()), [trees.get(i) for i in paths])
    return dict(zip(paths, found, strict=True))


def _is_fixed(trace: Trace, step: Graph, leaf: int) -> bool:
    out, var = trace.state_out[leaf], step.invars[leaf]
    return not compat.is_extended(var.aval.dtype) and (out is None or step.outvars[out] is var)


def _is_matrix(aval: Any) -> bool:
    return sum(size > 1 for size in aval.shape) > 1


def _with_held(graph: Graph, region: Eqn, held: tuple[int, ...], paths: tuple[Path, ...]) -> Any:
    params = {**region.params, "held": held, "paths": (*region.params["paths"], *paths)}
    marked = region.replace(params=params)
    eqns = [marked if eqn is region else eqn for eqn in graph.eqns]
    return compat.closed(
        graph.invars, graph.outvars, eqns, list(graph.consts), list(graph.consts.values())
    )
