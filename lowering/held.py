"""Finds the parameters that a loss reads without being differentiated by them.

The base weights under adapters, a reference model, a teacher, a moving average of the parameters: leaves of the state that
the loss takes as they are. They are **held**: they lie with the layer that reads them, as trained parameters do, but have no
gradient. Two kinds are:
    one that follows a parameter (see `followers`). It has that parameter's path, and so lies in its layer, where its
    update needs it;
    one that never changes, of a tree with a matrix among such leaves (a tree is a child of the state); `held_paths` finds
    its path. A tree of vectors (a table of noise levels) stays on every stage: it is small, and no model; so do scalars.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ratrain_jax import compat
from ratrain_jax.lowering.followers import AfterLoss
from ratrain_jax.lowering.graph import Eqn, Graph, Var, inline, is_var, needed
from ratrain_jax.lowering.held_paths import aligned, apart, settled
from ratrain_jax.lowering.labels import is_small
from ratrain_jax.lowering.regions import made_from_batch, one_region, parameters_of
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
    if not read:
        return trace
    # What is also read before the loss has to be where the prologue is.
    before = {
        a
        for eqn in needed(step.eqns, region.invars, step.invars)[0]
        for a in eqn.invars
        if is_var(a)
    }
    read = {
        i: leaf
        for i, leaf in read.items()
        if region.invars[i] not in before and region.invars.count(region.invars[i]) == 1
    }
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
    return list((AfterLoss.of(held, step, region).followers(_sources(region)) | paths).items())


def _sources(region: Eqn) -> dict[Var, Path]:
    """The parameters of a loss and their gradients, with their paths."""
    places, paths = parameters_of(region), region.params["paths"]
    found = {region.invars[i]: path for i, path in zip(places, paths, strict=True)}
    count = len(region.params["diff"])
    grads = region.outvars[len(region.outvars) - count :]
    return found | dict(zip(grads, paths[:count], strict=True))


def _paths(trace: Trace, step: Graph, region: Eqn, read: Mapping[int, int]) -> dict[int, Path]:
    """The path of each input of the loss, of those that are leaves of the state, that is held."""
    after, sources = AfterLoss.of(trace, step, region), _sources(region)
    followers = after.followers(sources)
    paths = {i: followers[leaf] for i, leaf in read.items() if leaf in followers}
    fixed = {
        i: trace.paths[leaf] or ("state",)
        for i, leaf in read.items()
        if trace.paths and after.is_fixed(leaf) and _is_array(step.invars[leaf])
    }
    paths.update(_fixed_paths(trace, step, region, fixed, paths))
    # An update that joins a parameter with another that never changes has to find both in one layer.
    trained = set(region.params["paths"])
    paths = {
        i: path
        for i, path in paths.items()
        if i not in fixed or path in trained or read[i] not in after.read
    }
    followers = after.followers(sources | {region.invars[i]: paths[i] for i in fixed if i in paths})
    return {i: followers[leaf] for i, leaf in read.items() if leaf in followers} | paths


def _fixed_paths(
    trace: Trace,
    step: Graph,
    region: Eqn,
    fixed: Mapping[int, Path],
    followers: Mapping[int, Path],
) -> dict[int, Path]:
    """The paths of what never changes, tree by tree; trees without a matrix have none."""
    trained = region.params["paths"]
    grown: dict[str, dict[int, Path]] = {}
    for i, path in fixed.items():
        grown.setdefault(path[0], {})[i] = path
    types = [var.aval for var in region.invars]
    shapes = {p: types[i].shape for i, p in zip(region.params["diff"], trained, strict=True)}
    paths: dict[int, Path] = {}
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
    loss, every = inline(region.params["loss"]), {**followers, **paths}
    params = (*region.params["diff"], *every)
    others = [i for i in range(len(loss.invars)) if i not in params]
    graph = dataclasses.replace(loss, invars=tuple(loss.invars[i] for i in (*params, *others)))
    from_batch = made_from_batch(step, trace.states)
    batch = [n for n, i in enumerate(others) if region.invars[i] in from_batch]
    found = settled(graph, batch, trained, list(every.values()), [trees.get(i) for i in every])
    return {i: path for i, path in zip(every, found, strict=True) if i in paths}


def _is_array(var: Var) -> bool:
    return not (compat.is_extended(var.aval.dtype) or is_small(var))


def _is_matrix(aval: Any) -> bool:
    return sum(size > 1 for size in aval.shape) > 1


def _with_held(graph: Graph, region: Eqn, held: tuple[int, ...], paths: tuple[Path, ...]) -> Any:
    params = {**region.params, "held": held, "paths": (*region.params["paths"], *paths)}
    marked = region.replace(params=params)
    eqns = [marked if eqn is region else eqn for eqn in graph.eqns]
    return compat.closed(
        graph.invars, graph.outvars, eqns, list(graph.consts), list(graph.consts.values())
    )
