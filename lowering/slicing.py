"""Works on stacked arrays slice by slice.

Terms.
    A **stacked** array holds one **slice** a layer along axis 0. It is **sliced** where it is known
    by its slices, each a variable of its own; the stacked array then exists only if an equation
    needs it. To **cut** an array is to take its slices.

A `Slicer` walks over equations, some of whose inputs are sliced. `slice_rules` says what a primitive
does to each slice; a `scan` over sliced arrays is unrolled; calls and branches are gone through, and
take and give slices. Whatever else meets a sliced array gets it stacked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core
from jax import lax
from jax.extend import core as jex

from ratrain_jax import compat
from ratrain_jax.lowering.concatenations import FOLDS
from ratrain_jax.lowering.graph import Atom, Eqn, Var, is_var
from ratrain_jax.lowering.opening import CUSTOM_CALLS, emit
from ratrain_jax.lowering.regions import loss_region_p
from ratrain_jax.lowering.slice_rules import RULES, SLICES, PerSlice

SlicePaths = Callable[[tuple[str, ...], int], tuple[str, ...]]
"""The path of a slice, from that of the stacked parameter and its number."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sliced:
    """A stacked array that is known by its slices."""

    slices: tuple[Atom, ...]


Value = Any  # Atom or Sliced


class Slicer:
    """Collects equations that work on slices.

    Args:
        paths: names the slices of a parameter of the loss.
        inside_loss: whether custom differentiation rules must be kept.
        consts: takes the arrays that opened code closed over.
        leaves: numbers of the leaves that a variable is made from, if they have its axis 0.
        cut_leaves: takes the leaves behind every array that was cut.

    Attributes:
        eqns: the equations.
    """

    def __init__(
        self,
        paths: SlicePaths,
        *,
        inside_loss: bool = False,
        consts: dict[Var, Any] | None = None,
        leaves: Mapping[Var, frozenset[int]] | None = None,
        cut_leaves: set[int] | None = None,
    ) -> None:
        self.paths, self.inside_loss = paths, inside_loss
        self.consts: dict[Var, Any] = {} if consts is None else consts
        self.leaves = dict(leaves or {})
        self.cut_leaves: set[int] = set() if cut_leaves is None else cut_leaves
        self.eqns: list[Eqn] = []
        self._env: dict[Var, Value] = {}
        self._stacked: dict[tuple[int, ...], tuple[Sliced, Atom]] = {}
        self._cuts: dict[tuple[Var, int], tuple[Atom, ...]] = {}
        self._broadcasts: dict[Var, Eqn] = {}
        self._source: Any = None

    def bind(self, var: Var, value: Value) -> None:
        """Says what stands for a variable."""
        self._env[var] = value

    def read(self, atom: Atom) -> Value:
        """What stands for an atom."""
        return self._env.get(atom, atom) if is_var(atom) else atom

    def run(self, eqns: Sequence[Eqn]) -> None:
        """Walks over equations whose variables occur nowhere else."""
        for eqn in eqns:
            operands = [self.read(atom) for atom in eqn.invars]
            self._source = eqn.source_info
            if any(isinstance(value, Sliced) for value in operands):
                results = self._visit(eqn, operands)
                self._env.update(zip(eqn.outvars, results, strict=True))
            else:
                self._add(eqn.replace(invars=operands))

    def whole(self, value: Value) -> Atom:
        """A value as one array."""
        if not isinstance(value, Sliced):
            return value
        key = tuple(map(id, value.slices))
        if key not in self._stacked:
            shape = value.slices[0].aval.shape
            made = self._make(
                lambda *slices: lax.concatenate(
                    [
                        lax.broadcast_in_dim(s, (1, *shape), range(1, len(shape) + 1))
                        for s in slices
                    ],
                    0,
                ),
                *value.slices,
            )
            self._stacked[key] = (value, made)
        return self._stacked[key][1]

    def cut(self, value: Value, count: int) -> tuple[Atom, ...]:
        """The slices of an array whose axis 0 counts `count` of them, or 1 that serves all."""
        if isinstance(value, Sliced):
            return value.slices
        key = (value, count) if is_var(value) else None
        if key is not None and key in self._cuts:
            return self._cuts[key]
        if is_var(value) and value.aval.shape[0] == count:
            self.cut_leaves |= self.leaves.get(value, frozenset())
        made = self._cut_broadcast(value, count)
        if made is None and value.aval.shape[0] == 1:
            made = (self._make(lambda x: lax.squeeze(x, [0]), value),) * count
        if made is None:
            made = tuple(
                self._make(lambda x, k=k: lax.index_in_dim(x, k, 0, keepdims=False), value)
                for k in range(count)
            )
        if key is not None:
            self._cuts[key] = made
        return made

    def _cut_broadcast(self, value: Value, count: int) -> tuple[Atom, ...] | None:
        """The slices of an array that is the same along axis 0."""
        eqn = self._broadcasts.get(value) if is_var(value) else None
        if eqn is None:
            return None
        dims, shape = eqn.params["broadcast_dimensions"], eqn.params["shape"][1:]
        (operand,) = eqn.invars
        if operand.aval.shape == shape and dims == tuple(range(1, len(shape) + 1)):
            return (operand,) * count
        lower = tuple(n - 1 for n in dims)
        return (self._make(lambda x: lax.broadcast_in_dim(x, shape, lower), operand),) * count

    def _visit(self, eqn: Eqn, operands: list[Value]) -> Sequence[Value]:
        """The results of an equation, at least one of whose operands is sliced."""
        name = eqn.primitive.name
        special = _SPECIAL.get(name) or (_handed_out if name in _HANDING else None)
        if special is not None:
            results = special(self, eqn, operands)
            if results is not None:
                return results
        called = self._called(eqn)
        if called is not None:
            return self._inlined(called, operands)
        if name in RULES:
            how = RULES[name](eqn, [isinstance(value, Sliced) for value in operands])
            if how is not None:
                return self._per_slice(eqn, operands, how)
        outputs = [compat.new_var(var.aval) for var in eqn.outvars]
        self._add(eqn.replace(invars=list(map(self.whole, operands)), outvars=outputs))
        return outputs

    def _called(self, eqn: Eqn) -> jex.ClosedJaxpr | None:
        if eqn.primitive.name in compat.CHECKPOINT_PRIMITIVES and self.inside_loss:
            return None
        key = None if self.inside_loss else CUSTOM_CALLS.get(eqn.primitive.name)
        return compat.called_jaxpr(eqn) if key is None else compat.as_closed(eqn.params[key])

    def _inlined(self, closed: jex.ClosedJaxpr, operands: Sequence[Value]) -> list[Value]:
        """The results of a jaxpr, whose equations get fresh variables."""
        jaxpr, outer = closed.jaxpr, self._env
        self._env = dict(zip(jaxpr.invars, operands, strict=True))
        for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
            self._env[var] = compat.new_var(var.aval)
            self.consts[self._env[var]] = value
        for eqn in jaxpr.eqns:
            fresh = [compat.new_var(var.aval) for var in eqn.outvars]
            renamed = eqn.replace(outvars=fresh)
            self.run([renamed])
            self._env.update(
                (var, self.read(new)) for var, new in zip(eqn.outvars, fresh, strict=True)
            )
        results = [self.read(atom) for atom in jaxpr.outvars]
        self._env = outer
        return results

    def _per_slice(self, eqn: Eqn, operands: Sequence[Value], how: PerSlice) -> list[Value]:
        count = next(len(v.slices) for v in operands if isinstance(v, Sliced))
        taken = [
            self.cut(value, count) if cut else (self.whole(value),) * count
            for value, cut in zip(operands, how.takes, strict=True)
        ]
        avals = [
            slice_type(var.aval) if gives == SLICES else var.aval
            for var, gives in zip(eqn.outvars, how.gives, strict=True)
        ]
        made: list[list[Atom]] = []
        for k in range(count):
            outputs = [compat.new_var(aval) for aval in avals]
            params = {**eqn.params, **how.params}
            self._add(
                eqn.replace(invars=[slices[k] for slices in taken], outvars=outputs, params=params)
            )
            made.append(outputs)
        return [
            Sliced(slices) if gives == SLICES else self._folded(slices, gives)
            for slices, gives in zip(zip(*made, strict=True), how.gives, strict=True)
        ]

    def _folded(self, parts: Sequence[Atom], combine: str) -> Atom:
        total = parts[0]
        for part in parts[1:]:
            total = self._make(FOLDS[combine], total, part)
        return total

    def _make(self, fun: Callable[..., Any], *atoms: Atom) -> Atom:
        """What a function gives, said to come from where the equation at hand was written."""
        eqns, (result,) = emit(fun, atoms)
        for eqn in eqns:
            self._add(eqn.replace(source_info=self._source or eqn.source_info))
        return result

    def _add(self, eqn: Eqn) -> None:
        self.eqns.append(eqn)
        if not eqn.outvars:
            return
        out = eqn.outvars[0]
        repeats = eqn.primitive.name == "broadcast_in_dim" and len(eqn.invars) == 1
        if repeats and out.aval.shape and 0 not in eqn.params["broadcast_dimensions"]:
            self._broadcasts[out] = eqn
        for var in eqn.outvars:
            behind = [
                self.leaves[atom]
                for atom in eqn.invars
                if is_var(atom)
                and atom in self.leaves
                and atom.aval.shape[:1] == var.aval.shape[:1]
            ]
            if behind:
                self.leaves[var] = frozenset().union(*behind)

    # Code inside an equation that takes and gives slices.

    def inside(self, inside_loss: bool) -> Slicer:
        """A slicer for code inside an equation."""
        return Slicer(self.paths, inside_loss=inside_loss, cut_leaves=self.cut_leaves)

    def enter(
        self, inner: Slicer, invars: Sequence[Var], operands: Sequence[Value]
    ) -> tuple[list[Var], list[Atom]]:
        """The inputs that inner code gets instead of `invars`, and the atoms to hand over for them."""
        inputs: list[Var] = []
        given: list[Atom] = []
        for var, value in zip(invars, operands, strict=True):
            if isinstance(value, Sliced):
                slices = tuple(compat.new_var(atom.aval) for atom in value.slices)
                inner.bind(var, Sliced(slices))
                inputs.extend(slices)
                given.extend(value.slices)
            else:
                inputs.append(var)
                given.append(value)
                if is_var(value) and value in self.leaves:
                    inner.leaves[var] = self.leaves[value]
        return inputs, given

    def results(
        self, outvars: Sequence[Var], counts: Sequence[int]
    ) -> tuple[list[Var], list[Value]]:
        """Fresh outputs of an equation that gives slices (of a count; 0 for none), and what stands for the old ones."""
        outputs: list[Var] = []
        values: list[Value] = []
        for var, count in zip(outvars, counts, strict=True):
            made = [
                compat.new_var(slice_type(var.aval) if count else var.aval)
                for _ in range(count or 1)
            ]
            outputs.extend(made)
            values.append(Sliced(tuple(made)) if count else made[0])
        return outputs, values


