"""Labels every value of the update by what it depends on, with no list of known optimizers.

Terms.
    A value is **small** if it has at most one element. Its kind (`Kind`) is one of
        REPLICATED  depends on state that belongs to no layer (counters), and on constants
        LAYER       of one layer: its gradients, its state, and what is computed of them
        SCALAR      what a layer's arrays were reduced to, and what is computed of that alone
        GLOBAL      depends on scalars of several layers, on the loss, or on the batch
    The **users** of a value are the layers whose new state depends on it, not counting what comes
    out of a further reduction.

What several kinds give together. An array of a layer keeps what meets it in that layer: scalars of
other layers and global ones are brought to it. Two scalars of different layers, or a layer's and a
global one, stay in a layer only if that layer alone uses the result; else the result is global.
Arrays of two layers do not meet: that is refused by name.

A state leaf belongs to the layer that its new value belongs to, taking it for replicated at first
and looking afresh until nothing changes. An array that never changes belongs to the only layer that
uses it.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from ratrain_jax.errors import UnsupportedError
from ratrain_jax.lowering.graph import Atom, Eqn, Var, is_var


class Kind(enum.Enum):
    """What a value depends on; see the module's terms."""

    REPLICATED = enum.auto()
    LAYER = enum.auto()
    SCALAR = enum.auto()
    GLOBAL = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """The label of one value.

    Attributes:
        kind: its kind.
        layer: whose it is, if LAYER or SCALAR.
        phase: how many global reductions must be over before it can be computed.
        batch: whether the batch reaches it otherwise than through the loss (GLOBAL only).
    """

    kind: Kind
    layer: int = -1
    phase: int = 0
    batch: bool = False

    @property
    def owned(self) -> bool:
        """Whether it belongs to a layer."""
        return self.kind is Kind.LAYER or self.kind is Kind.SCALAR

    @property
    def arrival(self) -> int:
        """The reduction that can bring it elsewhere."""
        return self.phase + 1 if self.owned else self.phase


