"""A step to plan for: traced once with the global batch, and once for each size of microbatch that is looked at."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ratrain_jax.kernels import Arithmetic, Machine
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
    _tables: dict[int, LayerTable] = dataclasses.field(default_factory=dict)

    def table(self, rows: int) -> LayerTable:
        """The layers at microbatches of `rows` examples, which must divide the global batch."""
        if rows not in self._tables:
            self._tables[rows] = self._stretched(rows) or self._count(rows)
        return self._tables[rows]

    def _stretched(self, rows: int) -> LayerTable | None:
        """From two sizes traced, where that gives what a trace would."""
        # A microbatch of one example has programs of its own: axes of one element need no transposing.
        traced = [n for n in self._tables if n > 1]
        if len(traced) < 2 or rows == 1:
            return None
        return stretched(self._tables[traced[0]], self._tables[traced[1]], rows)

    def _count(self, rows: int) -> LayerTable:
        options = Options(microbatches=self.global_batch // rows, batch_argnums=self.batch_argnums)
        if self._trace is None:
            self._trace, _ = trace_step(self.step, self.args, options)
        small = self._trace.whole
        if rows != self.global_batch:
            small = trace_small(self.step, self.args[0], microbatch(self.args[1:], options))
        whole = dataclasses.replace(self._trace, small=small)
        trace, lengths = open_short(whole, KEPT_LAYERS)
        table = self._table(trace, lengths, options, rows)
        if table is None:
            # Layers too small to stand alone were joined with their neighbours: only all of them tell.
            table = self._table(whole, {}, options, rows)
        assert table is not None
        return table

    def _table(
        self, trace: Trace, lengths: dict[str, int], options: Options, rows: int
    ) -> LayerTable | None:
        code = compile_code(trace, options.settings(), self.machine, None, self.kernels)
        return layer_table(code, lengths, self.machine, rows)