def slice_type(aval: Any) -> Any:
    """The type of one slice of a stacked array."""
    return jax.core.ShapedArray(aval.shape[1:], aval.dtype, weak_type=aval.weak_type)


def _counts(*cases: Sequence[Value]) -> list[int]:
    """For each result, how many slices it has in any of some cases; 0 if it is sliced in none."""
    return [
        max(len(value.slices) if isinstance(value, Sliced) else 0 for value in values)
        for values in zip(*cases, strict=True)
    ]


def _flat(slicer: Slicer, values: Sequence[Value], counts: Sequence[int]) -> list[Atom]:
    flat: list[Atom] = []
    for value, count in zip(values, counts, strict=True):
        flat.extend(slicer.cut(value, count) if count else [slicer.whole(value)])
    return flat


def _unrolled(slicer: Slicer, eqn: Eqn, operands: list[Value]) -> list[Value] | None:
    """A loop over sliced arrays, one body a slice."""
    consts, carried = compat.scan_counts(eqn)
    scanned = operands[consts + carried :]
    if not any(isinstance(value, Sliced) for value in scanned):
        return None
    length, body = eqn.params["length"], compat.as_closed(eqn.params["jaxpr"])
    fixed = [slicer.whole(value) for value in operands[:consts]]
    carry: list[Value] = [slicer.whole(value) for value in operands[consts : consts + carried]]
    slices = [slicer.cut(value, length) for value in scanned]
    made: dict[int, list[Atom]] = {}
    for k in reversed(range(length)) if eqn.params["reverse"] else range(length):
        results = slicer._inlined(body, [*fixed, *carry, *(part[k] for part in slices)])
        results = [slicer.whole(value) for value in results]
        carry, made[k] = results[:carried], results[carried:]
    stacked = zip(*(made[k] for k in range(length)), strict=True)
    return [*carry, *map(Sliced, stacked)]


