"""Chooses where a loss is cut into layers.

Terms.
    A **place** is a number of main equations: a cut at place p parts the first p of them from the
    rest. A **group** is a node of the parameter tree: the parameters whose paths begin alike. A cut
    **weighs** the bytes of main values that live across it. A layer is **coarse** if it costs more
    than half of what each stage gets of an even split.

The rule.
    1. Order the groups at the top of the tree by their first read. Cut between the last read of a
       group that comes before the next group's first read, and that first read, where the fewest
       bytes live (the earliest such place).
    2. While a cut weighs more than `DEARER` × its lighter neighbour and more than `stages` layers
       would remain, remove the heaviest such cut, unless that would join layers into a coarse one.
    3. Open a coarse group into its children: cut between them as between groups, but only where it
       weighs no more than the heavier end of the group's layer, or, if that layer costs more than
       an even share, no more than the lightest such cut. Repeat with what is still coarse.
    4. Join a layer of less than `TRIFLE` of an even share with the next one or, if that is a repeated
       block, with the one before, while more than `stages` layers remain. A repeated block is one of
       the same equations as its other neighbour: none is joined, for blocks that stay equal share
       their executables.

A layer is named after the group with which it begins.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Sequence

from ratrain_jax.errors import OptionError

Path = tuple[str, ...]

DEARER = 1.25
"""A cut that weighs this many times its lighter neighbour is worth removing."""

TRIFLE = 0.02
"""A layer below this part of an even share of a stage is joined with its neighbour."""

_ABOVE = 1 + 1e-6  # equal blocks fall on one side of a bound, whatever their sums round to


@dataclasses.dataclass(frozen=True, slots=True)
class Costs:
    """What the main equations cost and weigh.

    Attributes:
        seconds: seconds of all equations before each place, side equations counted with their first
            reader.
        live: weight of a cut at each place.
        codes: what each main equation computes; equal for equal equations, and hardly for others.
        stages: how many stages the layers will be balanced into.
    """

    seconds: Sequence[float]
    live: Sequence[int]
    codes: Sequence[Hashable]
    stages: float

    @property
    def share(self) -> float:
        """Seconds of each stage of an even split."""
        return self.seconds[-1] / self.stages

    def of(self, draft: _Draft) -> float:
        """Seconds of a layer."""
        return self.seconds[draft.end] - self.seconds[draft.start]

    def trifle(self, draft: _Draft) -> bool:
        """Whether a layer is too cheap to stand alone."""
        return self.of(draft) < TRIFLE * self.share

    def coarse(self, start: int, end: int) -> bool:
        """Whether the equations between two places would make a coarse layer."""
        return self.seconds[end] - self.seconds[start] > self.share / 2 * _ABOVE


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A layer to be: the main equations between two places.

    Attributes:
        name: of the layer.
        start: its first place.
        end: its last place.
    """

    name: str
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """Parameters whose paths begin alike, or that are first read by one and the same equation.

    Attributes:
        depth: how many keys of the paths are alike.
        members: path and main equations that read it (ascending), for each parameter.
        place: where a layer that begins with the group would begin.
    """

    depth: int
    members: tuple[tuple[Path, tuple[int, ...]], ...]
    place: int = 0

    @property
    def name(self) -> str:
        return "/".join(self.members[0][0][: self.depth]) or "params"

    @property
    def first(self) -> int:
        return min(reads[0] for _, reads in self.members)

    def last_before(self, place: int) -> int:
        """The last equation before a place that reads the group."""
        return max(read for _, reads in self.members for read in reads if read < place)


@dataclasses.dataclass(frozen=True, slots=True)
class _Draft:
    """A layer that may still be joined or opened.

    Attributes:
        name: of the layer.
        groups: what begins in it, in order; the first where it begins.
        end: where the next layer begins.
    """

    name: str
    groups: tuple[_Group, ...]
    end: int

    @property
    def start(self) -> int:
        return self.groups[0].place


