"""What a planner knows of a step: one row a layer, counted from its traced programs.

A model with a scan over layers is traced with three of them, and the row of the middle one stands for all that were left
out; equal layers are costed once. Bytes are those of one device of a data-parallel group that does nothing in shards;
`LayerRow` says what becomes of them when the group does.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

from ratrain_jax.kernels import Machine
from ratrain_jax.lowering.code import StepCode
from ratrain_jax.lowering.cost import aval_bytes
from ratrain_jax.lowering.units import gradient_dtype
from ratrain_jax.planning.code_cost import CodeCost
from ratrain_jax.planning.layer_work import LayerWork, rank_layer_work, whole_work
from ratrain_jax.planning.leaves import Leaf

KEPT_LAYERS = 3
"""Layers of a scan that are traced: the first, the last, and one between them."""


def running(numbers: Sequence[float]) -> list:
    """The sums of all beginnings of some numbers, the empty one first."""
    return list(itertools.accumulate(numbers, initial=0))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LayerRow:
    """One layer, for one microbatch.

    Attributes:
        name: its name.
        kind: rows of one kind have equal programs and equal bytes.
        forward: what its forward asks of the machine.
        backward: what its backward asks.
        parameters: its parameters in the user's state.
        optimizer: the rest of its state.
        gradients: its gradients, as they are accumulated.
        view: bytes of its parameters in compute dtype.
        aliased: those of them that a group of one device need not copy.
        fixed: those of them that no group need copy.
        residuals: bytes that backward needs of forward, its own inputs among them.
        inputs: bytes of what earlier layers hand it: its checkpoint.
        scratch: bytes that its programs hold for a while (an estimate).
        borrows: for each layer whose parameters it reads, its place among the rows, the bytes of their view here, and
            those of their gradients.
        late: whether its update waits for a global reduction.
        checkpointed: whether it holds code under `jax.checkpoint`, so that the runtime recovers it in any case.
    """

    name: str
    kind: int
    forward: CodeCost
    backward: CodeCost
    parameters: tuple[Leaf, ...]
    optimizer: tuple[Leaf, ...]
    gradients: tuple[Leaf, ...]
    view: int
    aliased: int
    fixed: int
    residuals: int
    inputs: int
    scratch: int
    borrows: tuple[tuple[int, int, int], ...]
    late: bool
    checkpointed: bool

    def copied(self, devices: int) -> int:
        """Bytes of its view that each device of a group of so many has beside its state."""
        return self.view - (self.aliased if devices == 1 else self.fixed)


@dataclasses.dataclass(frozen=True, eq=False)
class LayerTable:
    """All layers of a step at one size of microbatch.

    Attributes:
        rows: one a layer, in order.
        rows_per_microbatch: examples of a microbatch.
        cuts: bytes that cross from each layer to the next, for one microbatch; one number fewer than rows.
        operands: for each layer, bytes of the batch that it is the first to read on its stage, for one microbatch.
        layering: for how many stages the layers of the whole step must be found for them to be these. They were found for
            one stage in what was traced of it, and what is too large or too small for a layer goes by what a stage gets.
    """

    rows: tuple[LayerRow, ...]
    rows_per_microbatch: int
    cuts: tuple[int, ...]
    operands: tuple[int, ...]
    layering: float

    @functools.cached_property
    def forward(self) -> list[float]:
        """Seconds of the forwards of the first layers, for each number of them."""
        return running([row.forward.seconds for row in self.rows])

    @functools.cached_property
    def backward(self) -> list[float]:
        """Seconds of their backwards."""
        return running([row.backward.seconds for row in self.rows])

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(math.prod(leaf.shape) for row in self.rows for leaf in row.parameters)


def stretched(small: LayerTable, large: LayerTable, rows: int) -> LayerTable | None:
    """The layers at another size of microbatch, from those at two sizes; None if that needs a trace of its own.

    Args:
        small: at one size.
        large: at another.
        rows: the size wanted.
    """
    if len(small.rows) != len(large.rows):
        return None
    times = (rows - small.rows_per_microbatch) / (
        large.rows_per_microbatch - small.rows_per_microbatch
    )

    def between(one: int, other: int) -> int:
        return round(one + times * (other - one))

    known: dict[tuple[int, int], LayerRow] = {}
    found = []
    for one, other in zip(small.rows, large.rows, strict=True):
        if one.name != other.name:
            return None
        key = (one.kind, other.kind)
        if key not in known:
            forward = one.forward.stretched(other.forward, times)
            backward = one.backward.stretched(other.backward, times)
            if forward is None or backward is None:
                return None
            known[key] = dataclasses.replace(
                one,
                kind=len(known),
                forward=forward,
                backward=backward,
                residuals=between(one.residuals, other.residuals),
                inputs=between(one.inputs, other.inputs),
                scratch=between(one.scratch, other.scratch),
            )
        found.append(dataclasses.replace(known[key], name=one.name))
    return LayerTable(
        tuple(found),
        rows,
        tuple(map(between, small.cuts, large.cuts)),
        tuple(map(between, small.operands, large.operands)),
        small.layering,
    )


def layer_table(
    code: StepCode,
    lengths: dict[str, int],
    machine: Machine,
    rows_per_microbatch: int,
    tensor: int = 1,
) -> LayerTable | None:
    """Counts a step; None if the layers of a scan that was cut short do not stand alone, and so cannot be multiplied.

    Args:
        code: the step on one stage and one device, with scans cut short (`ratrain_jax.lowering.stacks.open_short`).
        lengths: how many layers each scan really has.
        machine: what costs are counted for.
        rows_per_microbatch: examples of a microbatch.
        tensor: tensor-parallel ranks; the table is that of one of them.
    """
    numbers = _expanded([layer.name for layer in code.layered.layers], lengths)
    counter = _Counter(code, machine, numbers, tensor)
    found = [counter.row(n) for n in numbers]
    names = _names([code.layered.layers[n].name for n in numbers], lengths)
    rows = tuple(
        dataclasses.replace(row, name=name) for row, name in zip(found, names, strict=True)
    )
    table = LayerTable(
        rows,
        rows_per_microbatch,
        tuple(counter.cut(n) for n in numbers[:-1]),
        tuple(counter.operands(n) for n in numbers),
        _layering(code, numbers),
    )
    return table if tensor > 1 or table.parameters == _parameters(code, lengths) else None


def _layering(code: StepCode, numbers: Sequence[int]) -> float:
    """How many times what was traced the whole step takes."""
    seconds = [layer.seconds for layer in code.layered.layers]
    return sum(seconds[n] for n in numbers) / sum(seconds)


def _parameters(code: StepCode, lengths: dict[str, int]) -> int:
    """Elements of the parameters of the whole model: those of a scan's layer as often as there are layers left out."""
    total = 0
    for path, aval in zip(map("/".join, code.regions.paths), code.master, strict=True):
        left_out = (n - KEPT_LAYERS for p, n in lengths.items() if f"{p}/1/" in f"{path}/")
        total += math.prod(aval.shape) * (1 + next(left_out, 0))
    return total


