"""Opens scans over stacked layers, so that every other pass sees a step whose state has one leaf a layer.

A model written with `nn.scan` or `lax.scan` keeps its layers in stacked leaves: axis 0 counts them.
This pass, the first of all, rewrites the step: each stacked parameter becomes one leaf a layer, and
so does all state that is updated with it (moments, averages); the scan is unrolled over these; the
update, arithmetic on stacked arrays, is done slice by slice, a reduction of a whole stacked leaf by
partial ones and their sum (`slicing`). Scans inside scans are opened one level after the other.

The slices of parameter `layers/attn/kernel` are called `layers/0/attn/kernel` and so on: the number
follows the part of the path that all parameters of the scan share.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from jax.extend import core as jex

from ratrain_jax import compat
from ratrain_jax.lowering.graph import Atom, Graph, Var, inline, is_var, needed
from ratrain_jax.lowering.labels import is_small
from ratrain_jax.lowering.regions import one_region, parameters_of
from ratrain_jax.lowering.slicing import Sliced, Slicer, slice_type
from ratrain_jax.lowering.stacked_scans import scans_of_layers
from ratrain_jax.lowering.trace import Trace

Path = tuple[str, ...]
Part = Any  # int | tuple[Part, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class StackMap:
    """Which leaves of the opened step each leaf of the user's step became.

    A leaf that was opened is a tuple with one part a slice: the number of a leaf, or such a tuple again.

    Attributes:
        states: for each leaf of the user's state: its number, or its slices.
        outputs: the same for each flat output of the user's step.
    """

    states: tuple[Part, ...]
    outputs: tuple[Part, ...]

    @property
    def opened(self) -> bool:
        """Whether there is any stacked leaf."""
        return any(isinstance(part, tuple) for part in (*self.states, *self.outputs))


def flat_parts(part: Part) -> list[int]:
    """The leaves that a part consists of, in order."""
    if not isinstance(part, tuple):
        return [part]
    return [number for inner in part for number in flat_parts(inner)]


def open_stacks(trace: Trace) -> tuple[Trace, StackMap | None]:
    """Opens all scans over stacked layers.

    Args:
        trace: the step, as the user wrote it.

    Returns:
        The step with one leaf a layer, and what became of each leaf. A step without such scans is
        given back as it is, with None.
    """
    opened = StackMap(tuple(range(trace.states)), tuple(range(len(trace.whole.out_avals))))
    while True:
        found = _open_once(trace)
        if found is None:
            return trace, opened if opened.opened else None
        trace, once = found
        opened = StackMap(
            tuple(_composed(part, once.states) for part in opened.states),
            tuple(_composed(part, once.outputs) for part in opened.outputs),
        )


def _composed(part: Part, later: Sequence[Part]) -> Part:
    if isinstance(part, tuple):
        return tuple(_composed(inner, later) for inner in part)
    return later[part]


def open_short(trace: Trace, most: int) -> tuple[Trace, dict[str, int]]:
    """The step of a shallower model: at most the first `most` layers of each outermost scan over layers.

    Its layers cost what those of the whole model cost, and are found sooner.

    Args:
        trace: the step, as the user wrote it.
        most: how many layers of a scan are kept.

    Returns:
        The step with one leaf a layer kept, and for each scan that was cut short the name before its layers' numbers
        (`layers` of `layers/0`) with the number of layers that it really has.
    """
    lengths: dict[str, int] = {}
    found = _open_once(trace, most, lengths)
    if found is None:
        return trace, {}
    return found[0], lengths


def _open_once(
    trace: Trace, most: int | None = None, lengths: dict[str, int] | None = None
) -> tuple[Trace, StackMap] | None:
    """Opens the outermost scans; None if there are none."""
    step = inline(trace.whole)
    region = one_region(step)
    if region is None:
        return None
    number = {var: leaf for leaf, var in enumerate(step.invars[: trace.states])}
    places = parameters_of(region)
    params = [region.invars[i] for i in places]
    scans = [
        [p for p in scan if is_var(params[p]) and params[p] in number]
        for scan in scans_of_layers(region.params["loss"], places)
    ]
    names = _SliceNames([[region.params["paths"][p] for p in scan] for scan in scans if scan])
    split = {number[params[p]] for scan in scans for p in scan}
    if not split:
        return None
    # Moments and averages have to be opened with the parameters: which ones, a first round tells.
    split |= _Opening(step, trace, split, names, scouting=True, most=most).also_stacked()
    while True:
        opening = _Opening(step, trace, split, names, most=most)
        more = opening.also_stacked() - split
        if not more or most is not None:
            break
        split |= more
    if lengths is not None:
        for p in {p for scan in scans for p in scan}:
            count = params[p].aval.shape[0]
            if most is not None and count > most:
                lengths[names.before(region.params["paths"][p])] = count
    whole, out = opening.closed()
    small = whole if trace.small is trace.whole else _open_small(trace, split, names, most)
    parts = opening.parts
    outputs = _numbered(out)
    flat = [n for leaf in range(trace.states) for n in flat_parts(parts[leaf])]
    new = Trace(
        whole=whole,
        small=small,
        names=(*_leaf_names(trace, parts), *trace.names[trace.states :]),
        states=len(flat),
        state_out=_new_outputs(trace, parts, outputs),
        metrics_out=tuple(n for o in trace.metrics_out for n in flat_parts(outputs[o])),
        where=trace.where,
    )
    return new, StackMap(parts, outputs)


def _new_outputs(
    trace: Trace, parts: Sequence[Part], outputs: Sequence[Part]
) -> tuple[int | None, ...]:
    """The output that is each new leaf's new value."""
    new: list[int | None] = []
    for leaf, out in enumerate(trace.state_out):
        count = len(flat_parts(parts[leaf]))
        new.extend([None] * count if out is None else flat_parts(outputs[out]))
    return tuple(new)


