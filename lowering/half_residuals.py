"""Keeps residuals in float16, for an accelerator that computes in it.

What a kernel reads is float16 anyway. Of the rest, float32 residuals as large as activations are rounded to float16 when
they are kept and widened when backward reads them; values beyond float16's range become its largest ones. **Statistics**
(a mean, a norm, a log-sum-exp a row) stay as they are: they are few, and an error in one is an error in a whole row. A
residual is taken for one if it has at most an eighth of the elements of the layer's largest.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from ratrain_jax.lowering.autodiff import LayerCode
from ratrain_jax.lowering.graph import as_function, fingerprint

STATISTICS = 8
"""A residual with fewer elements than the largest one's over this is kept as it is."""


def narrow_residuals(code: LayerCode) -> LayerCode:
    """A layer's code that keeps its large float32 residuals in float16.

    Args:
        code: a layer's two programs.
    """
    largest = max((aval.size for aval in code.residuals), default=0)
    narrowed = [
        aval.dtype == jnp.float32 and aval.size * STATISTICS > largest for aval in code.residuals
    ]
    if not any(narrowed):
        return code
    made = len(code.forward.out_avals) - len(narrowed)
    first = len(code.backward_reads) + len(code.backward_operands) + len(code.backward_inputs)
    forward = _narrowed_forward(code.forward, [False] * made + narrowed)
    kept = tuple(forward.out_avals[made:])
    backward = _narrowed_backward(code.backward, first, narrowed, kept)
    return dataclasses.replace(
        code,
        forward=forward,
        backward=backward,
        residuals=kept,
        fingerprint=fingerprint(forward, backward),
    )


def _narrow(x: jax.Array) -> jax.Array:
    largest = jnp.float32(jnp.finfo(jnp.float16).max)
    return jax.lax.clamp(-largest, x, largest).astype(jnp.float16)


def _narrowed_forward(forward: jex.ClosedJaxpr, narrowed: list[bool]) -> jex.ClosedJaxpr:
    run = as_function(forward)

    def call(*args: jax.Array) -> list[jax.Array]:
        return [
            _narrow(x) if is_half else x for x, is_half in zip(run(*args), narrowed, strict=True)
        ]

    return jax.make_jaxpr(call)(*forward.in_avals)


def _narrowed_backward(
    backward: jex.ClosedJaxpr, first: int, narrowed: list[bool], kept: tuple[Any, ...]
) -> jex.ClosedJaxpr:
    run = as_function(backward)
    last = first + len(narrowed)

    def call(*args: jax.Array) -> list[jax.Array]:
        residuals = [
            x.astype(jnp.float32) if is_half else x
            for x, is_half in zip(args[first:last], narrowed, strict=True)
        ]
        return run(*args[:first], *residuals, *args[last:])

    avals = backward.in_avals
    return jax.make_jaxpr(call)(*avals[:first], *kept, *avals[last:])
