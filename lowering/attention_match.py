"""Finds attention that a loss writes out: softmax(scale·Q·Kᵀ + biases, where masks hold)·V.

The search starts at a product that could be the one with V and walks back, equation by equation, through shape changes and
casts, a softmax, scales, biases and masks, to the product of Q and K.

Terms.
    A **label** names an axis of the probabilities as the product with V reads them: its place among their axes. On the way
    back every axis keeps its label; an axis of size 1 has none (None), wherever it comes from.
    An **extra** is a bias or a mask, with the labels of its own axes.
    **Keys** is the label that the product with V sums over; **batch** are the labels that V shares; **rows** are the others.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ratrain_jax.lowering.graph import Atom, Eqn, Graph, Var, is_var
from ratrain_jax.lowering.rewrite import constant

Labels = tuple[int | None, ...]

FAR = -1e4
"""What is put where a score does not count is this or less."""


@dataclasses.dataclass(frozen=True, slots=True)
class Extra:
    """A bias or a mask.

    Attributes:
        atom: its value.
        labels: of its axes.
        factor: what a bias is multiplied with; for a mask, -1 if it is true where scores do not count.
    """

    atom: Atom
    labels: Labels
    factor: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """An attention that was found.

    Attributes:
        scores: the product of Q and K.
        values: the product with V.
        query: which operand of `scores` is Q.
        weights: which operand of `values` are the probabilities.
        labels: of the axes of `scores`.
        scale: factor of the scores.
        biases: what is added to them.
        masks: where they count.
    """

    scores: Eqn
    values: Eqn
    query: int
    weights: int
    labels: Labels
    scale: float
    biases: tuple[Extra, ...]
    masks: tuple[Extra, ...]


@dataclasses.dataclass(slots=True)
class _Walk:
    """Where a walk back is.

    Attributes:
        atom: the value that it has come to.
        labels: of its axes.
        scale: factor between the value and the softmax.
        biases: met so far.
        masks: met so far.
        read: values that it came through, once for each time that the pattern reads them.
    """

    atom: Atom
    labels: Labels
    scale: float = 1.0
    biases: tuple[Extra, ...] = ()
    masks: tuple[Extra, ...] = ()
    read: tuple[Atom, ...] = ()

    def to(self, atom: Atom, labels: Labels | None = None, **changes: Any) -> _Walk:
        """The walk one value further back."""
        labels = self.labels if labels is None else labels
        read = (*self.read, atom)
        return dataclasses.replace(self, atom=atom, labels=labels, read=read, **changes)


class Finder:
    """Finds the attentions of one graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.makers: dict[Var, Eqn] = {var: eqn for eqn in graph.eqns for var in eqn.outvars}
        self.uses = Counter(a for eqn in graph.eqns for a in eqn.invars if is_var(a))
        self.uses.update(a for a in graph.outvars if is_var(a))

    def maker(self, atom: Atom) -> Eqn | None:
        """What makes an atom."""
        return self.makers.get(atom) if is_var(atom) else None

    def match(self, values: Eqn) -> Match | None:
        """The attention whose product with V an equation is, if it is one.

        Args:
            values: an equation of the graph.
        """
        if values.primitive.name != "dot_general":
            return None
        for weights in (0, 1):
            found = self._from(values, weights)
            if found is not None:
                return found
        return None

    def _from(self, values: Eqn, weights: int) -> Match | None:
        atom = values.invars[weights]
        contracted = values.params["dimension_numbers"][0][weights]
        keys = [axis for axis in contracted if atom.aval.shape[axis] > 1]
        if not is_var(atom) or len(keys) != 1:
            return None
        labels = tuple(i if size > 1 else None for i, size in enumerate(atom.aval.shape))
        walk = self._softmax(self._moved(_Walk(atom, labels, read=(atom,))), keys[0])
        walk = self._scores(walk) if walk is not None else None
        if walk is None:
            return None
        if any(self.uses[var] > reads for var, reads in Counter(walk.read).items()):
            return None  # somebody else wants the scores or the probabilities
        scores = self.maker(walk.atom)
        query = _query_side(scores, walk.labels, keys[0]) if scores is not None else None
        if scores is None or query is None:
            return None
        return Match(
            scores, values, query, weights, walk.labels, walk.scale, walk.biases, walk.masks
        )

    def _moved(self, walk: _Walk) -> _Walk:
        """Past casts and changes of shape that keep every axis."""
        while (further := self._step(walk)) is not None:
            walk = further
        return walk

    def _step(self, walk: _Walk) -> _Walk | None:
        eqn = self.maker(walk.atom)
        step = MOVES.get(eqn.primitive.name) if eqn is not None else None
        labels = step(eqn, walk.labels) if eqn is not None and step is not None else None
        return walk.to(eqn.invars[0], labels) if eqn is not None and labels is not None else None

    def _softmax(self, walk: _Walk, keys: int) -> _Walk | None:
        """From the probabilities to what the softmax is of."""
        quotient = self.maker(walk.atom)
        if quotient is None or quotient.primitive.name != "div":
            return None
        powers = self._reduced(walk.to(quotient.invars[0]), quotient.invars[1], "reduce_sum", keys)
        power = self.maker(self._moved(powers).atom) if powers is not None else None
        if powers is None or power is None or power.primitive.name != "exp":
            return None
        walk = self._moved(powers).to(power.invars[0])
        shift = self.maker(walk.atom)
        if shift is not None and shift.primitive.name == "sub":
            shifted = self._reduced(walk.to(shift.invars[0]), shift.invars[1], "reduce_max", keys)
            walk = shifted or walk
        return walk if is_var(walk.atom) else None

    def _reduced(self, walk: _Walk, atom: Atom, name: str, keys: int) -> _Walk | None:
        """On to the value whose reduction along the keys another atom broadcasts back, if it comes to one."""
        while (eqn := self.maker(atom)) is not None and eqn.primitive.name != name:
            if eqn.primitive.name == "max" and not is_var(eqn.invars[0]):
                atom = eqn.invars[1]  # jnp.max starts from -inf
            elif eqn.primitive.name in _TRANSPARENT:
                atom = eqn.invars[0]
            else:
                return None
        if eqn is None:
            return None
        while walk.atom is not eqn.invars[0]:
            further = self._step(walk)
            if further is None:
                return None
            walk = further
        reduced = {walk.labels[axis] for axis in eqn.params["axes"]} - {None}
        return walk.to(walk.atom) if reduced == {keys} else None  # the reduction reads it, too

    def _scores(self, walk: _Walk) -> _Walk | None:
        """From what the softmax is of to the product of Q and K."""
        walk = self._moved(walk)
        eqn = self.maker(walk.atom)
        if eqn is None or eqn.primitive.name == "dot_general":
            return walk if eqn is not None else None
        rule = _RULES.get(eqn.primitive.name)
        for after in rule(self, eqn, walk) if rule is not None else ():
            whole = is_var(after.atom) and after.atom.aval.shape == walk.atom.aval.shape
            found = self._scores(after) if whole else None
            if found is not None:
                return found
        return None

    def number(self, atom: Atom) -> float | None:
        """The one number that an atom holds everywhere, if it is known."""
        while (eqn := self.maker(atom)) is not None and eqn.primitive.name in _TRANSPARENT:
            atom = eqn.invars[0]
        if is_var(atom) and atom.aval.size != 1:
            return None
        value = constant(self.graph, atom)
        return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None

    def extra(self, atom: Atom, labels: Labels, factor: float = 1.0) -> Extra:
        """A bias or mask as it was before it was broadcast."""
        labels = _where_long(labels, atom)
        while (eqn := self.maker(atom)) is not None and eqn.primitive.name == "broadcast_in_dim":
            source = eqn.invars[0]
            if not is_var(source):
                break
            places = map(int, eqn.params["broadcast_dimensions"])
            labels = _where_long([labels[place] for place in places], source)
            atom = source
        return Extra(atom, labels, factor)


