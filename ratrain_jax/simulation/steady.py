"""The step in its steady state: as it runs when steps follow each other.

Terms.
    What the next step waits for is **carried** over: values that a step hands on (views, shards, replicated state), and ports,
    of which the next step's tasks stand behind this step's.
    A first step finds all values there and all ports free. Where that makes no difference to the next one, it stands for
    all. Else more steps follow, until none of a step's tasks starts later than in the step before, counted from each
    step's first Forward, and all steps last equally long; the last of them stands for all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from ratrain_jax.kernels import Machine
from ratrain_jax.simulation.contention import run_contended
from ratrain_jax.simulation.engine import independent, longest_paths
from ratrain_jax.simulation.sharing import run_shared
from ratrain_jax.simulation.tasks import Run, Tasks
from ratrain_jax.simulation.waiting import edges, queues

MOST_STEPS = 12
"""Steps that are run at most until one is as the one before; nearly all settle within three."""

_MOST_AT_ONCE = 8  # likewise, of those that are run together

_SAME = 1e-9  # sums in another order differ in their last bits


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class RepeatedTasks:
    """The tasks of a step, and of the next one's entry.

    Attributes:
        tasks: the tasks: of the step, then of the entry, then those that hold nothing and for which nothing waits.
        steps: how many tasks are of this step.
        ends: how many are of this step or the entry.
        entered: the task of each stage's first Forward, in this step and in the next.
        handed: pairs of tasks of the step, of which the second waits in the next step for the first of this one.
    """

    tasks: Tasks
    steps: int
    ends: int
    entered: tuple[tuple[int, int], ...]
    handed: tuple[tuple[int, int], ...]

    def periods(self, run: Run) -> np.ndarray:
        """For each stage, seconds from its first Forward to its first of the next step."""
        first, again = np.array(self.entered).T
        return run.start[again] - run.start[first]


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Carried:
    """What the step before lets a step wait for.

    Attributes:
        source: tasks of the step before.
        target: for each, one of this step that waits for it.
        moment: when each of the step before ends.
        period: seconds from step to step.
    """

    source: np.ndarray
    target: np.ndarray
    moment: np.ndarray
    period: float


def settle(
    made: RepeatedTasks, machine: Machine, pace: Callable[[float], float] | None = None
) -> tuple[Run, Carried | None]:
    """Runs a step as often as it takes to settle.

    Args:
        made: its tasks.
        machine: says which lanes of a device may work at once, and how much they slow each other down.
        pace: instead, by which factor every task takes longer while so many run at once, counted by their shares.

    Returns:
        When the tasks of the settled step run, and what they wait for of the step before; None where that is nothing,
        because it is the first.

    Raises:
        CycleError: some tasks wait for each other.
    """
    if pace is None and independent(made.tasks, machine):
        return _settle_freely(made)
    if pace is None:
        return _settle_together(made, functools.partial(run_contended, machine=machine))
    return _settle_together(made, functools.partial(run_shared, pace=pace))


def _carries(made: RepeatedTasks) -> tuple[np.ndarray, np.ndarray]:
    """Sources and targets of all that is carried."""
    port, task = queues(made.tasks, made.steps)
    first = np.append(True, port[1:] != port[:-1])
    last = np.append(first[1:], True)
    handed = np.array(made.handed, np.int64).reshape(-1, 2)
    return (
        np.concatenate([task[last], handed[:, 0]]),
        np.concatenate([task[first], handed[:, 1]]),
    )


def _goes_on(made: RepeatedTasks, run: Run, carried: tuple[np.ndarray, np.ndarray]) -> bool:
    """Whether the next step is this one, a period later, as far as what is carried says."""
    period = float(made.periods(run).max())
    source, target = carried
    late = run.end[source] - run.start[target] - period
    return float(late.max(initial=0.0)) <= _SAME * period


def _settled(made: RepeatedTasks, run: Run, before: np.ndarray | None) -> bool:
    """Whether a step lasts equally long for all stages, or as long as the one before."""
    periods = made.periods(run)
    even = np.allclose(periods, periods.max(), rtol=_SAME, atol=0)
    return even or (before is not None and np.allclose(periods, before, rtol=_SAME, atol=0))


def _settle_freely(made: RepeatedTasks) -> tuple[Run, Carried | None]:
    """Step after step, each from when what it waits for is there."""
    waits, seconds = edges(made.tasks), np.array(made.tasks.seconds, float)
    run = longest_paths(waits, seconds)
    lead = min(run.start[first] for first, _ in made.entered)
    source, target = _carries(made)
    floor, moment, before = None, None, None
    for _ in range(MOST_STEPS):
        if _goes_on(made, run, (source, target)) and _settled(made, run, before):
            break
        before, moment = made.periods(run), run.end[source]
        floor = np.full(len(seconds), moment.min())
        np.maximum.at(floor, target, moment)
        run = longest_paths(waits, seconds, floor)
    if floor is None or moment is None:
        return run, None
    # What a stage could do ahead of the step is shown within it, unless it has to be ahead.
    begin = min(run.start[first] for first, _ in made.entered) - lead
    if run.start.min() < begin:
        within = longest_paths(waits, seconds, np.maximum(floor, begin))
        run = within if np.array_equal(made.periods(within), made.periods(run)) else run
    return _from_its_start(made, run, source, target, moment)


def _from_its_start(
    made: RepeatedTasks, run: Run, source: np.ndarray, target: np.ndarray, moment: np.ndarray
) -> tuple[Run, Carried]:
    """A run and what is carried into it, with times counted from the start of the step."""
    begin = float(run.start[: made.steps].min())
    shifted = Run(run.start - begin, run.end - begin, run.depth)
    period = float(made.periods(run).max())
    return shifted, Carried(source, target, moment - begin, period)


def _settle_together(
    made: RepeatedTasks, engine: Callable[[Tasks], Run]
) -> tuple[Run, Carried | None]:
    """All steps at once, for tasks of one slow those of another down."""
    run = engine(made.tasks)
    again = min(run.start[entered] for _, entered in made.entered)
    if run.end[: made.steps].max() <= again and _settled(made, run, None):
        return run, None
    source, target = _carries(made)
    count = 1
    while True:
        count *= 2
        whole = engine(chain(made, count))
        before, run = (_part(made, whole, n, count) for n in (count - 2, count - 1))
        later = (run.start - before.start)[: made.steps] - made.periods(run).max()
        same = later.max() <= _SAME * made.periods(run).max()
        if count >= _MOST_AT_ONCE or (same and _settled(made, run, _periods_of(made, before, run))):
            return _from_its_start(made, run, source, target, before.end[source])


def _periods_of(made: RepeatedTasks, before: Run, run: Run) -> np.ndarray:
    """For each stage, seconds from its first Forward of the step before to its first of a step."""
    first = [first for first, _ in made.entered]
    return run.start[first] - before.start[first]


def chain(made: RepeatedTasks, count: int) -> Tasks:
    """Steps one behind the other, and the entry of one more.

    Args:
        made: the tasks of a step.
        count: how many steps.

    Returns:
        The tasks of all steps, each with those for which nothing waits, then those of the entry.
    """
    some, found = made.tasks, Tasks()
    alone = range(made.ends, len(some))
    length = made.steps + len(alone)
    sources: dict[int, list[int]] = {}
    for source, target in made.handed:
        sources.setdefault(target, []).append(source)
    for step in range(count):
        begin = step * length
        for n in range(made.steps):
            number = len(found)
            handed = sources.get(n, ()) if step else ()
            after = *(begin + a for a in some.after[n]), *(begin - length + a for a in handed)
            found.add_numbered(some.seconds[n], some.ports[n], after)
            if n in some.shares:
                found.shares[number] = some.shares[n]
            if n in some.behind:
                found.behind[number] = tuple(begin + a for a in some.behind[n])
        for n in alone:
            found.add_numbered(some.seconds[n], ())
            found.behind[len(found) - 1] = (begin,)
    last, entry = (count - 1) * length, count * length - made.steps
    for n in range(made.steps, made.ends):
        after = tuple(a + (last if a < made.steps else entry) for a in some.after[n])
        number = found.add_numbered(some.seconds[n], some.ports[n], after)
        if n in some.shares:
            found.shares[number] = some.shares[n]
    if some.rank is not None:
        most = int(some.rank.max()) + 1
        parts = [
            np.append(some.rank[: made.steps], np.zeros(len(alone))) + n * most
            for n in range(count)
        ]
        found.rank = np.concatenate([*parts, some.rank[made.steps : made.ends] + count * most])
    return found


def _part(made: RepeatedTasks, whole: Run, step: int, count: int) -> Run:
    """When a step of a chain ran, and the entry that is at its end."""
    length = len(made.tasks) - (made.ends - made.steps)
    own = np.arange(step * length, step * length + made.steps)
    entry = np.arange(count * length, count * length + made.ends - made.steps)
    alone = np.arange(step * length + made.steps, (step + 1) * length)
    which = np.concatenate([own, entry, alone])
    return Run(whole.start[which], whole.end[which], whole.depth[which])