def _leaf_names(trace: Trace, parts: Sequence[Part]) -> list[str]:
    names: list[str] = []
    for name, part in zip(trace.names, parts, strict=False):
        names.extend(
            [f"{name}[{k}]" for k in range(len(part))] if isinstance(part, tuple) else [name]
        )
    return names


def _numbered(counts: Sequence[int]) -> tuple[Part, ...]:
    """Numbers for leaves that have some slices each (0: not opened)."""
    numbers = itertools.count()
    return tuple(
        tuple(next(numbers) for _ in range(count)) if count else next(numbers) for count in counts
    )


def _open_small(
    trace: Trace, split: set[int], names: _SliceNames, most: int | None
) -> jex.ClosedJaxpr:
    """The microbatch-sized step, of which only the loss and what it reads is wanted."""
    small = inline(trace.small)
    region = one_region(small)
    if region is None:
        return trace.small
    eqns = needed(small.eqns, region.outvars)[0]
    outvars = tuple(region.outvars)
    graph = dataclasses.replace(small, eqns=tuple(eqns), outvars=outvars)
    loss_only = dataclasses.replace(trace, state_out=(None,) * trace.states)
    return _Opening(graph, loss_only, split, names, most=most).closed()[0]


class _SliceNames:
    """Names the slices of parameters: the number follows what the paths of one scan have in common."""

    def __init__(self, scans: Sequence[Sequence[Path]]) -> None:
        self._shared: dict[Path, int] = {}
        for paths in scans:
            columns = zip(*paths, strict=False)
            shared = len(list(itertools.takewhile(lambda keys: len(set(keys)) == 1, columns)))
            for path in paths:
                self._shared[path] = min(shared, self._shared.get(path, shared))

    def __call__(self, path: Path, number: int) -> Path:
        """The path of a slice. Layers are groups at the top of the tree, as those of an unrolled model are."""
        shared = self._shared.get(path, 0)
        kept = path[: self._outer(path)]
        return (*kept, f"{self.before(path)}/{number}", *path[shared:])

    def before(self, path: Path) -> str:
        """What stands before the number."""
        return "/".join(path[self._outer(path) : self._shared.get(path, 0)] or ("layer",))

    def _outer(self, path: Path) -> bool:
        """Whether the path begins with Flax's outermost key, which is no group of layers."""
        return path[0] == "params" and self._shared.get(path, 0) > 1


class _Opening:
    """A step with some of its leaves in slices.

    Attributes:
        parts: for each leaf: its new number, or the numbers of its slices.
    """

    def __init__(
        self,
        graph: Graph,
        trace: Trace,
        split: set[int],
        names: _SliceNames,
        scouting: bool = False,
        most: int | None = None,
    ) -> None:
        self.graph, self.trace, self.split = graph, trace, split
        states = graph.invars[: trace.states]
        leaves = {
            var: frozenset({leaf})
            for leaf, var in enumerate(states)
            if leaf not in split and var.aval.shape
        }
        self.slicer = Slicer(names, leaves=leaves, scouting=scouting, most=most)
        self.invars: list[Var] = []
        counts = []
        for leaf, var in enumerate(states):
            counts.append(self.slicer.shortened(var.aval.shape[0]) if leaf in split else 0)
            if leaf in split:
                slices = [compat.new_var(slice_type(var.aval)) for _ in range(counts[-1])]
                self.slicer.bind(var, Sliced(tuple(slices)))
                self.invars.extend(slices)
            else:
                self.invars.append(var)
        self.invars.extend(graph.invars[trace.states :])
        self.parts = _numbered(counts)
        self.slicer.run(graph.eqns)

    def also_stacked(self) -> set[int]:
        """Leaves that meet slices, or whose new value is sliced."""
        found = set(self.slicer.cut_leaves)
        for leaf, out in enumerate(self.trace.state_out):
            if out is not None and isinstance(self.slicer.read(self.graph.outvars[out]), Sliced):
                found.add(leaf)
        return found

    def closed(self) -> tuple[jex.ClosedJaxpr, list[int]]:
        """The step, and how many slices each of its outputs now is (0: none)."""
        new_states = {out: leaf for leaf, out in enumerate(self.trace.state_out) if out is not None}
        outvars: list[Atom] = []
        counts = []
        for out, atom in enumerate(self.graph.outvars):
            value = self.slicer.read(atom)
            if new_states.get(out) in self.split:
                slices = self.slicer.cut(value, self.slicer.shortened(atom.aval.shape[0]))
            elif isinstance(value, Sliced) and not is_small(value.slices[0]):
                slices = value.slices
            else:
                slices = ()
            counts.append(len(slices))
            outvars.extend(slices or [self.slicer.whole(value)])
        consts = {**self.graph.consts, **self.slicer.consts}
        closed = compat.closed(
            self.invars, outvars, self.slicer.eqns, list(consts), list(consts.values())
        )
        return closed, counts
