"""A lowered step: to read, to check against memory, and to compile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ratrain_jax import compat
from ratrain_jax.deferred import Deferred, deferred
from ratrain_jax.kernels import Machine, machine_of
from ratrain_jax.lowering.code import StepCode
from ratrain_jax.lowering.grid import grid
from ratrain_jax.lowering.jsonform import to_json
from ratrain_jax.lowering.memory import MemoryAnalysis, memory_analysis
from ratrain_jax.lowering.op_costs import layer_costs
from ratrain_jax.lowering.program import Program
from ratrain_jax.lowering.text import as_text
from ratrain_jax.lowering.trace import Trace
from ratrain_jax.lowering.unsharded import Unsharded, unsharded
from ratrain_jax.options import Options
from ratrain_jax.stacked_state import StackedState, stacked_state
from ratrain_jax.tracing import Signature
from ratrain_jax.words import counted

if TYPE_CHECKING:
    from ratrain_jax.costs import CostAnalysis
    from ratrain_jax.runtime.compiled import Compiled


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Lowered:
    """A step that was traced and lowered.

    Attributes:
        code: the code that the program's ops name.
        program: the program.
        signature: the trees and types of the step's arguments and results.
        options: what the step was decorated with.
        trace: the step as it was traced.
    """

    code: StepCode
    program: Program
    signature: Signature
    options: Options
    trace: Trace

    def as_text(self) -> str:
        """The program as text that `ratrain_jax.lowering.text.parse` reads back."""
        return as_text(self.program)

    def as_json(self) -> str:
        """The program as JSON."""
        return to_json(self.program)

    def grid(self) -> str:
        """The schedule as a grid of slots, one row a stage."""
        return grid(self.program)

    def summary(self) -> str:
        """The layers and their stages, as a table, and what there is to say of them.

        That is a layer that no split balances, what is not on shards, what stacked leaves cost, and what is deferred.
        """
        from ratrain_jax.oversized import oversized
        from ratrain_jax.tables import layer_table

        stacked = self.stacked_state() if self.options.state_layout == "stacked" else None
        table = layer_table(self.program)
        parts = [table, oversized(self.program), self.unsharded(), stacked, self.deferred()]
        return "\n\n".join(str(part) for part in parts if part is not None)

    def unsharded(self) -> Unsharded | None:
        """What every device of a stage holds or computes whole, with its bytes; None if all is on shards.

        These are leaves of the state without an axis that `data_parallel` divides, and the equations of the update that
        depend on where an element stands (random numbers, a sort) or reduce some axes.
        """
        return unsharded(self.code)

    def stacked_state(self) -> StackedState | None:
        """The bytes of the state's stacked leaves; `state_layout="stacked"` puts them together after every step.

        They are no part of `memory_analysis`, which ends with the program's last op.
        """
        return stacked_state(self.code)

    def deferred(self) -> Deferred | None:
        """With `validation="deferred"`, which layers are updated early, and why others wait; None without it."""
        return deferred(self.code, self.program)

    def memory_analysis(self) -> MemoryAnalysis:
        """Bytes on each device of every stage over the step, by kind, with the op at the peak."""
        return memory_analysis(self.program)

    def cost_analysis(self, machine: str | Machine | None = None) -> CostAnalysis:
        """FLOPs, bytes, seconds and utilization of a step by layer and kind of op; its `str` is a table.

        Args:
            machine: what to count for: a `ratrain_jax.kernels.Machine`, the name of a built-in one or the path of its
                file; the backend's own, or `"generic"`, unless given.

        Returns:
            The costs. What a kernel takes is costed by its plan on the machine, the rest by rooflines.

        Raises:
            MachineError: there is no such machine.
        """
        from ratrain_jax.costs import CostAnalysis

        if machine is None:
            kernels = self.options.kernels()
            machine = kernels.machine if kernels is not None else "generic"
        found = machine_of(machine)
        return CostAnalysis(found, layer_costs(self.code, self.program, found), self.code.routing)

    def compile(
        self,
        compiler_options: Mapping[str, Any] | None = None,
        *,
        progress: bool | Callable[[int, int], None] | None = None,
    ) -> Compiled:
        """Compiles the program for its devices.

        Args:
            compiler_options: as for `jax.stages.Lowered.compile`, for every executable.
            progress: told how many executables are compiled, and of how many; True for a bar on standard error, False
                for none, None for one if standard error is a terminal.

        Raises:
            LayoutError: there are fewer devices than stages × data_parallel.

        Example:
            >>> import jax, jax.numpy as jnp, ratrain_jax as rt
            >>> @rt.train_step()
            ... def step(w, x):
            ...     loss, grad = rt.value_and_grad(lambda w: ((x * w) ** 2).mean())(w)
            ...     return w - grad, loss
            >>> counts = []
            >>> lowered = step.lower(jnp.float32(1), jnp.ones(2))
            >>> compiled = lowered.compile(progress=lambda done, total: counts.append((done, total)))
            >>> counts[-1] == (compiled.executables, compiled.executables)
            True
        """
        from ratrain_jax.runtime.compiled import Compiled
        from ratrain_jax.runtime.progress import reporting

        with reporting(progress, "compiling") as report, compat.without_mesh():
            return Compiled(self, compiler_options or {}, report)

    def _repr_html_(self) -> str:
        from ratrain_jax.views.notebook import lowered_html

        return lowered_html(self)

    def __repr__(self) -> str:
        s = self.program.settings
        return (
            f"<Lowered {len(self.program.layers)} layers in {counted(s.stages, 'stage')} × {s.data_parallel},"
            f" {counted(s.microbatches, 'microbatch')}, {s.schedule}, zero={s.zero}>"
        )
