"""The order of forwards and backwards of each schedule, stage by stage.

A schedule here says only in which order a stage's compute ops go; where state ops and transfers go beside them is
decided in `ratrain_jax.lowering.order`.
"""

from __future__ import annotations

from ratrain_jax.errors import OptionError

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
