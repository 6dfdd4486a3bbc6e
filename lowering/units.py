"""Turns units into functions of bundles: what the compute ops run.

The functions are pure JAX code, traced and compiled elsewhere. A bundle is a tuple of arrays; arguments come in the order of
the calling convention in `ratrain_jax.lowering.program`. Operands hold all microbatches; the microbatch's number picks
the rows inside the function, so that one executable serves all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ratrain_jax.lowering.code import StepCode, Unit
from ratrain_jax.lowering.graph import as_function

Bundle = tuple[Any, ...]


def forward_function(code: StepCode, unit: Unit) -> Callable[..., tuple[Bundle, Bundle]]:
    """A block's forward: (index, views, operands, inputs) -> (outputs, residuals of each layer)."""

    def forward(
        index: Any, views: Sequence[Bundle], operands: Bundle, inputs: Bundle
    ) -> tuple[Bundle, tuple[Bundle, ...]]:
        params = _params(code, unit.stage, unit.views, views)
        chosen = _rows(code, unit.operands, operands, index)
        env = dict(zip(unit.inputs, inputs, strict=True))
        kept: list[Bundle] = []
        for n in range(*unit.layers):
            layer, layer_code = code.layered.layers[n], code.codes[n]
            inner = tuple(env[v] for v in code.inner_inputs(n))
            results = as_function(layer_code.forward)(
                *(params[p] for p in layer.reads),
                *(chosen[o] for o in layer.operands),
                *(env[v] for v in layer.inputs),
            )
            env.update(zip(layer.outputs, results, strict=False))
            kept.append((*inner, *results[len(layer.outputs) :]))
        return tuple(env[v] for v in unit.outputs), tuple(kept)

    return forward


def backward_function(
    code: StepCode, unit: Unit, fresh: Sequence[bool]
) -> Callable[..., tuple[Bundle, tuple[Bundle, ...]]]:
    """A unit's backward: (index, views, operands, inputs, residuals, cotangents, accumulators) -> (cotangents, accumulators).

    Args:
        code: the step's code.
        unit: the unit.
        fresh: for each of `unit.accumulators`, whether it starts from zero here instead of being read.
    """

    def backward(
        index: Any,
        views: Sequence[Bundle],
        operands: Bundle,
        inputs: Bundle,
        residuals: Sequence[Bundle],
        cotangents: Bundle,
        accumulators: Sequence[Bundle],
    ) -> tuple[Bundle, tuple[Bundle, ...]]:
        params = _params(code, unit.stage, unit.views, views)
        chosen = _rows(code, unit.operands, operands, index)
        env = dict(zip(unit.inputs, inputs, strict=True))
        flowing: dict[int, Any] = dict(zip(unit.cotangents_in, cotangents, strict=True))
        sums = _start(code, unit, fresh, accumulators)
        for n in reversed(range(*unit.layers)):
            _layer_backward(
                code, n, params, chosen, env, residuals[n - unit.layers[0]], flowing, sums
            )
        bundles = [code.gradients[unit.stage, owner] for owner in unit.accumulators]
        return (
            tuple(flowing[v] for v in unit.cotangents_out),
            tuple(tuple(sums[p] for p in bundle) for bundle in bundles),
        )

    return backward


