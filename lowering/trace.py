"""What the lowering starts from: a step, traced twice."""

from __future__ import annotations

import dataclasses

from jax.extend import core as jex


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Trace:
    """A step, traced.

    Attributes:
        whole: with the global batch.
        small: with one rank's microbatch.
        names: the path of each flat input.
        states: how many of the inputs are leaves of the state.
        state_out: the flat output that is each state leaf's new value, or None.
        metrics_out: the other outputs.
        where: the step's name, file and line, for messages.
        paths: the path of each leaf of the state, key by key, where that is known.
    """

    whole: jex.ClosedJaxpr
    small: jex.ClosedJaxpr
    names: tuple[str, ...]
    states: int
    state_out: tuple[int | None, ...]
    metrics_out: tuple[int, ...]
    where: str = ""
    paths: tuple[tuple[str, ...], ...] = ()

    def __repr__(self) -> str:
        equations = len(self.whole.jaxpr.eqns)
        return f"<Trace of {self.where.strip() or 'a step'}: {len(self.names)} inputs, {equations} equations>"
