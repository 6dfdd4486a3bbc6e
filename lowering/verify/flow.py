"""Checks that each op reads exactly the values that its role demands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

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
    Value,
    ZeroGradient,
)

from .compute_roles import ComputeRoles
from .fault import Place, named_op, named_value, refuse
from .shape import Shape
from .state_roles import StateRoles
from .tags import NEW, NEXT, OLD, THIS, Slot, Tag, known_types, phrase, problem, type_key

_REMEDY: Final = "Read the value that belongs there, or lower the step again."
_ROW: Final = "Correct its row in the table of values."


def check_flow(shape: Shape) -> None:
    """Refuses a program in which a value reaches the wrong reader.

    Values get tags from the ops that write them; each op's reads are compared with the tags that
    its role demands.
    """
    program = shape.program
    tags: list[Tag | None] = [None] * len(program.values)
    _tag_inputs(shape, tags)
    roles = _Roles(shape, tags)
    ops = [
        ((stage, index), op)
        for stage, ops in enumerate(program.order)
        for index, op in enumerate(ops)
        if op.stage == stage and not isinstance(op, Free)
    ]
    writers: dict[int, Place] = {}
    for last in (False, True):
        for at, op in ops:
            if isinstance(op, Send) == last:
                _tag_writes(program, roles, tags, at, op)
                writers.update((number, at) for number in op.writes)
    _check_rows(program, tags, writers)
    for at, op in ops:
        _check_reads(program, roles, tags, at, op)
    _check_outputs(shape, tags, writers)


class _Roles:
    """What to ask for each type of op."""

    def __init__(self, shape: Shape, tags: list[Tag | None]) -> None:
        compute = ComputeRoles(shape)
        state = StateRoles(compute, tags)
        self.compute = compute
        self.reads: dict[type[Op], Callable[[Any], list[Slot]]] = {
            Forward: compute.forward_reads,
            Recover: compute.recover_reads,
            Backward: compute.backward_reads,
            Prologue: state.prologue_reads,
            ZeroGradient: lambda op: [],
            SendActivation: state.send_reads,
            SendGradient: state.send_reads,
            Borrow: state.view_reads,
            PrefetchView: state.view_reads,
            GradSync: state.sync_reads,
            GlobalReduce: state.reduce_reads,
            UpdateShard: state.update_reads,
            Validate: state.validate_reads,
            Metrics: state.metrics_reads,
        }
        self.writes: dict[type[Op], Callable[[Any], list[Tag]]] = {
            Forward: compute.forward_writes,
            Recover: compute.recover_writes,
            Backward: compute.backward_writes,
            Prologue: state.prologue_writes,
            ZeroGradient: state.zero_writes,
            SendActivation: state.send_writes,
            SendGradient: state.send_writes,
            Borrow: state.view_writes,
            PrefetchView: state.view_writes,
            GradSync: state.sync_writes,
            GlobalReduce: state.reduce_writes,
            UpdateShard: state.update_writes,
            Validate: state.validate_writes,
            Metrics: state.metrics_writes,
        }


def _tag_inputs(shape: Shape, tags: list[Tag | None]) -> None:
    """Tags the inputs, and checks that they are those that the settings ask for."""
    program = shape.program
    given = {o.name: n for n, o in enumerate(program.operands) if not o.prologue}
    for number in program.inputs:
        tag = _input_tag(program, program.values[number], given)
        if tag is None:
            what = f"{named_value(program, number)} cannot be an input."
            refuse(program, what, "Remove it from the inputs, or let an op write it.")
        tags[number] = tag
    found = Counter(tag for tag in tags if tag is not None)
    needed, allowed = _expected_inputs(shape)
    for tag, count in found.items():
        if tag[0] != "argument" and (count > 1 or tag not in allowed):
            what = f"The inputs have {phrase(tag)} twice, or it belongs to no reader."
            refuse(program, what, "Hand in each value once where it is read.")
    for tag in sorted(needed.difference(found), key=str):
        refuse(program, f"The inputs lack {phrase(tag)}.", "Add it to the inputs.")


def _expected_inputs(shape: Shape) -> tuple[set[Tag], set[Tag]]:
    """What the inputs must have, and what they may have."""
    program = shape.program
    needed: set[Tag] = set()
    optional: set[Tag] = {("replicated", stage, OLD) for stage in range(len(program.order))}
    for number, stages in enumerate(shape.operand_stages):
        if not program.operands[number].prologue:
            needed.update(("operand", number, stage) for stage in stages)
    for stage, owners in enumerate(shape.bundles):
        for owner in owners:
            if shape.stage(owner) == stage:
                needed.add(("parameters", owner, OLD))
                optional.add(("optimizer", owner, OLD))
            if program.settings.update_prefetch:
                needed.add(("view", owner, stage, THIS))
    return needed, needed | optional


def _input_tag(program: Program, value: Value, given: dict[str, int]) -> Tag | None:
    match value.kind:
        case Kind.PARAMETERS | Kind.OPTIMIZER:
            return None if value.layer is None else (value.kind.value, value.layer, OLD)
        case Kind.VIEW:
            if value.layer is None or not program.settings.update_prefetch:
                return None
            return ("view", value.layer, value.stage, THIS)
        case Kind.REPLICATED:
            return ("replicated", value.stage, OLD)
        case Kind.OPERAND if value.name in given:
            return ("operand", given[value.name], value.stage)
        case Kind.OPERAND:
            return ("argument", value.stage)
    return None


def _tag_writes(program: Program, roles: _Roles, tags: list[Tag | None], at: Place, op: Op) -> None:
    expected = roles.writes[type(op)](op)
    if len(op.writes) != len(expected):
        what = f"{named_op(op)} writes {len(op.writes)} values where {len(expected)} belong."
        names = ", ".join(map(phrase, expected))
        refuse(program, what, f"It writes {names or 'nothing'}.", at)
    for number, tag in zip(op.writes, expected, strict=True):
        tags[number] = tag


def _check_rows(program: Program, tags: list[Tag | None], writers: dict[int, Place]) -> None:
    """Each value's row in the table fits what the value is for."""
    types = known_types(program)
    for value, tag in zip(program.values, tags, strict=True):
        if tag is None:
            what = f"{named_value(program, value.id)} is neither an input nor written by an op."
            refuse(program, what, "Remove it from the table of values, or let an op write it.")
        wrong = problem(program, value, tag)
        key = type_key(program, tag)
        if wrong is None and key is not None:
            arrays = types.setdefault(key, value.arrays)
            if arrays != value.arrays:
                wrong = "its arrays differ from those of other values of its kind"
        if wrong is not None:
            what = f"%{value.id} is {phrase(tag)}, but {wrong}."
            refuse(program, what, _ROW, writers.get(value.id))