def _branches(slicer: Slicer, eqn: Eqn, operands: list[Value]) -> list[Value]:
    """A `cond` whose branches take and give slices."""
    index, *given = operands
    inner, results = [], []
    for branch in map(compat.as_closed, eqn.params["branches"]):
        part = slicer.inside(slicer.inside_loss)
        jaxpr = branch.jaxpr
        part.consts.update(zip(jaxpr.constvars, branch.consts, strict=True))
        inputs, flat = slicer.enter(part, jaxpr.invars, given)
        part.run(jaxpr.eqns)
        inner.append((part, inputs))
        results.append([part.read(atom) for atom in jaxpr.outvars])
    counts = _counts(*results)
    branches = tuple(
        _close(part, inputs, _flat(part, values, counts))
        for (part, inputs), values in zip(inner, results, strict=True)
    )
    outputs, values = slicer.results(eqn.outvars, counts)
    params = {**eqn.params, "branches": branches}
    slicer._add(eqn.replace(invars=[slicer.whole(index), *flat], outvars=outputs, params=params))
    return values


def _close(slicer: Slicer, inputs: Sequence[Var], outputs: Sequence[Atom]) -> jex.ClosedJaxpr:
    consts = slicer.consts
    return compat.closed(inputs, outputs, slicer.eqns, list(consts), list(consts.values()))


