"""The program: what is printed, verified, simulated and run.

Terms.
    A **value** is one or more arrays that are born, moved and freed together (a layer's parameter shards, one boundary
    array, the residuals of one layer for one microbatch). Every value has one home stage; a copy on another stage is
    another value. Values are numbered, assigned once, and die once: by `Free`, or by donation to the op that reads them last.

    An **op** names its stage, its layers and microbatch where they apply, the values that it reads, writes and donates.
    Two orders hold: each stage has one list of ops; within a stage each *lane* (compute, link) runs its ops in list order,
    and an op starts when the values it reads exist. An op between stages (a send, a borrow, a global reduction)
    is the same op in the list of each stage that takes part.

    A **unit** is the run of layers that one compute op covers, written as a half-open range of layer numbers. Forward and
    Recover cover blocks; Backward covers blocks, or single layers where gradients are synchronised layer by layer.

What each op reads and writes, in this order (the calling convention of its code).
    Prologue            its inputs -> operands on stage 0
    Forward, Recover    views of the layers whose parameters the unit reads (owned or borrowed, ascending), operands
                        (ascending), boundary inputs (ascending) -> boundary outputs that a later unit reads, loss and aux
                        values (ascending by variable), residuals of each layer of the unit. A recovered unit's Forward
                        has its residuals freed at once; a Recover has the outputs freed that no next Recover reads.
    Backward            views, operands and boundary inputs that its layers' backward needs; residuals of each layer;
                        cotangents from later units of its outputs *and of its inputs* (ascending by variable);
                        accumulators of the layers it adds to (owned or borrowed, ascending; donated)
                        -> cotangents of its differentiable inputs, accumulators. A variable read by several units has its
                        cotangent handed from the last reader to the first, each adding its own share, then to the producer.
                        With ZeRO-2: no accumulators are read; the microbatch's whole gradients are written.
    ZeroGradient        -> accumulator (ZeRO-1), gradient shard (ZeRO-2)
    SendActivation/Gradient  one value -> its copy on the target
    GradSync            ZeRO-1: accumulator, shares of borrowers in stage order (donated) -> gradient.
                        ZeRO-2: microbatch's gradient, gradient shard (donated) -> gradient shard; once more for a
                        tied layer, with no microbatch: gradient shard, shares -> gradient
    UpdateShard         gradient, parameters, optimizer, replicated, scalars of each phase up to its own
                        -> partials (if a later reduction needs them); in its last phase it donates gradient, parameters and
                        optimizer and writes the new parameters and optimizer.
                        For a stage's replicated state (no layer): replicated, scalars -> replicated
                        The last of a layer whose validation is deferred takes the scalars of fewer phases, donates nothing,
                        and what it writes is yet to be validated; so is the view that is gathered from it.
    Validate            gradient, parameters, optimizer, replicated, scalars of each phase up to its own; what the layer's
                        last UpdateShard wrote, and the view -> the same once more. It donates all but replicated and scalars.
                        What was made early stays where it is if what it assumed holds, else it is made anew
    GlobalReduce        partials by layer, then loss and aux values by microbatch -> scalars, one value a receiving stage
    PrefetchView, Borrow  parameters -> view
    Metrics             scalars, then replicated, operands, loss values -> metrics
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Iterator

import numpy as np
from jax import dtypes

from .ops import OP_TYPES as OP_TYPES
from .ops import Backward as Backward
from .ops import Borrow as Borrow
from .ops import Forward as Forward
from .ops import Free as Free
from .ops import GlobalReduce as GlobalReduce
from .ops import GradSync as GradSync
from .ops import Lane as Lane
from .ops import Metrics as Metrics
from .ops import Op as Op
from .ops import PrefetchView as PrefetchView
from .ops import Prologue as Prologue
from .ops import Recover as Recover
from .ops import Send as Send
from .ops import SendActivation as SendActivation
from .ops import SendGradient as SendGradient
from .ops import UpdateShard as UpdateShard
from .ops import Validate as Validate
from .ops import ZeroGradient as ZeroGradient


class Kind(enum.StrEnum):
    """What a value is, which decides its line in the memory report."""

    PARAMETERS = "parameters"  # shards of a layer's parameters, in the dtype of the user's state
    OPTIMIZER = "optimizer"  # shards of every other state leaf that belongs to one layer
    REPLICATED = (
        "replicated"  # state leaves that belong to no layer (counters, schedules), one copy a stage
    )
    VIEW = "view"  # whole parameters in compute dtype
    OPERAND = "operand"  # what the loss reads of the batch or closes over
    BOUNDARY = "boundary"  # a value that crosses from one unit to another
    RESIDUALS = "residuals"  # what Backward needs of Forward, one value a layer
    COTANGENT = "cotangent"  # the gradient of a boundary value, summed over its later readers
    ACCUMULATOR = "accumulator"  # whole gradients of a layer's parameters, summed over microbatches
    GRADIENT = "gradient"  # shards of the gradient
    PARTIALS = "partials"  # scalars of one layer that a global reduction reads
    SCALARS = "scalars"  # what a global reduction gives
    LOSS = "loss"  # the loss and auxiliary values of one microbatch
    METRICS = "metrics"  # what the step returns beside the state


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayType:
    """Shape and dtype of one array on one device.

    Attributes:
        shape: the shape on each device of the home group.
        dtype: the name of the dtype; extended dtypes (typed keys) by their own name.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Bytes of one copy."""
        return math.prod(self.shape) * itemsize(self.dtype)


@functools.cache
def itemsize(dtype: str) -> int:
    """Bytes of one element; a typed key counts as its raw words."""
    if dtype.startswith("key<"):
        return {"key<fry>": 8, "key<rbg>": 16, "key<urbg>": 16}.get(dtype, 16)
    return np.dtype(getattr(dtypes, dtype, dtype)).itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """One numbered value.

    Attributes:
        id: its number, which is also its place in `Program.values`.
        kind: what it is.
        name: which one: a layer's name, a boundary variable (`x3`), an operand's path.
        arrays: the arrays it holds, on each device of its group.
        stage: its home.
        layer: the layer it belongs to, if to one.
        microbatch: the microbatch it belongs to, if to one.
        aliased: bytes of it that are the very buffers of another value (a view of an unsharded parameter).
    """

    id: int
    kind: Kind
    name: str
    arrays: tuple[ArrayType, ...]
    stage: int
    layer: int | None = None
    microbatch: int | None = None
    aliased: int = 0

    @property
    def bytes(self) -> int:
        """Bytes that it adds on each device of its group."""
        return sum(array.bytes for array in self.arrays) - self.aliased

    @property
    def role(self) -> tuple[Kind, int, int | None, str]:
        """What it is from step to step: an output of one has the role of the next one's input."""
        return self.kind, self.stage, self.layer, self.name


