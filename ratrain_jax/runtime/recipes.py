"""Says what each op computes, as a function of local bundles in the order of the op's reads.

A recipe's function takes the bundles of `op.reads` (compute ops: the microbatch's number first) and returns the bundles of
`op.writes`. Ops that only rename (a sync in a group of one) or that span groups (sends, reductions) have recipes for
their parts, or none; `ratrain_jax.runtime.instructions` puts these together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ratrain_jax import compat
from ratrain_jax.lowering.code import StepCode
from ratrain_jax.lowering.collectives import gathered, sums_scattered
from ratrain_jax.lowering.graph import as_function, fingerprint
from ratrain_jax.lowering.program import (
    ArrayType,
    Backward,
    Forward,
    GradSync,
    Metrics,
    Program,
    Prologue,
    Recover,
    UpdateShard,
    ZeroGradient,
)
from ratrain_jax.lowering.shards import ShardProgram
from ratrain_jax.lowering.units import backward_function, forward_function, unit_key
from ratrain_jax.lowering.unsharded import AXIS, update_on_shards

Bundle = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """How to make an executable.

    Attributes:
        key: equal for recipes that make the same executable on the same group.
        function: what it computes.
        types: the local types of its arguments.
        donate: arguments whose buffers may be reused.
        collective: whether the ranks of a group talk to each other in it.
    """

    key: Any
    function: Callable[..., Any]
    types: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    collective: bool = False


INDEX_TYPE = jax.ShapeDtypeStruct((), jnp.int32)


class Recipes:
    """Makes the recipes of one program.

    Args:
        code: the step's code.
        program: the program.
    """

    def __init__(self, code: StepCode, program: Program) -> None:
        self.code = code
        self.program = program
        self._updates: dict[tuple[int, int], ShardProgram] = {}

    def bundle(self, value: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The local types of a value."""
        return tuple(local_type(array) for array in self.program.values[value].arrays)

    def types(self, reads: Sequence[int]) -> tuple[Any, ...]:
        """The local types of some values."""
        return tuple(self.bundle(v) for v in reads)

    def _donated(self, op: Any, lead: int) -> tuple[int, ...]:
        return tuple(lead + op.reads.index(v) for v in op.donates)

    def forward(self, op: Forward | Recover) -> Recipe:
        """A block's forward; Recover runs the very same."""
        unit = self.code.forward_unit(op.layers)
        run = forward_function(self.code, unit)
        counts = (len(unit.views), len(unit.operands), len(unit.inputs))

        def function(index: Any, *bundles: Bundle) -> tuple[Bundle, ...]:
            views, operands, inputs = _split(bundles, counts)
            outputs, kept = run(index, views, _singles(operands), _singles(inputs))
            return (*((o,) for o in outputs), *kept)

        types = (INDEX_TYPE, *self.types(op.reads))
        return Recipe(("forward", unit_key(self.code, unit), shapes(types)), function, types)

    def tie(self, waits: Sequence[int]) -> Recipe:
        """Gives the microbatch's number back once other values exist: (number, zero, values) -> number.

        The zero is an argument, so that the compiler cannot see that nothing is added.
        """

        def function(index: Any, zero: Any, *bundles: Bundle) -> Any:
            for array in filter(lambda array: array.size, flat(bundles)):
                index = index + (array.ravel()[0] > 0).astype(jnp.int32) * zero
            return index

        types = (INDEX_TYPE, INDEX_TYPE, *self.types(waits))
        return Recipe(("tie", shapes(types)), function, types)

    def backward(self, op: Backward) -> Recipe:
        """A unit's backward."""
        unit = self.code.backward_unit(op.layers)
        layers = op.layers[1] - op.layers[0]
        added = len(op.donates)
        counts = (
            len(unit.views),
            len(unit.operands),
            len(unit.inputs),
            layers,
            len(unit.cotangents_in),
            added,
        )
        given = [self.program.values[v].layer for v in op.donates]
        fresh = tuple(owner not in given for owner in unit.accumulators)
        run = backward_function(self.code, unit, fresh)

        def function(index: Any, *bundles: Bundle) -> tuple[Bundle, ...]:
            views, operands, inputs, residuals, cotangents, sums = _split(bundles, counts)
            outgoing, totals = run(
                index,
                views,
                _singles(operands),
                _singles(inputs),
                residuals,
                _singles(cotangents),
                sums,
            )
            return (*((o,) for o in outgoing), *totals)

        types = (INDEX_TYPE, *self.types(op.reads))
        key = ("backward", unit_key(self.code, unit), fresh, shapes(types))
        return Recipe(key, function, types, self._donated(op, 1))

    def zero_gradient(self, op: ZeroGradient) -> Recipe:
        """A layer's zero gradients."""
        arrays = self.bundle(op.writes[0])

        def function(index: Any) -> tuple[Bundle, ...]:
            del index
            return (tuple(jnp.zeros(a.shape, a.dtype) for a in arrays),)

        return Recipe(("zero", shapes(arrays)), function, (INDEX_TYPE,))

    def prologue(self, op: Prologue) -> Recipe:
        """The operands that the prologue computes, each rank its own rows."""
        code = self.code
        run = as_function(code.prologue)

        def function(index: Any, *bundles: Bundle) -> tuple[Bundle, ...]:
            del index  # pmap wants an argument, but a prologue may read nothing
            made = run(*(array for bundle in bundles for array in bundle))
            return tuple(
                (_own_rows(code, o, array),)
                for o, array in zip(code.prologue_operands, made, strict=True)
            )

        return Recipe("prologue", function, (INDEX_TYPE, *self.types(op.reads)))

    def metrics(self, op: Metrics) -> Recipe:
        """What the step returns beside the state."""
        code = self.code
        run = as_function(code.update.metrics)
        scalars = len(code.update.reductions)
        state = 1 if code.update.replicated else 0

        def function(index: Any, *bundles: Bundle) -> tuple[Bundle, ...]:
            del index  # pmap wants an argument, but metrics may be constants
            ordered = (
                *bundles[scalars : scalars + state],
                *bundles[:scalars],
                *bundles[scalars + state :],
            )
            return (tuple(run(*flat(ordered))),)

        return Recipe("metrics", function, (INDEX_TYPE, *self.types(op.reads)))

    def grad_sync(self, op: GradSync) -> Recipe | None:
        """The sync's code; None where it only renames."""
        code, home = self.code, self.program.values[op.reads[0]].stage
        bundle = code.gradients[home, op.layer]
        axes = tuple(code.param_axes[p] for p in bundle)
        types = self.types(op.reads)
        if op.microbatch is not None:

            def accumulate(whole: Bundle, before: Bundle) -> tuple[Bundle, ...]:
                sums = self._scatter(whole, axes)
                return (tuple(b + part for b, part in zip(before, sums, strict=True)),)

            key = ("accumulate", axes, shapes(types))
            donate = (1,) if code.data_parallel > 1 else self._donated(op, 0)[-1:]
            return Recipe(key, accumulate, types, donate, collective=True)
        if code.data_parallel == 1 and len(op.reads) == 1:
            return None
        places = tuple(
            tuple(bundle.index(p) for p in code.gradients[stage, op.layer])
            for stage in code.borrowers(op.layer)
        )
        scatter = code.zero == 1

        def sync(own: Bundle, *shares: Bundle) -> tuple[Bundle, ...]:
            total = list(own)
            for share, where in zip(shares, places, strict=True):
                for place, array in zip(where, share, strict=True):
                    total[place] = total[place] + array
            return (self._scatter(total, axes) if scatter else tuple(total),)

        donate = (0,) if not scatter or code.data_parallel == 1 else ()
        key = ("sync", scatter, places, axes, shapes(types))
        return Recipe(key, sync, types, donate, collective=scatter)

    def _scatter(self, arrays: Sequence[Any], axes: Sequence[int | None]) -> Bundle:
        if self.code.data_parallel == 1:
            return tuple(arrays)
        return sums_scattered(arrays, axes, AXIS)

    def gather(self, layer: int, stage: int) -> tuple[Recipe | None, tuple[bool, ...]]:
        """The code of a view, and which of its arrays are seen in place.

        The code takes and returns the arrays that are not seen in place.
        """
        code = self.code
        params = code.bundles[stage, layer]
        axes = [code.param_axes[p] for p in params]
        home = stage == code.stage_of[layer]
        dtypes = [code.view_dtypes[p] for p in params]
        in_place = tuple(
            home and axis is None and dtype == code.master[p].dtype
            for p, axis, dtype in zip(params, axes, dtypes, strict=True)
        )
        moved = [j for j, seen in enumerate(in_place) if not seen]
        if not moved:
            return None, in_place
        types = tuple(
            jax.ShapeDtypeStruct(
                _cut(code.master[params[j]].shape, axes[j], code.data_parallel),
                code.master[params[j]].dtype,
            )
            for j in moved
        )

        talks = any(axes[j] is not None for j in moved)

        def function(shards: Bundle) -> Bundle:
            cast = [s.astype(dtypes[j]) for s, j in zip(shards, moved, strict=True)]
            if not talks:
                return tuple(cast)
            return gathered(cast, [axes[j] for j in moved], AXIS)

        key = ("gather", tuple(axes[j] for j in moved), tuple(map(str, dtypes)), shapes(types))
        return Recipe(key, function, (types,), collective=talks), in_place

    def update(self, op: UpdateShard) -> Recipe:
        """One phase of a layer's update, or a stage's replicated update."""
        if op.layer is None:
            run = as_function(self.code.update.replicated_program)
            types = self.types(op.reads)
            return Recipe("replicated", lambda *b: (tuple(run(*flat(b))),), types)
        return self._layer_update(op, op.layer)

    def _layer_update(self, op: UpdateShard, layer: int) -> Recipe:
        shards = self.shard_program(layer, op.phase)
        types = self.types(op.reads)

        def function(*bundles: Bundle) -> tuple[Bundle, ...]:
            return self.written(layer, op.phase, shards.run(*flat(bundles)))

        key = ("update", *self.update_key(layer, op.phase), shapes(types))
        donate = tuple(op.reads.index(v) for v in op.donates if v != op.reads[0])
        return Recipe(key, function, types, donate, self.talks(function, types))

    def written(self, layer: int, phase: int, results: Sequence[Any]) -> tuple[Bundle, ...]:
        """What an update's program gives, as the bundles that its op writes."""
        update = self.code.update.layers[layer]
        final = phase == update.phase
        made = (len(update.parameters), len(update.optimizer), len(update.outputs))
        state = sum(made) if final else 0
        out = [tuple(results[state:])] if update.partials[phase] else []
        if final:
            parameters, optimizer, extra = _split(results[:state], made)
            out += [parameters, optimizer]
            out += [extra] if update.outputs else []
        return tuple(out)

    def update_key(self, layer: int, phase: int) -> tuple[Any, ...]:
        """Equal for update programs that compute the same and write it in the same bundles."""
        update = self.code.update.layers[layer]
        made = (len(update.parameters), len(update.optimizer), len(update.outputs))
        final, partials = phase == update.phase, len(update.partials[phase])
        return fingerprint(update.phases[phase]), final, made, partials

    def talks(self, function: Callable[..., Any], types: tuple[Any, ...]) -> bool:
        """Whether a function of a group's slices uses a collective."""
        if self.code.data_parallel == 1:
            return False
        traced = jax.make_jaxpr(function, axis_env=[(AXIS, self.code.data_parallel)])(*types)
        return any(_names_axis(eqn) for eqn in traced.jaxpr.eqns)

    def shard_program(self, layer: int, phase: int) -> ShardProgram:
        """A layer's update program over shards."""
        if (layer, phase) not in self._updates:
            self._updates[layer, phase] = update_on_shards(self.code, layer, phase)
        return self._updates[layer, phase]


