"""Gives each op of a program what it runs on its group, or between groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ratrain_jax.lowering.code import StepCode
from ratrain_jax.lowering.graph import as_function
from ratrain_jax.lowering.program import (
    Backward,
    Borrow,
    Forward,
    GlobalReduce,
    GradSync,
    Metrics,
    Op,
    PrefetchView,
    Program,
    Prologue,
    Recover,
    Send,
    SendActivation,
    SendGradient,
    UpdateShard,
    Validate,
    ZeroGradient,
)
from ratrain_jax.runtime.executables import Library, chained
from ratrain_jax.runtime.groups import Group
from ratrain_jax.runtime.instructions import Bundle, Execute
from ratrain_jax.runtime.joins import combine, join
from ratrain_jax.runtime.launches import launcher
from ratrain_jax.runtime.recipes import Recipe, Recipes
from ratrain_jax.runtime.validation import early_update, use_up, validate
from ratrain_jax.runtime.workers import Task


class Executors:
    """Makes what each op runs; executables are compiled in the background until `finish`.

    Args:
        code: the step's code.
        program: the program.
        groups: the group of each stage.
        library: where executables are made.
    """

    def __init__(
        self, code: StepCode, program: Program, groups: Sequence[Group], library: Library
    ) -> None:
        self.code = code
        self.program = program
        self.groups = groups
        self.recipes = Recipes(code, program)
        self.library = library
        self._used: dict[Op, list[Task]] = {}
        self._op: Op | None = None
        self._indices = [
            [group.put_whole(np.int32(i)) for i in range(code.microbatches)] for group in groups
        ]

    def __call__(self, op: Op) -> Execute:
        """What an op runs."""
        self._op = op
        return _MAKERS[type(op)](self, op)

    def temporaries(self) -> dict[Op, int]:
        """Scratch bytes of each op's executables on each device; waits for the compiler."""
        return {
            op: max(task.result().memory_analysis().temp_size_in_bytes for task in tasks)
            for op, tasks in self._used.items()
        }

    def executable(self, stage: int, recipe: Recipe) -> Callable[..., Any]:
        """A recipe's executable on a stage; waits for the compiler when first called."""
        task = self.library.get(stage, recipe)
        if self._op is not None:
            self._used.setdefault(self._op, []).append(task)
        cell: list[Any] = []

        def call(*args: Any) -> Any:
            if not cell:
                cell.append(task.result())
            return cell[0](*args)

        group = self.groups[stage]
        return call if group.size == 1 else launcher(group, call, chained(group, recipe))

    def _plain(self, op: Op, recipe: Recipe) -> Execute:
        call = self.executable(op.stage, recipe)
        return lambda bundles: call(*bundles)

    def _indexed(self, op: Any, recipe: Recipe) -> Execute:
        call = self.executable(op.stage, recipe)
        index = self._indices[op.stage][getattr(op, "microbatch", 0)]
        if not op.waits:
            return lambda bundles: call(index, *bundles)
        reads, zero = len(op.reads), self._indices[op.stage][0]
        tie = self.executable(op.stage, self.recipes.tie(op.waits))
        return lambda bundles: call(tie(index, zero, *bundles[reads:]), *bundles[:reads])

    def _forward(self, op: Forward) -> Execute:
        return self._indexed(op, self.recipes.forward(op))

    def _recover(self, op: Recover) -> Execute:
        return self._indexed(op, self.recipes.forward(op))

    def _backward(self, op: Backward) -> Execute:
        return self._indexed(op, self.recipes.backward(op))

    def _zero(self, op: ZeroGradient) -> Execute:
        call = self.executable(op.stage, self.recipes.zero_gradient(op))
        index = self._indices[op.stage][0]
        return lambda bundles: call(index)

    def _prologue(self, op: Prologue) -> Execute:
        return self._indexed(op, self.recipes.prologue(op))

    def _metrics(self, op: Metrics) -> Execute:
        return self._indexed(op, self.recipes.metrics(op))

    def _update(self, op: UpdateShard) -> Execute:
        if op.layer is not None:
            layer = self.program.layers[op.layer]
            if layer.deferred and op.phase == layer.update_phase:
                return self._update_early(op, op.layer)
        return self._plain(op, self.recipes.update(op))

    def _update_early(self, op: UpdateShard, layer: int) -> Execute:
        recipe, expected = early_update(self.recipes, op, layer)
        call = self.executable(op.stage, recipe)
        given = tuple(self.groups[op.stage].put_whole(value) for value in expected)
        return lambda bundles: call(*bundles, given)

    def _validate(self, op: Validate) -> Execute:
        recipe, in_place = validate(self.recipes, op)
        call = self.executable(op.stage, recipe)
        update = self.code.update.layers[op.layer]
        places = [update.params.index(p) for p in self.code.bundles[op.stage, op.layer]]
        parameters = 1 if update.partials[op.phase] else 0

        def execute(bundles: Sequence[Bundle]) -> Sequence[Bundle]:
            moved = tuple(a for a, seen in zip(bundles[-1], in_place, strict=True) if not seen)
            *kept, gathered = call(*bundles[:-1], moved)
            use_up(bundles[1:3])
            left = iter(gathered)
            seen_at = zip(places, in_place, strict=True)
            view = tuple(kept[parameters][at] if seen else next(left) for at, seen in seen_at)
            return (*kept, view)

        return execute

    def _send(self, op: Send) -> Execute:
        sharding = self.groups[op.target].sharding
        return lambda bundles: (jax.device_put(bundles[0], sharding),)

    def _grad_sync(self, op: GradSync) -> Execute:
        recipe = self.recipes.grad_sync(op)
        if recipe is None:
            return lambda bundles: (bundles[0],)
        return self._plain(op, recipe)

    def _prefetch(self, op: PrefetchView) -> Execute:
        gather = self.gather(op.layer, op.stage)
        return lambda bundles: (gather(bundles[0]),)

    def gather(self, layer: int, stage: int) -> Callable[[Bundle], Bundle]:
        """From a layer's parameter shards on its own stage to its view on a stage."""
        code = self.code
        owned = code.update.layers[layer].params
        places = [owned.index(p) for p in code.bundles[stage, layer]]
        recipe, in_place = self.recipes.gather(layer, stage)
        if recipe is None:
            return lambda shards: tuple(shards[place] for place in places)
        call = self.executable(stage, recipe)
        away = stage != code.stage_of[layer]
        sharding = self.groups[stage].sharding

        def gather(shards: Bundle) -> Bundle:
            mine = [shards[place] for place in places]
            moved = tuple(a for a, seen in zip(mine, in_place, strict=True) if not seen)
            made = iter(call(jax.device_put(moved, sharding) if away else moved))
            return tuple(a if seen else next(made) for a, seen in zip(mine, in_place, strict=True))

        return gather

    def _borrow(self, op: Borrow) -> Execute:
        gather = self.gather(op.layer, op.target)
        return lambda bundles: (gather(bundles[0]),)

    def _reduce(self, op: GlobalReduce) -> Execute:
        return _Reduction(self, op).execute