@dataclasses.dataclass(frozen=True, slots=True)
class LayerInfo:
    """What a program knows of a layer.

    Attributes:
        name: a parameter path.
        stage: where it runs.
        block: number of its block within the stage.
        parameters: names of the parameters it owns.
        borrows: (owning layer, parameter names) of each layer whose parameters it reads.
        inputs: boundary variables that it reads from other layers.
        outputs: boundary variables that it makes.
        operands: numbers of the loss operands that it reads.
        backward_inputs: those of `inputs` whose value its backward needs.
        backward_operands: those of `operands` that its backward needs.
        update_phase: how many global reductions its update depends on; its last UpdateShard has this phase.
        flops: floating-point operations of its forward for one microbatch.
        seconds: roofline seconds of its forward and backward for one microbatch, on the machine that cut the layers.
        recovered: whether its residuals are made by Recover.
        fingerprint: of its forward and backward code; equal layers have equal fingerprints.
        early: how many its last UpdateShard waits for if validation is deferred, fewer than that; None if it is not.
    """

    name: str
    stage: int
    block: int
    parameters: tuple[str, ...]
    borrows: tuple[tuple[int, tuple[str, ...]], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    operands: tuple[int, ...]
    backward_inputs: tuple[int, ...]
    backward_operands: tuple[int, ...]
    update_phase: int
    flops: int
    seconds: float
    recovered: bool
    fingerprint: str
    early: int | None = None

    @property
    def deferred(self) -> bool:
        """Whether a Validate stands behind the reductions that its last UpdateShard does not wait for."""
        return self.early is not None

    @property
    def waits(self) -> int:
        """How many global reductions its last UpdateShard waits for."""
        return self.update_phase if self.early is None else self.early


@dataclasses.dataclass(frozen=True, slots=True)
class Variable:
    """One value of the loss that is made in one layer and read in others, or is a result of the loss.

    Attributes:
        array: its type for one microbatch.
        producer: the layer that makes it.
        readers: the layers that read it, ascending.
        differentiable: whether gradients flow back through it.
        role: `boundary`, `loss` (the loss) or `aux` (an auxiliary result).
        join: how a result's values of all ranks and microbatches become one (`mean`, `sum`, `rows` or `first`, see
            `ratrain_jax.lowering.results`); `none` for a boundary.
    """

    array: ArrayType
    producer: int
    readers: tuple[int, ...]
    differentiable: bool
    role: str = "boundary"
    join: str = "none"


@dataclasses.dataclass(frozen=True, slots=True)
class OperandInfo:
    """What the loss reads beside parameters.

    Attributes:
        name: its path in the step's arguments, or the computation that made it.
        array: its type on one device for the whole step: (m, rows, ...) if split, else its own shape.
        split: whether each microbatch reads its own rows.
        prologue: whether the prologue computes it (on stage 0), rather than the caller handing it in.
    """

    name: str
    array: ArrayType
    split: bool
    prologue: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Reduction:
    """One global reduction of the update.

    Attributes:
        phase: its number, from 1.
        layers: layers that give partial scalars.
        loss: whether it reads the loss and auxiliary values of all microbatches.
        stages: stages that receive its scalars.
    """

    phase: int
    layers: tuple[int, ...]
    loss: bool
    stages: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The choices that a program was made with.

    Attributes:
        stages: P, pipeline stages.
        data_parallel: D, devices of each stage.
        microbatches: m.
        schedule: `gpipe`, `1f1b` or `ratrain`; `forward` for a step that only evaluates.
        zero: 1 or 2.
        recovery: `none`, `backward`, `forward` or `auto`.
        layerwise_state: sync a layer as soon as its gradient is final.
        update_prefetch: queue update and gather behind the sync.
        window_layers: layers whose state tasks may be in flight at once on a stage.
        window_bytes: bytes of their gradient shards and new views; None for no bound.
        window_microbatches: microbatches whose residuals may be recovered ahead of their Backward.
        memory_limit: bytes a device, one a stage; empty for no limit.
        validation: `immediate`, or `deferred` to update layers before the reductions that may show it wrong.
    """

    stages: int
    data_parallel: int
    microbatches: int
    schedule: str = "ratrain"
    zero: int = 1
    recovery: str = "auto"
    layerwise_state: bool = True
    update_prefetch: bool = True
    window_layers: int = 2
    window_bytes: int | None = None
    window_microbatches: int = 1
    memory_limit: tuple[int, ...] = ()
    validation: str = "immediate"

    @property
    def trains(self) -> bool:
        """Whether there are gradients and a new state; a step that evaluates only goes forward."""
        return self.schedule != "forward"


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Program:
    """A whole step of all stages.

    Attributes:
        settings: the choices it was made with.
        layers: every layer, in order of first use.
        variables: what layers pass to each other.
        operands: what they read beside parameters.
        reductions: the update's global reductions, in order; the last may serve the metrics alone.
        values: every value; `values[i].id == i`.
        order: one list of ops a stage.
        inputs: values that exist when the step starts.
        outputs: values that are handed back; alive when the step ends.
        fingerprint: of the code that its ops name.
    """

    settings: Settings
    layers: tuple[LayerInfo, ...]
    variables: tuple[Variable, ...]
    operands: tuple[OperandInfo, ...]
    reductions: tuple[Reduction, ...]
    values: tuple[Value, ...]
    order: tuple[tuple[Op, ...], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    fingerprint: str = ""

    def ops(self) -> Iterator[Op]:
        """Every op once, stage by stage (an op between stages with its `stage`)."""
        for stage, ops in enumerate(self.order):
            yield from (op for op in ops if op.stages[0] == stage)

    def runs_nothing(self, op: Op) -> bool:
        """Whether an op only stands for an order: one of gradients, of a layer that holds parameters alone."""
        of_gradients = isinstance(op, (ZeroGradient, Backward, SendGradient, GradSync))
        return of_gradients and not any(self.values[value].arrays for value in op.writes)

    def _repr_html_(self) -> str:
        from .markup import program_html

        return program_html(self)

    def __repr__(self) -> str:
        s = self.settings
        ops = sum(1 for op in self.ops() if not isinstance(op, Free))
        return (
            f"<Program {_counted(len(self.layers), 'layer')} in {_counted(s.stages, 'stage')} × {s.data_parallel},"
            f" {_counted(s.microbatches, 'microbatch', 'es')}, {s.schedule}, zero={s.zero}: {ops} ops>"
        )


def _counted(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{plural if count != 1 else ''}"
