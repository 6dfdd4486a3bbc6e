"""`profile`: runs a step's ops on the devices here, one at a time and several at once, and writes down what they take.

The step runs op by op in its launch order, so that ops find the caches about as they do in a step, and every op of every
microbatch is one more sample of its key. A first run warms up and is not counted. Then runs, transfers, collectives
and slowdowns are measured in turn, `repetitions` times, so that what the host does meanwhile falls on all alike. Where
other processes use its cores, more repetitions are made, and the calmest count.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ratrain_jax import compat
from ratrain_jax.errors import OptionError
from ratrain_jax.lowered import Lowered
from ratrain_jax.profiling.calm import DISTURBED, Others
from ratrain_jax.profiling.keys import Key, key_of
from ratrain_jax.profiling.links import Moves, lines
from ratrain_jax.profiling.overhead import Overhead
from ratrain_jax.profiling.profile import Measured, Profile
from ratrain_jax.profiling.repetition import Repetition, joined
from ratrain_jax.profiling.slowdown import sample, slowdowns
from ratrain_jax.runtime.compiled import Compiled
from ratrain_jax.runtime.host import cores
from ratrain_jax.runtime.processes import exchange, host_mates, several
from ratrain_jax.runtime.progress import reporting
from ratrain_jax.runtime.serial import Serial, Taken
from ratrain_jax.runtime.turns import in_turn

REPETITIONS = 5
TRIES = 3
"""How many times as many repetitions are made at most, where other processes disturb."""


@compat.without_mesh()
def profile(
    step: Compiled | Lowered,
    *args: Any,
    repetitions: int = REPETITIONS,
    progress: bool | Callable[[int, int], None] | None = None,
) -> Profile:
    """Measures what the ops of a step take on its devices.

    Run it with the `XLA_FLAGS` of the runs to predict and on an otherwise idle host: the number of devices decides how many
    threads a CPU op gets, and whatever else runs is measured too (see `Profile.busy_elsewhere`).

    Args:
        step: a compiled step, or a lowered one, which is compiled.
        *args: as for a call of the step; nothing of them is used up.
        repetitions: how often the step is run, beside once to warm up.
        progress: told how many runs are done, and of how many; True for a bar on standard error, False for none, None
            for one if standard error is a terminal.

    Returns:
        The profile: for `ratrain_jax.simulate`, and for programs with the same layers.

    Raises:
        OptionError: `step` is neither, or `repetitions` is less than 1.
        StateError, BatchError: as a call of the step does.

    Example:
        >>> import jax.numpy as jnp, ratrain_jax as rt
        >>> @rt.train_step(microbatches=2)
        ... def step(w, x):
        ...     loss, grad = rt.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
        ...     return w - grad, loss
        >>> w, x = jnp.ones(3), jnp.ones((4, 3))
        >>> lowered = step.lower(w, x)
        >>> measured = rt.profile(lowered, w, x, repetitions=1)
        >>> measured.missing(lowered)
        ()
        >>> rt.simulate(lowered, "cpu", profile=measured).step_seconds > 0
        True
    """
    if repetitions < 1:
        raise OptionError(f"repetitions is {repetitions}; give 1 or more.")
    if isinstance(step, Lowered):
        step = step.compile(progress=progress)
    if not isinstance(step, Compiled):
        raise OptionError(
            f"step is {step!r}; give what `step.lower(...)` returns, or its `compile()`."
        )
    with reporting(progress, "profiling") as report:
        twin = step.twin()
        # Op by op, between processes too: all from the one thread that may.
        found = in_turn(lambda: joined(_repetitions(twin, args, repetitions, report)))
        return _profile(step, found)


def _repetitions(
    step: Compiled, args: Sequence[Any], wanted: int, report: Callable[[int, int], None]
) -> list[Repetition]:
    """Measures as often as wanted, and again for what others disturbed; the calmest repetitions."""
    first = step.serial(*args)
    overhead = Overhead(next(group for group in first.groups if group.is_here))
    moves = Moves(first.program, first.groups)
    for _ in first.run():
        pass
    found: list[Repetition] = []
    calm = 0
    while calm < wanted and len(found) < TRIES * wanted:
        report(calm, wanted)
        others = Others()
        found.append(
            Repetition(
                ops=_one_by_one(step.serial(*args)),
                overhead=overhead.sample(),
                moves=moves.sample(),
                slowdowns=sample(step.serial(*args)),
                others=_others(others),
            )
        )
        calm += (found[-1].others or 0.0) <= DISTURBED
    report(wanted, wanted)
    return sorted(found, key=lambda repetition: repetition.others or 0.0)[:wanted]


def _one_by_one(step: Serial) -> dict[Key, list[Taken]]:
    samples: dict[Key, list[Taken]] = {}
    for op, taken in step.run():
        key = key_of(op, step.program)
        if key is not None and taken is not None and step.makes(op):
            samples.setdefault(key, []).append(taken)
    return samples


def _others(others: Others) -> float | None:
    """Cores that processes of no part in this run used; the same number in every process."""
    if not several():
        return others.cores()
    own = exchange(np.array([others.own], np.float32))[:, 0]
    found = others.cores(float(sum(own[process] for process in host_mates())))
    every = exchange(np.array([np.nan if found is None else found], np.float32))
    return None if np.isnan(every).any() else float(every.max())


def _profile(step: Compiled, found: Sequence[Repetition]) -> Profile:
    """Puts repetitions together."""
    program = step.lowered.program
    device, ranks = step.devices[0], program.settings.data_parallel
    wait = statistics.median(repetition.overhead[1] for repetition in found)
    samples = {key: [s for each in found for s in each.ops[key]] for key in sorted(found[0].ops)}
    others = [each.others for each in found if each.others is not None]
    return Profile(
        fingerprint=program.fingerprint,
        platform=device.platform,
        device_kind=device.device_kind,
        jax_version=jax.__version__,
        device_count=jax.device_count(),
        cores=cores(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        launch_seconds=statistics.median(repetition.overhead[0] for repetition in found),
        wait_seconds=wait,
        busy_elsewhere=statistics.mean(others) if others else None,
        measured=tuple(measured(key, taken, wait) for key, taken in samples.items()),
        lines=lines([each.moves for each in found], ranks, wait),
        slowdowns=slowdowns([each.slowdowns for each in found]),
    )


def measured(key: Key, samples: Sequence[Taken], wait: float) -> Measured:
    """What ops of a key took.

    Args:
        key: the key.
        samples: what each took.
        wait: seconds of waiting, subtracted.

    Example:
        >>> measured(Key("Metrics", "8", 1), [Taken(1, 4), Taken(1, 6), Taken(1, 5)], 0.5)
        Measured(kind='Metrics', code='8', devices=1, seconds=3.5, count=3, spread=1.0, launch=1.0, share=1.0)
    """
    seconds = [taken.behind for taken in samples]
    ends = statistics.quantiles(seconds, method="inclusive") if len(samples) > 1 else seconds * 3
    return Measured(
        key.kind,
        key.code,
        key.devices,
        seconds=max(statistics.median(seconds) - wait, 0.0),
        count=len(samples),
        spread=ends[2] - ends[0],
        launch=statistics.fmean(taken.hidden for taken in samples),
        share=statistics.median(taken.share for taken in samples),
    )