@dataclasses.dataclass(frozen=True, slots=True)
class _Pack:
    """What one stage gives to a reduction.

    Attributes:
        stage: the stage.
        call: joins its ranks' partials and its losses' microbatches.
        places: where its reads stand among the op's.
    """

    stage: int
    call: Callable[..., Any]
    places: tuple[int, ...]


class _Reduction:
    """A global reduction: each giving stage packs, every taking stage gets all packs and evaluates."""

    def __init__(self, executors: Executors, op: GlobalReduce) -> None:
        self.executors = executors
        self.op = op
        self.code = executors.code
        self.info = executors.program.reductions[op.phase - 1]
        self.losses = self.code.loss_variables if self.info.loss else ()
        self.packs = [p for p in map(self._pack, range(self.code.stages)) if p is not None]
        self.takers = {stage: self._evaluate(stage) for stage in self.info.stages}

    def execute(self, bundles: Sequence[Bundle]) -> list[Bundle]:
        """Runs the reduction."""
        packed = [pack.call(*(bundles[place] for place in pack.places)) for pack in self.packs]
        results = []
        for stage in self.info.stages:
            sharding = self.executors.groups[stage].sharding
            here = [
                given if pack.stage == stage else jax.device_put(given, sharding)
                for pack, given in zip(self.packs, packed, strict=True)
            ]
            call, places = self.takers[stage]
            results.append(call(tuple(here), *(bundles[place] for place in places)))
        return results

    def _pack(self, stage: int) -> _Pack | None:
        values = self.executors.program.values
        recipes = self.executors.recipes
        layers = [n for n in self.info.layers if self.code.stage_of[n] == stage]
        losses = [v for v in self.losses if self._home(v) == stage]
        if not layers and not losses:
            return None
        given = [i for i, v in enumerate(self.op.reads) if self._is_partial(v, layers)]
        given += [
            i
            for v in losses
            for i, read in enumerate(self.op.reads)
            if values[read].kind == "loss" and values[read].name == f"x{v}"
        ]
        how = [h for n in layers for h in recipes.shard_program(n, self.op.phase - 1).combine]
        devices, count, m = self.code.data_parallel, len(layers), self.code.microbatches
        results = [self._result(v) for v in losses]

        def function(*bundles: Bundle) -> Bundle:
            partials = [array for bundle in bundles[:count] for array in bundle]
            out = combine(partials, how, devices)
            for start, (kind, aval) in zip(range(count, len(bundles), m), results, strict=True):
                each = [bundle[0] for bundle in bundles[start : start + m]]
                out.append(join(each, kind, aval.dtype, devices))
            return tuple(out)

        types = tuple(recipes.bundle(self.op.reads[i]) for i in given)
        recipe = Recipe(("pack", self.op.phase), function, types, collective=True)
        return _Pack(stage, self.executors.executable(stage, recipe), tuple(given))

    def _home(self, variable: int) -> int:
        return self.code.stage_of[self.code.layered.variables[variable].producer]

    def _is_partial(self, value: int, layers: Sequence[int]) -> bool:
        v = self.executors.program.values[value]
        return v.kind == "partials" and v.layer in layers

    def _result(self, variable: int) -> tuple[str, Any]:
        """How a result of the loss is joined, and its type in the step."""
        regions, place = self.code.regions, self.code.loss_variables.index(variable)
        return regions.joins[place], regions.results[place].aval

    def _evaluate(self, stage: int) -> tuple[Callable[..., Any], tuple[int, ...]]:
        """The user's own equations on one stage, and which reads of the op they take."""
        code, program, recipes = self.code, self.executors.program, self.executors.recipes
        reduction = code.update.reductions[self.op.phase - 1]
        run = as_function(reduction.program)
        places = tuple(
            i
            for i, v in enumerate(self.op.reads)
            if program.values[v].stage == stage
            and program.values[v].kind in ("replicated", "operand", "scalars")
        )
        kinds = [program.values[self.op.reads[i]].kind for i in places]
        order = self._order()

        def function(packs: Sequence[Bundle], *bundles: Bundle) -> Bundle:
            def of(kind: str) -> list[Any]:
                return [a for b, k in zip(bundles, kinds, strict=True) if k == kind for a in b]

            gathered = [packs[pack][place] for pack, place in order]
            return tuple(run(*of("replicated"), *gathered, *of("operand"), *of("scalars")))

        packs = tuple(self._pack_types(pack) for pack in self.packs)
        types = (packs, *(recipes.bundle(self.op.reads[i]) for i in places))
        recipe = Recipe(("reduce", self.op.phase), function, types)
        return self.executors.executable(stage, recipe), places

    def _order(self) -> list[tuple[int, int]]:
        """Where each partial (by layer) and each loss result stands: (pack, place)."""
        spots: dict[Any, tuple[int, int]] = {}
        partials = self.code.update.layers
        for number, pack in enumerate(self.packs):
            place = 0
            for n in self.info.layers:
                if self.code.stage_of[n] == pack.stage:
                    for j in range(len(partials[n].partials[self.op.phase - 1])):
                        spots["partial", n, j] = (number, place)
                        place += 1
            for v in self.losses:
                if self._home(v) == pack.stage:
                    spots["loss", v] = (number, place)
                    place += 1
        wanted = [
            ("partial", n, j)
            for n in self.info.layers
            for j in range(len(partials[n].partials[self.op.phase - 1]))
        ]
        return [spots[w] for w in wanted] + [spots["loss", v] for v in self.losses]

    def _pack_types(self, pack: _Pack) -> tuple[Any, ...]:
        recipes, reads = self.executors.recipes, self.op.reads
        values = self.executors.program.values
        types: list[Any] = []
        seen: set[str] = set()
        for place in pack.places:
            value = values[reads[place]]
            if value.kind != "partials" and value.name in seen:
                continue
            seen.add(value.name)
            if value.kind == "partials":
                types.extend(recipes.bundle(reads[place]))
            else:
                aval = self._result(int(value.name[1:]))[1]
                types.append(jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        return tuple(types)


_MAKERS: dict[type[Op], Callable[[Executors, Any], Execute]] = {
    Prologue: Executors._prologue,
    Forward: Executors._forward,
    Recover: Executors._recover,
    Backward: Executors._backward,
    ZeroGradient: Executors._zero,
    SendActivation: Executors._send,
    SendGradient: Executors._send,
    Borrow: Executors._borrow,
    GradSync: Executors._grad_sync,
    GlobalReduce: Executors._reduce,
    UpdateShard: Executors._update,
    PrefetchView: Executors._prefetch,
    Validate: Executors._validate,
    Metrics: Executors._metrics,
}