REPLICATED = Mark(Kind.REPLICATED)


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """The update region, opened.

    Attributes:
        eqns: its equations, in order, none of them dead.
        states: the state's leaves.
        batch: the batch's leaves.
        grads: the layer of each gradient.
        params: the layer of each leaf that is a parameter.
        results: the loss and the auxiliary values.
        state_out: for each leaf its new value (itself, if the step returns none).
        metrics: the step's outputs that are no new state.
        kept: leaves that the loss reads as they are; one of them that never changes stays
            replicated.
    """

    eqns: tuple[Eqn, ...]
    states: tuple[Var, ...]
    batch: tuple[Var, ...]
    grads: Mapping[Var, int]
    params: Mapping[int, int]
    results: tuple[Var, ...]
    state_out: tuple[Atom, ...]
    metrics: tuple[Atom, ...]
    kept: frozenset[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Labels:
    """The labels of a whole update.

    Attributes:
        marks: the label of each variable.
        home: the layer of each state leaf; None for a replicated one.
        makers: the equation that makes each variable.
        mixed: equations where arrays of several layers meet; `check_labels` refuses them.
    """

    marks: Mapping[Var, Mark]
    home: tuple[int | None, ...]
    makers: Mapping[Var, Eqn]
    mixed: tuple[Eqn, ...]

    def mark(self, atom: Atom) -> Mark:
        """The label of an atom; constants are replicated."""
        return self.marks.get(atom, REPLICATED) if is_var(atom) else REPLICATED


def is_small(atom: Atom) -> bool:
    """Whether a value has at most one element."""
    return math.prod(atom.aval.shape) <= 1


def find_labels(update: Update) -> Labels:
    """Labels an update."""
    home = dict(update.params)
    found = home
    while found:
        marks, mixed = _propagate(update, home, find_users(update, home))
        found = _new_homes(update, home, marks) or _constant_homes(update, home, marks)
        home.update(found)
    makers = {var: eqn for eqn in update.eqns for var in eqn.outvars}
    homes = tuple(home.get(leaf) for leaf in range(len(update.states)))
    return Labels(marks, homes, makers, tuple(mixed))


def check_labels(
    update: Update, labels: Labels, names: Sequence[str] = (), layer_names: Sequence[str] = ()
) -> None:
    """Refuses an update that cannot be split by layer.

    Args:
        update: the update.
        labels: its labels.
        names: the path of each state leaf, for messages.
        layer_names: the name of each layer, for messages.

    Raises:
        UnsupportedError: arrays of several layers meet in one equation, or in one state leaf.
    """

    def name(layer: int | None) -> str:
        if layer is None or layer >= len(layer_names):
            return str(layer)
        return f"`{layer_names[layer]}`"

    if labels.mixed:
        eqn = labels.mixed[0]
        layers = sorted({labels.mark(a).layer for a in eqn.invars if labels.mark(a).owned})
        raise UnsupportedError(
            f"the update joins arrays of the layers {', '.join(map(name, layers))} in"
            f" `{eqn.primitive.name}` ({origin(eqn)}). Each layer is updated on its own device group:"
            " reduce the arrays to scalars leaf by leaf before you join them."
        )
    for leaf, atom in enumerate(update.state_out):
        mark, home = labels.mark(atom), labels.home[leaf]
        if mark.kind is Kind.LAYER and mark.layer != home and not is_small(atom):
            path = names[leaf] if leaf < len(names) else f"leaf {leaf}"
            raise UnsupportedError(
                f"the new value of {path} in the state, which belongs to the layer {name(home)}, is an"
                f" array of the layer {name(mark.layer)}. The update of a layer may only read other layers"
                " through scalars."
            )


STATE = 1
"""The user that is no layer: state that belongs to none (yet). Layer n is the bit `_bit(n)`."""


def _bit(layer: int) -> int:
    return 2 << layer


def find_users(update: Update, home: Mapping[int, int]) -> dict[Var, int]:
    """The users of each variable, as a set of bits.

    Args:
        update: the update.
        home: the layer of each state leaf that is known to belong to one.
    """
    users: dict[Var, int] = {}

    def add(atom: Atom, bits: int) -> None:
        if is_var(atom):
            users[atom] = users.get(atom, 0) | bits

    for leaf, (var, atom) in enumerate(zip(update.states, update.state_out, strict=True)):
        if atom is not var or leaf in home:
            add(atom, _bit(home[leaf]) if leaf in home else STATE)
    for eqn in reversed(update.eqns):
        bits = 0
        for var in eqn.outvars:
            bits |= users.get(var, 0)
        for atom in () if _reduces(eqn) else eqn.invars:
            add(atom, bits)
    return users


def _propagate(
    update: Update, home: Mapping[int, int], users: Mapping[Var, int]
) -> tuple[dict[Var, Mark], list[Eqn]]:
    """Labels forward; also gives the equations where arrays of several layers meet."""
    marks: dict[Var, Mark] = {}
    for leaf, var in enumerate(update.states):
        marks[var] = Mark(Kind.LAYER, home[leaf]) if leaf in home else REPLICATED
    for var in update.batch:
        marks[var] = Mark(Kind.GLOBAL, phase=1, batch=True)
    for var in update.results:
        marks[var] = Mark(Kind.GLOBAL, phase=1)
    for var, layer in update.grads.items():
        marks[var] = Mark(Kind.LAYER, layer)
    mixed = []
    for eqn in update.eqns:
        read = [(atom, marks.get(atom, REPLICATED)) for atom in eqn.invars if is_var(atom)]
        arrays = {m.layer for atom, m in read if m.kind is Kind.LAYER and not is_small(atom)}
        if len(arrays) > 1:
            mixed.append(eqn)
        for var in eqn.outvars:
            marks[var] = _join(eqn, var, read, arrays, users.get(var, 0))
    return marks, mixed


def _join(
    eqn: Eqn, var: Var, read: Sequence[tuple[Var, Mark]], arrays: set[int], users: int
) -> Mark:
    marks = [mark for _, mark in read]
    layers = {mark.layer for mark in marks if mark.owned}
    shared = any(mark.kind is Kind.GLOBAL for mark in marks)
    if arrays:
        layer = min(arrays)
        kind = Kind.SCALAR if is_small(var) else Kind.LAYER
    elif not layers and not shared:
        return REPLICATED
    else:
        alone = len(layers) == 1 and not shared
        staying = next((n for n in layers if alone or _stays(eqn, read, n, users)), None)
        if staying is None:
            phase = max(mark.arrival for mark in marks)
            return Mark(Kind.GLOBAL, -1, phase, any(mark.batch for mark in marks))
        layer = staying
        elementwise = not _reduces(eqn) and _has_element(marks, layer)
        kind = Kind.LAYER if elementwise else Kind.SCALAR
    phase = max(
        mark.phase if mark.owned and mark.layer == layer else mark.arrival for mark in marks
    )
    return Mark(kind, layer, phase)


def _has_element(marks: Sequence[Mark], layer: int) -> bool:
    return any(mark.kind is Kind.LAYER and mark.layer == layer for mark in marks)


def _stays(eqn: Eqn, read: Sequence[tuple[Var, Mark]], layer: int, users: int) -> bool:
    """Whether a scalar that is made of a layer's and of foreign ones belongs to that layer.

    It does if that layer alone uses it. If no layer is known to use it, but state does (the
    momentum of a scalar parameter), it does if it is an element of the layer's arrays, or one kept
    or dropped by a foreign predicate.
    """
    layers = users & ~STATE
    if layers:
        return layers == _bit(layer)
    if users != STATE:
        return False
    cases = [mark for atom, mark in read if atom is not eqn.invars[0]]
    kept = eqn.primitive.name == "select_n" and all(
        mark.layer == layer if mark.owned else mark.kind is Kind.REPLICATED for mark in cases
    )
    return kept or (not _reduces(eqn) and _has_element([mark for _, mark in read], layer))


def _reduces(eqn: Eqn) -> bool:
    """Whether an equation reduces even an array of one element, so that the result is a scalar by nature."""
    return eqn.primitive.name == "dot_general" or eqn.primitive.name.startswith("reduce_")


def _new_homes(
    update: Update, home: Mapping[int, int], marks: Mapping[Var, Mark]
) -> dict[int, int]:
    found = {}
    for leaf, atom in enumerate(update.state_out):
        if leaf not in home and is_var(atom):
            mark = marks.get(atom, REPLICATED)
            if mark.owned:
                found[leaf] = mark.layer
    return found


def _constant_homes(
    update: Update, home: Mapping[int, int], marks: Mapping[Var, Mark]
) -> dict[int, int]:
    """Homes of leaves that never change (the parameters that training began with): where arrays of one layer meet them.

    A small one that also meets other values stays replicated: it is cheaper to have everywhere than to send.
    """
    constant = {
        var: leaf
        for leaf, (var, atom) in enumerate(zip(update.states, update.state_out, strict=True))
        if atom is var and leaf not in home and leaf not in update.kept
    }
    derived: dict[Var, set[int]] = {var: {leaf} for var, leaf in constant.items()}
    met: dict[int, set[int]] = {leaf: set() for leaf in constant.values()}
    for eqn in update.eqns:
        leaves = set().union(*(derived.get(a, ()) for a in eqn.invars if is_var(a)))
        if not leaves:
            continue
        read = [marks.get(atom, REPLICATED) for atom in eqn.invars if is_var(atom)]
        layers = {mark.layer for mark in read if mark.kind is Kind.LAYER}
        foreign = {-1} if any(m.kind in (Kind.GLOBAL, Kind.SCALAR) for m in read) else set()
        for leaf in leaves:
            met[leaf] |= layers | (foreign if is_small(update.states[leaf]) else set())
        if not layers and not foreign:
            derived.update((var, leaves) for var in eqn.outvars)
    return {
        leaf: min(layers) for leaf, layers in met.items() if len(layers) == 1 and -1 not in layers
    }


UNKNOWN = "in an unknown place"

_OWN = Path(__file__).resolve().parent


def origin(eqn: Eqn) -> str:
    """Where in the user's code an equation was written, as `file:line`."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        foreign = "site-packages" in frame.file_name or frame.file_name.startswith("<")
        if not foreign and not Path(frame.file_name).resolve().is_relative_to(_OWN):
            return f"{frame.file_name}:{frame.line_num}"
    return UNKNOWN
