"""Decides in which layers each side value is made.

A side value (see `dependence`) that one layer reads is made in that layer. One that several layers
read is made again in each of them if that takes no longer than to send it over the machine's link;
else the first of them makes it and hands it on. What needs dear side values is itself handed on
only where that is fewer bytes than to hand on what it needs.

A value much smaller than the parameters behind it (a penalty on their norm) is made where these
parameters are at home and handed on, so that its reader need not borrow them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

from ratrain_jax.kernels import Machine
from ratrain_jax.lowering.cost import aval_bytes, equation_costs, equation_seconds
from ratrain_jax.lowering.dependence import Flow
from ratrain_jax.lowering.graph import Atom, Eqn, Var, is_var

MUCH_SMALLER = 64
"""How many times smaller than its parameters a value must be to be made in their layer.

The value is sent once a microbatch, borrowed parameters once a step: this stands for a number of
microbatches.
"""

_UNREPEATABLE = frozenset({"rng_bit_generator", "rng_uniform"})
"""Primitives whose results are promised to be equal only within one program, as are those of the
random primitives under an `rbg` key."""


@dataclasses.dataclass(frozen=True, slots=True)
class SidePlacement:
    """Where side values are made.

    Attributes:
        makers: the layers that run each side equation, by its number among them.
        passed: side values that are handed on: the layer that makes each, and the later ones that
            read it.
    """

    makers: tuple[frozenset[int], ...]
    passed: Mapping[Var, tuple[int, tuple[int, ...]]]


def place_sides(
    flow: Flow,
    layers: Sequence[int],
    outvars: Sequence[Atom],
    param_bytes: Sequence[int],
    keys: Sequence[Hashable],
    machine: Machine,
) -> SidePlacement:
    """Decides in which layers each side equation runs.

    Args:
        flow: the equations.
        layers: the layer of each main equation, ascending.
        outvars: results of the loss; what of them is no main value is wanted in the last layer.
        param_bytes: bytes of each parameter.
        keys: one a parameter; those of equal keys have one home.
        machine: what making and sending are costed for.

    Returns:
        The placement.
    """
    first: dict[Hashable, int] = {}  # the layer that reads parameters of each key first
    needs: dict[Var, set[int]] = {var: set() for var in flow.maker}
    for layer, eqn, numbers in zip(layers, flow.main, flow.reads, strict=True):
        for number in numbers:
            first.setdefault(keys[number], layer)
        for atom in eqn.invars:
            if is_var(atom) and atom in needs:
                needs[atom].add(layer)
    for atom in outvars:
        if is_var(atom) and atom in needs:
            needs[atom].add(layers[-1])

    home = {number: first[key] for number, key in enumerate(keys) if key in first}
    handed = _worth_handing_on(flow, machine)
    makers: list[frozenset[int]] = []
    passed: dict[Var, tuple[int, tuple[int, ...]]] = {}
    for number, eqn in reversed(list(enumerate(flow.sides))):
        wanted = set().union(*(needs[var] for var in eqn.outvars))
        made = wanted
        if len(wanted) > 1 and handed[number]:
            made = {min(wanted)}
        made = _at_home(eqn, flow, home, param_bytes, made)
        if made != wanted:
            maker = min(made)
            passed.update(
                (var, (maker, tuple(sorted(needs[var] - made))))
                for var in eqn.outvars
                if needs[var] - made
            )
        for atom in eqn.invars:
            if is_var(atom) and atom in needs:
                needs[atom] |= made
        makers.append(frozenset(made))
    return SidePlacement(tuple(reversed(makers)), passed)


def _at_home(
    eqn: Eqn,
    flow: Flow,
    home: Mapping[int, int],
    param_bytes: Sequence[int],
    made: set[int],
) -> set[int]:
    """Moves a value to the last home of the parameters behind it, if it is much smaller."""
    params = flow.behind.get(eqn.outvars[0], frozenset())
    size = sum(aval_bytes(var.aval) for var in eqn.outvars)
    if not params or MUCH_SMALLER * size > sum(param_bytes[number] for number in params):
        return made
    last = max(home.get(number, min(made)) for number in params)
    return {last} if last < min(made) else made


def _worth_handing_on(flow: Flow, machine: Machine) -> list[bool]:
    """Whether each side equation's results are handed on rather than made again."""
    costs = equation_costs(flow.sides, ())
    seconds: dict[Var, float] = {}  # to make a side value from parameters and operands
    dear: set[Var] = set()
    handed = []
    for eqn, cost in zip(flow.sides, costs, strict=True):
        inputs = {atom for atom in eqn.invars if is_var(atom) and atom in flow.maker}
        total = equation_seconds(eqn, cost, machine) + sum(seconds[var] for var in inputs)
        seconds.update((var, total) for var in eqn.outvars)
        size = sum(aval_bytes(var.aval) for var in eqn.outvars)
        sending = machine.link_latency + size / machine.link_bandwidth
        repeatable = _repeatable(eqn)
        if total <= sending and repeatable and not inputs & dear:
            handed.append(False)
            continue
        needed = sum(aval_bytes(var.aval) for var in inputs & dear)
        handed.append(not repeatable or not needed or size <= needed)
        dear.update(eqn.outvars)
    return handed


def _repeatable(eqn: Eqn) -> bool:
    if eqn.primitive.name != "random_bits":
        return eqn.primitive.name not in _UNREPEATABLE
    return "rbg" not in str(eqn.invars[0].aval.dtype)
