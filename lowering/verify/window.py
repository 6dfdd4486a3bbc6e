"""Checks the bounds on what a stage has in flight: state chains, and recovered microbatches.

A layer's state chain is in flight from the sync that makes its gradient final (or from its last
UpdateShard, if a global reduction decides on that) to its PrefetchView. The bound holds where views
are gathered behind their updates; without that there is nothing to look ahead to.
"""

from __future__ import annotations

from collections import Counter

from ratrain_jax.lowering.program import (
    Backward,
    GradSync,
    Op,
    PrefetchView,
    Program,
    Recover,
    UpdateShard,
)

from .fault import refuse
from .shape import Shape


def check_window(shape: Shape) -> None:
    """Refuses a program that runs further ahead than its window allows."""
    for stage in range(len(shape.program.order)):
        if shape.program.settings.update_prefetch:
            _check_chains(shape, stage)
        _check_recovered(shape.program, stage)


def _check_chains(shape: Shape, stage: int) -> None:
    program, settings = shape.program, shape.program.settings
    held = _chain_bytes(shape, stage)
    flying: dict[int, int] = {}
    for index, op in enumerate(program.order[stage]):
        if isinstance(op, PrefetchView):
            flying.pop(op.layer, None)
        layer = _opens(shape, op)
        if layer is None:
            continue
        flying[layer] = held[layer]
        names = ", ".join(f"L{n}" for n in flying)
        if len(flying) > settings.window_layers:
            what = (
                f"Stage {stage} has the state of {names} in flight, of {settings.window_layers}"
                " layers that its window allows."
            )
            refuse(program, what, "Issue this op behind a PrefetchView.", (stage, index))
        total, bound = sum(flying.values()), settings.window_bytes
        if bound is not None and total > bound and len(flying) > 1:
            what = (
                f"Stage {stage} holds {total:,} bytes for the state of {names} in flight, above the"
                f" {bound:,} of its window."
            )
            refuse(program, what, "Issue this op behind a PrefetchView.", (stage, index))


def _opens(shape: Shape, op: Op) -> int | None:
    """The layer whose chain an op opens, if it opens one."""
    match op:
        case GradSync():
            layers, last = shape.program.layers, shape.program.settings.microbatches - 1
            tied = bool(shape.borrowers[op.layer])
            final = op.microbatch is None or (op.microbatch == last and not tied)
            at_home = layers[op.layer].stage == op.stage
            return op.layer if final and at_home and not layers[op.layer].update_phase else None
        case UpdateShard() if op.layer is not None and op.phase:
            final = op.phase == shape.program.layers[op.layer].update_phase
            return op.layer if final else None
    return None


def _chain_bytes(shape: Shape, stage: int) -> dict[int, int]:
    """Bytes of each layer's gradient shard and new view on its own stage."""
    values = shape.program.values
    held: dict[int, int] = {}
    for op in shape.program.order[stage]:
        match op:
            case GradSync() if shape.stage(op.layer) == stage:
                held[op.layer] = values[op.writes[0]].bytes
            case PrefetchView():
                held[op.layer] = held.get(op.layer, 0) + values[op.writes[0]].bytes
    return held


def _check_recovered(program: Program, stage: int) -> None:
    """A microbatch is recovered ahead from its first Recover to its last recovered Backward."""
    layers = program.layers
    left = Counter(
        op.microbatch
        for op in program.order[stage]
        if isinstance(op, Backward) and layers[op.layers[0]].recovered
    )
    flying: set[int] = set()
    allowed = program.settings.window_microbatches + 1
    for index, op in enumerate(program.order[stage]):
        if isinstance(op, Recover):
            flying.add(op.microbatch)
            if len(flying) > allowed:
                what = (
                    f"Stage {stage} has recovered the residuals of {len(flying)} microbatches,"
                    f" where its window allows {allowed - 1} beside the one in use."
                )
                refuse(program, what, "Recover this one behind a Backward.", (stage, index))
        elif isinstance(op, Backward) and layers[op.layers[0]].recovered:
            left[op.microbatch] -= 1
            if not left[op.microbatch]:
                flying.discard(op.microbatch)
