"""Checks that a program has exactly the ops that its settings and layers ask for."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Final, NamedTuple

from ratrain_jax.lowering.program import (
    Backward,
    Borrow,
    Forward,
    Free,
    GlobalReduce,
    GradSync,
    Kind,
    Metrics,
    Op,
    PrefetchView,
    Program,
    Prologue,
    Recover,
    Send,
    SendActivation,
    SendGradient,
    UpdateShard,
    Validate,
    ZeroGradient,
)

from .fault import Place, named_layer, named_op, refuse
from .shape import Shape

_REMEDY: Final = "Put it back, or lower the step again."


class _Need(NamedTuple):
    """What tells an op of one program from all others of its type.

    Attributes:
        kind: the type.
        stage: the stage that runs it.
        what: the layer, the unit, or what is sent, if any.
        microbatch: which one, if one.
        also: target, phase or group, if any.
    """

    kind: type[Op]
    stage: int
    what: Hashable = None
    microbatch: int | None = None
    also: Hashable = None


def check_complete(shape: Shape) -> None:
    """Refuses a program with an op missing, doubled, or that nothing asks for."""
    program = shape.program
    _check_copies(program)
    expected = Counter(_expected(shape))
    found: Counter[_Need] = Counter()
    for stage, ops in enumerate(program.order):
        for index, op in enumerate(ops):
            if isinstance(op, (Free, Backward)) or op.stage != stage:
                continue
            need = _need(program, op)
            found[need] += 1
            if found[need] <= expected[need]:
                continue
            if expected[need]:
                what, remedy = f"{named_op(op)} is there twice.", "Remove one of the two."
            else:
                what = f"{named_op(op)} has no place in this program."
                remedy = "Remove it, or correct what it is for."
            refuse(program, what, remedy, (stage, index))
    for need in expected:
        if found[need] < expected[need]:
            refuse(program, _missing(program, need), _REMEDY, _nearest(program, need))
    _check_backwards(shape)


def _check_copies(program: Program) -> None:
    """An op between stages stands once in the list of each."""
    copies: dict[Op, list[int]] = {}
    places: dict[Op, Place] = {}
    for stage, ops in enumerate(program.order):
        for index, op in enumerate(ops):
            if len(op.stages) > 1:
                copies.setdefault(op, []).append(stage)
                places.setdefault(op, (stage, index))
    for op, stages in copies.items():
        if sorted(stages) != sorted(op.stages):
            wanted = ", ".join(map(str, op.stages))
            there = ", ".join(map(str, stages))
            what = (
                f"{named_op(op)} must stand once in the lists of stages {wanted}; it is in {there}."
            )
            refuse(program, what, "Write the same op into each of these lists.", places[op])


def _check_backwards(shape: Shape) -> None:
    """Each layer goes backward once for each microbatch."""
    program = shape.program
    for stage in range(len(program.order)):
        first, last = shape.blocks[stage][0][0], shape.blocks[stage][-1][1]
        for microbatch in range(program.settings.microbatches):
            covered = last if program.settings.trains else first
            for low, high in shape.units.get((stage, microbatch), ()):
                if high != covered:
                    _refuse_cover(program, stage, microbatch, high, covered)
                covered = low
            if covered != first:
                _refuse_cover(program, stage, microbatch, first, covered)


def _refuse_cover(program: Program, stage: int, microbatch: int, low: int, high: int) -> None:
    """Layers from `low` to `high` lack a Backward; where `low` is above, layers have two."""
    doubled = low > high
    layer = high if doubled else low
    problem = "goes backward twice" if doubled else "has no Backward"
    what = f"{named_layer(program, layer)} {problem} for microbatch {microbatch}."
    near = _nearest(program, _Need(Backward, stage, layer, microbatch))
    refuse(program, what, "Cover each layer once.", near)


def _need(program: Program, op: Op) -> _Need:
    kind = type(op)
    match op:
        case Forward() | Recover():
            return _Need(kind, op.stage, op.layers, op.microbatch)
        case Send():
            return _Need(kind, op.stage, _sent(program, op), op.microbatch, op.target)
        case Borrow():
            return _Need(kind, op.stage, op.layer, None, op.target)
        case GradSync():
            return _Need(kind, op.stage, op.layer, op.microbatch)
        case UpdateShard():
            return _Need(kind, op.stage, op.layer, None, None if op.layer is None else op.phase)
        case Validate():
            return _Need(kind, op.stage, op.layer, None, op.phase)
        case ZeroGradient() | PrefetchView():
            return _Need(kind, op.stage, op.layer)
        case GlobalReduce():
            return _Need(kind, op.stage, None, None, (op.phase, op.group))
    return _Need(kind, op.stage)


def _sent(program: Program, op: Op) -> Hashable:
    """What a send carries: kind, and layer or name."""
    if len(op.reads) != 1:
        return None
    value = program.values[op.reads[0]]
    return (value.kind, value.name if value.layer is None else value.layer)


def _expected(shape: Shape) -> Iterator[_Need]:
    program = shape.program
    if any(operand.prologue for operand in program.operands):
        yield _Need(Prologue, 0)
    for stage, blocks in enumerate(shape.blocks):
        for block in blocks:
            for microbatch in range(program.settings.microbatches):
                yield _Need(Forward, stage, block, microbatch)
                if program.layers[block[0]].recovered:
                    yield _Need(Recover, stage, block, microbatch)
    yield from _expected_sends(shape)
    yield from _expected_state(shape)
    yield from _expected_updates(shape)
    for value in program.values:
        if value.kind is Kind.METRICS and value.layer is None:
            yield _Need(Metrics, value.stage)


def _expected_sends(shape: Shape) -> Iterator[_Need]:
    program = shape.program
    for number, variable in enumerate(program.variables):
        kind = Kind.BOUNDARY if variable.role == "boundary" else Kind.LOSS
        forward = _steps(shape.holders(number))
        back = _steps(shape.givers(number)) if variable.differentiable else []
        for microbatch in range(program.settings.microbatches):
            for source, target in forward:
                yield _Need(SendActivation, source, (kind, f"x{number}"), microbatch, target)
            for source, target in back:
                what = (Kind.COTANGENT, f"x{number}")
                yield _Need(SendGradient, source, what, microbatch, target)
    for number, operand in enumerate(program.operands):
        for stage in shape.operand_stages[number]:
            if operand.prologue and stage:
                yield _Need(SendActivation, 0, (Kind.OPERAND, operand.name), None, stage)
    if not program.settings.trains:
        return
    share = Kind.ACCUMULATOR if program.settings.zero == 1 else Kind.GRADIENT
    for owner, stages in enumerate(shape.borrowers):
        for stage in stages:
            yield _Need(SendGradient, stage, (share, owner), None, shape.stage(owner))


def _steps(stages: list[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(stages))


def _expected_state(shape: Shape) -> Iterator[_Need]:
    settings = shape.program.settings
    for stage, owners in enumerate(shape.bundles):
        for owner in owners:
            home = shape.stage(owner)
            if home == stage:
                yield _Need(PrefetchView, stage, owner)
            else:
                yield _Need(Borrow, home, owner, None, stage)
            if not settings.trains:
                continue
            yield _Need(ZeroGradient, stage, owner)
            if settings.zero == 2:
                for microbatch in range(settings.microbatches):
                    yield _Need(GradSync, stage, owner, microbatch)
            if home == stage and (settings.zero == 1 or shape.borrowers[owner]):
                yield _Need(GradSync, stage, owner)


def _expected_updates(shape: Shape) -> Iterator[_Need]:
    program = shape.program
    phases = [{layer.update_phase} if layer.parameters else set() for layer in program.layers]
    for reduction in program.reductions:
        group = reduction_group(shape, reduction.phase)
        yield _Need(GlobalReduce, group[0], None, None, (reduction.phase, group))
        for number in reduction.layers:
            phases[number].add(reduction.phase - 1)
    if not program.settings.trains:
        return
    for number, numbers in enumerate(phases):
        for phase in sorted(numbers):
            yield _Need(UpdateShard, shape.stage(number), number, None, phase)
        layer = program.layers[number]
        if layer.deferred:
            yield _Need(Validate, layer.stage, number, None, layer.update_phase)
    for stage in sorted(shape.replicated):
        yield _Need(UpdateShard, stage)


def reduction_group(shape: Shape, phase: int) -> tuple[int, ...]:
    """The stages that take part in a reduction: those that give, and those that take."""
    program = shape.program
    reduction = program.reductions[phase - 1]
    givers = {shape.stage(layer) for layer in reduction.layers}
    if reduction.loss:
        givers.update(shape.stage(program.variables[v].producer) for v in shape.results)
    return tuple(sorted(givers | set(reduction.stages)))


def _missing(program: Program, need: _Need) -> str:
    """Says which op is missing."""
    words = [f"Stage {need.stage} lacks the {need.kind.__name__}"]
    match need.what:
        case int():
            words.append(f"of {named_layer(program, need.what)}")
        case (Kind() as kind, what):
            words.append(f"of the {kind.value} {what if isinstance(what, str) else f'of L{what}'}")
        case (first, last):
            words.append(f"of layers L{first}:{last}")
    if need.microbatch is not None:
        words.append(f"for microbatch {need.microbatch}")
    if issubclass(need.kind, (Send, Borrow)):
        words.append(f"to stage {need.also}")
    elif isinstance(need.also, int):
        words.append(f"of phase {need.also}")
    elif isinstance(need.also, tuple):
        words.append(f"of phase {need.also[0]}")
    return " ".join(words) + "."


def _nearest(program: Program, need: _Need) -> Place | None:
    """The first op that reads what a missing one should write, or else the last one like it."""
    stages = {need.stage, need.also if issubclass(need.kind, (Send, Borrow)) else need.stage}
    written = {number for ops in program.order for op in ops for number in op.writes}
    made = written.union(program.inputs)
    best, place = -1, None
    for stage, ops in enumerate(program.order):
        for index, op in enumerate(ops if stage in stages else ()):
            if isinstance(op, Free):
                continue
            if not made.issuperset(op.reads):
                return stage, index
            score = _likeness(op, need)
            if score >= best:
                best, place = score, (stage, index)
    return place


def _likeness(op: Op, need: _Need) -> int:
    """How much an op has to do with a missing one."""
    score = 0
    if need.microbatch is not None:
        score += 2 * (getattr(op, "microbatch", None) == need.microbatch)
    if isinstance(need.what, int):
        first, last = getattr(op, "layers", (-1, -1))
        score += getattr(op, "layer", None) == need.what or first <= need.what < last
    return score