def unit_key(code: StepCode, unit: Unit) -> tuple[Any, ...]:
    """Equal for units whose functions are equal: their layers' code, and how these are wired, with numbers made local."""
    names: dict[tuple[str, int], int] = {}

    def local(kind: str, numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(names.setdefault((kind, n), len(names)) for n in numbers)

    bundles = (
        *(local("p", code.bundles[unit.stage, owner]) for owner in unit.views),
        *(local("p", code.gradients[unit.stage, owner]) for owner in unit.accumulators),
    )
    layers = tuple(
        (
            code.codes[n].fingerprint,
            local("p", code.layered.layers[n].reads),
            local("o", code.layered.layers[n].operands),
            local("v", code.layered.layers[n].inputs),
            local("v", code.layered.layers[n].outputs),
            local("v", code.inner_inputs(n)),
            local("p", code.codes[n].backward_reads),
            local("o", code.codes[n].backward_operands),
            local("v", code.codes[n].backward_inputs),
            tuple(code.layered.variables[v].role for v in code.layered.layers[n].outputs),
            tuple(code.layered.variables[v].differentiable for v in code.layered.layers[n].outputs),
        )
        for n in range(*unit.layers)
    )
    split = tuple(code.regions.operands[o].split for o in unit.operands)
    variables = (unit.inputs, unit.outputs, unit.cotangents_in, unit.cotangents_out)
    return (
        bundles,
        layers,
        local("o", unit.operands),
        split,
        *(local("v", numbers) for numbers in variables),
        (len(unit.views), len(unit.accumulators)),
    )


def _layer_backward(
    code: StepCode,
    n: int,
    params: dict[int, Any],
    operands: dict[int, Any],
    env: dict[int, Any],
    kept: Bundle,
    flowing: dict[int, Any],
    sums: dict[int, Any],
) -> None:
    """Runs one layer backward; adds into `flowing` (cotangents by variable) and `sums` (gradients by parameter)."""
    layer, layer_code = code.layered.layers[n], code.codes[n]
    inner = code.inner_inputs(n)
    known = {**env, **dict(zip(inner, kept, strict=False))}
    variables = code.layered.variables
    incoming = [
        _cotangent(code, v, flowing)
        for v in layer.outputs
        if variables[v].differentiable and variables[v].role != "aux"
    ]
    results = as_function(layer_code.backward)(
        *(params[p] for p in layer_code.backward_reads),
        *(operands[o] for o in layer_code.backward_operands),
        *(known[v] for v in layer_code.backward_inputs),
        *kept[len(inner) :],
        *incoming,
    )
    for p, gradient in zip(layer.trained, results, strict=False):
        sums[p] = sums[p] + gradient.astype(sums[p].dtype)
    moving = [v for v in layer.inputs if variables[v].differentiable]
    for v, cotangent in zip(moving, results[len(layer.trained) :], strict=True):
        flowing[v] = flowing[v] + cotangent if v in flowing else cotangent


def _cotangent(code: StepCode, v: int, flowing: dict[int, Any]) -> Any:
    """What comes back for a variable: its readers' sum, and for the loss its share of the mean, or of the sum."""
    variable = code.layered.variables[v]
    aval = variable.aval
    if variable.role == "loss":
        parts = code.data_parallel * code.microbatches if code.regions.reduction == "mean" else 1
        share = jnp.full(aval.shape, 1.0 / parts, aval.dtype)
        return share + flowing[v] if v in flowing else share
    return flowing[v] if v in flowing else jnp.zeros(aval.shape, aval.dtype)


def _params(
    code: StepCode, stage: int, owners: Sequence[int], views: Sequence[Bundle]
) -> dict[int, Any]:
    """Parameters by number, out of the bundles of their owners."""
    return {
        p: array
        for owner, view in zip(owners, views, strict=True)
        for p, array in zip(code.bundles[stage, owner], view, strict=True)
    }


def _rows(code: StepCode, numbers: Sequence[int], operands: Bundle, index: Any) -> dict[int, Any]:
    """Operands by number; of a split one, the microbatch's rows."""
    split = code.regions.operands
    return {
        o: jax.lax.dynamic_index_in_dim(array, index, 0, keepdims=False)
        if split[o].split
        else array
        for o, array in zip(numbers, operands, strict=True)
    }


def _start(
    code: StepCode, unit: Unit, fresh: Sequence[bool], accumulators: Sequence[Bundle]
) -> dict[int, Any]:
    """Gradient sums by parameter, before the unit adds its own."""
    sums: dict[int, Any] = {}
    given = iter(accumulators)
    for owner, is_fresh in zip(unit.accumulators, fresh, strict=True):
        bundle = code.gradients[unit.stage, owner]
        if is_fresh:
            sums.update((p, zero_gradient(code, p)) for p in bundle)
        else:
            sums.update(zip(bundle, next(given), strict=True))
    return sums


def zero_gradient(code: StepCode, param: int) -> Any:
    """A parameter's whole zero gradient in the dtype that gradients are summed in."""
    aval = code.master[param]
    return jnp.zeros(aval.shape, gradient_dtype(aval.dtype))


def gradient_dtype(dtype: Any) -> Any:
    """The dtype that gradients of a parameter of `dtype` are summed in."""
    return jnp.promote_types(dtype, jnp.float32)