def _where_long(labels: Sequence[int | None], atom: Atom) -> Labels:
    """Labels of an atom that broadcasts: none where it has one element."""
    pairs = zip(labels, atom.aval.shape, strict=True)
    return tuple(label if size > 1 else None for label, size in pairs)


def _query_side(scores: Eqn, labels: Labels, keys: int) -> int | None:
    """Which operand of a product is Q: the one whose free axes are not the keys."""
    (left, _), (batch, _) = scores.params["dimension_numbers"]
    free = scores.invars[0].aval.ndim - len(left) - len(batch)
    first = set(labels[len(batch) : len(batch) + free]) - {None}
    second = set(labels[len(batch) + free :]) - {None}
    if second == {keys} and keys not in first:
        return 0
    return 1 if first == {keys} and keys not in second else None


# --- how equations carry labels back ------------------------------------------------------------


def _same(eqn: Eqn, labels: Labels) -> Labels | None:
    source = eqn.invars[0].aval.dtype
    return labels if jnp.issubdtype(source, jnp.floating) else None


def _transposed(eqn: Eqn, labels: Labels) -> Labels | None:
    back: list[int | None] = [None] * len(labels)
    for place, axis in enumerate(eqn.params["permutation"]):
        back[int(axis)] = labels[place]
    return tuple(back)


