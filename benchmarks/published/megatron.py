"""The time of a GPT training iteration of Megatron-LM on a machine, and its parts.

The iteration is

    pipeline + gradient all-reduce + all-reduce of the tied embedding + optimizer + framework

none of which overlap (no bucketing of gradients, as in the published runs).

**A pass** of a stage (forward of a microbatch, or recomputation with backward) is a queue of kernels that the host fills
and the GPU empties, from one pipeline transfer, at which Megatron-LM waits for the device, to the next:

    max(launches, GPU + exposed · launches)        launches = kernels × seconds of a launch

A launch is what the framework does for a kernel in Python and C++, not the driver's part alone. Small layers are bound
by it, large ones hide it; *exposed* is the share that they do not hide, 0 for a queue that never runs dry.

**Softmax.** One kernel if the heads of a rank times the sequences of a microbatch are a multiple of 4, else five
(Megatron-DeepSpeed, `megatron/model/fused_softmax.py`).

**Full** recomputation runs a layer's forward again before its backward, with its all-reduces; **selective** recomputation
the core of the attention (V. Korthikanti et al., 2022).

**Places.** Tensor-parallel ranks are neighbours, data-parallel ones lie tp devices apart, stages tp · dp.

**Transfers** between stages are of 1/t of the activation from each rank, gathered after (the scatter–gather of D. Narayanan
et al., SC 2021, section 4.1).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from gpt_kernels import Part, Shape, trace_core, trace_embedding, trace_head, trace_layer
from kernel_costs import (
    Kernels,
    accumulation_kernels,
    backward_kernels,
    forward_kernels,
    gpu_seconds,
    parameter_bytes,
)

from ratrain_jax.kernels import Machine
from ratrain_jax.kernels.collectives import all_gather_seconds, all_reduce_seconds, transfer_seconds
from ratrain_jax.simulation.engine import run
from ratrain_jax.simulation.pipelines import Pipeline, StageSeconds, pipeline_tasks

Repeated = Sequence[tuple[Kernels, float]]
"""Kernels, and how often each of them runs."""

GRADIENT_BYTES = 2
"""Of one parameter's gradient, which is float16 like the parameter."""

OPTIMIZER_BYTES = 52
"""A parameter, in an iteration: its gradient to float32 (6), check and unscale (8), norm (4), Adam on master, two moments
and gradient (28), and master to float16 (6)."""


@dataclasses.dataclass(frozen=True)
class Training:
    """What is trained, and how it is spread.

    Attributes:
        shape: of one microbatch.
        layers: how many.
        tensor: tensor-parallel ranks.
        data: data-parallel ranks.
        stages: pipeline stages.
        microbatches: of an iteration, on each data-parallel rank.
        chunks: runs of layers a stage (interleaved 1F1B); 1 is plain 1F1B.
        recompute: "full", "selective" or "none".
        sequence_parallel: whether norms and dropout are divided, too.
    """

    shape: Shape
    layers: int
    tensor: int
    data: int
    stages: int
    microbatches: int
    chunks: int = 1
    recompute: str = "full"
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if self.layers % (self.stages * self.chunks):
            raise ValueError(
                f"{self.layers} layers do not divide evenly into {self.stages} stages of {self.chunks}"
                " chunks, as Megatron-LM requires."
            )

    @property
    def parts(self) -> tuple[Part, Part, Part]:
        """Embedding, layer and head."""
        return (
            trace_embedding(self.shape),
            trace_layer(self.shape, fused=self.fused),
            trace_head(self.shape),
        )

    @property
    def fused(self) -> bool:
        """Whether the softmax is one kernel."""
        return self.shape.heads // self.tensor * self.shape.rows % 4 == 0


@dataclasses.dataclass(frozen=True)
class Framework:
    """What the framework costs on the host.

    Attributes:
        launch: seconds a kernel.
        exposed: share of the launches that the GPU's work does not hide.
    """

    launch: float
    exposed: float = 0.0


