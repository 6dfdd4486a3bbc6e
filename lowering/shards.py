"""Runs a layer's update program on shards, inside `pmap`.

Each equation has a rule, found by its primitive (`shard_rules`), that says which layouts it takes
and gives. An equation without a rule, or whose rule does not apply, runs on whole operands, which
are gathered for it; its result is cut again where it meets shards. `PARTIAL` is asked of an output
that may be left uncombined: each device then gives what its own shards contribute, and
`ShardProgram.combine` says how these join.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from jax.extend import core as jex

from ratrain_jax import compat
from ratrain_jax.lowering.graph import Atom, Eqn, Var, as_function, is_var
from ratrain_jax.lowering.layouts import Axis, Layout, Pending, convert, is_cut
from ratrain_jax.lowering.layouts import shard_axis as shard_axis
from ratrain_jax.lowering.layouts import shard_shape as shard_shape
from ratrain_jax.lowering.opening import open_calls
from ratrain_jax.lowering.shard_rules import RULES, Local
from ratrain_jax.lowering.shard_rules import combine_of as combine_of

PARTIAL: Final = "partial"


@dataclasses.dataclass(frozen=True, slots=True)
class Whole:
    """An equation that runs on whole operands.

    Attributes:
        primitive: its name.
        bytes: what is gathered for it, and what it makes whole only to be cut.
    """

    primitive: str
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ShardProgram:
    """A program over local shards.

    Attributes:
        run: takes the local inputs and returns a list of local outputs; to be called inside `pmap`.
        combine: for each output asked as `PARTIAL`, in order: `sum`, `max`, `min`, `and`, `or`, or
            `same` (every device holds the same, whole value).
        whole: what runs whole.
    """

    run: Callable[..., list[Any]]
    combine: tuple[str, ...]
    whole: tuple[Whole, ...]


def on_shards(
    closed: jex.ClosedJaxpr,
    layouts_in: Sequence[Axis],
    layouts_out: Sequence[Axis | str],
    devices: int,
    axis_name: str,
) -> ShardProgram:
    """Rewrites a program to run on local shards.

    Args:
        closed: the program, over whole shapes.
        layouts_in: the axis along which each input comes cut; None for whole.
        layouts_out: the same for each output; `PARTIAL` for one that may be left uncombined.
        devices: D.
        axis_name: the name of `pmap`'s axis.

    Returns:
        The program over shards. With one device it is the program itself.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> norm = jax.make_jaxpr(lambda x: jnp.sum(x * x))(jnp.zeros((4, 2)))
        >>> on_shards(norm, [0], [PARTIAL], 2, "data").combine
        ('sum',)
    """
    partial = sum(layout == PARTIAL for layout in layouts_out)
    if devices == 1:
        return ShardProgram(as_function(closed), ("same",) * partial, ())
    jaxpr = closed.jaxpr
    opened = open_calls(jaxpr.eqns, keep=lambda eqn: True)
    eqns, outvars = opened.eqns, [opened.read(atom) for atom in jaxpr.outvars]
    consts = {**opened.consts, **dict(zip(jaxpr.constvars, closed.consts, strict=True))}
    laid: dict[Var, Layout] = dict(zip(jaxpr.invars, layouts_in, strict=True))
    wants = _wants(eqns, outvars, layouts_out)
    steps, whole = _lay_out(eqns, laid, wants, devices)
    ends: list[tuple[Atom, Layout]] = []
    combine: list[str] = []
    for atom, want in zip(outvars, layouts_out, strict=True):
        if not isinstance(want, str):
            ends.append((atom, want))
            continue
        have = laid.get(atom) if is_var(atom) else None
        pending = have if isinstance(have, Pending) else None
        combine.append(pending.combine if pending else "same")
        ends.append((atom, pending))
    run = _runner(jaxpr.invars, steps, ends, consts, laid, devices, axis_name)
    return ShardProgram(run, tuple(combine), tuple(whole))


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """One equation of a program over shards, and what it does there."""

    eqn: Eqn
    local: Local


def _wants(
    eqns: Sequence[Eqn], outvars: Sequence[Atom], layouts_out: Sequence[Axis | str]
) -> dict[Var, Axis]:
    """The axis along which each variable is wanted cut by all that read it; None where they differ.

    A value that an equation made whole is cut at once if everything after it runs on shards.
    """
    wants: dict[Var, Axis] = {}

    def want(atom: Atom, axis: Axis) -> None:
        if is_var(atom):
            wants[atom] = axis if wants.get(atom, axis) == axis else None

    for atom, axis in zip(outvars, layouts_out, strict=True):
        want(atom, axis if isinstance(axis, int) else None)
    for eqn in reversed(eqns):
        out = eqn.outvars[0]
        for atom in eqn.invars:
            through = atom.aval.shape == out.aval.shape and eqn.primitive.name in RULES
            want(atom, wants.get(out) if through else None)
    return wants


def _lay_out(
    eqns: Sequence[Eqn], laid: dict[Var, Layout], wants: dict[Var, Axis], devices: int
) -> tuple[list[_Step], list[Whole]]:
    """Chooses what each equation does; adds the layout of each variable to `laid`."""
    steps, report = [], []
    for eqn in eqns:
        layouts = [laid.get(atom) if is_var(atom) else None for atom in eqn.invars]
        rule = RULES.get(eqn.primitive.name)
        local = rule(eqn, layouts, wants.get(eqn.outvars[0]), devices) if rule else None
        if local is None:
            local = Local(tuple(None for _ in layouts), {}, (None,) * len(eqn.outvars), whole=True)
            moved = [a for a, layout in zip(eqn.invars, layouts, strict=True) if is_cut(layout)]
            made = [var for var in eqn.outvars if var.aval.shape]
            if moved or made:
                total = sum(map(_bytes, [*moved, *made]))
                report.append(Whole(eqn.primitive.name, total))
        steps.append(_Step(eqn, local))
        laid.update(zip(eqn.outvars, local.gives, strict=True))
    return steps, report


def _bytes(atom: Atom) -> int:
    return math.prod(atom.aval.shape) * atom.aval.dtype.itemsize


def _runner(
    invars: Sequence[Var],
    steps: Sequence[_Step],
    ends: Sequence[tuple[Atom, Layout]],
    consts: dict[Var, Any],
    laid: dict[Var, Layout],
    devices: int,
    axis_name: str,
) -> Callable[..., list[Any]]:
    def run(*args: Any) -> list[Any]:
        held: dict[tuple[Var, Layout], Any] = {(var, None): value for var, value in consts.items()}
        held.update({(v, laid[v]): arg for v, arg in zip(invars, args, strict=True)})

        def get(atom: Atom, want: Layout) -> Any:
            if not is_var(atom):
                return atom.val
            if (atom, want) not in held:
                have = laid.get(atom)
                held[atom, want] = convert(
                    held[atom, have], atom.aval.shape, have, want, devices, axis_name
                )
            return held[atom, want]

        for step in steps:
            taken = [get(*pair) for pair in zip(step.eqn.invars, step.local.takes, strict=True)]
            made = _evaluate(step, taken)
            for var, layout, value in zip(step.eqn.outvars, step.local.gives, made, strict=True):
                held[var, layout] = value
        return [get(atom, want) for atom, want in ends]

    return run


def _evaluate(step: _Step, taken: list[Any]) -> Sequence[Any]:
    eqn, local = step.eqn, step.local
    if local.passes:
        return taken[:1]
    if local.whole:
        inner = [compat.new_var(atom.aval) for atom in eqn.invars]
        return as_function(compat.closed(inner, eqn.outvars, [eqn.replace(invars=inner)]))(*taken)
    made = eqn.primitive.bind(*taken, **{**eqn.params, **local.params})
    return made if eqn.primitive.multiple_results else [made]
