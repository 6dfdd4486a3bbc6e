"""A step to plan for: traced once with the global batch, and once for each size of microbatch that is looked at."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ratrain_jax.errors import BatchError
from ratrain_jax.kernels import Arithmetic, Machine
from ratrain_jax.lowering.lower import compile_code
from ratrain_jax.lowering.stacks import open_short
from ratrain_jax.lowering.trace import Trace
from ratrain_jax.options import Options
from ratrain_jax.planning.layer_table import KEPT_LAYERS, LayerTable, layer_table, stretched
from ratrain_jax.tracing import abstract, microbatch, trace_small, trace_step


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
        trace, lengths = open_short(dataclasses.replace(self._trace, small=small), KEPT_LAYERS)
        code = compile_code(trace, options.settings(), self.machine, None, self.kernels)
        return layer_table(code, lengths, self.machine, rows)


def with_global_batch(
    args: Sequence[Any], rows: int, batch_argnums: Sequence[int] | None
) -> tuple[Any, ...]:
    """The types of a step's arguments, with `rows` examples in every argument that is cut.

    Raises:
        BatchError: arguments disagree on their examples.
    """
    state, *rest = (abstract(arg) for arg in args)
    cut = set(batch_argnums) if batch_argnums is not None else set(range(1, len(args)))
    sizes = {
        leaf.shape[0]
        for n, arg in enumerate(rest, 1)
        for leaf in jax.tree.leaves(arg)
        if n in cut and leaf.shape
    }
    if len(sizes) > 1:
        raise BatchError(
            f"the batch's leaves disagree on axis 0: {sorted(sizes)}; put what is not cut into an argument of its own."
        )

    def resized(leaf: Any) -> Any:
        if not leaf.shape:
            return leaf
        return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)

    return (
        state,
        *(jax.tree.map(resized, arg) if n in cut else arg for n, arg in enumerate(rest, 1)),
    )
