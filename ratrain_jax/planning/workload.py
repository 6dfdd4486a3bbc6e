"""A step to plan for: traced once with the global batch, and once for each size of microbatch that is looked at."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ratrain_jax.kernels import Arithmetic, Machine
from ratrain_jax.lowering.code import StepCode
from ratrain_jax.lowering.held import hold
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

    def trace_few(self, sizes: Collection[int]) -> None:
        """Traces as few sizes as need be: the ends of each range in which steps have the same layers.

        Args:
            sizes: examples of a microbatch, all that will be asked for.
        """
        several = sorted(n for n in sizes if n > 1)
        ranges = [(0, len(several) - 1)] if several else []
        while ranges:
            first, last = ranges.pop()
            small, large = self.table(several[first]), self.table(several[last])
            between = (first + last) // 2
            if first < between and stretched(small, large, several[between]) is None:
                ranges += [(first, between), (between, last)]

    def _stretched(self, rows: int, tensor: int) -> LayerTable | None:
        """From a smaller and a larger size that were traced, where that gives what a trace would.

        How large one part of a step is beside another grows or falls with the size, so that what two sizes agree on,
        where layers begin for one, those between them do too.
        """
        # A microbatch of one example has programs of its own: axes of one element need no transposing.
        smaller = sorted(n for n in self._codes if 1 < n < rows)
        larger = sorted(n for n in self._codes if n > rows)
        if rows in self._codes:
            return None
        for below, above in itertools.product(reversed(smaller), larger):
            found = stretched(self.table(below, tensor), self.table(above, tensor), rows)
            if found is not None:
                return found
        return None

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
        whole = hold(dataclasses.replace(self._trace, small=small))
        trace, lengths = open_short(whole, KEPT_LAYERS)
        settings = options.settings()
        code = compile_code(trace, settings, self.machine, None, self.kernels)
        table = layer_table(code, lengths, self.machine, rows)
        if table is None:
            # Layers too small to stand alone were joined with their neighbours: only all of them tell.
            return compile_code(whole, settings, self.machine, None, self.kernels), {}
        self._tables[rows, 1] = table
        return code, lengths