def _check_reads(
    program: Program, roles: _Roles, tags: list[Tag | None], at: Place, op: Op
) -> None:
    place = 0
    donated: list[int] = []
    skipped: list[Slot] = []
    for slot in roles.reads[type(op)](op):
        while place < len(op.reads) and tags[op.reads[place]] in slot.tags:
            if slot.donated:
                donated.append(op.reads[place])
            skipped.clear()
            place += 1
            if not slot.many:
                break
        else:
            if not slot.many:
                skipped.append(slot)
                if not slot.optional:
                    _refuse_read(program, tags, at, op, place, skipped)
    if place < len(op.reads):
        number = op.reads[place]
        what = f"{named_op(op)} reads %{number}, {phrase(tags[number])}, which it has no use for."
        refuse(program, what, "Remove it from the reads.", at)
    if sorted(op.donates) != sorted(donated):
        named = " ".join(f"%{number}" for number in donated) or "nothing"
        refuse(program, f"{named_op(op)} must donate {named}.", "Correct its donations.", at)
    if isinstance(op, Forward):
        _check_waits(program, tags, at, op, roles.compute.forward_waits(op))
    elif isinstance(op, Recover):
        _check_waits(program, tags, at, op, roles.compute.recover_waits(op))
    elif isinstance(op, Backward):
        _check_waits(program, tags, at, op, roles.compute.backward_waits(op))


def _refuse_read(
    program: Program,
    tags: list[Tag | None],
    at: Place,
    op: Op,
    place: int,
    missing: list[Slot],
) -> None:
    """Refuses what stands in a place where one of some tags should, the last of them at least."""
    belongs = phrase(missing[-1].tags[0])
    if place == len(op.reads):
        refuse(program, f"{named_op(op)} does not read {belongs}.", _REMEDY, at)
    number = op.reads[place]
    tag = tags[number]
    for slot in missing:
        if tag is not None and slot.tags[0][0] == tag[0]:
            belongs = phrase(slot.tags[0])
    found = phrase(tag)
    if found == belongs:
        found = f"the same on stage {program.values[number].stage}"
    what = f"{named_op(op)} reads %{number}, {found}, in the place of {belongs}."
    refuse(program, what, _REMEDY, at)


def _check_waits(
    program: Program, tags: list[Tag | None], at: Place, op: Op, expected: list[Tag]
) -> None:
    settings = program.settings
    why = {
        Forward: f"with update_prefetch {'on' if settings.update_prefetch else 'off'}",
        Recover: f"with recovery {settings.recovery!r}",
        Backward: f"with zero={settings.zero}",
    }[type(op)]
    found = [tags[number] for number in op.waits]
    if sorted(map(str, found)) == sorted(map(str, expected)):
        return
    names = _list(map(phrase, expected))
    what = f"{named_op(op)} waits for {_list(map(phrase, found))}; {why} it waits for {names}."
    refuse(program, what, "Correct what it waits for.", at)


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"


def _check_outputs(shape: Shape, tags: list[Tag | None], writers: dict[int, Place]) -> None:
    """The outputs are the new state, the next step's views if they are there, and the metrics.

    A step that evaluates hands its parameters back as they were.
    """
    program = shape.program

    def handed_back(tag: Tag) -> bool:
        if not program.settings.trains and tag[0] == "parameters":
            return True
        return tag[-1] in (NEW, NEXT) or tag[0] in ("metrics", "layer metrics")

    wanted = {number for number, tag in enumerate(tags) if tag is not None and handed_back(tag)}
    what_is = (
        "new state, next views and metrics" if program.settings.trains else "parameters and metrics"
    )
    for number in program.outputs:
        if number not in wanted:
            what = f"%{number}, {phrase(tags[number])}, is an output."
            refuse(program, what, f"Only {what_is} are.", writers.get(number))
    for number in sorted(wanted.difference(program.outputs)):
        what = f"%{number}, {phrase(tags[number])}, is not among the outputs."
        refuse(program, what, "Add it.", writers.get(number))