def automatic_spans(reads: Sequence[tuple[Path, tuple[int, ...]]], costs: Costs) -> list[Span]:
    """Cuts the main equations into layers by the parameters that they read.

    Args:
        reads: path and main equations that read it (ascending), for each parameter.
        costs: of the main equations.

    Returns:
        The layers, in order; they cover all main equations.
    """
    end = len(costs.seconds) - 1
    used = [member for member in reads if member[1]]
    if not used:
        return [Span("input", 0, end)]
    groups = _place(_groups(used, shared_keys([path for path, _ in used]) + 1), 0, costs)
    drafts = _split(groups, end, lambda group: True)
    drafts = _remove_dear(drafts, costs)
    drafts = [opened for draft in drafts for opened in _open(draft, costs)]
    drafts = _join_trifles(drafts, costs)
    return [Span(draft.name, draft.start, draft.end) for draft in drafts]


def marked_spans(marks: Sequence[tuple[str, int]], first: str, end: int) -> list[Span]:
    """Cuts the main equations at marks.

    Args:
        marks: name and place of each.
        first: the name of what comes before the first mark.
        end: how many main equations there are.

    Returns:
        The layers, in order; they cover all main equations.

    Raises:
        OptionError: nothing is computed between two marks.
    """
    names = [name for name, _ in marks]
    while first in names:
        first += "/input"
    places = [place for _, place in marks]
    if places[0] > 0:
        names, places = [first, *names], [0, *places]
    spans = list(map(Span, names, places, [*places[1:], end]))
    for span in spans:
        if span.start == span.end:
            raise OptionError(
                f"layer {span.name!r} is empty: nothing that depends on parameters and batch is"
                " computed between its mark and the next one or the end. Remove its mark."
            )
    return spans


def shared_keys(paths: Sequence[Path]) -> int:
    """How many leading keys all paths share, leaving each path one key at least."""
    shared = itertools.takewhile(lambda keys: len(set(keys)) == 1, zip(*paths, strict=False))
    return max(0, min(len(list(shared)), *(len(path) - 1 for path in paths)))


def _groups(members: Sequence[tuple[Path, tuple[int, ...]]], depth: int) -> list[_Group]:
    """The groups of a depth, in order of first read; each member has a read."""
    by_path: dict[Path, list[tuple[Path, tuple[int, ...]]]] = {}
    for member in sorted(members, key=lambda member: member[1][0]):
        by_path.setdefault(member[0][:depth], []).append(member)
    groups: list[_Group] = []
    for part in by_path.values():
        group = _Group(depth, tuple(part))
        if groups and groups[-1].first == group.first:
            group = dataclasses.replace(group, members=groups.pop().members + group.members)
        groups.append(group)
    return groups


def _place(groups: Sequence[_Group], start: int, costs: Costs) -> list[_Group]:
    """Says where each group begins: the first at `start`, another where the fewest bytes live."""
    placed = [dataclasses.replace(groups[0], place=start)]
    for before, group in itertools.pairwise(groups):
        places = range(before.last_before(group.first) + 1, group.first + 1)
        place = min(places, key=lambda place: (costs.live[place], place))
        placed.append(dataclasses.replace(group, place=place))
    return placed


def _split(groups: Sequence[_Group], end: int, cuts: Callable[[_Group], bool]) -> list[_Draft]:
    """Layers that begin with the first group, and with each further one that `cuts`."""
    parts: list[list[_Group]] = []
    for group in groups:
        if not parts or cuts(group):
            parts.append([])
        parts[-1].append(group)
    ends = [*(part[0].place for part in parts[1:]), end]
    return [_Draft(part[0].name, tuple(part), end) for part, end in zip(parts, ends, strict=True)]


def _join(drafts: list[_Draft], number: int) -> list[_Draft]:
    """Removes the cut after layer `number`."""
    one, two = drafts[number : number + 2]
    joined = _Draft(one.name, one.groups + two.groups, two.end)
    return [*drafts[:number], joined, *drafts[number + 2 :]]


