"""Cuts a loss into layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend import core as jex

from ratrain_jax.kernels import Machine
from ratrain_jax.lowering.cost import Cost
from ratrain_jax.lowering.graph import Graph


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a loss.

    Attributes:
        name: the path of the parameters that it begins with, or the name of its mark.
        owned: numbers of the parameters of which it is the first reader.
        reads: numbers of all parameters that it reads, ascending.
        operands: numbers of the operands that it reads, ascending.
        inputs: numbers of the variables that it reads, ascending.
        outputs: numbers of the variables that it makes, ascending.
        program: takes the parameters of `reads`, the operands, the inputs; returns the outputs.
        cost: of the program, for one microbatch.
        seconds: roofline seconds of forward and backward, for one microbatch.
        checkpointed: whether it holds code that was under `jax.checkpoint`.
    """

    name: str
    owned: tuple[int, ...]
    reads: tuple[int, ...]
    operands: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    program: jex.ClosedJaxpr
    cost: Cost
    seconds: float
    checkpointed: bool


@dataclasses.dataclass(frozen=True, slots=True)
class LossVariable:
    """A value that one layer makes and others read, or a result of the loss.

    Attributes:
        aval: its type for one microbatch.
        producer: the layer that makes it.
        readers: the later layers that read it, ascending.
        differentiable: whether gradients flow back through it.
        role: `boundary`, `loss` (the loss) or `aux` (an auxiliary result).
    """

    aval: Any
    producer: int
    readers: tuple[int, ...]
    differentiable: bool
    role: str


@dataclasses.dataclass(frozen=True, slots=True)
class LayeredLoss:
    """A loss in layers.

    Attributes:
        layers: in order; each reads variables of earlier ones only.
        variables: what they make for each other, and the results of the loss.
    """

    layers: tuple[Layer, ...]
    variables: tuple[LossVariable, ...]


def find_layers(
    loss: Graph,
    paths: Sequence[tuple[str, ...]],
    *,
    operands: int,
    stages: int,
    machine: Machine,
) -> LayeredLoss:
    """Cuts a loss into layers.

    Args:
        loss: its inputs are the parameters, then the operands.
        paths: the path of each parameter in the tree by which the loss is differentiated.
        operands: how many operands there are.
        stages: how many stages the layers will be balanced into.
        machine: what their costs are counted for.

    Returns:
        The layers and the variables between them.
    """
    raise NotImplementedError
