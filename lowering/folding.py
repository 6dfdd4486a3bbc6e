"""Evaluates equations on values of which only some are known, and these only as what is to be expected.

Terms.
    A value is **known** if all its elements are one number, and that number can be told. It is **settled** if the number
    stays when what was told for it by way of a guess turns out a little larger: a norm that is 0 in the guess is not
    settled, whether it is below 1 is.

Rules stand in tables keyed by primitive; a primitive that is in none gives what is not known.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from jax.extend import core as jex

from ratrain_jax import compat
from ratrain_jax.lowering.graph import Atom, Eqn, Var, is_var


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """A value that is known.

    Attributes:
        value: each of its elements.
        settled: whether it stays if what was guessed is a little larger.
    """

    value: Any
    settled: bool = True


class Folding:
    """A program, evaluated as far as its inputs are known.

    Args:
        closed: a program without calls.
        given: its inputs; None for one that is not known.
        guess: whether to take for finite what is not known, and its product with zero for zero.

    Attributes:
        outputs: what is known of its outputs.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> below = jax.make_jaxpr(lambda x, norm: jnp.where(norm < 1, x, x / norm))(1.0, 1.0)
        >>> folding = Folding(below, [None, Known(np.float32(0.5), settled=False)])
        >>> folding.outputs  # x itself
        (None,)
        >>> [below.jaxpr.invars.index(var) for var in folding.live()]
        [0]
    """

    def __init__(
        self, closed: jex.ClosedJaxpr, given: Sequence[Known | None], *, guess: bool = False
    ) -> None:
        jaxpr = closed.jaxpr
        self.jaxpr, self.guess = jaxpr, guess
        self._known: dict[Var, Known] = {}
        self._same: dict[Var, Atom] = {}
        for var, value in zip(jaxpr.invars, given, strict=True):
            self._tell(var, value)
        for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
            if not compat.is_extended(var.aval.dtype) and np.size(value) == 1:
                self._tell(var, Known(np.asarray(value).reshape(())))
        with np.errstate(all="ignore"):
            for eqn in jaxpr.eqns:
                self._fold(eqn)
        self.outputs = tuple(map(self.known, jaxpr.outvars))

    def known(self, atom: Atom) -> Known | None:
        """What is known of a value."""
        if is_var(atom):
            return self._known.get(atom)
        return None if compat.is_extended(atom.aval.dtype) else Known(np.asarray(atom.val))

    def live(self) -> dict[Var, Eqn | None]:
        """The inputs that the outputs still depend on, each with an equation that reads it, or None for an output."""
        makers = {var: eqn for eqn in self.jaxpr.eqns for var in eqn.outvars}
        inputs = set(self.jaxpr.invars)
        found: dict[Var, Eqn | None] = {}
        seen: set[Var] = set()
        stack: list[tuple[Atom, Eqn | None]] = [(out, None) for out in self.jaxpr.outvars]
        while stack:
            atom, reader = stack.pop()
            while is_var(atom) and atom in self._same:
                atom = self._same[atom]
            if not is_var(atom) or atom in seen or atom in self._known:
                continue
            seen.add(atom)
            if atom in inputs:
                found[atom] = reader
            elif atom in makers:
                stack += [(read, makers[atom]) for read in makers[atom].invars]
        return found

    def _tell(self, var: Var, known: Known | None) -> None:
        if known is not None:
            value = np.asarray(known.value).astype(var.aval.dtype)
            self._known[var] = Known(value, known.settled)

    def _fold(self, eqn: Eqn) -> None:
        if len(eqn.outvars) != 1 or compat.is_extended(eqn.outvars[0].aval.dtype):
            return
        name, out = eqn.primitive.name, eqn.outvars[0]
        read = [self.known(atom) for atom in eqn.invars]
        if name == "select_n" and read[0] is not None:
            chosen = int(read[0].value)
            if read[0].settled:
                self._same[out] = eqn.invars[1 + chosen]
            if (case := read[1 + chosen]) is not None:
                self._tell(out, Known(case.value, case.settled and read[0].settled))
            return
        if self.guess and name in _GUESSES:
            guessed = _GUESSES[name](eqn, read)
            if guessed is not None:
                self._tell(out, guessed)
                return
        rule = _RULES.get(name)
        if rule is not None:
            self._tell(out, rule(eqn, read))


Rule = Callable[[Eqn, Sequence[Known | None]], Known | None]


def _elementwise(function: Callable[..., Any]) -> Rule:
    def rule(eqn: Eqn, read: Sequence[Known | None]) -> Known | None:
        del eqn
        known = [value for value in read if value is not None]
        if len(known) < len(read):
            return None
        return Known(function(*(v.value for v in known)), all(v.settled for v in known))

    return rule


def _compare(function: Callable[[Any, Any], Any]) -> Rule:
    """A comparison; of two equal values the one that is not settled is a little larger."""

    def rule(eqn: Eqn, read: Sequence[Known | None]) -> Known | None:
        del eqn
        one, other = read
        if one is None or other is None:
            return None
        if one.settled or other.settled:
            nudge = int(not one.settled) - int(not other.settled)
            equal = bool(one.value == other.value)
            result = function(nudge, 0) if equal else function(one.value, other.value)
            return Known(np.bool_(result))
        return Known(np.bool_(function(one.value, other.value)), settled=False)

    return rule


def _extreme(function: Callable[[Any, Any], Any]) -> Rule:
    """The larger or the smaller of two values, which is as settled as it is itself."""

    def rule(eqn: Eqn, read: Sequence[Known | None]) -> Known | None:
        del eqn
        one, other = read
        if one is None or other is None:
            return None
        value = function(one.value, other.value)
        chosen = [k for k in (one, other) if bool(k.value == value)]
        return Known(value, bool(chosen) and all(k.settled for k in chosen))

    return rule


def _absorbed(by: bool, function: Callable[[Any, Any], Any]) -> Rule:
    """`and` and `or`, which one operand may decide alone."""
    both = _elementwise(function)

    def rule(eqn: Eqn, read: Sequence[Known | None]) -> Known | None:
        if eqn.outvars[0].aval.dtype == np.bool_:
            for value in read:
                if value is not None and value.settled and bool(value.value) is by:
                    return value
        return both(eqn, read)

    return rule


def _all_alike(eqn: Eqn, read: Sequence[Known | None]) -> Known | None:
    """What puts elements elsewhere, or picks some of them."""
    del eqn
    known = [value for value in read if value is not None]
    if len(known) < len(read) or any(v.value != known[0].value for v in known):
        return None
    return Known(known[0].value, all(v.settled for v in known))


def _first(eqn: Eqn, read: Sequence[Known | None]) -> Known | None:
    del eqn
    return read[0]


def _converted(eqn: Eqn, read: Sequence[Known | None]) -> Known | None:
    value = read[0]
    return value and Known(value.value.astype(eqn.outvars[0].aval.dtype), value.settled)


def _summed(eqn: Eqn, read: Sequence[Known | None]) -> Known | None:
    value = read[0]
    count = eqn.invars[0].aval.size // max(1, eqn.outvars[0].aval.size)
    return value and Known(value.value * np.asarray(count, value.value.dtype), value.settled)


def _power(eqn: Eqn, read: Sequence[Known | None]) -> Known | None:
    value = read[0]
    return value and Known(value.value ** eqn.params["y"], value.settled)


def _quotient(eqn: Eqn, read: Sequence[Known | None]) -> Known | None:
    """Of floating-point numbers; integers round in ways of their own."""
    whole = np.issubdtype(eqn.outvars[0].aval.dtype, np.integer)
    return None if whole else _elementwise(np.true_divide)(eqn, read)


_RULES: Final[dict[str, Rule]] = {
    **{
        name: _elementwise(function)
        for name, function in {
            "abs": np.abs, "add": np.add, "add_any": np.add, "ceil": np.ceil, "exp": np.exp,
            "expm1": np.expm1, "floor": np.floor, "is_finite": np.isfinite, "log": np.log,
            "log1p": np.log1p, "mul": np.multiply, "neg": np.negative, "not": np.invert,
            "pow": np.power, "rsqrt": lambda x: 1 / np.sqrt(x), "sign": np.sign, "sqrt": np.sqrt,
            "square": np.square, "sub": np.subtract, "tanh": np.tanh, "xor": np.bitwise_xor,
        }.items()
    },
    **{
        name: _compare(getattr(operator, name)) for name in ("lt", "le", "gt", "ge", "eq", "ne")
    },
    **dict.fromkeys(
        (
            "broadcast_in_dim", "copy", "copy_p", "expand_dims", "reshape", "rev", "slice",
            "squeeze", "stop_gradient", "transpose", "reduce_and", "reduce_or", "reduce_max",
            "reduce_min",
        ),
        _first,
    ),
    "and": _absorbed(False, np.bitwise_and),
    "or": _absorbed(True, np.bitwise_or),
    "max": _extreme(np.maximum),
    "min": _extreme(np.minimum),
    "concatenate": _all_alike,
    "convert_element_type": _converted,
    "div": _quotient,
    "integer_pow": _power,
    "reduce_sum": _summed,
}  # fmt: skip
"""What a primitive gives, of known values."""


def _zero_times(eqn: Eqn, read: Sequence[Known | None]) -> Known | None:
    """Zero times anything; a quotient only by its dividend."""
    factors = read[:1] if eqn.primitive.name == "div" else read[:2]
    return next((v for v in factors if v is not None and not np.any(v.value)), None)


def _finite(eqn: Eqn, read: Sequence[Known | None]) -> Known | None:
    del eqn, read
    return Known(np.bool_(True))


def _itself(equal: bool) -> Rule:
    """A comparison of a value with itself, which finds what is not a number."""

    def rule(eqn: Eqn, read: Sequence[Known | None]) -> Known | None:
        del read
        one, other = eqn.invars
        return Known(np.bool_(equal)) if is_var(one) and one is other else None

    return rule


_GUESSES: Final[dict[str, Rule]] = {
    "div": _zero_times,
    "dot_general": _zero_times,
    "eq": _itself(True),
    "is_finite": _finite,
    "mul": _zero_times,
    "ne": _itself(False),
}
"""What a primitive is expected to give, also of values that are not known."""