def _checkpoint(slicer: Slicer, eqn: Eqn, operands: list[Value]) -> list[Value] | None:
    """A `jax.checkpoint` region that takes and gives slices; outside of the loss it is a plain call."""
    called = compat.called_jaxpr(eqn)
    if not slicer.inside_loss or called is None:
        return None
    part = slicer.inside(True)
    part.consts.update(zip(called.jaxpr.constvars, called.consts, strict=True))
    inputs, flat = slicer.enter(part, called.jaxpr.invars, operands)
    part.run(called.jaxpr.eqns)
    results = [part.read(atom) for atom in called.jaxpr.outvars]
    counts = _counts(results)
    ends = _flat(part, results, counts)
    # The region is held as a jaxpr that closes over nothing: its arrays are handed over.
    outer = [compat.new_var(var.aval) for var in part.consts]
    slicer.consts.update(zip(outer, part.consts.values(), strict=True))
    inner = compat.closed([*part.consts, *inputs], ends, part.eqns)
    outputs, values = slicer.results(eqn.outvars, counts)
    params = {**eqn.params, compat.CALL_PRIMITIVES[eqn.primitive.name]: inner.jaxpr}
    slicer._add(eqn.replace(invars=[*outer, *flat], outvars=outputs, params=params))
    return values


def _loss_region(slicer: Slicer, eqn: Eqn, operands: list[Value]) -> list[Value]:
    """The loss, by whose slices it is then differentiated."""
    loss, diff = eqn.params["loss"], eqn.params["diff"]
    given = [value if i in diff else slicer.whole(value) for i, value in enumerate(operands)]
    part = slicer.inside(True)
    part.consts.update(zip(loss.jaxpr.constvars, loss.consts, strict=True))
    inputs, flat = slicer.enter(part, loss.jaxpr.invars, given)
    part.run(loss.jaxpr.eqns)
    ends = [part.whole(part.read(atom)) for atom in loss.jaxpr.outvars]
    counts = [len(v.slices) if isinstance(v, Sliced) else 0 for v in given]
    starts = [sum(n or 1 for n in counts[:i]) for i in range(len(counts))]
    numbers, paths = [], []
    for i, path in zip(diff, eqn.params["paths"], strict=True):
        numbers.extend(range(starts[i], starts[i] + (counts[i] or 1)))
        paths.extend([slicer.paths(path, k) for k in range(counts[i])] or [path])
    results = [0] * (len(eqn.outvars) - len(diff))
    outputs, values = slicer.results(eqn.outvars, [*results, *(counts[i] for i in diff)])
    params = {
        **eqn.params,
        "loss": _close(part, inputs, ends),
        "diff": tuple(numbers),
        "paths": tuple(paths),
    }
    slicer._add(eqn.replace(invars=flat, outvars=outputs, params=params))
    return values


_HANDING = frozenset(
    {"slice", "split", "squeeze", "concatenate", "unstack", "optimization_barrier"}
)


def _handed_out(slicer: Slicer, eqn: Eqn, operands: list[Value]) -> list[Value] | None:
    """What only chooses among slices, or joins them, hands them out as they are."""
    name, params, first = eqn.primitive.name, eqn.params, operands[0]
    if name == "optimization_barrier":
        return operands
    if name == "concatenate":
        if params["dimension"] or not all(isinstance(value, Sliced) for value in operands):
            return None
        return [Sliced(tuple(atom for value in operands for atom in value.slices))]
    if not isinstance(first, Sliced):
        return None
    if name == "slice":
        shape, strides = eqn.invars[0].aval.shape, params["strides"] or (1,)
        if eqn.outvars[0].aval.shape[1:] != shape[1:]:
            return None
        start, stop = params["start_indices"][0], params["limit_indices"][0]
        return [Sliced(first.slices[start : stop : strides[0]])]
    if name == "split" and params["axis"] == 0:
        ends = [sum(params["sizes"][: i + 1]) for i in range(len(params["sizes"]))]
        return [
            Sliced(first.slices[end - size : end])
            for end, size in zip(ends, params["sizes"], strict=True)
        ]
    if name == "squeeze" and params["dimensions"] == (0,):
        return [first.slices[0]]
    if name == "unstack" and params["axis"] == 0:
        return list(first.slices)
    return None


_SPECIAL: dict[str, Callable[[Slicer, Eqn, list[Value]], Sequence[Value] | None]] = {
    "scan": _unrolled,
    "cond": _branches,
    loss_region_p.name: _loss_region,
    **dict.fromkeys(compat.CHECKPOINT_PRIMITIVES, _checkpoint),
    **dict.fromkeys(_HANDING, _handed_out),
}
