"""Numbers the values of a program while it is built."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ratrain_jax.lowering.code import StepCode
from ratrain_jax.lowering.program import ArrayType, Kind, Value
from ratrain_jax.lowering.units import gradient_dtype


def array_type(aval: Any) -> ArrayType:
    """The type of an abstract value."""
    return ArrayType(tuple(aval.shape), str(aval.dtype))


def _local(shape: Sequence[int], axis: int | None, devices: int) -> tuple[int, ...]:
    return tuple(size // devices if i == axis else size for i, size in enumerate(shape))


class Values:
    """Makes numbered values; knows the types of each kind.

    Args:
        code: the step's code.
    """

    def __init__(self, code: StepCode) -> None:
        self.code = code
        self.made: list[Value] = []
        self._residuals = [self._residual_types(n) for n in range(len(code.codes))]
        self._variables = [array_type(v.aval) for v in code.layered.variables]
        self._whole_gradients = {key: self._gradient_types(key) for key in code.gradients}

    def new(
        self,
        kind: Kind,
        name: str,
        arrays: Iterable[ArrayType],
        stage: int,
        layer: int | None = None,
        microbatch: int | None = None,
        aliased: int = 0,
    ) -> int:
        """Numbers a new value."""
        number = len(self.made)
        value = Value(number, kind, name, tuple(arrays), stage, layer, microbatch, aliased)
        self.made.append(value)
        return number

    def parameters(self, layer: int) -> int:
        """A layer's parameter shards."""
        leaves = self.code.update.layers[layer].parameters
        return self._state(Kind.PARAMETERS, layer, leaves)

    def optimizer(self, layer: int) -> int:
        """A layer's other state shards."""
        leaves = self.code.update.layers[layer].optimizer
        return self._state(Kind.OPTIMIZER, layer, leaves)

    def _state(self, kind: Kind, layer: int, leaves: Sequence[int]) -> int:
        arrays = [self._shard(leaf) for leaf in leaves]
        return self.new(kind, self._name(layer), arrays, self.code.stage_of[layer], layer)

    def _shard(self, leaf: int) -> ArrayType:
        aval = self.code.regions.step.invars[leaf].aval
        axis = self.code.shard_axes[leaf]
        return ArrayType(_local(aval.shape, axis, self.code.data_parallel), str(aval.dtype))

    def replicated(self, stage: int) -> int:
        """A stage's copy of the state of no layer."""
        leaves = self.code.update.replicated
        arrays = [array_type(self.code.regions.step.invars[leaf].aval) for leaf in leaves]
        return self.new(Kind.REPLICATED, "replicated", arrays, stage)

    def view(self, layer: int, stage: int) -> int:
        """A layer's view on a stage; parameters that are neither sharded nor cast are seen in place."""
        code = self.code
        arrays, aliased = [], 0
        for p in code.bundles[stage, layer]:
            array = ArrayType(tuple(code.master[p].shape), str(code.view_dtypes[p]))
            whole = code.data_parallel == 1 or code.param_axes[p] is None
            if whole and stage == code.stage_of[layer] and array.dtype == str(code.master[p].dtype):
                aliased += array.bytes
            arrays.append(array)
        return self.new(Kind.VIEW, self._name(layer), arrays, stage, layer, aliased=aliased)

    def accumulator(self, layer: int, stage: int, microbatch: int | None = None) -> int:
        """A layer's whole gradients on a stage: summed, or with ZeRO-2 of one microbatch."""
        arrays = self._whole_gradients[stage, layer]
        return self.new(Kind.ACCUMULATOR, self._name(layer), arrays, stage, layer, microbatch)

    def _gradient_types(self, bundle: tuple[int, int]) -> tuple[ArrayType, ...]:
        master = [self.code.master[p] for p in self.code.gradients[bundle]]
        return tuple(ArrayType(tuple(p.shape), str(gradient_dtype(p.dtype))) for p in master)

    def gradient(self, layer: int, stage: int) -> int:
        """A layer's gradient shards on a stage."""
        code = self.code
        arrays = []
        for p in code.gradients[stage, layer]:
            axis = code.param_axes[p]
            shape = _local(code.master[p].shape, axis, code.data_parallel)
            arrays.append(ArrayType(shape, str(gradient_dtype(code.master[p].dtype))))
        return self.new(Kind.GRADIENT, self._name(layer), arrays, stage, layer)

    def copy(self, value: int, stage: int) -> int:
        """The same value on another stage."""
        v = self.made[value]
        return self.new(v.kind, v.name, v.arrays, stage, v.layer, v.microbatch)

    def variable(self, number: int, stage: int, microbatch: int) -> int:
        """A boundary or loss value on a stage."""
        role = self.code.layered.variables[number].role
        kind = Kind.BOUNDARY if role == "boundary" else Kind.LOSS
        return self.new(kind, f"x{number}", [self._variables[number]], stage, microbatch=microbatch)

    def cotangent(self, number: int, stage: int, microbatch: int) -> int:
        """The gradient of a boundary value on a stage."""
        return self.new(
            Kind.COTANGENT, f"x{number}", [self._variables[number]], stage, microbatch=microbatch
        )

    def residuals(self, layer: int, microbatch: int) -> int:
        """A layer's residuals for one microbatch."""
        return self.new(
            Kind.RESIDUALS,
            self._name(layer),
            self._residuals[layer],
            self.code.stage_of[layer],
            layer,
            microbatch,
        )

    def _residual_types(self, layer: int) -> tuple[ArrayType, ...]:
        code = self.code
        inner = [code.layered.variables[v].aval for v in code.inner_inputs(layer)]
        return tuple(array_type(aval) for aval in (*inner, *code.codes[layer].residuals))

    def _name(self, layer: int) -> str:
        return self.code.layered.layers[layer].name

    def partials(self, layer: int, phase: int) -> int:
        """What a layer gives to the reduction after a phase."""
        arrays = [array_type(p.aval) for p in self.code.update.layers[layer].partials[phase]]
        return self.new(
            Kind.PARTIALS,
            f"{self._name(layer)}@{phase + 1}",
            arrays,
            self.code.stage_of[layer],
            layer,
        )

    def scalars(self, phase: int, stage: int) -> int:
        """What a reduction gives to a stage."""
        arrays = [array_type(aval) for aval in self.code.update.reductions[phase - 1].scalars]
        return self.new(Kind.SCALARS, f"scalars{phase}", arrays, stage)

    def layer_outputs(self, layer: int) -> int:
        """Arrays of one layer among the step's results."""
        code = self.code
        outvars = code.regions.step.outvars
        arrays = []
        for output in code.update.layers[layer].outputs:
            aval = outvars[output].aval
            axis = code.axis(aval.shape)
            arrays.append(ArrayType(_local(aval.shape, axis, code.data_parallel), str(aval.dtype)))
        return self.new(Kind.METRICS, self._name(layer), arrays, code.stage_of[layer], layer)

    def argument(self, leaf: int, stage: int) -> int:
        """A leaf of the batch, whole, as the prologue, a reduction or the metrics read it."""
        aval = self.code.regions.step.invars[leaf].aval
        return self.new(Kind.OPERAND, f"argument{leaf}", [array_type(aval)], stage)

    def metrics(self, stage: int) -> int:
        """The step's other results."""
        arrays = [array_type(aval) for aval in self.code.update.metrics.out_avals]
        return self.new(Kind.METRICS, "metrics", arrays, stage)
