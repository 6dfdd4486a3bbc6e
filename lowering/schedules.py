"""The order of forwards and backwards of each schedule, stage by stage.

A schedule here says only in which order a stage's compute ops go; where state ops and transfers go beside them is
decided in `ratrain_jax.lowering.order`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ratrain_jax.errors import OptionError

T = TypeVar("T")

Slot = tuple[str, int]
"""`("F", i)` or `("B", i)`: the stage's whole forward or backward of microbatch i."""


def gpipe(stage: int, stages: int, microbatches: int) -> list[Slot]:
    """All forwards, then all backwards."""
    del stage, stages
    return [("F", i) for i in range(microbatches)] + [("B", i) for i in range(microbatches)]


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> list[Slot]:
    """Warm-up of `stages - stage - 1` forwards, then one forward and one backward in turn, then cool-down.

    At most `min(microbatches, stages - stage)` microbatches are in flight.

    Example:
        >>> one_forward_one_backward(0, 2, 3)
        [('F', 0), ('F', 1), ('B', 0), ('F', 2), ('B', 1), ('B', 2)]
    """
    warm_up = min(microbatches, stages - stage - 1)
    slots: list[Slot] = [("F", i) for i in range(warm_up)]
    for i in range(microbatches):
        if warm_up + i < microbatches:
            slots.append(("F", warm_up + i))
        slots.append(("B", i))
    return slots


def forward(stage: int, stages: int, microbatches: int) -> list[Slot]:
    """Forwards alone, of a step that evaluates."""
    del stage, stages
    return [("F", i) for i in range(microbatches)]


def in_order_of_data(
    slots: Sequence[Sequence[T]], ready: Callable[[int, T], bool]
) -> Iterator[tuple[int, T]]:
    """The slots of all stages, each stage's in its order, and each after those that it reads.

    Args:
        slots: what each stage does, in order.
        ready: whether what a slot of a stage reads was given before.

    Yields:
        The stage and the slot. Slots that are never ready are left out.

    Example:
        >>> seen = set()
        >>> for stage, slot in in_order_of_data([["b"], ["a"]], lambda _, slot: slot == "a" or "a" in seen):
        ...     seen.add(slot)
        ...     print(stage, slot)
        1 a
        0 b
    """
    done = [0] * len(slots)
    moved = True
    while moved:
        moved = False
        for stage, own in enumerate(slots):
            while done[stage] < len(own) and ready(stage, own[done[stage]]):
                yield stage, own[done[stage]]
                done[stage] += 1
                moved = True


SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "ratrain": one_forward_one_backward,
}


def compute_order(schedule: str, stages: int, microbatches: int) -> list[list[Slot]]:
    """The slots of every stage.

    Raises:
        OptionError: no such schedule.
    """
    if schedule == "forward":
        return [forward(stage, stages, microbatches) for stage in range(stages)]
    if schedule not in SCHEDULES:
        known = ", ".join(repr(name) for name in SCHEDULES)
        raise OptionError(f"schedule={schedule!r} is not known; choose one of {known}.")
    return [SCHEDULES[schedule](stage, stages, microbatches) for stage in range(stages)]
