"""Runs the programs of an update plan layer by layer, as the runtime does, for the tests."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ratrain_jax.lowering import update
from ratrain_jax.lowering.graph import cut, fingerprint
from ratrain_jax.lowering.regions import Regions, split_step
from ratrain_jax.lowering.shards import PARTIAL, ShardProgram, on_shards, shard_axis

AXIS = "data"
COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": operator.add,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "and": jnp.logical_and,
    "or": jnp.logical_or,
    "same": lambda first, second: first,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A step, traced and planned.

    Attributes:
        regions: the step, cut.
        plan: its update by layer.
        step: the step.
        inputs: its arguments.
        new_state: how many of its flat outputs are new state.
    """

    regions: Regions
    plan: update.UpdatePlan
    step: Callable[..., Any]
    inputs: tuple[Any, ...]
    new_state: int


def make_case(
    step: Callable[..., Any],
    state: Any,
    *batch: Any,
    layer_of: Callable[[str], int],
    layers: int,
    returns_state: bool = True,
) -> Case:
    """Traces and plans a step; `layer_of` maps the path of a parameter to its layer."""
    paths, _ = jax.tree_util.tree_flatten_with_path((state, *batch))
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    states = len(jax.tree.leaves(state))
    whole, out = jax.make_jaxpr(step, return_shape=True)(state, *batch)
    regions = split_step(whole, whole, states=states, names=names, parts=1)
    new_state = states if returns_state else 0
    leaf_of = {var: i for i, var in enumerate(regions.step.invars)}
    owner = [layer_of(names[leaf_of[var]]) if var in leaf_of else 0 for var in regions.params]
    plan = update.split_update(
        regions,
        owner=owner,
        layers=layers,
        state_out=list(range(states)) if returns_state else [None] * states,
        metrics_out=range(new_state, len(jax.tree.leaves(out))),
        names=names,
        layer_names=[f"layer{n}" for n in range(layers)],
    )
    return Case(regions, plan, step, (state, *batch), new_state)


