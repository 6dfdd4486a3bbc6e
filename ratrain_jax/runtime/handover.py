"""The state of a compiled step between its calls: what was handed out, and what was made ahead for the next.

What goes in is told apart by identity. Arrays that this step handed out are used up; views and replicas that were made with
them are taken as they are. All others are copied to where they are wanted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ratrain_jax.lowering.code import StepCode
from ratrain_jax.lowering.program import Kind, Program, Value
from ratrain_jax.options import Options
from ratrain_jax.runtime.executors import Executors
from ratrain_jax.runtime.groups import Group
from ratrain_jax.runtime.instructions import Bundle
from ratrain_jax.runtime.placing import agree_on_globals, placed, private_copy
from ratrain_jax.runtime.processes import elsewhere, make_global, several
from ratrain_jax.runtime.shared import Shared
from ratrain_jax.runtime.stacks import Stacks
from ratrain_jax.runtime.state import Ownership, Reshaper, leaf_places
from ratrain_jax.runtime.turns import in_turn
from ratrain_jax.runtime.workers import Workers
from ratrain_jax.tracing import Signature

Move = Callable[[Bundle | None], Bundle | None]
Ahead = tuple[tuple[weakref.ref[Any], ...], Bundle | None]
"""Made ahead: the leaves that it belongs to, and what lies on this process's devices."""
_NOTHING: Ahead = ((), None)


