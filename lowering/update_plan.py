"""What the update of a step becomes: one program a layer and phase, with reductions between them.

Terms.
    A **leaf** is a leaf of the state, by its number. A **parameter** is a leaf that the loss is
    differentiated by, or that it holds; it belongs to the layer that owns it. Any other leaf that only one layer's
    update reads or makes belongs to that layer (its **optimizer** leaves); what is left (counters,
    schedules, loss scales) is **replicated**: one copy a stage, computed on each.

    A **partial** is a scalar that one layer gives away: a norm, a finite check. A **reduction**
    takes the partials of several layers, or the loss and auxiliary values, and evaluates the user's
    own equations on them; what it gives are the **scalars** (mostly, but auxiliary values of any
    shape pass through it too). Reductions are numbered from 1.

    A value has **phase** k if reductions 1 to k must be over before it can be computed. A layer's
    update has one program a phase. Each starts from the layer's inputs anew: elementwise work of an
    earlier phase is done again, not stored.

Calling conventions. All programs are closed jaxprs over whole shapes; `shards` makes them run on
shards.
    phase k of a layer
        gradients (of `trained`, in the accumulator's dtype), parameters, optimizer, replicated,
        scalars of reductions 1 to k -> partials of phase k. The last phase gives, before its partials, the
        new parameters, the new optimizer leaves and the outputs.
    reduction k
        replicated, partials of phase k-1 by layer, loss and auxiliary values (if `loss`), batch
        leaves (those of `batch`), scalars of reductions 1 to k-1 -> scalars of reduction k
    replicated program
        replicated, scalars of reductions 1 to `replicated_phase` -> new replicated
    metrics
        replicated (old), scalars of all reductions, batch leaves (those of `metrics_batch`)
        -> metrics
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.extend import core as jex


@dataclasses.dataclass(frozen=True, slots=True)
class Partial:
    """A value that one layer gives to a reduction.

    Attributes:
        aval: its type.
        combine: how the values of ranks join if each computes it from its own shards: `sum`, `max`,
            `min`, `and`, `or`; or `same` if it is no plain reduction, so that every rank must hold
            the whole value. What a rank really holds depends on the shapes: ask
            `shards.ShardProgram.combine`.
    """

    aval: Any
    combine: str


@dataclasses.dataclass(frozen=True, slots=True)
class LayerUpdate:
    """The update of one layer.

    Attributes:
        params: numbers of the parameters that it owns, ascending.
        trained: those of them that have gradients.
        parameters: the state leaf of each of `params`.
        optimizer: the other state leaves that belong to it, ascending.
        phase: the phase of its last program.
        phases: one program a phase, from 0 to `phase`.
        partials: what each phase gives to the reduction after it.
        outputs: flat outputs of the step, arrays of this layer alone, that its last phase makes.
    """

    params: tuple[int, ...]
    trained: tuple[int, ...]
    parameters: tuple[int, ...]
    optimizer: tuple[int, ...]
    phase: int
    phases: tuple[jex.ClosedJaxpr, ...]
    partials: tuple[tuple[Partial, ...], ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ScalarReduction:
    """One global reduction; its number is its place in `UpdatePlan.reductions`, plus 1.

    Attributes:
        program: see the module's calling conventions.
        layers: the layers that give partials to it, ascending.
        loss: whether it reads the loss and the auxiliary values.
        batch: the step's flat inputs, leaves of the batch, that it reads whole.
        scalars: types of what it gives.
    """

    program: jex.ClosedJaxpr
    layers: tuple[int, ...]
    loss: bool
    batch: tuple[int, ...]
    scalars: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class UpdatePlan:
    """The whole update.

    Attributes:
        replicated: state leaves that belong to no layer, ascending.
        layers: one update a layer.
        reductions: the global reductions, in order; the last may serve the metrics alone.
        replicated_program: the new replicated leaves.
        replicated_phase: the last reduction that it reads; 0 for none.
        metrics: what the step returns beside the state and is no array of one layer.
        metrics_outputs: which flat outputs of the step `metrics` makes, in its order.
        metrics_batch: the step's flat inputs, leaves of the batch, that `metrics` reads whole.
    """

    replicated: tuple[int, ...]
    layers: tuple[LayerUpdate, ...]
    reductions: tuple[ScalarReduction, ...]
    replicated_program: jex.ClosedJaxpr
    replicated_phase: int
    metrics: jex.ClosedJaxpr
    metrics_outputs: tuple[int, ...]
    metrics_batch: tuple[int, ...]
