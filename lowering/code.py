"""All that a program's ops refer to: layers, their code, where they run, and what each unit reads and writes.

A `StepCode` depends on the step, the split, data parallelism, microbatches and the ZeRO stage alone. Every schedule, switch
and recovery of a step runs the same `StepCode`, which is why they agree to the last bit.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

from jax.extend import core as jex

from ratrain_jax.lowering.autodiff import LayerCode
from ratrain_jax.lowering.graph import fingerprint
from ratrain_jax.lowering.layers import LayeredLoss
from ratrain_jax.lowering.program import ArrayType
from ratrain_jax.lowering.regions import Regions
from ratrain_jax.lowering.routing import Routing
from ratrain_jax.lowering.shards import shard_axis
from ratrain_jax.lowering.speculation import Speculation, speculate
from ratrain_jax.lowering.stacks import StackMap
from ratrain_jax.lowering.update import UpdatePlan

Range = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """What a run of layers reads and writes (see the calling convention in `ratrain_jax.lowering.program`).

    Attributes:
        stage: where it runs.
        layers: the run, half-open.
        views: layers whose parameters it reads.
        operands: operands it reads.
        inputs: variables from outside its block.
        outputs: variables read outside its block, and the loss's results; for a forward unit.
        cotangents_in: variables whose cotangent comes from later units.
        cotangents_out: differentiable variables from outside the unit.
        accumulators: layers whose parameters it has gradients for.
    """

    stage: int
    layers: Range
    views: tuple[int, ...]
    operands: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...] = ()
    cotangents_in: tuple[int, ...] = ()
    cotangents_out: tuple[int, ...] = ()
    accumulators: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, repr=False)
class StepCode:
    """The code of a step.

    Attributes:
        regions: the step in three parts.
        layered: its loss in layers.
        codes: the programs of each layer.
        stage_of: stage of each layer.
        block_of: block of each layer, within its stage.
        update: its update, by layer.
        names: the path of each flat input of the step.
        paths: name of each parameter.
        master: types of the parameters in the user's state.
        view_dtypes: compute dtype of each parameter.
        fixed: leaves of held parameters that never change, whole on every device of their group.
        data_parallel: D.
        microbatches: m.
        zero: 1 or 2.
        prologue: what the loss reads and the prologue computes: [replicated, batch leaves it reads] -> operands.
        prologue_operands: the operands that it makes.
        prologue_arguments: the step's flat inputs, leaves of the batch, that it reads.
        routing: what a backend's kernels take; None where XLA takes all.
        stacks: what became of the leaves of the user's step; None where each is still one.
    """

    regions: Regions
    layered: LayeredLoss
    codes: tuple[LayerCode, ...]
    stage_of: tuple[int, ...]
    block_of: tuple[int, ...]
    update: UpdatePlan
    names: tuple[str, ...]
    paths: tuple[str, ...]
    master: tuple[Any, ...]
    view_dtypes: tuple[Any, ...]
    fixed: frozenset[int]
    data_parallel: int
    microbatches: int
    zero: int
    prologue: jex.ClosedJaxpr
    prologue_operands: tuple[int, ...]
    prologue_arguments: tuple[int, ...]
    routing: Routing | None = None
    stacks: StackMap | None = None

    def __repr__(self) -> str:
        return f"<StepCode {self.fingerprint}: {len(self.codes)} layers>"

    def axis(self, shape: Sequence[int]) -> int | None:
        """The axis along which an array of a layer's state is cut over the group."""
        return shard_axis(shape, self.data_parallel)

    @functools.cached_property
    def shard_axes(self) -> dict[int, int | None]:
        """The axis along which each state leaf is cut: none for those that belong to no layer."""
        invars = self.regions.step.invars
        axes: dict[int, int | None] = dict.fromkeys(self.update.replicated)
        for layer in self.update.layers:
            for leaf in (*layer.parameters, *layer.optimizer):
                axes[leaf] = None if leaf in self.fixed else self.axis(invars[leaf].aval.shape)
        return axes

    @functools.cached_property
    def param_axes(self) -> tuple[int | None, ...]:
        """The axis along which each parameter is cut."""
        axes = {
            p: self.shard_axes[leaf]
            for layer in self.update.layers
            for p, leaf in zip(layer.params, layer.parameters, strict=True)
        }
        return tuple(axes[p] for p in range(len(axes)))

    @functools.cached_property
    def leaf_stages(self) -> dict[int, int]:
        """The stage that each leaf of the state lives on; those of no layer live on stage 0."""
        stages = dict.fromkeys(self.update.replicated, 0)
        for n, layer in enumerate(self.update.layers):
            stages.update(dict.fromkeys((*layer.parameters, *layer.optimizer), self.stage_of[n]))
        return stages

    def operand_type(self, number: int) -> ArrayType:
        """An operand's type on one device: all its microbatches, if it is split."""
        operand = self.regions.operands[number]
        shape = tuple(operand.aval.shape)
        if operand.split:
            rows = shape[0] // (self.microbatches * self.data_parallel)
            shape = (self.microbatches, rows, *shape[1:])
        return ArrayType(shape, str(operand.aval.dtype))

    @functools.cached_property
    def metrics_stage(self) -> int:
        """The stage that makes the loss, and so the metrics."""
        producers = [v.producer for v in self.layered.variables if v.role == "loss"]
        return self.stage_of[producers[0]]

    @functools.cached_property
    def loss_variables(self) -> tuple[int, ...]:
        """The loss and the auxiliary results, in the order in which the loss returns them."""
        variables = enumerate(self.layered.variables)
        return tuple(n for n, v in variables if v.role != "boundary")

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of all code that a program's ops name."""
        digest = hashlib.sha256()
        for code in self.codes:
            digest.update(code.fingerprint.encode())
        for update in self.update.layers:
            digest.update(fingerprint(*update.phases).encode())
        rest = [r.program for r in self.update.reductions]
        rest += [self.update.replicated_program, self.update.metrics, self.prologue]
        digest.update(fingerprint(*rest).encode())
        where = (self.stage_of, self.block_of, self.data_parallel, self.microbatches, self.zero)
        digest.update(repr((where, self.regions.reduction, self.regions.joins)).encode())
        if self.routing is not None:
            digest.update(repr(self.routing.arithmetic).encode())
        return digest.hexdigest()[:16]

    @property
    def stages(self) -> int:
        """P, the pipeline stages."""
        return max(self.stage_of) + 1

    @functools.cached_property
    def owner(self) -> tuple[int, ...]:
        """The layer that owns each parameter."""
        owners = {p: n for n, layer in enumerate(self.layered.layers) for p in layer.owned}
        return tuple(owners[p] for p in range(len(self.paths)))

    @functools.cached_property
    def blocks(self) -> tuple[Range, ...]:
        """Every block, in order."""
        keys = list(zip(self.stage_of, self.block_of, strict=True))
        starts = [i for i, key in enumerate(keys) if i == 0 or key != keys[i - 1]]
        return tuple(zip(starts, [*starts[1:], len(keys)], strict=True))

    def block(self, layer: int) -> Range:
        """The block that holds a layer."""
        return next(b for b in self.blocks if b[0] <= layer < b[1])

    def layers_of(self, stage: int) -> list[int]:
        """The layers of a stage."""
        return [i for i, s in enumerate(self.stage_of) if s == stage]

    def stage_blocks(self, stage: int) -> list[Range]:
        """The blocks of a stage, in order."""
        return [b for b in self.blocks if self.stage_of[b[0]] == stage]

    def backward_ranges(self, stage: int, microbatch: int) -> list[Range]:
        """The backward units of a stage, in forward order: layers where gradients are synchronised, else blocks."""
        last = microbatch == self.microbatches - 1
        if self.data_parallel > 1 and (last or self.zero == 2):
            return [(n, n + 1) for n in self.layers_of(stage)]
        return self.stage_blocks(stage)

    @functools.cached_property
    def bundles(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """The parameters of (stage, owning layer): all that the layer owns at home, those borrowed elsewhere."""
        found: dict[tuple[int, int], set[int]] = {}
        for n, layer in enumerate(self.layered.layers):
            if layer.owned:
                found.setdefault((self.stage_of[n], n), set()).update(layer.owned)
            for p in layer.reads:
                found.setdefault((self.stage_of[n], self.owner[p]), set()).add(p)
        return {key: tuple(sorted(params)) for key, params in sorted(found.items())}

    @functools.cached_property
    def gradients(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """Those of `bundles` that the loss is differentiated by: the parameters that have gradients there."""
        trained = self.regions.trained
        return {
            key: tuple(p for p in params if p < trained) for key, params in self.bundles.items()
        }

    def borrowers(self, layer: int) -> list[int]:
        """Stages, other than its own, that read parameters of a layer."""
        return [s for (s, owner) in self.bundles if owner == layer and s != self.stage_of[layer]]

    @functools.cached_property
    def _units(self) -> dict[tuple[str, Range], Unit]:
        """The units asked for before: a program asks for the same ones for every microbatch."""
        return {}

    def forward_unit(self, layers: Range) -> Unit:
        """What a block reads and writes going forward."""
        key = ("forward", layers)
        if key not in self._units:
            self._units[key] = self._forward_unit(layers)
        return self._units[key]

    def backward_unit(self, layers: Range) -> Unit:
        """What a run of layers within one block reads and writes going backward."""
        key = ("backward", layers)
        if key not in self._units:
            self._units[key] = self._backward_unit(layers)
        return self._units[key]

    def _forward_unit(self, layers: Range) -> Unit:
        variables = self.layered.variables
        inside = range(*layers)
        members = [self.layered.layers[n] for n in inside]
        made = {v for layer in members for v in layer.outputs}
        outputs = sorted(
            v
            for v in made
            if variables[v].role != "boundary" or any(r not in inside for r in variables[v].readers)
        )
        return Unit(
            stage=self.stage_of[layers[0]],
            layers=layers,
            views=_sorted(self.owner[p] for layer in members for p in layer.reads),
            operands=_sorted(o for layer in members for o in layer.operands),
            inputs=_sorted(v for layer in members for v in layer.inputs if v not in made),
            outputs=tuple(outputs),
        )

    def _backward_unit(self, layers: Range) -> Unit:
        variables = self.layered.variables
        inside = range(*layers)
        block = range(*self.block(layers[0]))
        members = [self.layered.layers[n] for n in inside]
        codes = [self.codes[n] for n in inside]
        touched = _sorted(v for layer in members for v in (*layer.inputs, *layer.outputs))
        moving = [v for v in touched if variables[v].differentiable]
        return Unit(
            stage=self.stage_of[layers[0]],
            layers=layers,
            views=_sorted(self.owner[p] for code in codes for p in code.backward_reads),
            operands=_sorted(o for code in codes for o in code.backward_operands),
            inputs=_sorted(
                v
                for code in codes
                for v in code.backward_inputs
                if variables[v].producer not in block
            ),
            cotangents_in=tuple(
                v for v in moving if any(r >= layers[1] for r in variables[v].readers)
            ),
            cotangents_out=tuple(
                v
                for v in moving
                if variables[v].producer < layers[0]
                and any(r in inside for r in variables[v].readers)
            ),
            accumulators=_sorted(self.owner[p] for layer in members for p in layer.reads),
        )

    @functools.cached_property
    def speculations(self) -> tuple[Speculation | None, ...]:
        """Of each layer that waits for reductions, what an early update would assume, or why it must wait all the same."""
        return tuple(
            Speculation(reason=f"stage {', '.join(map(str, self.borrowers(n)))} borrows from it")
            if found is not None and self.borrowers(n)
            else found
            for n, found in enumerate(speculate(self.update))
        )

    def inner_inputs(self, layer: int) -> tuple[int, ...]:
        """Variables made in a layer's own block that its backward needs: kept among its residuals."""
        block = range(*self.block(layer))
        variables = self.layered.variables
        return tuple(v for v in self.codes[layer].backward_inputs if variables[v].producer in block)


_KNOWN: weakref.WeakValueDictionary[str, StepCode] = weakref.WeakValueDictionary()


def remember(code: StepCode) -> None:
    """Lets `known_code` find a code for as long as something else holds it."""
    _KNOWN[code.fingerprint] = code


def known_code(fingerprint: str) -> StepCode | None:
    """The code of a fingerprint, if a step with it was lowered in this process and is still there."""
    return _KNOWN.get(fingerprint)


def _sorted(numbers: Any) -> tuple[int, ...]:
    return tuple(sorted(set(numbers)))
