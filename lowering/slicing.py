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

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import lax
from jax.extend import core as jex

from ratrain_jax import compat
from ratrain_jax.lowering.concatenations import FOLDS
from ratrain_jax.lowering.graph import Atom, Eqn, Var, is_var
from ratrain_jax.lowering.opening import emit
from ratrain_jax.lowering.shard_rules import ELEMENTWISE
from ratrain_jax.lowering.slice_code import SPECIAL
from ratrain_jax.lowering.slice_rules import (
    RULES,
    SLICES,
    PerSlice,
    Sliced,
    Value,
    slice_type,
)

SlicePaths = Callable[[tuple[str, ...], int], tuple[str, ...]]
"""The path of a slice, from that of the stacked parameter and its number."""


class Slicer:
    """Collects equations that work on slices.

    Args:
        paths: names the slices of a parameter of the loss.
        inside_loss: whether custom differentiation rules must be kept.
        consts: takes the arrays that opened code closed over.
        leaves: numbers of the leaves that a variable is made from, if they have its axis 0.
        cut_leaves: takes the leaves behind every array that was cut.
        scouting: whether only `cut_leaves` is wanted; what is cut then comes from nowhere.
        most: how many bodies of a loop over layers are unrolled at most; all unless given.

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
        scouting: bool = False,
        most: int | None = None,
    ) -> None:
        self.paths, self.inside_loss = paths, inside_loss
        self.consts: dict[Var, Any] = {} if consts is None else consts
        self.leaves = dict(leaves or {})
        self.cut_leaves: set[int] = set() if cut_leaves is None else cut_leaves
        self.scouting, self.most = scouting, most
        self.eqns: list[Eqn] = []
        self._env: dict[Var, Value] = {}
        self._stacked: dict[tuple[int, ...], tuple[Sliced, Atom]] = {}
        self._cuts: dict[tuple[Var, int], tuple[Atom, ...]] = {}
        self._uniform: dict[Var, Eqn] = {}
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
                self.add(eqn.replace(invars=operands))

    def whole(self, value: Value) -> Atom:
        """A value as one array."""
        if not isinstance(value, Sliced):
            return value
        key = tuple(map(id, value.slices))
        if key not in self._stacked:
            shape = value.slices[0].aval.shape
            made = self.make(
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
        if is_var(value) and value in self._uniform:
            made = (self._uniform_slice(value),) * count
        elif value.aval.shape[0] == 1:
            made = (self.make(lambda x: lax.squeeze(x, [0]), value),) * count
        elif self.scouting:
            made = tuple(compat.new_var(slice_type(value.aval)) for _ in range(count))
        else:
            made = tuple(
                self.make(lambda x, k=k: lax.index_in_dim(x, k, 0, keepdims=False), value)
                for k in range(count)
            )
        if key is not None:
            self._cuts[key] = made
        return made

    def _uniform_slice(self, var: Var) -> Atom:
        """The one slice of an array that is the same along axis 0."""
        eqn = self._uniform[var]
        if eqn.primitive.name != "broadcast_in_dim":
            operands = [self.cut(a, 1)[0] if a.aval.shape else a for a in eqn.invars]
            out = compat.new_var(slice_type(var.aval))
            self.add(eqn.replace(invars=operands, outvars=[out]))
            return out
        dims, shape = eqn.params["broadcast_dimensions"], eqn.params["shape"][1:]
        (operand,) = eqn.invars
        if operand.aval.shape == shape and dims == tuple(range(1, len(shape) + 1)):
            return operand
        lower = tuple(n - 1 for n in dims)
        return self.make(lambda x: lax.broadcast_in_dim(x, shape, lower), operand)

    def _is_uniform(self, eqn: Eqn) -> bool:
        """Whether the result is the same along axis 0, by how it is made."""
        if not eqn.outvars[0].aval.shape:
            return False
        if eqn.primitive.name == "broadcast_in_dim":
            return len(eqn.invars) == 1 and 0 not in eqn.params["broadcast_dimensions"]
        arrays = [atom for atom in eqn.invars if atom.aval.shape]
        elementwise = eqn.primitive.name in ELEMENTWISE and bool(arrays)
        return elementwise and all(is_var(atom) and atom in self._uniform for atom in arrays)

    def _visit(self, eqn: Eqn, operands: list[Value]) -> Sequence[Value]:
        """The results of an equation, at least one of whose operands is sliced."""
        name = eqn.primitive.name
        special = SPECIAL.get(name)
        if special is not None:
            results = special(self, eqn, operands)
            if results is not None:
                return results
        called = self._called(eqn)
        if called is not None:
            return self.inlined(called, operands)
        if name in RULES:
            how = RULES[name](eqn, [isinstance(value, Sliced) for value in operands])
            if how is not None:
                return self._per_slice(eqn, operands, how)
        outputs = [compat.new_var(var.aval) for var in eqn.outvars]
        self.add(eqn.replace(invars=list(map(self.whole, operands)), outvars=outputs))
        return outputs

    def _called(self, eqn: Eqn) -> jex.ClosedJaxpr | None:
        if eqn.primitive.name in compat.CHECKPOINT_PRIMITIVES and self.inside_loss:
            return None
        key = None if self.inside_loss else compat.CUSTOM_CALLS.get(eqn.primitive.name)
        return compat.called_jaxpr(eqn) if key is None else compat.as_closed(eqn.params[key])

    def inlined(self, closed: jex.ClosedJaxpr, operands: Sequence[Value]) -> list[Value]:
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
            self.add(
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
            total = self.make(FOLDS[combine], total, part)
        return total

    def make(self, fun: Callable[..., Any], *atoms: Atom) -> Atom:
        """What a function gives, said to come from where the equation at hand was written."""
        eqns, (result,) = emit(fun, atoms)
        for eqn in eqns:
            self.add(eqn.replace(source_info=self._source or eqn.source_info))
        return result

    def add(self, eqn: Eqn) -> None:
        """Adds an equation whose operands are atoms."""
        self.eqns.append(eqn)
        if not eqn.outvars:
            return
        if self._is_uniform(eqn):
            self._uniform[eqn.outvars[0]] = eqn
        behind: dict[int, frozenset[int]] = {}
        for atom in eqn.invars:
            if is_var(atom) and atom in self.leaves:
                rows = atom.aval.shape[0]
                behind[rows] = behind.get(rows, frozenset()) | self.leaves[atom]
        for var in eqn.outvars if behind else ():
            if var.aval.shape and var.aval.shape[0] in behind:
                self.leaves[var] = behind[var.aval.shape[0]]

    # Code inside an equation that takes and gives slices.

    def inside(self, inside_loss: bool) -> Slicer:
        """A slicer for code inside an equation."""
        return Slicer(
            self.paths,
            inside_loss=inside_loss,
            cut_leaves=self.cut_leaves,
            scouting=self.scouting,
            most=self.most,
        )

    def shortened(self, count: int) -> int:
        """How many of some slices are worked on."""
        return count if self.most is None else min(count, self.most)

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
