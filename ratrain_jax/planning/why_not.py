"""Why the other choices were not taken: of each kind the best, with the term that speaks against it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from ratrain_jax.kernels import Machine
from ratrain_jax.planning.configuration import Configuration
from ratrain_jax.planning.layer_table import LayerTable
from ratrain_jax.planning.search import Candidate, Found, look_at, ordered

AXES: Final = {
    "stages": "stages",
    "rows": "examples a microbatch",
    "schedule": "schedule",
    "zero": "zero",
    "recovery": "recovery",
    "tensor": "tensor",
    "window": "window",
}
"""The choices by which kinds are told apart."""

_TRIES: Final = 3
"""Configurations of a kind that are looked at, of those that the search passed over."""


@dataclasses.dataclass(frozen=True, slots=True)
class WhyNot:
    """The best rejected plan of one kind.

    Attributes:
        kind: the choice that it has in common with all of its kind, such as `zero=1`.
        configuration: that plan's.
        seconds: its step; None if it does not fit.
        slower: how many times slower than the plan taken; None if it does not fit, or nothing does.
        short: by how many bytes it does not fit; 0 if it does.
        term: what makes it slower, or the largest term of its memory.
    """

    kind: str
    configuration: Configuration
    seconds: float | None
    slower: float | None
    short: int
    term: str


def why_not(
    found: Found, tables: Callable[[int, int], LayerTable], machine: Machine, limit: int
) -> tuple[WhyNot, ...]:
    """The best rejected plan of each kind.

    Args:
        found: what a search found.
        tables: the layers, as the search had them.
        machine: likewise.
        limit: likewise.
    """
    entries = []
    for kind, members in _kinds(found):
        candidate = _best(members, tables, machine, limit)
        if candidate is not None:
            entries.append(_entry(kind, candidate, found.best))
    return tuple(entries)


def _kinds(found: Found) -> Iterator[tuple[str, list[Candidate]]]:
    """Every choice not taken, with the candidates that make it: those nearest to the plan taken first, then by bound."""
    everything = [*found.seen, *found.rest]
    taken = found.best.configuration if found.best else None
    for axis, name in AXES.items():
        groups: dict[int | str, list[Candidate]] = {}
        for candidate in everything:
            groups.setdefault(getattr(candidate.configuration, axis), []).append(candidate)
        for value in sorted(groups, key=str if axis in ("schedule", "recovery") else int):
            if taken is None or value != getattr(taken, axis):
                yield f"{name}={value}", sorted(groups[value], key=lambda c: _distance(c, taken))


def _distance(candidate: Candidate, taken: Configuration | None) -> tuple[int, float]:
    """How many choices differ from those taken."""
    mine = candidate.configuration
    differ = sum(taken is not None and getattr(mine, a) != getattr(taken, a) for a in AXES)
    return differ, candidate.bound


def _best(
    members: Sequence[Candidate],
    tables: Callable[[int, int], LayerTable],
    machine: Machine,
    limit: int,
) -> Candidate | None:
    """The fastest of a kind that fits; if none is known to, the one that lacks least."""
    fitting = ordered(members)
    if fitting:
        return fitting[0]
    looked = [c for c in members if c.shortfall is not None]
    for candidate in [c for c in members if c.shortfall is None][:_TRIES]:
        configuration = candidate.configuration
        closer = look_at(
            configuration, tables(configuration.rows, configuration.tensor), machine, limit
        )
        if closer.seconds is not None:
            return closer
        looked.append(closer)
    return min(looked, key=lambda c: c.shortfall.bytes if c.shortfall else 0, default=None)


def _entry(kind: str, candidate: Candidate, best: Candidate | None) -> WhyNot:
    if candidate.shortfall is not None:
        memory, stage = candidate.shortfall.memory, candidate.shortfall.stage
        term = f"{memory.largest} on stage {stage}"
        return WhyNot(kind, candidate.configuration, None, None, candidate.shortfall.bytes, term)
    assert candidate.seconds is not None
    if best is None or best.seconds is None:
        return WhyNot(kind, candidate.configuration, candidate.seconds.step, None, 0, "")
    mine, taken = _terms(candidate), _terms(best)
    term = max(mine, key=lambda name: mine[name] - taken[name])
    slower = candidate.seconds.step / best.seconds.step
    return WhyNot(kind, candidate.configuration, candidate.seconds.step, slower, 0, term)


def _terms(candidate: Candidate) -> dict[str, float]:
    """Seconds of a step, by what they are spent on in the slowest stage."""
    assert candidate.split is not None
    assert candidate.seconds is not None
    m = candidate.configuration.microbatches
    slowest = max(candidate.split.stages, key=lambda stage: stage.seconds)
    return {
        "compute of the slowest stage": m * (slowest.forward + slowest.backward),
        "recovery": m * slowest.recover,
        "bubble and exposed communication": candidate.seconds.body - m * slowest.seconds,
        "tail": candidate.seconds.tail,
    }
