"""Cuts a labelled update into programs, and finds what they need of each other.

Demands only ever go to earlier reductions, so one pass from the last reduction to the first finds
them all. Equations are put in the order in which the outputs need them: equal layers get equal
programs, whatever the order of the trace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from ratrain_jax import compat
from ratrain_jax.lowering.graph import Atom, Graph, Var, cut
from ratrain_jax.lowering.labels import Kind, Labels, Update, is_small
from ratrain_jax.lowering.opening import emit
from ratrain_jax.lowering.regions import Regions
from ratrain_jax.lowering.shards import combine_of
from ratrain_jax.lowering.update_plan import LayerUpdate, Partial, ScalarReduction, UpdatePlan
from ratrain_jax.lowering.update_stops import Stop, Stops, walk


@dataclasses.dataclass(frozen=True, slots=True)
class _Reads:
    """What a reduction reads beside replicated state and earlier scalars.

    Attributes:
        number: the reduction.
        partials: by layer.
        results: the loss and auxiliary values, or nothing.
        batch: numbers of batch leaves.
    """

    number: int
    partials: tuple[tuple[Var, ...], ...]
    results: tuple[Var, ...]
    batch: tuple[int, ...]


class Planner:
    """Collects what each program needs of the others, outputs first, and then cuts the programs.

    Attributes:
        params: numbers of the parameters of each layer.
        leaves: their state leaves.
        optimizer: the other state leaves of each layer.
        replicated: the state leaves of no layer.
        scalars: what each reduction gives, in order of demand.
        partials: what each layer gives to reductions, by phase.
        traced: the place of each variable in the trace.
    """

    def __init__(
        self,
        update: Update,
        graph: Graph,
        labels: Labels,
        regions: Regions,
        owner: Sequence[int],
        layers: int,
        metrics_out: Sequence[int],
    ) -> None:
        self.update, self.graph, self.labels = update, graph, labels
        self.stops = Stops(labels)
        self.makers = dict(labels.makers)
        leaf_of = {var: leaf for leaf, var in enumerate(update.states)}
        self.params = [[i for i, own in enumerate(owner) if own == n] for n in range(layers)]
        self.leaves = [[leaf_of[regions.params[i]] for i in owned] for owned in self.params]
        self.optimizer = [
            [leaf for leaf, home in enumerate(labels.home) if home == n and leaf not in owned]
            for n, owned in enumerate(self.leaves)
        ]
        self.replicated = [leaf for leaf, home in enumerate(labels.home) if home is None]
        self.accumulated = [self._accumulated(grad) for grad in regions.grads]
        self.results = [
            [update.state_out[leaf] for leaf in [*self.leaves[n], *self.optimizer[n]]]
            for n in range(layers)
        ]
        self.layer_outputs: list[list[int]] = [[] for _ in range(layers)]
        self.metrics_outputs: list[int] = []
        self.metrics_results: list[Atom] = []
        self._place_metrics(metrics_out)
        self.scalars: dict[int, dict[Var, None]] = {}
        self.partials: list[dict[int, list[Var]]] = [{} for _ in range(layers)]
        made = (var for eqn in update.eqns for var in eqn.outvars)
        self.traced = {v: i for i, v in enumerate([*update.states, *update.grads, *made])}

    def _accumulated(self, grad: Var) -> Var:
        """The input that a gradient is cast from, in the accumulator's dtype; adds the cast."""
        dtype = grad.aval.dtype
        wide = jnp.promote_types(dtype, jnp.float32)
        if wide == dtype:
            return grad
        given = compat.new_var(grad.aval.update(dtype=wide, weak_type=False))
        (cast,), _ = emit(lambda x: lax.convert_element_type(x, dtype), [given])
        self.makers[grad] = cast.replace(outvars=[grad])
        return given

    def _place_metrics(self, metrics_out: Sequence[int]) -> None:
        """An output that is an array of one layer is made by that layer; the others by the metrics."""
        for out, atom in zip(metrics_out, self.update.metrics, strict=True):
            mark = self.labels.mark(atom)
            if mark.kind is Kind.LAYER and not is_small(atom):
                self.layer_outputs[mark.layer].append(out)
                self.results[mark.layer].append(atom)
            else:
                self.metrics_outputs.append(out)
                self.metrics_results.append(atom)

    def plan(self) -> UpdatePlan:
        """The whole plan."""
        stops, layers = self.stops, range(len(self.params))
        phases = [self._demand(self.results[n], stops.layer(n), n) for n in layers]
        new = [self.update.state_out[leaf] for leaf in self.replicated]
        replicated_phase = self._demand(new, stops.shared)
        batch = self._batch_read(walk(self.makers, self.metrics_results, stops.metrics)[1])
        given = self._batch(batch)
        self._demand(self.metrics_results, stops.metrics, given=given)
        count = max(self.scalars, default=0)
        reads = [self._reduce(number) for number in range(count, 0, -1)]
        phases = [max([phases[n], *self.partials[n]]) for n in layers]
        old = self._states(self.replicated)
        metrics_inputs = [*old, *self._brought(count, given), *given]
        return UpdatePlan(
            replicated=tuple(self.replicated),
            layers=tuple(self._layer(n, phases[n]) for n in layers),
            reductions=tuple(self._reduction(read) for read in reversed(reads)),
            replicated_program=self._cut(
                [*old, *self._brought(replicated_phase)], new, stops.shared
            ),
            replicated_phase=replicated_phase,
            metrics=self._cut(metrics_inputs, self.metrics_results, stops.metrics),
            metrics_outputs=tuple(self.metrics_outputs),
            metrics_batch=batch,
        )

    def _states(self, leaves: Sequence[int]) -> list[Var]:
        return [self.update.states[leaf] for leaf in leaves]

    def _batch(self, numbers: Sequence[int]) -> list[Var]:
        return [self.update.batch[number - len(self.update.states)] for number in numbers]

    def _batch_read(self, ends: Collection[Var]) -> tuple[int, ...]:
        """The batch leaves among some variables, as flat inputs of the step."""
        first, ends = len(self.update.states), set(ends)
        return tuple(first + i for i, var in enumerate(self.update.batch) if var in ends)

    def _brought(self, phase: int, made: Collection[Var] = (), layer: int = -2) -> list[Var]:
        """The scalars of reductions 1 to `phase`; a fresh variable for each that the program makes or has by itself."""
        marks = self.labels
        return [
            compat.new_var(var.aval)
            if var in made or (marks.mark(var).owned and marks.mark(var).layer == layer)
            else var
            for number in range(1, phase + 1)
            for var in self.scalars.get(number, ())
        ]

    def _bring(self, var: Var) -> int:
        """Has the reduction that a value arrives with give it; returns that reduction."""
        arrival = self.labels.mark(var).arrival
        self.scalars.setdefault(arrival, {})[var] = None
        return arrival

    def _demand(
        self, outvars: Sequence[Atom], stop: Stop, layer: int = -2, given: Collection[Var] = ()
    ) -> int:
        """Demands what a program lacks to compute `outvars`; returns the last reduction that it waits for."""
        phase = 0
        for var in walk(self.makers, outvars, stop)[1]:
            mark = self.labels.mark(var)
            own = mark.owned and mark.layer == layer
            if not own and mark.kind is not Kind.REPLICATED and var not in given:
                phase = max(phase, self._bring(var))
        return phase

    def _reduce(self, number: int) -> _Reads:
        """Finds what a reduction reads, and demands it."""
        scalars = self.scalars.get(number, {})
        ends = walk(self.makers, scalars, self.stops.reduction(number))[1]
        partials: list[list[Var]] = [[] for _ in self.params]
        first = {*self.update.results, *self.update.batch} if number == 1 else set()
        for var in ends:
            mark = self.labels.mark(var)
            if mark.owned and mark.phase == number - 1:
                partials[mark.layer].append(var)
            elif mark.kind is not Kind.REPLICATED and var not in first:
                self._bring(var)
        for layer, given in enumerate(partials):
            if given:
                # In the order of the trace, which is the same for equal layers.
                given.sort(key=self.traced.__getitem__)
                self.partials[layer][number - 1] = given
                self._demand(given, self.stops.layer(layer), layer)
        loss = bool(first.intersection(self.update.results, ends))
        return _Reads(
            number,
            tuple(tuple(given) for given in partials),
            self.update.results if loss else (),
            self._batch_read(ends) if number == 1 else (),
        )

    def _reduction(self, reads: _Reads) -> ScalarReduction:
        scalars = list(self.scalars.get(reads.number, ()))
        inputs = [
            *self._states(self.replicated),
            *(var for given in reads.partials for var in given),
            *reads.results,
            *self._batch(reads.batch),
            *self._brought(reads.number - 1),
        ]
        return ScalarReduction(
            program=self._cut(inputs, scalars, self.stops.reduction(reads.number)),
            layers=tuple(n for n, given in enumerate(reads.partials) if given),
            loss=bool(reads.results),
            batch=reads.batch,
            scalars=tuple(var.aval for var in scalars),
        )

    def _layer(self, n: int, phase: int) -> LayerUpdate:
        given = [self.partials[n].get(k, []) for k in range(phase + 1)]
        trained = tuple(i for i in self.params[n] if i < len(self.accumulated))
        programs = []
        for k in range(phase + 1):
            inputs = [
                *(self.accumulated[i] for i in trained),
                *self._states([*self.leaves[n], *self.optimizer[n], *self.replicated]),
                *self._brought(k, layer=n),
            ]
            results = [*(self.results[n] if k == phase else ()), *given[k]]
            programs.append(self._cut(inputs, results, self.stops.layer(n)))
        return LayerUpdate(
            params=tuple(self.params[n]),
            trained=trained,
            parameters=tuple(self.leaves[n]),
            optimizer=tuple(self.optimizer[n]),
            phase=phase,
            phases=tuple(programs),
            partials=tuple(tuple(map(self._partial, vars_)) for vars_ in given),
            outputs=tuple(self.layer_outputs[n]),
        )

    def _partial(self, var: Var) -> Partial:
        eqn = self.makers.get(var)
        reduced = eqn is not None and self.labels.mark(var).kind is Kind.SCALAR
        return Partial(var.aval, combine_of(eqn) if reduced else "same")

    def _cut(self, inputs: Sequence[Var], outputs: Sequence[Atom], stop: Stop) -> jex.ClosedJaxpr:
        return cut(self.graph, inputs, outputs, walk(self.makers, outputs, stop)[0])
