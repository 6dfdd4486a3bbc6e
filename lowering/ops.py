"""The ops of a program. What each reads and writes, in which order, is stated in `program`."""

from __future__ import annotations

import dataclasses
import enum
from typing import ClassVar


class Lane(enum.StrEnum):
    """Where an op runs; ops of one lane of a stage run in list order."""

    COMPUTE = "compute"
    LINK = "link"
    NONE = "none"


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """What all ops have.

    Attributes:
        stage: the stage that runs it (the sender, for an op between stages).
        reads: values it reads, in the order of its program's arguments.
        writes: values it makes.
        donates: those of `reads` whose life ends here; their buffers may be reused for `writes`.
        waits: values that must exist before it starts, though it does not read them (an order edge).
    """

    stage: int
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    donates: tuple[int, ...] = ()
    waits: tuple[int, ...] = ()

    lane: ClassVar[Lane] = Lane.COMPUTE

    @property
    def stages(self) -> tuple[int, ...]:
        """Every stage in whose list the op stands."""
        return (self.stage,)


@dataclasses.dataclass(frozen=True, slots=True)
class Prologue(Op):
    """Computes from the whole batch what the loss reads of it (stage 0)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Forward(Op):
    """Runs a unit forward for one microbatch; writes boundary values and, unless recovered, residuals.

    A stage's first one waits for all of its views where these are gathered at the start of the step: without
    `update_prefetch` compute begins behind the last of them.

    Attributes:
        layers: the unit.
        microbatch: which one.
    """

    layers: tuple[int, int] = (0, 0)
    microbatch: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Recover(Op):
    """Runs a unit's forward program again to make its residuals.

    Attributes:
        layers: the unit.
        microbatch: which one.
    """

    layers: tuple[int, int] = (0, 0)
    microbatch: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Backward(Op):
    """Runs a unit backward for one microbatch; adds into the accumulators, or writes the microbatch's gradients (ZeRO-2).

    Attributes:
        layers: the unit.
        microbatch: which one.
    """

    layers: tuple[int, int] = (0, 0)
    microbatch: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class ZeroGradient(Op):
    """Makes a layer's zero accumulator (the sharded one with ZeRO-2).

    Attributes:
        layer: whose.
    """

    layer: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Send(Op):
    """Copies one value to another stage's group, rank to rank.

    Attributes:
        target: the receiving stage.
        microbatch: which one; None for what is sent once a step.
    """

    target: int = 0
    microbatch: int | None = None
    lane: ClassVar[Lane] = Lane.LINK

    @property
    def stages(self) -> tuple[int, ...]:
        """The sender and the receiver."""
        return (self.stage, self.target)


@dataclasses.dataclass(frozen=True, slots=True)
class SendActivation(Send):
    """Sends a boundary value, or an operand that the prologue made, to a stage that reads it."""


@dataclasses.dataclass(frozen=True, slots=True)
class SendGradient(Send):
    """Sends a cotangent back towards its producer, or a borrower's share of a tied gradient to its owner."""


@dataclasses.dataclass(frozen=True, slots=True)
class Borrow(Op):
    """Gathers on the borrower's group a view of parameters that another stage owns.

    Attributes:
        layer: the owning layer.
        target: the borrowing stage.
    """

    layer: int = 0
    target: int = 0
    lane: ClassVar[Lane] = Lane.LINK

    @property
    def stages(self) -> tuple[int, ...]:
        """The sender and the receiver."""
        return (self.stage, self.target)


@dataclasses.dataclass(frozen=True, slots=True)
class GradSync(Op):
    """Reduce-scatters a layer's gradients over the group.

    Attributes:
        layer: whose.
        microbatch: None for once a step (ZeRO-1) or for the sum of tied shares (ZeRO-2); else the microbatch whose
            gradient is reduced and added into the sharded accumulator.
    """

    layer: int = 0
    microbatch: int | None = None
    lane: ClassVar[Lane] = Lane.LINK


@dataclasses.dataclass(frozen=True, slots=True)
class GlobalReduce(Op):
    """Gathers partial scalars of all layers (and the loss) and evaluates the user's own equations on them, on each stage.

    Attributes:
        phase: which reduction of the step; updates of the same phase wait for it.
        group: the stages that give or take something.
    """

    phase: int = 1
    group: tuple[int, ...] = ()
    lane: ClassVar[Lane] = Lane.LINK

    @property
    def stages(self) -> tuple[int, ...]:
        """All that give or take."""
        return self.group


@dataclasses.dataclass(frozen=True, slots=True)
class UpdateShard(Op):
    """Updates one layer's shards, or a stage's replicated state.

    Attributes:
        layer: whose; None for the stage's replicated state.
        phase: how many global reductions it waits for.
    """

    layer: int | None = None
    phase: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class PrefetchView(Op):
    """All-gathers a layer's view from its parameter shards.

    Attributes:
        layer: whose.
    """

    layer: int = 0
    lane: ClassVar[Lane] = Lane.LINK


@dataclasses.dataclass(frozen=True, slots=True)
class Validate(Op):
    """Keeps a layer's early update and the view of it, or makes both anew if the reductions show that it was wrong.

    Attributes:
        layer: whose.
        phase: how many global reductions it waits for.
    """

    layer: int = 0
    phase: int = 1
    # It waits for a gather, which must not hold up the next step's first forward.
    lane: ClassVar[Lane] = Lane.LINK


@dataclasses.dataclass(frozen=True, slots=True)
class Metrics(Op):
    """Computes what the step returns beside the state."""


@dataclasses.dataclass(frozen=True, slots=True)
class Free(Op):
    """Ends one value's life; the value is its only read."""

    lane: ClassVar[Lane] = Lane.NONE


OP_TYPES: dict[str, type[Op]] = {
    cls.__name__: cls
    for cls in (
        Prologue,
        Forward,
        Recover,
        Backward,
        ZeroGradient,
        SendActivation,
        SendGradient,
        Borrow,
        GradSync,
        GlobalReduce,
        UpdateShard,
        PrefetchView,
        Validate,
        Metrics,
        Free,
    )
}