def _reshaped(eqn: Eqn, labels: Labels) -> Labels | None:
    """Through a reshape that only adds and removes axes of size 1."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if [size for size in before if size > 1] != [size for size in after if size > 1]:
        return None
    kept = iter([label for label, size in zip(labels, after, strict=True) if size > 1])
    return tuple(next(kept) if size > 1 else None for size in before)


MOVES: dict[str, Callable[[Eqn, Labels], Labels | None]] = {
    "convert_element_type": _same,
    "copy": _same,
    "reduce_precision": _same,
    "transpose": _transposed,
    "reshape": _reshaped,
    "squeeze": _reshaped,
    "expand_dims": _reshaped,
    "broadcast_in_dim": _reshaped,
}
"""Equations that keep all axes: labels of the result → labels of the input."""

_TRANSPARENT = frozenset(
    {"broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "reshape", "squeeze"}
    | {"stop_gradient", "transpose"}
)


# --- what may stand between the product and the softmax -----------------------------------------


def _scaled(finder: Finder, eqn: Eqn, walk: _Walk) -> Sequence[_Walk]:
    found = []
    for place in (0, 1):
        number = finder.number(eqn.invars[1 - place])
        if number is None or (eqn.primitive.name == "div" and place == 1) or number == 0:
            continue
        factor = number if eqn.primitive.name == "mul" else 1 / number
        found.append(walk.to(eqn.invars[place], scale=walk.scale * factor))
    return found


def _biased(finder: Finder, eqn: Eqn, walk: _Walk) -> Sequence[_Walk]:
    found = []
    for place in (0, 1):
        if eqn.primitive.name == "sub" and place == 1:
            continue
        other = eqn.invars[1 - place]
        sign = -1.0 if eqn.primitive.name == "sub" else 1.0
        biases = walk.biases
        if finder.number(other) is None:  # the same number everywhere changes no softmax
            biases = (*biases, finder.extra(other, walk.labels, sign * walk.scale))
        found.append(walk.to(eqn.invars[place], biases=biases))
    return found


def _masked(finder: Finder, eqn: Eqn, walk: _Walk) -> Sequence[_Walk]:
    if len(eqn.invars) != 3 or walk.scale <= 0:
        return ()
    mask, *cases = eqn.invars
    if mask.aval.ndim != len(walk.labels):
        return ()
    found = []
    for place, sign in ((1, 1.0), (0, -1.0)):
        number = finder.number(cases[1 - place])
        if number is not None and number * walk.scale <= FAR:
            masks = (*walk.masks, finder.extra(mask, walk.labels, sign))
            found.append(walk.to(cases[place], masks=masks))
    return found


_RULES: dict[str, Callable[[Finder, Eqn, _Walk], Sequence[_Walk]]] = {
    "add": _biased,
    "sub": _biased,
    "mul": _scaled,
    "div": _scaled,
    "select_n": _masked,
}
"""What may stand between: the ways back from it."""


def is_causal(value: np.ndarray, labels: Labels, query: int, keys: int) -> bool:
    """Whether a mask is true exactly where a key is no later than the query.

    Args:
        value: the mask.
        labels: of its axes.
        query: label of the queries.
        keys: label of the keys.
    """
    if query not in labels or keys not in labels:
        return False
    others = [axis for axis, label in enumerate(labels) if label not in (query, keys)]
    square: Any = value.all(axis=tuple(others))
    if (square != value.any(axis=tuple(others))).any():
        return False  # it is not the same for all heads
    if labels.index(keys) < labels.index(query):
        square = square.T
    return bool((square == np.tri(square.shape[0], square.shape[1], dtype=bool)).all())