def _remove_dear(drafts: list[_Draft], costs: Costs) -> list[_Draft]:
    while len(drafts) - 1 > costs.stages:
        weights = [costs.live[draft.start] for draft in drafts[1:]]
        dear = [
            number
            for number, weight in enumerate(weights)
            if weight > DEARER * _lighter_neighbour(weights, number)
            and not costs.coarse(drafts[number].start, drafts[number + 1].end)
        ]
        if not dear:
            break
        drafts = _join(drafts, max(dear, key=lambda number: (weights[number], -number)))
    return drafts


def _lighter_neighbour(weights: Sequence[int], number: int) -> float:
    neighbours = [*weights[max(0, number - 1) : number], *weights[number + 1 : number + 2]]
    return min(neighbours, default=math.inf)


def _open(draft: _Draft, costs: Costs) -> list[_Draft]:
    """Opens the coarse groups of a coarse layer, and of the layers that this gives."""
    if not costs.coarse(draft.start, draft.end):
        return [draft]
    ends = [*(group.place for group in draft.groups[1:]), draft.end]
    groups: list[_Group] = []
    for group, end in zip(draft.groups, ends, strict=True):
        children = _children(group, end, costs) if costs.coarse(group.place, end) else []
        groups.extend(children or [group])
    if len(groups) == 1:
        return [draft]
    limit = _limit(draft, groups, costs)
    parts = _split(groups, draft.end, lambda group: costs.live[group.place] <= limit)
    if len(parts) == 1:
        if len(groups) == len(draft.groups):
            return [draft]
        parts = [dataclasses.replace(parts[0], name=draft.name)]
    return [opened for part in parts for opened in _open(part, costs)]


def _children(group: _Group, end: int, costs: Costs) -> list[_Group]:
    """The children of a group, or of its only child; none if it is a leaf."""
    inside = [(path, tuple(read for read in reads if read < end)) for path, reads in group.members]
    members = [
        member for member in inside if member[1]
    ]  # what is first read later is borrowed here
    deepest = max(len(path) for path, _ in members)
    for depth in range(group.depth + 1, deepest + 1):
        children = _groups(members, depth)
        if len(children) > 1:
            return _place(children, group.place, costs)
    return []


def _limit(draft: _Draft, groups: Sequence[_Group], costs: Costs) -> float:
    """What a cut inside a layer may weigh."""
    last = len(costs.seconds) - 1
    limit = max(
        (costs.live[place] for place in (draft.start, draft.end) if 0 < place < last),
        default=math.inf,
    )
    if costs.seconds[draft.end] - costs.seconds[draft.start] > costs.share * _ABOVE:
        limit = max(limit, min(costs.live[group.place] for group in groups[1:]))
    return limit


def _join_trifles(drafts: list[_Draft], costs: Costs) -> list[_Draft]:
    number = 0
    while number < len(drafts) and len(drafts) > costs.stages:
        partner = _partner(drafts, number, costs) if costs.trifle(drafts[number]) else None
        if partner is None:
            number += 1
        else:
            number = min(number, partner)
            drafts = _join(drafts, number)
    return drafts


def _partner(drafts: Sequence[_Draft], number: int, costs: Costs) -> int | None:
    """The neighbour with which a trifle is joined: the next, else the one before, unless they are repeated blocks."""
    for step in (1, -1):
        other, beyond = number + step, number + 2 * step
        if 0 <= other < len(drafts) and not (
            0 <= beyond < len(drafts) and _repeated(drafts[other], drafts[beyond], costs)
        ):
            return other
    return None


def _repeated(one: _Draft, two: _Draft, costs: Costs) -> bool:
    """Whether two layers seem to be the same block, by their equations; trifles are no blocks."""
    codes = [costs.codes[draft.start : draft.end] for draft in (one, two)]
    return codes[0] == codes[1] and not costs.trifle(one)