def _expanded(names: Sequence[str], lengths: dict[str, int]) -> list[int]:
    """The number of the traced layer that stands for each layer of the model."""
    numbers: list[int] = []
    place = 0
    while place < len(names):
        prefix = next((p for p in lengths if _inside(names[place], f"{p}/1")), None)
        stop = place + 1
        if prefix is not None:
            while stop < len(names) and _inside(names[stop], f"{prefix}/1"):
                stop += 1
        times = 1 if prefix is None else lengths[prefix] - KEPT_LAYERS + 1
        numbers += [*range(place, stop)] * times
        place = stop
    return numbers


def _inside(name: str, group: str) -> bool:
    return name == group or name.startswith(f"{group}/")


def _names(names: Sequence[str], lengths: dict[str, int]) -> list[str]:
    """The names that the layers of the whole model have."""
    found: list[str] = []
    seen: dict[str, int] = {}
    for name in names:
        prefix = next((p for p in lengths if name.startswith(f"{p}/")), None)
        if prefix is None:
            found.append(name)
            continue
        number, _, rest = name[len(prefix) + 1 :].partition("/")
        key = f"{prefix}//{rest}"
        if number == "1":
            seen[key] = seen.get(key, 0) + 1
            number = str(seen[key])
        elif number == "2":
            number = str(lengths[prefix] - 1)
        found.append(f"{prefix}/{number}" + (f"/{rest}" if rest else ""))
    return found