@dataclasses.dataclass(frozen=True)
class Iteration:
    """The parts of an iteration, in seconds."""

    pipeline: float
    gradients: float
    tied: float
    optimizer: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.pipeline + self.gradients + self.tied + self.optimizer


def iteration(training: Training, machine: Machine, framework: Framework) -> Iteration:
    """The time of one iteration."""
    pipeline = pipeline_of(training, stage_seconds(training, machine, framework))
    return Iteration(run(pipeline_tasks(pipeline)[0]).last, *after(training, machine))


def pipeline_of(training: Training, stages: tuple[StageSeconds, ...]) -> Pipeline:
    """The pipeline of an iteration."""
    schedule = "interleaved" if training.chunks > 1 else "1f1b"
    return Pipeline(schedule, stages, training.microbatches, chunks=training.chunks)


def stage_seconds(
    training: Training, machine: Machine, framework: Framework
) -> tuple[StageSeconds, ...]:
    """Seconds of each stage, or each chunk of one, in the order of the model."""
    count = training.stages * training.chunks
    send = transfer(training, machine)
    # All stages but the first and the last are alike.
    known = {
        ends: [
            _pass_seconds(found, training, machine, framework) for found in _passes(training, *ends)
        ]
        for ends in {(place == 0, place == count - 1) for place in range(count)}
    }
    return tuple(
        StageSeconds(*known[place == 0, place == count - 1], send=send) for place in range(count)
    )


def _pass_seconds(
    found: Repeated, training: Training, machine: Machine, framework: Framework
) -> float:
    launches = framework.launch * sum(times * kernels.count for kernels, times in found)
    busy = sum(times * gpu_seconds(one, machine, training.tensor) for one, times in found)
    return max(launches, busy + framework.exposed * launches)


@functools.cache
def _passes(training: Training, first: bool, last: bool) -> tuple[Repeated, Repeated]:
    """Kernels of one forward, and of recomputation with backward, of a stage."""
    layers = training.layers // (training.stages * training.chunks)
    how = (training.tensor, training.sequence_parallel)
    parts = [
        (part, times)
        for part, times in zip(training.parts, (int(first), layers, int(last)), strict=True)
        if times
    ]
    forward = [(forward_kernels(part, *how), times) for part, times in parts]
    backward = [(backward_kernels(part, *how), times) for part, times in parts]
    # The first microbatch's gradients need no addition.
    added = 1 - 1 / training.microbatches
    backward += [
        (accumulation_kernels(part, training.tensor), times * added) for part, times in parts
    ]
    again = training.parts[1] if training.recompute == "full" else None
    if training.recompute == "selective":
        again = trace_core(training.shape, fused=training.fused)
    if again is not None:
        backward.append((forward_kernels(again, *how), layers))
    return forward, backward


def transfer(training: Training, machine: Machine) -> float:
    """Seconds to hand a microbatch to the next stage."""
    if training.stages == 1:
        return 0.0
    shape, group = training.shape, training.tensor * training.data
    whole = GRADIENT_BYTES * shape.sequence * shape.rows * shape.hidden
    sent = transfer_seconds(machine, whole / training.tensor, distance=group, sharing=group)
    if training.sequence_parallel:  # the next stage wants it divided
        return sent
    return sent + all_gather_seconds(machine, whole, training.tensor)


def after(training: Training, machine: Machine) -> tuple[float, float, float]:
    """Seconds after the pipeline: gradients of the largest stage, those of the tied embedding, the optimizer."""
    embedding, layer, _ = training.parts
    tensor, group = training.tensor, training.tensor * training.data
    tied = parameter_bytes(embedding, tensor)
    held = training.layers // training.stages * parameter_bytes(layer, tensor) + tied
    parameters = held / GRADIENT_BYTES
    gradients = all_reduce_seconds(
        machine, parameters * GRADIENT_BYTES, training.data, stride=tensor
    )
    across = 0.0
    if training.stages > 1:
        across = all_reduce_seconds(machine, tied, 2, stride=group * (training.stages - 1))
    return gradients, across, OPTIMIZER_BYTES * parameters / machine.streaming_bandwidth
