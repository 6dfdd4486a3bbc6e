"""Where the time of a step goes: one line that adds up.

Terms.
    The line is that of the **pacing stage**, the one that keeps the next step waiting longest; of several that do, the one
    that goes on first after its last Backward. Its step lasts from its first Forward to its first Forward of the next
    step, and each moment of its compute lane belongs to one term:

    ideal      it runs an op other than Recover before its last Backward ends, for as long as the op takes by itself
    recovery   it runs a Recover, likewise
    exposed    communication: it is idle, and what its next op waits for is under way on a link; or an op takes longer
               than by itself, for the lanes slow each other down
    bubble     it is idle, and what its next op waits for is computed on another stage
    tail       from the end of its last Backward to its first Forward of the next step
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ratrain_jax.lowering.program import Backward, Forward, Lane, Op, Recover
from ratrain_jax.simulation.causes import Causes
from ratrain_jax.simulation.program_tasks import ProgramTasks
from ratrain_jax.simulation.tasks import Run


@dataclasses.dataclass(frozen=True, slots=True)
class Breakdown:
    """The terms of a step, in seconds; they add up to `step`.

    Attributes:
        stage: the pacing stage.
        ideal: compute that every schedule does.
        bubble: waiting for other stages' compute.
        exposed: waiting for communication.
        recovery: running forwards again.
        tail: from the last Backward to the next step's first Forward.
    """

    stage: int
    ideal: float
    bubble: float
    exposed: float
    recovery: float
    tail: float

    @property
    def step(self) -> float:
        """Seconds from step to step."""
        return self.ideal + self.bubble + self.exposed + self.recovery + self.tail

    def __str__(self) -> str:
        terms = {
            "ideal": self.ideal,
            "bubble": self.bubble,
            "exposed communication": self.exposed,
            "recovery": self.recovery,
            "tail": self.tail,
        }
        shown = " + ".join(f"{name} {seconds:.4g}" for name, seconds in terms.items())
        return f"step {self.step:.4g} s = {shown}"


def pacing_stage(entered: Sequence[tuple[int, int]], run: Run, ends: Sequence[float]) -> int:
    """The stage whose line is drawn.

    Args:
        entered: the task of each stage's first Forward, in this step and in the next.
        run: when tasks ran.
        ends: when the last Backward of each stage ends.
    """
    lasts = [float(run.start[again] - run.start[first]) for first, again in entered]
    # Sums in another order differ in their last bits; those are no reason.
    longest = [s for s, seconds in enumerate(lasts) if seconds >= max(lasts) * (1 - 1e-9)]
    tails = [float(run.start[again]) - end for (_, again), end in zip(entered, ends, strict=True)]
    return min(longest, key=tails.__getitem__)


def body_ends(made: ProgramTasks, run: Run) -> list[float]:
    """For each stage, when its last Backward ends, or without one its last Forward."""
    ends = [0.0] * len(made.entered)
    trains = any(isinstance(op, Backward) for op in made.ops)
    for n, op in enumerate(made.ops[: made.steps]):
        if isinstance(op, Backward if trains else Forward):
            ends[op.stage] = max(ends[op.stage], float(run.end[n]))
    return ends


def break_down(made: ProgramTasks, run: Run, causes: Causes) -> Breakdown:
    """Accounts for the pacing stage's step.

    Args:
        made: the program's tasks.
        run: when they ran.
        causes: what each waited for.
    """
    ends = body_ends(made, run)
    stage = pacing_stage(made.entered, run, ends)
    first, again = made.entered[stage]
    body_end = ends[stage]
    body = [
        n
        for n in range(first, made.steps)
        if made.ops[n].lane == Lane.COMPUTE
        and made.ops[n].stage == stage
        and run.start[n] < body_end
    ]
    terms = {"ideal": 0.0, "bubble": 0.0, "exposed": 0.0, "recovery": 0.0}
    at = float(run.start[first])
    for n in body:
        for term, seconds in _gap(made.ops, run, causes, n, at).items():
            terms[term] += seconds
        took, alone = float(run.end[n] - run.start[n]), made.tasks.seconds[n]
        slowed = took - alone if took > alone * (1 + 1e-9) else 0.0
        terms["recovery" if isinstance(made.ops[n], Recover) else "ideal"] += took - slowed
        terms["exposed"] += slowed
        at = float(run.end[n])
    return Breakdown(stage, tail=float(run.start[again]) - body_end, **terms)


def _gap(
    ops: Sequence[Op], run: Run, causes: Causes, number: int, since: float
) -> dict[str, float]:
    """What a stage's idle time before an op is spent on, from the end of the op before."""
    terms = {"bubble": 0.0, "exposed": 0.0}
    until = float(run.start[number])
    for cause in causes.chain(number):
        if until <= since:
            break
        if cause == (number, 0):
            continue
        begun = max(causes.start(cause), since)
        if begun < until:
            terms["exposed" if ops[cause[0]].lane == Lane.LINK else "bubble"] += until - begun
            until = begun
    terms["bubble"] += max(until - since, 0.0)
    return terms