def _names_axis(eqn: Any) -> bool:
    """Whether an equation, or one inside it, talks over a mapped axis."""
    names = (eqn.params.get("axes"), eqn.params.get("axis_name"))
    if any(AXIS in name for name in names if isinstance(name, (tuple, str))):
        return True
    return any(_names_axis(inner) for _, sub in compat.sub_jaxprs(eqn) for inner in sub.jaxpr.eqns)


def local_type(array: ArrayType) -> jax.ShapeDtypeStruct:
    """The JAX type of an array type."""
    return jax.ShapeDtypeStruct(array.shape, compat.dtype_named(array.dtype))


def _split(items: Sequence[Any], counts: Sequence[int]) -> list[tuple[Any, ...]]:
    parts, start = [], 0
    for count in counts:
        parts.append(tuple(items[start : start + count]))
        start += count
    return parts


def _singles(bundles: Sequence[Bundle]) -> Bundle:
    return tuple(bundle[0] for bundle in bundles)


def flat(bundles: Sequence[Bundle]) -> list[Any]:
    """The arrays of some bundles."""
    return [array for bundle in bundles for array in bundle]


def shapes(types: Any) -> tuple[Any, ...]:
    """The types of some bundles, and how they are bundled: two of one array are not one of two."""
    leaves, tree = jax.tree.flatten(types)
    return (tree, *((t.shape, str(t.dtype)) for t in leaves))


def _cut(shape: Sequence[int], axis: int | None, devices: int) -> tuple[int, ...]:
    return tuple(size // devices if i == axis else size for i, size in enumerate(shape))


def _own_rows(code: StepCode, operand: int, array: Any) -> Any:
    """A rank's rows of a whole operand, by microbatch."""
    if not code.regions.operands[operand].split:
        return array
    rows = array.shape[0] // (code.data_parallel * code.microbatches)
    cut = array.reshape(code.data_parallel, code.microbatches, rows, *array.shape[1:])
    if code.data_parallel == 1:
        return cut[0]
    rank = jax.lax.axis_index(AXIS)
    return jax.lax.dynamic_index_in_dim(cut, rank, 0, keepdims=False)
