"""Gives each op of a program what it runs on its group, or between groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ratrain_jax.lowering.code import StepCode
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
from ratrain_jax.runtime.crossings import Crossing
from ratrain_jax.runtime.executables import Library, chained
from ratrain_jax.runtime.groups import Group
from ratrain_jax.runtime.instructions import Bundle, Execute
from ratrain_jax.runtime.launches import launcher
from ratrain_jax.runtime.recipes import Recipe, Recipes
from ratrain_jax.runtime.reductions import Reduction
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
            [group.put_whole(np.int32(i)) for i in range(code.microbatches)]
            if group.is_here
            else []
            for group in groups
        ]
        self.crossings: list[Crossing] = []

    def __call__(self, op: Op) -> Execute:
        """What an op runs."""
        if self.program.runs_nothing(op):
            return lambda bundles: ((),) * len(op.writes)
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

    def _executable_here(self, stage: int, recipe: Recipe) -> Callable[..., Any] | None:
        """A recipe's executable on a stage, if this process has devices of it."""
        return self.executable(stage, recipe) if self.groups[stage].is_here else None

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

    def crossing(self, source: int, target: int, types: Sequence[Any]) -> Crossing:
        """What moves a bundle from one stage's group to another's."""
        made = Crossing(self.groups[source], self.groups[target], types)
        self.crossings.append(made)
        return made

    def _send(self, op: Send) -> Execute:
        move = self.crossing(op.stage, op.target, self.recipes.bundle(op.reads[0]))
        return lambda bundles: (move(bundles[0]),)

    def _grad_sync(self, op: GradSync) -> Execute:
        recipe = self.recipes.grad_sync(op)
        if recipe is None:
            return lambda bundles: (bundles[0],)
        return self._plain(op, recipe)

    def _prefetch(self, op: PrefetchView) -> Execute:
        gather = self.gather(op.layer, op.stage)
        return lambda bundles: (gather(bundles[0]),)

    def gather(self, layer: int, stage: int) -> Callable[[Bundle | None], Bundle | None]:
        """From a layer's parameter shards on its own stage to its view on a stage; None stands for what is not here."""
        code = self.code
        owned = code.update.layers[layer].params
        places = [owned.index(p) for p in code.bundles[stage, layer]]
        recipe, in_place = self.recipes.gather(layer, stage)
        if recipe is None:
            return lambda shards: (
                None if shards is None else tuple(shards[place] for place in places)
            )
        home = code.stage_of[layer]
        call = self._executable_here(stage, recipe)
        if stage != home:
            move = self.crossing(home, stage, recipe.types[0])

            def borrow(shards: Bundle | None) -> Bundle | None:
                # Nothing is seen in place by another stage.
                mine = None if shards is None else tuple(shards[place] for place in places)
                moved = move(mine)
                return None if call is None else tuple(call(moved))

            return borrow

        def gather(shards: Bundle | None) -> Bundle | None:
            if call is None or shards is None:
                return None
            mine = [shards[place] for place in places]
            moved = tuple(a for a, seen in zip(mine, in_place, strict=True) if not seen)
            made = iter(call(moved))
            return tuple(a if seen else next(made) for a, seen in zip(mine, in_place, strict=True))

        return gather

    def _borrow(self, op: Borrow) -> Execute:
        gather = self.gather(op.layer, op.target)
        return lambda bundles: (gather(bundles[0]),)

    def _reduce(self, op: GlobalReduce) -> Execute:
        return Reduction(self.recipes, self._executable_here, self.crossing, op).execute


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
