"""Global reductions: what each stage gives, who gets it, and the user's own equations on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ratrain_jax.lowering.graph import as_function
from ratrain_jax.lowering.program import GlobalReduce
from ratrain_jax.runtime.crossings import Crossing
from ratrain_jax.runtime.instructions import Bundle
from ratrain_jax.runtime.joins import combine, join
from ratrain_jax.runtime.recipes import Recipe, Recipes


@dataclasses.dataclass(frozen=True, slots=True)
class _Pack:
    """What one stage gives to a reduction.

    Attributes:
        stage: the stage.
        call: joins its ranks' partials and its losses' microbatches; None where the stage is not here.
        places: where its reads stand among the op's.
    """

    stage: int
    call: Callable[..., Any] | None
    places: tuple[int, ...]


class Reduction:
    """A global reduction: each giving stage packs, every taking stage gets all packs and evaluates.

    Args:
        recipes: of the program.
        executable: gives a recipe's executable on a stage; None where the stage is not here.
        crossing: gives what moves a bundle of some types from one stage to another.
        op: the reduction.
    """

    def __init__(
        self,
        recipes: Recipes,
        executable: Callable[[int, Recipe], Callable[..., Any] | None],
        crossing: Callable[[int, int, Sequence[Any]], Crossing],
        op: GlobalReduce,
    ) -> None:
        self.recipes, self.op, self._executable = recipes, op, executable
        self.code, self.program = recipes.code, recipes.program
        self.info = self.program.reductions[op.phase - 1]
        self.losses = self.code.loss_variables if self.info.loss else ()
        self.packs = [p for p in map(self._pack, range(self.code.stages)) if p is not None]
        self.takers = {stage: self._evaluate(stage) for stage in self.info.stages}
        self.moves = {
            (pack.stage, stage): crossing(pack.stage, stage, self._pack_types(pack))
            for stage in self.info.stages
            for pack in self.packs
            if pack.stage != stage
        }

    def execute(self, bundles: Sequence[Bundle | None]) -> list[Bundle | None]:
        """Runs the reduction; None stands for what is not here."""
        packed = [self._packed(pack, bundles) for pack in self.packs]
        results: list[Bundle | None] = []
        for stage in self.info.stages:
            here = [
                given if pack.stage == stage else self.moves[pack.stage, stage](given)
                for pack, given in zip(self.packs, packed, strict=True)
            ]
            call, places = self.takers[stage]
            if call is None:
                results.append(None)
            else:
                results.append(call(tuple(here), *(bundles[place] for place in places)))
        return results

    def _packed(self, pack: _Pack, bundles: Sequence[Bundle | None]) -> Bundle | None:
        if pack.call is None:
            return None
        return pack.call(*(bundles[place] for place in pack.places))

    def _pack(self, stage: int) -> _Pack | None:
        values = self.program.values
        recipes = self.recipes
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
        return _Pack(stage, self._executable(stage, recipe), tuple(given))

    def _home(self, variable: int) -> int:
        return self.code.stage_of[self.code.layered.variables[variable].producer]

    def _is_partial(self, value: int, layers: Sequence[int]) -> bool:
        v = self.program.values[value]
        return v.kind == "partials" and v.layer in layers

    def _result(self, variable: int) -> tuple[str, Any]:
        """How a result of the loss is joined, and its type in the step."""
        regions, place = self.code.regions, self.code.loss_variables.index(variable)
        return regions.joins[place], regions.results[place].aval

    def _evaluate(self, stage: int) -> tuple[Callable[..., Any] | None, tuple[int, ...]]:
        """The user's own equations on one stage, and which reads of the op they take; no call where it is not here."""
        code, program, recipes = self.code, self.program, self.recipes
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
        return self._executable(stage, recipe), places

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
        recipes, reads = self.recipes, self.op.reads
        values = self.program.values
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
