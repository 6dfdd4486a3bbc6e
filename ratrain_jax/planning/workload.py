"""A step to plan for: traced once with the global batch, and once for each size of microbatch that is looked at."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ratrain_jax.kernels import Arithmetic, Machine
from ratrain_jax.lowering.code import StepCode
from ratrain_jax.lowering.lower import compile_code
from ratrain_jax.lowering.stacks import open_short
from ratrain_jax.lowering.trace import Trace
from ratrain_jax.options import Options
from ratrain_jax.planning.layer_table import KEPT_LAYERS, LayerTable, layer_table, stretched
from ratrain_jax.tracing import microbatch, trace_small, trace_step


@dataclasses.dataclass
class Workload:
    """A step, its types, and what is known of it.

    Attributes:
        step: the undecorated step.
        args: the types of its arguments, at the global batch.
        machine: what it is to run on.
        kernels: how kernels compute the products that they take; None where XLA takes all.
        global_batch: examples of a step.
        batch_argnums: which arguments are cut along axis 0; all but the first if None.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    machine: Machine
    kernels: Arithmetic | None
    global_batch: int
    batch_argnums: Sequence[int] | None = None
    _trace: Trace | None = None
    _codes: dict[int, tuple[StepCode, dict[str, int]]] = dataclasses.field(default_factory=dict)
    _tables: dict[tuple[int, int], LayerTable] = dataclasses.field(default_factory=dict)

    def table(self, rows: int, tensor: int = 1) -> LayerTable:
        """The layers at microbatches of `rows` examples, which must divide the global batch.

        Args:
            rows: examples of a microbatch.
            tensor: tensor-parallel ranks; the table is that of one of them.
        """
        key = (rows, tensor)
        if key not in self._tables:
            self._tables[key] = self._stretched(rows, tensor) or self._count(rows, tensor)
        return self._tables[key]

    def _stretched(self, rows: int, tensor: int) -> LayerTable | None:
        """From two sizes traced, where that gives what a trace would."""
        # A microbatch of one example has programs of its own: axes of one element need no transposing.
        traced = [n for n in self._codes if n > 1][:2]
        if len(traced) < 2 or rows in self._codes or rows == 1:
            return None
        return stretched(self.table(traced[0], tensor), self.table(traced[1], tensor), rows)

    def _count(self, rows: int, tensor: int = 1) -> LayerTable:
        if rows not in self._codes:
            self._codes[rows] = self._code(rows)
        if (rows, tensor) in self._tables:
            return self._tables[rows, tensor]
        code, lengths = self._codes[rows]
        table = layer_table(code, lengths, self.machine, rows, tensor)
        assert table is not None
        return table

    def _code(self, rows: int) -> tuple[StepCode, dict[str, int]]:
        """The code of the step with its scans cut short, where that tells all, and how long they really are."""
        options = Options(microbatches=self.global_batch // rows, batch_argnums=self.batch_argnums)
        if self._trace is None:
            self._trace, _ = trace_step(self.step, self.args, options)
        small = self._trace.whole
        if rows != self.global_batch:
            small = trace_small(self.step, self.args[0], microbatch(self.args[1:], options))
        whole = dataclasses.replace(self._trace, small=small)
        trace, lengths = open_short(whole, KEPT_LAYERS)
        settings = options.settings()
        code = compile_code(trace, settings, self.machine, None, self.kernels)
        table = layer_table(code, lengths, self.machine, rows)
        if table is None:
            # Layers too small to stand alone were joined with their neighbours: only all of them tell.
            return compile_code(whole, settings, self.machine, None, self.kernels), {}
        self._tables[rows, 1] = table
        return code, lengths
