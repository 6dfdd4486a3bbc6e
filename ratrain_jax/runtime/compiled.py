"""A compiled step: callable, with the step's own arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from ratrain_jax import compat
from ratrain_jax.distributed.failures import named
from ratrain_jax.lowering.memory import MemoryAnalysis, memory_analysis
from ratrain_jax.lowering.program import Kind, Value
from ratrain_jax.runtime.agreement import agree, connect
from ratrain_jax.runtime.arguments import check_arguments
from ratrain_jax.runtime.batches import host_array, host_rows
from ratrain_jax.runtime.census import MemoryCensus, take_census
from ratrain_jax.runtime.executables import shared_library
from ratrain_jax.runtime.executors import Executors
from ratrain_jax.runtime.flights import Flights, telling
from ratrain_jax.runtime.groups import make_groups
from ratrain_jax.runtime.handover import Handover
from ratrain_jax.runtime.host import keep_freed_memory
from ratrain_jax.runtime.instructions import Bundle, flatten
from ratrain_jax.runtime.launches import settle
from ratrain_jax.runtime.measured import MeasuredRun, Watcher, marks
from ratrain_jax.runtime.processes import elsewhere, make_global
from ratrain_jax.runtime.serial import Serial
from ratrain_jax.runtime.shared import everywhere
from ratrain_jax.runtime.state import Reshaper
from ratrain_jax.runtime.threads import Threads
from ratrain_jax.runtime.turns import in_turn, link_workers
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
        agree(lowered)
        self._groups = make_groups(
            options.stages, options.data_parallel, options.devices, compiler_options
        )
        library = self._library = shared_library(self._code.fingerprint, self._groups)
        try:
            executors = Executors(self._code, self._program, self._groups, library)
            self._prepare(executors)
            self.executables = library.finish(progress)
            connect(executors.crossings)
        except BaseException:
            # Else the process could not end before all that was asked for is compiled.
            library.give_up()
            raise
        self._threads = Threads(repr(self), self._program, self._plan, self._link)
        self._operands = {operand.name: operand for operand in self._code.regions.operands}
        values = self._program.values
        self._batch_inputs = [
            values[v]
            for v in self._program.inputs
            if values[v].kind is Kind.OPERAND and self._groups[values[v].stage].is_here
        ]
        self._metrics_outputs = [
            values[v] for v in self._program.outputs if values[v].kind is Kind.METRICS
        ]
        self._metric_reshapers: dict[int, Reshaper] = {}
        self._flights = Flights()

    def _prepare(self, executors: Executors) -> None:
        """Asks for all that a step runs."""
        here = [group.is_here for group in self._groups]
        self._plan = flatten(self._program, executors, here)
        self._link = link_workers()
        self._handover = Handover(
            self._code,
            self._program,
            self._groups,
            executors,
            self.lowered.signature,
            self.lowered.options,
            self._link,
        )
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
        with telling(args[:1]), named(), compat.without_mesh():
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
        with telling(args[:1]), named(), compat.without_mesh(), watcher.held, watcher:
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
        with telling(args[:1]), named(), compat.without_mesh():
            step = self.serial(*args)
            census = in_turn(lambda: take_census(step))
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
            value.id: (self._operand(value, batch),) for value in self._batch_inputs
        }
        table.update(self._handover.enter(given if read is None else [leaves[n] for n in read]))
        compute, link = self._plan.inputs
        return (
            {v: table[v] for v in compute},
            {v: table[v] for v in table if v in link or v not in compute},
        )

    def _operand(self, value: Value, batch: Sequence[Any]) -> Any:
        """A leaf of the batch where it is read: each rank's rows, or a whole copy."""
        code, states = self._code, self._code.regions.states
        group = self._groups[value.stage]
        if value.name.startswith("argument"):
            return group.put_whole(host_array(batch[int(value.name[8:]) - states]))
        operand = self._operands[value.name]
        place = (operand.argument or 0) - states
        leaf = batch[place]
        if not operand.split:
            return group.put_whole(host_array(leaf))
        d, m = code.data_parallel, code.microbatches
        signature = self.lowered.signature
        array = host_rows(leaf, group, signature.names[signature.states + place])
        return group.put_rows(array.reshape(d, m, array.shape[0] // (d * m), *array.shape[1:]))

    # State and results out.

    def _leave(self, tables: Sequence[dict[int, Bundle]]) -> Any:
        signature = self.lowered.signature
        made = {v: tables[thread][v] for v, thread in self._plan.results.items()}
        results: dict[int, Any] = {}
        for value in self._metrics_outputs:
            results.update(self._metrics(value, made.get(value.id)))
        if signature.has_state:
            results.update(self._handover.leave(made))
        return signature.result.unflatten(self._handover.flat(results))

    def _metrics(self, value: Value, bundle: Bundle | None) -> dict[int, Any]:
        """What the step returns beside its state: in every process what the loss gives, global what belongs to a layer."""
        code = self._code
        group = self._groups[value.stage]
        if value.layer is not None:
            outputs = code.update.layers[value.layer].outputs
            axes = [code.axis(code.regions.step.outvars[o].aval.shape) for o in outputs]
        else:
            outputs = code.update.metrics_outputs
            axes = [None] * len(outputs)
        if value.id not in self._metric_reshapers:
            self._metric_reshapers[value.id] = Reshaper(group, axes)
        if bundle is not None:
            left = [make_global(x) for x in self._metric_reshapers[value.id].leave(bundle)]
        else:
            avals = [code.regions.step.outvars[o].aval for o in outputs]
            shardings = map(group.state_sharding, axes)
            left = [elsewhere(*pair) for pair in zip(avals, shardings, strict=True)]
        if value.layer is None:
            left = everywhere(left, group)
        return dict(zip(outputs, left, strict=True))