def gradients(case: Case, inputs: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """The loss and auxiliary values of a step, and its gradients."""
    regions = case.regions
    closed = cut(regions.step, regions.step.invars, [*regions.results, *regions.grads])
    values = run_small(closed, jax.tree.leaves(inputs))
    return values[: len(regions.results)], values[len(regions.results) :]


def run_whole(
    case: Case, inputs: tuple[Any, ...], results: Sequence[Any], grads: Sequence[Any]
) -> list[Any]:
    """The flat outputs of a step whose update runs as it was written, under `jit`."""
    step = case.regions.step
    invars = [*step.invars, *case.regions.results, *case.regions.grads]
    closed = cut(step, invars, step.outvars)
    return run_small(closed, [*jax.tree.leaves(inputs), *results, *grads])


def run_plan(
    case: Case,
    inputs: tuple[Any, ...],
    results: Sequence[Any],
    grads: Sequence[Any],
    devices: int,
) -> list[Any]:
    """The flat outputs of a step whose update runs layer by layer, on shards."""
    flat = [jnp.asarray(leaf) for leaf in jax.tree.leaves(inputs)]
    plan = case.plan
    run = _Run(plan, flat, results, grads, devices)
    new = dict(zip(plan.replicated, run.replicated(), strict=True))
    outputs: dict[int, Any] = {}
    for layer in plan.layers:
        made = run.final[id(layer)]
        leaves = [*layer.parameters, *layer.optimizer]
        new.update(zip(leaves, made, strict=False))
        outputs.update(zip(layer.outputs, made[len(leaves) :], strict=True))
    outputs.update(zip(plan.metrics_outputs, run.metrics(), strict=True))
    if case.new_state:
        outputs.update(new)
    assert sorted(outputs) == list(range(len(outputs)))
    return [outputs[i] for i in range(len(outputs))]


class _Run:
    """One run of a plan; `scalars` grows by one reduction at a time."""

    def __init__(
        self,
        plan: update.UpdatePlan,
        flat: Sequence[Any],
        results: Sequence[Any],
        grads: Sequence[Any],
        devices: int,
    ) -> None:
        self.plan, self.flat, self.devices = plan, flat, devices
        self.old = [flat[leaf] for leaf in plan.replicated]
        self.grads = [g.astype(jnp.promote_types(g.dtype, jnp.float32)) for g in grads]
        self.scalars: list[Any] = []
        self.given: list[int] = [0]
        self.final: dict[int, list[Any]] = {}
        phases = max(len(layer.phases) for layer in plan.layers)
        for phase in range(max(phases, len(plan.reductions) + 1)):
            partials = [self.phase(layer, phase) for layer in plan.layers]
            if phase < len(plan.reductions):
                self.reduce(plan.reductions[phase], partials, results)

    def phase(self, layer: update.LayerUpdate, phase: int) -> list[Any]:
        if phase > layer.phase:
            return []
        owned = [self.grads[i] for i in layer.params]
        owned += [self.flat[leaf] for leaf in [*layer.parameters, *layer.optimizer]]
        shared = [*self.old, *self.scalars]
        closed, given = layer.phases[phase], len(layer.partials[phase])
        made = on_devices(closed, owned, shared, given, self.devices)
        if phase == layer.phase:
            self.final[id(layer)] = made[: len(made) - given]
        return made[len(made) - given :]

    def reduce(
        self, reduction: update.ScalarReduction, partials: list[list[Any]], results: Sequence[Any]
    ) -> None:
        assert reduction.layers == tuple(n for n, given in enumerate(partials) if given)
        batch = [self.flat[i] for i in reduction.batch]
        loss = results if reduction.loss else ()
        flat = [value for given in partials for value in given]
        inputs = [*self.old, *flat, *loss, *batch, *self.scalars]
        self.scalars += run_small(reduction.program, inputs)
        self.given.append(len(self.scalars))

    def replicated(self) -> list[Any]:
        known = self.scalars[: self.given[self.plan.replicated_phase]]
        return run_small(self.plan.replicated_program, [*self.old, *known])

    def metrics(self) -> list[Any]:
        batch = [self.flat[i] for i in self.plan.metrics_batch]
        return run_small(self.plan.metrics, [*self.old, *self.scalars, *batch])


_compiled: dict[tuple[str, int, int], tuple[Callable[..., Any], ShardProgram]] = {}


def on_devices(
    closed: Any, owned: Sequence[Any], shared: Sequence[Any], partials: int, devices: int
) -> list[Any]:
    """Evaluates a layer's program on shards of `owned`, and puts the results together."""
    layouts_in = [shard_axis(x.shape, devices) for x in owned] + [None] * len(shared)
    kept = len(closed.out_avals) - partials
    layouts_out = [shard_axis(aval.shape, devices) for aval in closed.out_avals[:kept]]
    key = (fingerprint(closed), partials, devices)
    if key not in _compiled:
        wanted = [*layouts_out, *[PARTIAL] * partials]
        program = on_shards(closed, layouts_in, wanted, devices, AXIS)
        chosen = jax.devices()[:devices]
        mapped = jax.pmap(program.run, axis_name=AXIS, devices=chosen)
        _compiled[key] = (jax.jit(program.run) if devices == 1 else mapped, program)
    run, program = _compiled[key]
    if devices == 1:
        return run(*owned, *shared)
    inputs = list(map(cut_up, [*owned, *shared], layouts_in, [devices] * len(layouts_in)))
    made = run(*inputs) if inputs else program.run()
    whole = list(map(put_together, made[:kept], layouts_out))
    for value, combine in zip(made[kept:], program.combine, strict=True):
        whole.append(functools.reduce(COMBINE[combine], [value[i] for i in range(devices)]))
    return whole


def run_small(closed: Any, inputs: Sequence[Any]) -> list[Any]:
    """Evaluates a program that has no shards, compiled once."""
    return on_devices(closed, [], inputs, 0, 1)


def cut_up(value: Any, axis: int | None, devices: int) -> Any:
    """The shards of a value, stacked; on the host, for `pmap` to place."""
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        data: Any = np.asarray(jax.random.key_data(value))
        stacked: Any = np.stack([data] * devices)
        return jax.random.wrap_key_data(stacked, impl=jax.random.key_impl(value))
    value = np.asarray(value)
    return np.stack([value] * devices if axis is None else np.split(value, devices, axis))


def put_together(value: Any, axis: int | None) -> Any:
    """The value behind its shards; whole values must be the same on every device."""
    value = np.asarray(value)
    if axis is not None:
        return np.concatenate(list(value), axis)
    for other in value[1:]:
        np.testing.assert_array_equal(other, value[0])
    return value[0]
