"""What holds code of its own, or only moves slices: how each such equation takes and gives slices.

A handler is given the slicer, an equation and what stands for its operands, at least one of them sliced (see
`slicing`). It answers with what stands for the results, or with None to leave the equation to the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jax import lax
from jax.extend import core as jex

from ratrain_jax import compat
from ratrain_jax.lowering.graph import Atom, Eqn, Var
from ratrain_jax.lowering.regions import loss_region_p, parameters_of
from ratrain_jax.lowering.slice_rules import Sliced, Value

if TYPE_CHECKING:
    from ratrain_jax.lowering.slicing import Slicer


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
    length, body = slicer.shortened(eqn.params["length"]), compat.as_closed(eqn.params["jaxpr"])
    fixed = [slicer.whole(value) for value in operands[:consts]]
    carry: list[Value] = [slicer.whole(value) for value in operands[consts : consts + carried]]
    slices = [slicer.cut(value, length) for value in scanned]
    made: dict[int, list[Atom]] = {}
    for k in reversed(range(length)) if eqn.params["reverse"] else range(length):
        results = slicer.inlined(body, [*fixed, *carry, *(part[k] for part in slices)])
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
    slicer.add(eqn.replace(invars=[slicer.whole(index), *flat], outvars=outputs, params=params))
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
    slicer.add(eqn.replace(invars=[*outer, *flat], outvars=outputs, params=params))
    return values


def _loss_region(slicer: Slicer, eqn: Eqn, operands: list[Value]) -> list[Value]:
    """The loss, by whose slices it is then differentiated."""
    loss, diff, params = eqn.params["loss"], eqn.params["diff"], parameters_of(eqn)
    given = [value if i in params else slicer.whole(value) for i, value in enumerate(operands)]
    part = slicer.inside(True)
    part.consts.update(zip(loss.jaxpr.constvars, loss.consts, strict=True))
    inputs, flat = slicer.enter(part, loss.jaxpr.invars, given)
    part.run(loss.jaxpr.eqns)
    ends = [part.whole(part.read(atom)) for atom in loss.jaxpr.outvars]
    counts = [len(v.slices) if isinstance(v, Sliced) else 0 for v in given]
    starts = [sum(n or 1 for n in counts[:i]) for i in range(len(counts))]
    places: dict[int, range] = {}
    paths: list[tuple[str, ...]] = []
    for i, path in zip(params, eqn.params["paths"], strict=True):
        places[i] = range(starts[i], starts[i] + (counts[i] or 1))
        paths.extend([slicer.paths(path, k) for k in range(counts[i])] or [path])
    results = [0] * (len(eqn.outvars) - len(diff))
    outputs, values = slicer.results(eqn.outvars, [*results, *(counts[i] for i in diff)])
    changed = {
        **eqn.params,
        "loss": _close(part, inputs, ends),
        "diff": tuple(number for i in diff for number in places[i]),
        "held": tuple(number for i in eqn.params["held"] for number in places[i]),
        "paths": tuple(paths),
    }
    slicer.add(eqn.replace(invars=flat, outvars=outputs, params=changed))
    return values


def _flattened(slicer: Slicer, eqn: Eqn, operands: list[Value]) -> list[Value] | None:
    """A reshape that joins axis 0 with the next ones: the slices, reshaped, one after the other."""
    (value, *others), sizes = operands, tuple(eqn.params["new_sizes"])
    if others or eqn.params.get("dimensions") is not None or not isinstance(value, Sliced):
        return None
    count = len(value.slices)
    if not sizes or sizes[0] % count or sizes[0] == count:
        return None
    shape = (sizes[0] // count, *sizes[1:])
    parts = [slicer.make(lambda x: lax.reshape(x, shape), atom) for atom in value.slices]
    return [slicer.make(lambda *parts: lax.concatenate(parts, 0), *parts)]


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


SPECIAL: dict[str, Callable[[Slicer, Eqn, list[Value]], Sequence[Value] | None]] = {
    "scan": _unrolled,
    "cond": _branches,
    "reshape": _flattened,
    loss_region_p.name: _loss_region,
    **dict.fromkeys(compat.CHECKPOINT_PRIMITIVES, _checkpoint),
    **dict.fromkeys(_HANDING, _handed_out),
}