class Handover:
    """Takes a state in and hands it out.

    Args:
        code: the step's code.
        program: the program.
        groups: the devices of each stage.
        executors: where moves between groups are made.
        signature: of the step.
        options: how the state is handed out, and whether what was is used up.
        link: the thread that launches gathers.
    """

    def __init__(
        self,
        code: StepCode,
        program: Program,
        groups: Sequence[Group],
        executors: Executors,
        signature: Signature,
        options: Options,
        link: Workers,
    ) -> None:
        self._code, self._program, self._groups = code, program, groups
        self._donate = options.donate_state
        self._trains = program.settings.trains
        self._own = Ownership()
        self._stacks = Stacks(
            code.stacks,
            groups[0],
            layers=options.state_layout == "layers",
            states=signature.states if signature.has_state else 0,
            donate=options.donate_state,
        )
        self._shared = Shared(code.update.replicated, groups[0], donate=options.donate_state)
        self._places = leaf_places(code)
        inputs = [program.values[v] for v in program.inputs]
        self._inputs = [v for v in inputs if v.kind is not Kind.OPERAND]
        self._outputs = [program.values[v] for v in program.outputs]
        self._shards = {v.layer: v.id for v in inputs if v.kind is Kind.PARAMETERS}
        self._reshapers = self._make_reshapers(link)
        views = [v for v in inputs if v.kind is Kind.VIEW]
        self._gathers = {v.id: executors.gather(v.layer or 0, v.stage) for v in views}
        self._in_place = {v.id: executors.recipes.gather(v.layer or 0, v.stage)[1] for v in views}
        self._replicating: dict[int, Move] = {
            v.id: executors.crossing(0, v.stage, executors.recipes.bundle(v.id))
            for v in inputs
            if v.kind is Kind.REPLICATED and v.stage
        }
        self._ahead: dict[int, Ahead] = {}
        self._inputs_of = {v.role: v.id for v in inputs}

    def _make_reshapers(self, link: Workers) -> dict[int, tuple[list[int], Reshaper]]:
        """For each stage: the leaves that live there, and their reshapes."""
        made = {}
        for stage, group in enumerate(self._groups):
            leaves = sorted(leaf for leaf, place in self._places.items() if place.stage == stage)
            axes = [self._places[n].axis for n in leaves]
            made[stage] = (leaves, Reshaper(group, axes, donate=self._trains, link=link))
        return made

    # In.

    def enter(self, given: Sequence[Any]) -> dict[int, Bundle]:
        """Takes a state in.

        Args:
            given: the flat leaves that the step reads, as they were handed out or as the user made them.

        Returns:
            The values of the program's inputs that are here, by number.
        """
        stacked = self._stacks.enter(given)
        state = self._shared.enter(stacked)
        if not several() or self._comes_back(state):
            return self._taken_in(state)
        return in_turn(lambda: self._taken_in(state))

    def _comes_back(self, state: Sequence[Any]) -> bool:
        """Whether a state is the one handed out, with all that was made ahead: no other process is asked for anything."""
        if not (self._trains and self._donate):
            return False
        own = all(self._own.holds(n, state[n]) for n in self._places)
        return own and all(
            self._are_of(value, self._ahead.get(value.id, _NOTHING)[0], state)
            for value in filter(_can_be_ahead, self._inputs)
        )

    def _are_of(self, value: Value, refs: Sequence[weakref.ref[Any]], state: Sequence[Any]) -> bool:
        """Whether what was made ahead of a view or a replica belongs to the very leaves of a state."""
        leaves = self._made_of(value)
        return len(refs) == len(leaves) and all(
            ref() is state[n] for ref, n in zip(refs, leaves, strict=True)
        )

    def _made_of(self, value: Value) -> Sequence[int]:
        """The leaves that a view or a replica is made of."""
        update = self._code.update
        if value.layer is None:
            return update.replicated
        return update.layers[value.layer].parameters

    def _taken_in(self, state: Sequence[Any]) -> dict[int, Bundle]:
        entered = self._enter_leaves(state)
        self._stacks.use_up()
        self._shared.use_up()
        table: dict[int, Bundle] = {}
        for value in self._inputs:
            bundle = self._input(value, state, entered, table)
            if bundle is not None and self._groups[value.stage].is_here:
                table[value.id] = bundle
        return table

    def _enter_leaves(self, state: Sequence[Any]) -> dict[int, Any]:
        """Every leaf that is here as it lies inside a step."""
        arrays = list(state)
        numbers = [n for leaves, _ in self._reshapers.values() for n in leaves]
        donated = self._trains and self._donate
        foreign = [n for n in numbers if not donated or not self._own.holds(n, state[n])]
        agree_on_globals([state[n] for n in foreign])
        # Everything is copied before anything is used up: one array may stand in two places.
        for n, array in zip(foreign, self._brought(state, foreign), strict=True):
            arrays[n] = array
        entered: dict[int, Any] = {}
        for stage, (leaves, reshaper) in self._reshapers.items():
            mine = [arrays[n] for n in leaves]
            if self._groups[stage].is_here:
                entered.update(zip(leaves, reshaper.enter(mine), strict=True))
            elif self._trains:
                for array in mine:
                    array.delete()
        return entered

    def _brought(self, state: Sequence[Any], leaves: Sequence[int]) -> list[Any]:
        """Leaves where they are wanted: the very arrays, in a step that evaluates, where they are there already."""
        shardings = [self._sharding(n) for n in leaves]
        given = [state[n] for n in leaves]
        if self._trains:
            return private_copy(given, shardings)
        return [placed(array, sharding) for array, sharding in zip(given, shardings, strict=True)]

    def _sharding(self, leaf: int) -> Any:
        place = self._places[leaf]
        return self._groups[place.stage].state_sharding(place.axis)

    def _input(
        self,
        value: Value,
        state: Sequence[Any],
        entered: dict[int, Any],
        table: dict[int, Bundle],
    ) -> Bundle | None:
        update = self._code.update
        if value.kind is Kind.REPLICATED:
            return self._replicated(value, state, entered)
        if value.kind is Kind.VIEW:
            return self._view(value, value.layer or 0, state, table)
        if value.layer is None or not self._groups[value.stage].is_here:
            return None
        layer = update.layers[value.layer]
        leaves = layer.parameters if value.kind is Kind.PARAMETERS else layer.optimizer
        return tuple(entered[n] for n in leaves)

    def _replicated(
        self, value: Value, state: Sequence[Any], entered: dict[int, Any]
    ) -> Bundle | None:
        """State of no layer: each group has its own copy, kept from the last step if the leaves are the same."""
        leaves = self._made_of(value)
        home = self._groups[0].is_here
        first = tuple(entered[n] for n in leaves) if home else None
        if value.stage == 0:
            return first
        known, bundle = self._ahead.pop(value.id, _NOTHING)
        if self._are_of(value, known, state):
            return bundle
        return self._replicating[value.id](first)

    def _view(
        self, value: Value, layer: int, state: Sequence[Any], table: dict[int, Bundle]
    ) -> Bundle | None:
        """A layer's view: the prefetched one if the leaves are those handed out with it."""
        shards = table.get(self._shards[layer])
        known, bundle = self._ahead.pop(value.id, _NOTHING)
        if not self._are_of(value, known, state):
            return self._gathers[value.id](shards)
        seen = self._in_place[value.id]
        if bundle is None or shards is None or not any(seen):
            return bundle
        return tuple(s if p else b for p, s, b in zip(seen, shards, bundle, strict=True))

    # Out.

    def leave(self, made: Mapping[int, Bundle]) -> dict[int, Any]:
        """Hands a state out.

        Args:
            made: the program's outputs that are here, by number.

        Returns:
            The leaves of the opened step's new state, by number, global in a run of several processes.
        """
        inside: dict[int, Any] = {}
        layers = self._code.update.layers
        for value in self._outputs:
            if value.id not in made:
                continue
            bundle = made[value.id]
            if value.kind is Kind.PARAMETERS and value.layer is not None:
                inside.update(zip(layers[value.layer].parameters, bundle, strict=True))
            elif value.kind is Kind.OPTIMIZER and value.layer is not None:
                inside.update(zip(layers[value.layer].optimizer, bundle, strict=True))
            elif value.kind is Kind.REPLICATED and value.stage == 0:
                inside.update(zip(self._code.update.replicated, bundle, strict=True))
        out: dict[int, Any] = {}
        for stage, (leaves, reshaper) in self._reshapers.items():
            if self._groups[stage].is_here:
                left = [make_global(x) for x in reshaper.leave([inside[n] for n in leaves])]
            else:
                left = [elsewhere(self._aval(n), self._sharding(n)) for n in leaves]
            out.update(zip(leaves, left, strict=True))
        self._own.add(out)
        self._keep_ahead(made, out)
        return self._shared.leave(out)

    def _aval(self, leaf: int) -> Any:
        return self._code.regions.step.invars[leaf].aval

    def _keep_ahead(self, made: Mapping[int, Bundle], out: Mapping[int, Any]) -> None:
        """Remembers views and replicas for a next step that starts from these very arrays."""
        for value in filter(_can_be_ahead, self._outputs):
            refs = tuple(weakref.ref(out[n]) for n in self._made_of(value))
            self._ahead[self._inputs_of[value.role]] = (refs, made.get(value.id))

    def flat(self, results: Mapping[int, Any]) -> list[Any]:
        """The flat results of the user's step, from those of the opened step."""
        return self._stacks.leave(results)


def _can_be_ahead(value: Value) -> bool:
    """Whether a value is made of leaves, for a step that starts from these very leaves."""
    return value.kind is Kind.VIEW or (value.kind is Kind.REPLICATED and value.stage > 0)
