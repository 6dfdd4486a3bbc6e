"""Traces losses, and runs and checks the layers that they are cut into, for the tests."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from ratrain_jax.kernels import Link, Machine, load_machine
from ratrain_jax.losses import value_and_grad
from ratrain_jax.lowering.graph import Graph, as_function, cut, inline, needed
from ratrain_jax.lowering.layers import LayeredLoss, find_layers
from ratrain_jax.lowering.regions import find_loss
from tests.models import Case

GENERIC = load_machine("generic")

# A machine on which sending takes no time, so that nothing is worth making twice.
FREE_LINK = dataclasses.replace(GENERIC, links=(Link("free", bandwidth=1e15, latency=0.0),))

# A small batch for small losses.
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)


@dataclasses.dataclass(frozen=True, slots=True)
class TracedLoss:
    """A loss as the layer finder takes it, with values to run it on.

    Attributes:
        graph: its inputs are the parameters, then the operands.
        paths: the path of each parameter.
        params: the value of each.
        operands: the values of what it reads beside.
    """

    graph: Graph
    paths: tuple[tuple[str, ...], ...]
    params: tuple[Any, ...]
    operands: tuple[Any, ...]

    def layers(self, stages: int = 2, machine: Machine = GENERIC) -> LayeredLoss:
        return find_layers(
            self.graph, self.paths, operands=len(self.operands), stages=stages, machine=machine
        )

    def results(self, params: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        whole = cut(self.graph, self.graph.invars, self.graph.outvars)
        return as_function(whole)(*params, *operands)


def trace_loss(loss: Callable[..., Any], params: Any, *operands: Any) -> TracedLoss:
    """Traces `loss(params, *operands)`, which returns the loss, or it and other results."""
    graph = inline(jax.make_jaxpr(loss)(params, *operands))
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    paths = tuple(tuple(str(getattr(key, "key", key)) for key in path) for path, _ in leaves)
    return TracedLoss(
        graph, paths, tuple(leaf for _, leaf in leaves), tuple(jax.tree.leaves(operands))
    )


class _Enough(Exception):
    """Ends a step once its loss is captured."""


def trace_case(case: Case, rows: int = 2) -> TracedLoss:
    """Traces the loss of a model's train step, as a compiled step captures it."""
    optimizer = optax.sgd(0.1)
    state, batch = case.make_state(optimizer), case.make_batch(0, rows)

    def until_loss(state: Any, batch: Any) -> list[Any]:
        results = []

        def capture(loss: Callable[..., Any]) -> Callable[..., Any]:
            def call(params: Any) -> Any:
                results.append(value_and_grad(loss)(params))
                raise _Enough

            return call

        with contextlib.suppress(_Enough):
            case.make_step(optimizer, capture)(state, batch)
        return results

    step = inline(jax.make_jaxpr(until_loss)(state, batch))
    region = find_loss(step)
    diff = region.params["diff"]
    order = [*diff, *(i for i in range(len(region.invars)) if i not in set(diff))]
    read = as_function(cut(step, step.invars, [region.invars[i] for i in order]))
    values = read(*jax.tree.leaves((state, batch)))
    loss = inline(region.params["loss"])
    graph = dataclasses.replace(loss, invars=tuple(loss.invars[i] for i in order))
    count = len(diff)
    return TracedLoss(graph, region.params["paths"], tuple(values[:count]), tuple(values[count:]))


def run_layers(
    layered: LayeredLoss, params: Sequence[Any], operands: Sequence[Any], *, block: bool = False
) -> list[Any]:
    """Runs layer after layer; returns the results of the loss.

    Args:
        layered: the layers.
        params: every parameter of the loss.
        operands: every operand.
        block: whether gradients stop at variables that are said not to be differentiable.
    """
    values: dict[int, Any] = {}
    for layer in layered.layers:
        made = as_function(layer.program)(
            *(params[i] for i in layer.reads),
            *(operands[i] for i in layer.operands),
            *(values[i] for i in layer.inputs),
        )
        for number, value in zip(layer.outputs, made, strict=True):
            stops = block and not layered.variables[number].differentiable
            values[number] = jax.lax.stop_gradient(value) if stops else value
    results = [i for i, variable in enumerate(layered.variables) if variable.role != "boundary"]
    return [values[i] for i in results]


def check_layers(layered: LayeredLoss, traced: TracedLoss) -> None:
    """Asserts whatever must hold of the layers of any loss."""
    layers, variables = layered.layers, layered.variables
    owned = sorted(number for layer in layers for number in layer.owned)
    assert owned == list(range(len(traced.params)))
    for number in owned:
        readers = [i for i, layer in enumerate(layers) if number in layer.reads]
        assert number in layers[readers[0] if readers else 0].owned
    outputs = [number for layer in layers for number in layer.outputs]
    assert sorted(outputs) == list(range(len(variables)))
    assert all(layer.outputs == tuple(sorted(layer.outputs)) for layer in layers)
    for number, variable in enumerate(variables):
        assert number in layers[variable.producer].outputs
        readers = tuple(i for i, layer in enumerate(layers) if number in layer.inputs)
        assert variable.readers == readers
        assert all(reader > variable.producer for reader in readers)
        assert bool(readers) == (variable.role == "boundary")
    more = len(traced.graph.outvars) - 1
    first = len(variables) - more - 1
    roles = [variable.role for variable in variables]
    assert roles == ["boundary"] * first + ["loss"] + ["aux"] * more
    producers = [variable.producer for variable in variables[:first]]
    assert producers == sorted(producers)
    for layer in layers:
        assert layer.program.in_avals == [
            *(traced.graph.invars[i].aval for i in layer.reads),
            *(traced.graph.invars[len(traced.params) + i].aval for i in layer.operands),
            *(variables[i].aval for i in layer.inputs),
        ]
        assert list(layer.program.out_avals) == [variables[i].aval for i in layer.outputs]
        assert layer.reads == tuple(sorted(layer.reads))
        assert layer.seconds >= 0 and layer.cost.flops >= 0
    assert len({layer.name for layer in layers}) == len(layers)


def names(layered: LayeredLoss) -> list[str]:
    """The names of the layers, in order."""
    return [layer.name for layer in layered.layers]


def count(eqns: Sequence[Any], primitive: str) -> int:
    """How many equations are of a primitive."""
    return sum(eqn.primitive.name == primitive for eqn in eqns)


def live_equations(traced: TracedLoss) -> list[Any]:
    """The equations that the results need."""
    return needed(traced.graph.eqns, traced.graph.outvars, traced.graph.invars)[0]


def dense_params(layers: int, width: int = 8) -> dict[str, np.ndarray]:
    """Square matrices by the names l0, l1, …."""
    rng = np.random.default_rng(0)
    return {f"l{i}": rng.standard_normal((width, width)).astype(np.float32) for i in range(layers)}


def assert_equal_results(traced: TracedLoss, layered: LayeredLoss) -> None:
    """Asserts that the layers give the loss, bit for bit: equation by equation on equal values."""
    np.testing.assert_array_equal(
        run_layers(layered, traced.params, traced.operands),
        traced.results(traced.params, traced.operands),
    )


def assert_equal_gradients(traced: TracedLoss, layered: LayeredLoss) -> None:
    """Asserts equal gradients, stopping them where a variable is said not to be differentiable."""
    operands = traced.operands
    whole = jax.grad(lambda params: traced.results(params, operands)[0])(traced.params)
    parts = jax.grad(lambda params: run_layers(layered, params, operands, block=True)[0])(
        traced.params
    )
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
