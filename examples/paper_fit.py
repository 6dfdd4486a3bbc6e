"""The one parameter of the machine that `reproduce_paper.py` fits, to the paper's first scaling row and to nothing else.

**The row**: LLaMA-2-7B on 256 clusters, 29,069.73 tokens a second: one number, which determines one parameter. Fitting
two or three to it would leave all but one to chance.

**The parameter** is the cores' clock (`accelerator.clock`), from which the arithmetic peaks follow. Two clocks have a source:
0.88 GHz, derived from the 8.1 TFLOPS that the paper's authors count with and the machine's own value, and 1.2 GHz, the
nominal one. Nothing else that is open moves the row far enough: `leeway` says how far what is `assumed` does.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

from paper_planning import MACHINE, SCALING, SEQUENCE, TOKENS_A_CLUSTER, step_of, work_of

from ratrain_jax.kernels import Machine

NAME = "accelerator.clock"
NOMINAL = 1.2e9
CLUSTERS = min(SCALING)
RECOVERIES = ("forward", "auto")
_CLOSE = 1e-4
_MOST_STEPS = 20


@dataclasses.dataclass(frozen=True)
class Fit:
    """The machine with its clock fitted.

    Attributes:
        recovery: of the step whose time was fitted.
        machine: the machine.
        before: seconds of that step with the machine's own clock.
        after: seconds of it now.
    """

    recovery: str
    machine: Machine
    before: float
    after: float


def clock_of(machine: Machine) -> float:
    """Cycles a second of the cores."""
    assert machine.accelerator is not None
    return machine.accelerator.clock


def with_clock(machine: Machine, clock: float) -> Machine:
    """The machine with another clock, and the arithmetic peaks that follow from it.

    Args:
        machine: the machine.
        clock: cycles a second.
    """
    assert machine.accelerator is not None
    faster = clock / machine.accelerator.clock
    return dataclasses.replace(
        machine,
        accelerator=dataclasses.replace(machine.accelerator, clock=clock),
        peak_flops=tuple((dtype, rate * faster) for dtype, rate in machine.peak_flops),
    )


def first_row(machine: Machine, recovery: str) -> float:
    """Seconds of the step of the first scaling row.

    Args:
        machine: what it runs on.
        recovery: "forward" or "auto".
    """
    work = work_of("llama2-7b", CLUSTERS * TOKENS_A_CLUSTER // SEQUENCE, machine)
    return step_of(work, CLUSTERS, recoveries=(recovery,))


def published_seconds() -> float:
    """Seconds of that step as published."""
    return CLUSTERS * TOKENS_A_CLUSTER / SCALING[CLUSTERS]


def fit(recovery: str, seconds: Callable[[Machine, str], float] = first_row) -> Fit:
    """Fits the clock, so that the step of the first row takes as long as published.

    A step's time is nearly linear in the length of a cycle: a secant goes there in a few steps.

    Args:
        recovery: "forward" or "auto".
        seconds: of that step on a machine, with that recovery.

    Raises:
        ValueError: no clock gives the published time.
    """
    target = published_seconds()
    own = 1 / clock_of(MACHINE)
    before = seconds(MACHINE, recovery)
    points = [(own, before), (1 / NOMINAL, seconds(with_clock(MACHINE, NOMINAL), recovery))]
    for _ in range(_MOST_STEPS):
        (a, at_a), (b, at_b) = points[-2:]
        if abs(at_b / target - 1) < _CLOSE:
            return Fit(recovery, with_clock(MACHINE, 1 / b), before, at_b)
        if at_a == at_b:
            break
        cycle = b + (target - at_b) * (b - a) / (at_b - at_a)
        if not 0 < cycle < math.inf:
            break
        points.append((cycle, seconds(with_clock(MACHINE, 1 / cycle), recovery)))
    raise ValueError(f"no clock makes the first scaling row's step take {target:.2f} s.")


def leeway(
    recovery: str, seconds: Callable[[Machine, str], float] = first_row
) -> Iterator[tuple[str, str, float]]:
    """What else is open, and by how much it could change the step of the first row.

    Args:
        recovery: of that step.
        seconds: of that step on a machine, with that recovery.

    Yields:
        The parameter, the value that favours the paper most, and the change of the step's time as a share.
    """
    before = seconds(MACHINE, recovery)
    for name, value, machine in itertools.chain(_memories(), _rest()):
        yield name, value, seconds(machine, recovery) / before - 1


def _memories() -> Iterator[tuple[str, str, Machine]]:
    for name, bandwidth in (("GSM", 1e12), ("AM", 1e12), ("SM", 1e12)):
        memories = tuple(
            dataclasses.replace(memory, bandwidth=bandwidth) if memory.name == name else memory
            for memory in MACHINE.memories
        )
        yield (
            f"memories.{name}.bandwidth",
            "1 TB/s",
            dataclasses.replace(MACHINE, memories=memories),
        )


def _rest() -> Iterator[tuple[str, str, Machine]]:
    inside = MACHINE.accelerator
    assert inside is not None
    quick = dataclasses.replace(inside.latencies, fma=1)
    links = tuple(dataclasses.replace(link, latency=0.0) for link in MACHINE.links)
    yield "links.interconnect.latency", "0 s", dataclasses.replace(MACHINE, links=links)
    yield "launch_seconds", "0 s", dataclasses.replace(MACHINE, launch_seconds=0.0)
    for name, value, changed in (
        ("accelerator.latencies.fma", "1 cycle", dataclasses.replace(inside, latencies=quick)),
        ("accelerator.accumulator", "fp16", dataclasses.replace(inside, accumulator="fp16")),
        ("accelerator.exp_operations", "1", dataclasses.replace(inside, exp_operations=1)),
    ):
        yield name, value, dataclasses.replace(MACHINE, accelerator=changed)
