"""Splits the update region of a step (everything that is not the loss) by layer.

The region is opened (`opening`), labelled (`labels`) and cut (`update_programs`); what comes out,
and its calling conventions, is in `update_plan`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ratrain_jax.errors import UnsupportedError
from ratrain_jax.lowering.branches import has_heavy_branch, split_branches
from ratrain_jax.lowering.concatenations import JOINS, take_apart
from ratrain_jax.lowering.graph import Atom, Eqn, Graph, Var, is_var, needed
from ratrain_jax.lowering.labels import Labels, Update, check_labels, find_labels, origin
from ratrain_jax.lowering.opening import Opened, open_calls
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
    layer_names: Sequence[str] = (),
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
        layer_names: the name of each layer, for messages.

    Raises:
        UnsupportedError: a parameter that is no leaf of the state, arrays of several layers that
            meet in one equation, or an effect.
    """
    _check_step(regions, names)
    update, graph, labels = open_update(regions, owner, state_out, metrics_out)
    check_labels(update, labels, names, layer_names)
    planner = Planner(update, graph, labels, regions, owner, layers, metrics_out)
    return planner.plan()


def _check_step(regions: Regions, names: Sequence[str]) -> None:
    step = regions.step
    states = step.invars[: regions.states]
    for number, var in enumerate(regions.params):
        if var not in states:
            raise UnsupportedError(
                f"parameter {number} of the loss, {var.aval.str_short()}, is computed from the state before the"
                " loss is differentiated. Differentiate by leaves of the state, and compute inside the loss."
            )
        if var in regions.params[:number]:
            leaf = states.index(var)
            name = names[leaf] if leaf < len(names) else f"leaf {leaf}"
            raise UnsupportedError(
                f"the loss is differentiated twice by {name} of the state. Pass it once, and read it twice."
            )
    for eqn in step.eqns:
        if eqn.effects and not set(eqn.outvars) & set(regions.grads):
            raise UnsupportedError(
                f"the step has a side effect outside the loss: `{eqn.primitive.name}` ({origin(eqn)})."
                " Remove it, or return the value as a metric."
            )


def open_update(
    regions: Regions,
    owner: Sequence[int],
    state_out: Sequence[int | None],
    metrics_out: Sequence[int],
) -> tuple[Update, Graph, Labels]:
    """The update region of a step, opened and labelled, and the graph with its equations and constants.

    Args:
        regions: the step, cut.
        owner: the layer that owns each parameter.
        state_out: the flat output that is each leaf's new value, or None.
        metrics_out: the flat outputs that are no new state.
    """
    region = _Region(regions, owner, state_out, metrics_out)
    opened, update = region.open(region.eqns, set())
    labels = find_labels(update)
    tried: set[Var] = set()
    if any(has_heavy_branch(eqn) for eqn in region.eqns):
        opened, update, labels = region.keep_branches(opened, labels)
    while joins := {e.outvars[0] for e in labels.mixed if e.primitive.name in JOINS} - tried:
        tried |= joins
        eqns, wanted = take_apart(update.eqns, [*update.state_out, *update.metrics], joins)
        update = region.update(eqns, wanted)
        labels = find_labels(update)
    step = regions.step
    consts = {**step.consts, **opened.consts}
    return update, dataclasses.replace(step, eqns=update.eqns, consts=consts), labels


class _Region:
    """The update region as it was traced, and how it is opened."""

    def __init__(
        self,
        regions: Regions,
        owner: Sequence[int],
        state_out: Sequence[int | None],
        metrics_out: Sequence[int],
    ) -> None:
        step = regions.step
        self.regions, self.owner = regions, owner
        self.states = step.invars[: regions.states]
        outs = [*state_out, *metrics_out]
        self.wanted = [
            self.states[leaf] if out is None else step.outvars[out] for leaf, out in enumerate(outs)
        ]
        self.given = [*step.invars, *regions.grads, *regions.results]
        self.eqns = needed(step.eqns, self.wanted, self.given)[0]

    def open(self, eqns: Sequence[Eqn], kept: set[Var]) -> tuple[Opened, Update]:
        """Opens equations, but for the `cond`s that make some variables."""
        opened = open_calls(eqns, lambda eqn: not kept.isdisjoint(eqn.outvars))
        return opened, self.update(opened.eqns, list(map(opened.read, self.wanted)))

    def keep_branches(self, opened: Opened, labels: Labels) -> tuple[Opened, Update, Labels]:
        """Keeps each `cond` with a heavy branch as one `cond` a layer, if it falls apart by layer."""

        def group(var: Var) -> int | None:
            mark = labels.mark(opened.read(var))
            return mark.layer if mark.owned else None

        eqns, kept = split_branches(self.eqns, group)
        while True:
            again, update = self.open(eqns, kept)
            found = find_labels(update)
            mixed = kept.intersection(var for eqn in found.mixed for var in eqn.outvars)
            if not mixed:
                return again, update, found
            kept -= mixed

    def update(self, eqns: Sequence[Eqn], wanted: Sequence[Atom]) -> Update:
        """The update that some equations make."""
        regions, count = self.regions, len(self.states)
        leaf_of = {var: leaf for leaf, var in enumerate(self.states)}
        return Update(
            eqns=tuple(needed(eqns, wanted, self.given)[0]),
            states=self.states,
            batch=regions.step.invars[count:],
            grads=dict(zip(regions.grads, self.owner, strict=False)),
            params={leaf_of[var]: self.owner[i] for i, var in enumerate(regions.params)},
            results=regions.results,
            state_out=tuple(wanted[:count]),
            metrics=tuple(wanted[count:]),
            kept=frozenset(leaf_of[v] for v in regions.sources if is_var(v) and v in leaf_of),
        )
