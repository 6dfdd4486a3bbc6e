"""What the programs of one layer ask of a device: all of it, or one of several tensor-parallel ranks."""

from __future__ import annotations

import dataclasses

from ratrain_jax.kernels import Machine
from ratrain_jax.lowering.autodiff import LayerCode
from ratrain_jax.lowering.cost import aval_bytes
from ratrain_jax.lowering.layers import Layer
from ratrain_jax.lowering.scratch import scratch_bytes
from ratrain_jax.lowering.tensor_parallel import divide_layer, layer_on_rank
from ratrain_jax.planning.code_cost import CodeCost, code_cost, rank_cost


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWork:
    """What the programs of a layer ask of a device.

    Attributes:
        forward: what forward asks.
        backward: what backward asks.
        scratch: the most bytes that either holds for a while.
        residuals: bytes of what forward makes for backward.
        shares: which share of each parameter that the layer reads the device holds.
    """

    forward: CodeCost
    backward: CodeCost
    scratch: int
    residuals: int
    shares: tuple[float, ...]


def whole_work(layer: Layer, code: LayerCode, machine: Machine) -> LayerWork:
    """That of a device that does all of a layer.

    Args:
        layer: the layer.
        code: its two programs.
        machine: what they are to run on.
    """
    forward, backward = code.forward, code.backward
    return LayerWork(
        code_cost(forward, machine),
        code_cost(backward, machine),
        max(scratch_bytes(forward), scratch_bytes(backward)),
        sum(map(aval_bytes, code.residuals)),
        (1.0,) * len(layer.reads),
    )


def rank_layer_work(layer: Layer, code: LayerCode, machine: Machine, tensor: int) -> LayerWork:
    """That of one of several tensor-parallel ranks, with what they exchange.

    Args:
        layer: the layer.
        code: its two programs.
        machine: what they are to run on.
        tensor: how many ranks there are.
    """
    rank = layer_on_rank(layer, code, machine, tensor)
    divisions = divide_layer(layer, code)
    costs = [
        rank_cost(division, machine, tensor, exchanged)
        for division, exchanged in zip(divisions, rank.communication(machine), strict=True)
    ]
    scratch = [
        scratch_bytes(d.closed, lambda var, d=d: aval_bytes(var.aval) * d.held(var, tensor))
        for d in divisions
    ]
    residuals = round(rank.residual_bytes)
    return LayerWork(costs[0], costs[1], max(scratch), residuals, rank.parameters)
