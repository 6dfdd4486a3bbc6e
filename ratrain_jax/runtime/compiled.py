"""A compiled step: callable, with the step's own arguments and results."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ratrain_jax import compat
from ratrain_jax.lowering.memory import MemoryAnalysis, memory_analysis
from ratrain_jax.lowering.program import Kind, Value
from ratrain_jax.runtime.arguments import check_arguments
from ratrain_jax.runtime.census import MemoryCensus, take_census
from ratrain_jax.runtime.executables import shared_library
from ratrain_jax.runtime.executors import Executors
from ratrain_jax.runtime.flights import Flights, telling
from ratrain_jax.runtime.groups import make_groups
from ratrain_jax.runtime.host import keep_freed_memory
from ratrain_jax.runtime.instructions import Bundle, flatten
from ratrain_jax.runtime.launches import settle
from ratrain_jax.runtime.measured import MeasuredRun, Watcher, marks
from ratrain_jax.runtime.serial import Serial
from ratrain_jax.runtime.stacks import Stacks
from ratrain_jax.runtime.state import Ownership, Reshaper, leaf_places, private_copy
from ratrain_jax.runtime.threads import Threads
from ratrain_jax.stacked_leaf import is_stacked_leaf

if TYPE_CHECKING:
    from ratrain_jax.lowered import Lowered


class Compiled:
    """A step, compiled for its devices. Call it like the undecorated step.

    Attributes:
        lowered: what it was compiled from.
        executables: how many distinct executables it runs.
    """

    def __init__(
        self,
        lowered: Lowered,
        compiler_options: Mapping[str, Any],
        progress: Callable[[int, int], None],
    ) -> None:
        options = lowered.options
        self.lowered = lowered
        self._compiler_options = compiler_options
        self._code, self._program = lowered.code, lowered.program
        keep_freed_memory()
        self._groups = make_groups(
            options.stages, options.data_parallel, options.devices, compiler_options
        )
        library = self._library = shared_library(self._code.fingerprint, self._groups)
        try:
            executors = Executors(self._code, self._program, self._groups, library)
            self._prepare(executors)
            self.executables = library.finish(progress)
        except BaseException:
            # Else the process could not end before all that was asked for is compiled.
            library.give_up()
            raise
        self._threads = Threads(repr(self), self._program, self._plan)
        self._own = Ownership()
        self._stacks = Stacks(
            self._code.stacks,
            self._groups[0],
            layers=options.state_layout == "layers",
            states=lowered.signature.states if lowered.signature.has_state else 0,
            donate=options.donate_state,
        )
        self._places = leaf_places(self._code)
        self._inputs = [self._program.values[v] for v in self._program.inputs]
        parameters = [v for v in self._inputs if v.kind is Kind.PARAMETERS]
        self._shards = {v.layer: v.id for v in parameters}
        self._operands = {operand.name: operand for operand in self._code.regions.operands}
        self._outputs = [self._program.values[v] for v in self._program.outputs]
        self._reshapers = self._make_reshapers()
        self._metric_reshapers: dict[int, Reshaper] = {}
        self._flights = Flights()
        self._views: dict[tuple[int, int], tuple[tuple[Any, ...], Bundle]] = {}
        self._replicas: dict[int, tuple[tuple[Any, ...], Bundle]] = {}

    def _prepare(self, executors: Executors) -> None:
        """Asks for all that a step runs."""
        self._plan = flatten(self._program, executors)
        views = [
            (v, self._program.values[v].layer or 0, self._program.values[v].stage)
            for v in self._program.inputs
            if self._program.values[v].kind is Kind.VIEW
        ]
        self._gathers = {v: executors.gather(layer, stage) for v, layer, stage in views}
        self._in_place = {v: executors.recipes.gather(layer, stage)[1] for v, layer, stage in views}
        self._temporaries = executors.temporaries

    def __call__(self, *args: Any) -> Any:
        """Runs one step.

        Args:
            *args: the step's arguments. Arrays of a state that an earlier call handed out are used up.

        Returns:
            What the step returns.

        Raises:
            StateError: the state has another tree, or leaves of other shapes, than what was compiled, or was used up,
                or comes from a step that failed.
            BatchError: the batch does.
        """
        self._flights.admit(args)
        with telling(args[:1]):
            tables = self._enter(args)
            self._launch(tables)
            result = self._leave(tables)
            kept = self.lowered.signature.states if self.lowered.signature.has_state else 0
            leaves = jax.tree.leaves(result, is_leaf=is_stacked_leaf)
            # A step that returns nothing but its state is waited for by marks: the state itself will be used up.
            self._flights.add(leaves[kept:] or marks(leaves))
            return result

    def memory_analysis(self) -> MemoryAnalysis:
        """As `Lowered.memory_analysis`, with the scratch bytes that the compiled programs need reported apart."""
        return memory_analysis(self._program, self._temporaries())

    def trace(self, *args: Any) -> tuple[Any, MeasuredRun]:
        """Runs one step and measures when each op started and ended.

        Args:
            *args: as for a call.

        Returns:
            What the step returns, and the measured run.
        """
        devices = [[device.id for device in group.devices] for group in self._groups]
        watcher = Watcher(self._program, devices)
        with telling(args[:1]), watcher.held, watcher:
            tables = self._enter(args)
            watcher.begin()
            self._launch(tables, watcher.watch)
            measured = watcher.finish()
            return self._leave(tables), measured

    def census(self, *args: Any) -> tuple[Any, MemoryCensus]:
        """Runs one step, op by op, and counts the bytes of live buffers after each: to check `memory_analysis`.

        Args:
            *args: as for a call.

        Returns:
            What the step returns, and the count beside the prediction.
        """
        with telling(args[:1]):
            step = self.serial(*args)
            census = take_census(step)
            return self._leave((step.table, step.table)), census

    def serial(self, *args: Any) -> Serial:
        """A step to be run op by op.

        Args:
            *args: as for a call; what a call would use up is used up.
        """
        compute, link = self._enter(args)
        settle(self._groups)
        return Serial(self._program, self._groups, self._plan, {**compute, **link})

    @property
    def devices(self) -> tuple[Any, ...]:
        """Its devices, stage by stage, in rank order."""
        return tuple(device for group in self._groups for device in group.devices)

    def twin(self) -> Compiled:
        """The same step, with the very executables, that has handed out no arrays: it uses up none that others hold."""
        return Compiled(self.lowered, self._compiler_options, lambda done, total: None)

    def __repr__(self) -> str:
        return f"<Compiled {self.lowered!r}, {self.executables} executables>"

    def _launch(self, tables: Sequence[dict[int, Bundle]], watch: Any = None) -> None:
        settle(self._groups)
        self._threads.launch(tables, watch)

    # State and batch in.

    def _enter(self, args: Sequence[Any]) -> tuple[dict[int, Bundle], dict[int, Bundle]]:
        leaves = check_arguments(self.lowered.signature, args)
        states = self.lowered.signature.states
        read = self.lowered.signature.read
        given, batch = leaves[:states], leaves[states:]
        # The batch first: where it fails, or does not fit, nothing of the state is used up yet.
        table: dict[int, Bundle] = {
            value.id: (self._operand(value, batch),)
            for value in self._inputs
            if value.kind is Kind.OPERAND
        }
        state = self._stacks.enter(given if read is None else [leaves[n] for n in read])
        entered = self._enter_state(state)
        self._stacks.use_up()
        for value in self._inputs:
            if value.id not in table:
                table[value.id] = self._input(value, state, entered, table)
        compute, link = self._plan.inputs
        return (
            {v: table[v] for v in compute},
            {v: table[v] for v in table if v in link or v not in compute},
        )

    def _make_reshapers(self) -> dict[int, tuple[list[int], Reshaper]]:
        """For each stage: the leaves that live there, and their reshapes."""
        made = {}
        for stage, group in enumerate(self._groups):
            leaves = sorted(leaf for leaf, place in self._places.items() if place.stage == stage)
            axes = [self._places[n].axis for n in leaves]
            made[stage] = (leaves, Reshaper(group, axes, donate=self._program.settings.trains))
        return made

    def _enter_state(self, state: Sequence[Any]) -> dict[int, Any]:
        """Every leaf as it lies inside a step."""
        donate = self.lowered.options.donate_state
        arrays = list(state)
        if not self._program.settings.trains:
            return self._read_state(arrays)
        # Everything is copied before anything is used up: one array may stand in two places.
        for leaves, reshaper in self._reshapers.values():
            places = list(enumerate(leaves))
            foreign = [i for i, n in places if not donate or not self._own.holds(n, state[n])]
            shardings = [reshaper.shardings[i] for i in foreign]
            copies = private_copy([state[leaves[i]] for i in foreign], shardings)
            for i, copy in zip(foreign, copies, strict=True):
                arrays[leaves[i]] = copy
        entered: dict[int, Any] = {}
        for leaves, reshaper in self._reshapers.values():
            entered.update(zip(leaves, reshaper.enter([arrays[n] for n in leaves]), strict=True))
        return entered

    def _read_state(self, arrays: Sequence[Any]) -> dict[int, Any]:
        """Every leaf as it lies inside a step that evaluates: the very array, where it is there already."""
        entered: dict[int, Any] = {}
        for leaves, reshaper in self._reshapers.values():
            placed = jax.device_put([arrays[n] for n in leaves], list(reshaper.shardings))
            entered.update(zip(leaves, reshaper.enter(placed), strict=True))
        return entered

    def _input(
        self,
        value: Value,
        state: Sequence[Any],
        entered: dict[int, Any],
        table: dict[int, Bundle],
    ) -> Bundle:
        update = self._code.update
        if value.kind is Kind.PARAMETERS and value.layer is not None:
            return tuple(entered[n] for n in update.layers[value.layer].parameters)
        if value.kind is Kind.OPTIMIZER and value.layer is not None:
            return tuple(entered[n] for n in update.layers[value.layer].optimizer)
        if value.kind is Kind.REPLICATED:
            return self._replicated(value.stage, state, entered)
        return self._view(value, value.layer or 0, state, table)

    def _replicated(self, stage: int, state: Sequence[Any], entered: dict[int, Any]) -> Bundle:
        """State of no layer: each group has its own copy, kept from the last step if the leaves are the same."""
        leaves = self._code.update.replicated
        if stage == 0:
            return tuple(entered[n] for n in leaves)
        given, bundle = self._replicas.pop(stage, ((), ()))
        wanted = tuple(state[n] for n in leaves)
        if len(given) == len(wanted) and all(
            ref() is w for ref, w in zip(given, wanted, strict=True)
        ):
            return bundle
        return tuple(jax.device_put(entered[n], self._groups[stage].sharding) for n in leaves)

    def _view(
        self, value: Value, layer: int, state: Sequence[Any], table: dict[int, Bundle]
    ) -> Bundle:
        """A layer's view: the prefetched one if the leaves are those handed out with it."""
        update = self._code.update.layers[layer]
        given, bundle = self._views.pop((value.stage, layer), ((), ()))
        wanted = tuple(state[n] for n in update.parameters)
        fresh = len(given) == len(wanted) and all(
            ref() is w for ref, w in zip(given, wanted, strict=True)
        )
        shards = table[self._shards[layer]]
        if not fresh:
            return self._gathers[value.id](shards)
        seen = self._in_place[value.id]
        if not any(seen):
            return bundle
        return tuple(s if p else b for p, s, b in zip(seen, shards, bundle, strict=True))

    def _operand(self, value: Value, batch: Sequence[Any]) -> Any:
        """A leaf of the batch where it is read: each rank's rows, or a whole copy."""
        code, states = self._code, self._code.regions.states
        group = self._groups[value.stage]
        if value.name.startswith("argument"):
            return group.put_whole(_array(batch[int(value.name[8:]) - states]))
        operand = self._operands[value.name]
        array = _array(batch[(operand.argument or 0) - states])
        if not operand.split:
            return group.put_whole(array)
        d, m = code.data_parallel, code.microbatches
        return group.put_rows(array.reshape(d, m, array.shape[0] // (d * m), *array.shape[1:]))

    # State and results out.

    def _leave(self, tables: Sequence[dict[int, Bundle]]) -> Any:
        signature = self.lowered.signature
        made = {v.id: tables[self._plan.results[v.id]][v.id] for v in self._outputs}
        inside: dict[int, Any] = {}
        results: dict[int, Any] = {}
        code = self._code
        for value in self._outputs:
            bundle = made[value.id]
            if value.kind is Kind.PARAMETERS and value.layer is not None:
                inside.update(zip(code.update.layers[value.layer].parameters, bundle, strict=True))
            elif value.kind is Kind.OPTIMIZER and value.layer is not None:
                inside.update(zip(code.update.layers[value.layer].optimizer, bundle, strict=True))
            elif value.kind is Kind.REPLICATED and value.stage == 0:
                inside.update(zip(code.update.replicated, bundle, strict=True))
            elif value.kind is Kind.METRICS:
                results.update(self._metrics(value, bundle))
        if signature.has_state:
            results.update(self._leave_state(inside))
            self._keep_ahead(made, results)
        return signature.result.unflatten(self._stacks.leave(results))

    def _leave_state(self, inside: dict[int, Any]) -> dict[int, Any]:
        out: dict[int, Any] = {}
        for leaves, reshaper in self._reshapers.values():
            out.update(zip(leaves, reshaper.leave([inside[n] for n in leaves]), strict=True))
        self._own.add(out)
        return out

    def _keep_ahead(self, made: dict[int, Bundle], results: dict[int, Any]) -> None:
        """Remembers views and replicas for a next step that starts from these very arrays."""
        update = self._code.update
        for value in self._outputs:
            if value.kind is Kind.VIEW and value.layer is not None:
                leaves = update.layers[value.layer].parameters
                refs = tuple(weakref.ref(results[n]) for n in leaves)
                self._views[value.stage, value.layer] = (refs, made[value.id])
            elif value.kind is Kind.REPLICATED and value.stage > 0:
                refs = tuple(weakref.ref(results[n]) for n in update.replicated)
                self._replicas[value.stage] = (refs, made[value.id])

    def _metrics(self, value: Value, bundle: Bundle) -> dict[int, Any]:
        code = self._code
        group = self._groups[value.stage]
        if value.layer is not None:
            outputs = code.update.layers[value.layer].outputs
            shapes = [code.regions.step.outvars[o].aval.shape for o in outputs]
            axes = [code.axis(shape) for shape in shapes]
        else:
            outputs = code.update.metrics_outputs
            axes = [None] * len(outputs)
        if value.id not in self._metric_reshapers:
            self._metric_reshapers[value.id] = Reshaper(group, axes)
        left = self._metric_reshapers[value.id].leave(bundle)
        return dict(zip(outputs, left, strict=True))


def _array(leaf: Any) -> Any:
    """A leaf of the batch as an array that may be cut; typed keys stay JAX arrays."""
    if isinstance(leaf, jax.Array) and compat.is_extended(leaf.dtype):
        return leaf
    dtype = jax.typeof(leaf).dtype
    return np.array(leaf, dtype=dtype)