class _Counter:
    """Counts rows; each traced layer once."""

    def __init__(
        self, code: StepCode, machine: Machine, numbers: Sequence[int], tensor: int
    ) -> None:
        self.code, self.machine, self.tensor = code, machine, tensor
        self._place = {n: place for place, n in reversed([*enumerate(numbers)])}
        self._rows: dict[int, LayerRow] = {}
        self._kinds: dict[tuple[Any, ...], int] = {}
        self._works: dict[str, LayerWork] = {}

    def row(self, n: int) -> LayerRow:
        """The row of a traced layer."""
        if n not in self._rows:
            self._rows[n] = self._count(n)
        return self._rows[n]

    def cut(self, n: int) -> int:
        """Bytes that cross from a traced layer to the next."""
        return sum(
            aval_bytes(v.aval)
            for v in self.code.layered.variables
            if v.role == "boundary" and v.producer <= n and any(r > n for r in v.readers)
        )

    def operands(self, n: int) -> int:
        """Bytes of what one microbatch of a traced layer reads of the batch."""
        found = 0
        for o in self.code.layered.layers[n].operands:
            array = self.code.operand_type(o)
            split = self.code.regions.operands[o].split
            found += array.bytes // self.code.microbatches if split else 0
        return found

    def _work(self, n: int) -> LayerWork:
        code = self.code.codes[n]
        if code.fingerprint not in self._works:
            layer = self.code.layered.layers[n]
            self._works[code.fingerprint] = (
                whole_work(layer, code, self.machine)
                if self.tensor == 1
                else rank_layer_work(layer, code, self.machine, self.tensor)
            )
        return self._works[code.fingerprint]

    def _count(self, n: int) -> LayerRow:
        code, layer, layer_code = self.code, self.code.layered.layers[n], self.code.codes[n]
        work = self._work(n)
        share = dict(zip(layer.reads, work.shares, strict=True))
        update = code.update.layers[n]
        kept = sum(aval_bytes(code.layered.variables[v].aval) for v in layer_code.backward_inputs)
        borrows: dict[int, list[int]] = {}
        for p in layer.reads:
            if code.owner[p] != n:
                borrows.setdefault(self._place[code.owner[p]], []).append(p)
        parameters = tuple(
            self._leaf(leaf).part(share.get(p, 1.0))
            for p, leaf in zip(update.params, update.parameters, strict=True)
        )
        # What an optimizer holds of a parameter has its shape, and lies as it does.
        shapes = {tuple(code.master[p].shape): share.get(p, 1.0) for p in update.params}
        optimizer = tuple(
            leaf.part(shapes.get(leaf.shape, 1.0)) for leaf in map(self._leaf, update.optimizer)
        )
        # Equal programs may be updated by different optimizers.
        key = (layer_code.fingerprint, parameters, optimizer)

        def view(p: int) -> int:
            return round(self._view(p) * share.get(p, 1.0))

        def gradient(p: int) -> Leaf:
            return self._gradient(p).part(share.get(p, 1.0))

        def bytes_of_gradients(params: Sequence[int]) -> int:
            return sum(gradient(p).bytes for p in params if p < code.regions.trained)

        return LayerRow(
            name=layer.name,
            kind=self._kinds.setdefault(key, len(self._kinds)),
            forward=work.forward,
            backward=work.backward,
            parameters=parameters,
            optimizer=optimizer,
            gradients=tuple(map(gradient, update.trained)),
            view=sum(map(view, update.params)),
            aliased=sum(map(view, filter(self._same_dtype, update.params))),
            fixed=sum(
                view(p)
                for p, leaf in zip(update.params, update.parameters, strict=True)
                if leaf in code.fixed
            ),
            residuals=kept + work.residuals,
            inputs=sum(aval_bytes(code.layered.variables[v].aval) for v in layer.inputs),
            scratch=work.scratch,
            borrows=tuple(
                (owner, sum(map(view, ps)), bytes_of_gradients(ps))
                for owner, ps in sorted(borrows.items())
            ),
            late=update.phase > 0,
            checkpointed=layer.checkpointed,
        )

    def _leaf(self, leaf: int) -> Leaf:
        aval = self.code.regions.step.invars[leaf].aval
        return Leaf(tuple(aval.shape), aval.dtype.itemsize, leaf in self.code.fixed)

    def _gradient(self, param: int) -> Leaf:
        master = self.code.master[param]
        return Leaf(tuple(master.shape), gradient_dtype(master.dtype).itemsize)

    def _view(self, param: int) -> int:
        return math.prod(self.code.master[param].shape) * self.code.view_dtypes[param].itemsize

    def _same_dtype(self, param: int) -> bool:
        return self.code.view_dtypes[param] == self.code.master[param].dtype
