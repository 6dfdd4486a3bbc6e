"""Splits the update region of a step (everything that is not the loss) by layer.

The region is opened (`opening`), labelled (`labels`) and cut (`update_programs`); what comes out,
and its calling conventions, is in `update_plan`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ratrain_jax.errors import UnsupportedError
from ratrain_jax.lowering.graph import Graph, is_var, needed
from ratrain_jax.lowering.labels import Update, find_labels, origin
from ratrain_jax.lowering.opening import open_calls
from ratrain_jax.lowering.regions import Regions
from ratrain_jax.lowering.update_plan import LayerUpdate as LayerUpdate
from ratrain_jax.lowering.update_plan import Partial as Partial
from ratrain_jax.lowering.update_plan import ScalarReduction as ScalarReduction
from ratrain_jax.lowering.update_plan import UpdatePlan as UpdatePlan
from ratrain_jax.lowering.update_programs import Planner


def split_update(
    regions: Regions,
    *,
    owner: Sequence[int],
    layers: int,
    state_out: Sequence[int | None],
    metrics_out: Sequence[int],
    names: Sequence[str] = (),
) -> UpdatePlan:
    """Splits a step's update by layer.

    Args:
        regions: the step, cut.
        owner: the layer that owns each parameter.
        layers: how many layers there are.
        state_out: for each state leaf the flat output that is its new value, or None if it stays as
            it is.
        metrics_out: the flat outputs that are no new state.
        names: the path of each flat input, for messages.

    Raises:
        UnsupportedError: a parameter that is no leaf of the state, arrays of several layers that
            meet in one equation, or an effect.
    """
    update, graph = open_update(regions, owner, state_out, metrics_out, names)
    labels = find_labels(update, names)
    planner = Planner(update, graph, labels, regions, owner, layers, metrics_out)
    return planner.plan()


def open_update(
    regions: Regions,
    owner: Sequence[int],
    state_out: Sequence[int | None],
    metrics_out: Sequence[int],
    names: Sequence[str] = (),
) -> tuple[Update, Graph]:
    """The update region of a step, opened, and the graph that holds its equations and constants.

    Raises:
        UnsupportedError: a parameter that is no leaf of the state, or an effect.
    """
    step = regions.step
    states = step.invars[: regions.states]
    leaf_of = {var: leaf for leaf, var in enumerate(states)}
    for number, var in enumerate(regions.params):
        if var not in leaf_of:
            raise UnsupportedError(
                f"parameter {number} of the loss, {var.aval.str_short()}, is computed from the state before the"
                " loss is differentiated. Differentiate by leaves of the state, and compute inside the loss."
            )
    if len(set(regions.params)) < len(regions.params):
        raise UnsupportedError(
            "the loss is differentiated twice by one leaf of the state. Pass it once, and read it twice."
        )
    wanted = [
        *(states[leaf] if out is None else step.outvars[out] for leaf, out in enumerate(state_out)),
        *(step.outvars[out] for out in metrics_out),
    ]
    given = [*step.invars, *regions.grads, *regions.results]
    for eqn in step.eqns:
        if eqn.effects and not set(eqn.outvars) & set(given):
            raise UnsupportedError(
                f"the step has a side effect outside the loss: `{eqn.primitive.name}` ({origin(eqn)})."
                " Remove it, or return the value as a metric."
            )
    eqns, outvars, consts = open_calls(needed(step.eqns, wanted, given)[0], wanted)
    eqns = needed(eqns, outvars, given)[0]
    graph = dataclasses.replace(step, eqns=tuple(eqns), consts={**step.consts, **consts})
    update = Update(
        eqns=graph.eqns,
        states=states,
        batch=step.invars[regions.states :],
        grads=dict(zip(regions.grads, owner, strict=True)),
        params={leaf_of[var]: owner[i] for i, var in enumerate(regions.params)},
        results=regions.results,
        state_out=tuple(outvars[: len(states)]),
        metrics=tuple(outvars[len(states) :]),
        kept=frozenset(leaf_of[v] for v in regions.sources if is_var(v) and v in leaf_of),
    )
    return update, graph
