"""Checks that a program's tables agree with each other and its ops only name what there is."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from ratrain_jax.lowering.program import (
    Backward,
    Borrow,
    Forward,
    Free,
    GlobalReduce,
    GradSync,
    LayerInfo,
    Op,
    PrefetchView,
    Program,
    Recover,
    SendActivation,
    SendGradient,
    UpdateShard,
    Validate,
    ZeroGradient,
)

from .fault import Place, named_layer, named_op, refuse

_REMEDY: Final = "Correct the program's text, or lower the step again."

_SCHEDULES: Final = ("gpipe", "1f1b", "ratrain", "forward")
_VALIDATIONS: Final = ("immediate", "deferred")
_RECOVERIES: Final = ("none", "backward", "forward", "auto")
_ROLES: Final = ("boundary", "loss", "aux")
_JOINS: Final = ("mean", "sum", "rows", "first")


def check_form(program: Program) -> None:
    """Refuses a program that names what does not exist, or whose tables contradict each other."""
    for problems in (_settings, _layers, _variables, _operands, _reductions, _values):
        for problem in problems(program):
            refuse(program, problem, _REMEDY)
    writers: dict[int, Op | None] = dict.fromkeys(program.inputs)
    for stage, ops in enumerate(program.order):
        for index, op in enumerate(ops):
            for problem in _op(program, op, stage):
                refuse(program, f"{named_op(op)} {problem}.", _REMEDY, (stage, index))
            if op.stage != stage:
                continue
            for value in op.writes:
                if value in writers:
                    _refuse_write(program, op, value, writers[value], (stage, index))
                writers[value] = op


def _refuse_write(program: Program, op: Op, value: int, first: Op | None, at: Place) -> None:
    if op == first:
        refuse(program, f"{named_op(op)} is there twice.", "Remove one of the two.", at)
    maker = "is an input" if first is None else f"{named_op(first)} writes already"
    what = f"{named_op(op)} writes %{value}, which {maker}."
    refuse(program, what, "Give each write a value of its own.", at)


def _settings(program: Program) -> Iterator[str]:
    settings = program.settings
    if settings.stages != len(program.order) or settings.stages < 1:
        yield f"stages is {settings.stages}, but there are lists for {len(program.order)} stages."
    for name in ("data_parallel", "microbatches", "window_layers", "window_microbatches"):
        if getattr(settings, name) < 1:
            yield f"{name} is {getattr(settings, name)}; it must be 1 or more."
    choices = (
        ("schedule", _SCHEDULES),
        ("zero", (1, 2)),
        ("recovery", _RECOVERIES),
        ("validation", _VALIDATIONS),
    )
    for name, allowed in choices:
        if getattr(settings, name) not in allowed:
            yield f"{name} is {getattr(settings, name)!r}; it must be one of {allowed}."
    if len(settings.memory_limit) not in (0, settings.stages):
        yield f"memory_limit has {len(settings.memory_limit)} numbers for {settings.stages} stages."


def _layers(program: Program) -> Iterator[str]:
    stage = block = -1
    recovered = False
    owned: set[str] = set()
    for number, layer in enumerate(program.layers):
        where = named_layer(program, number)
        begins_stage = layer.stage == stage + 1 and layer.block == 0
        continues = layer.stage == stage and layer.block in (block, block + 1)
        if not begins_stage and not continues:
            yield f"{where} is in block {layer.block} of stage {layer.stage}, out of order."
        if continues and layer.block == block and layer.recovered != recovered:
            yield f"{where} is recovered and its block is not, or the reverse; blocks are whole."
        stage, block, recovered = layer.stage, layer.block, layer.recovered
        yield from (f"{where} {problem}." for problem in _layer(program, number, layer))
        if not owned.isdisjoint(layer.parameters):
            yield f"{where} owns a parameter that another layer owns too."
        owned.update(layer.parameters)
    if stage != len(program.order) - 1:
        yield f"the layers end on stage {stage}; each of {len(program.order)} stages needs some."


def _layer(program: Program, number: int, layer: LayerInfo) -> Iterator[str]:
    variables, operands = program.variables, program.operands
    for variable in layer.inputs:
        if not _in(variable, variables) or number not in variables[variable].readers:
            yield f"reads x{variable}, which does not name it as a reader"
    for variable in layer.outputs:
        if not _in(variable, variables) or variables[variable].producer != number:
            yield f"makes x{variable}, which does not name it as its producer"
    if not all(_in(operand, operands) for operand in layer.operands):
        yield "reads an operand that does not exist"
    if not set(layer.backward_inputs) <= set(layer.inputs):
        yield "needs for its backward an input that it does not read"
    if not set(layer.backward_operands) <= set(layer.operands):
        yield "needs for its backward an operand that it does not read"
    for lists in (layer.inputs, layer.outputs, layer.operands, [o for o, _ in layer.borrows]):
        if not _ascending(lists):
            yield "lists its variables, operands or owners out of order"
    for owner, names in layer.borrows:
        if not 0 <= owner < number or not set(names) <= set(program.layers[owner].parameters):
            yield f"borrows from L{owner} what that does not own"
    if not 0 <= layer.update_phase <= len(program.reductions):
        yield f"updates after {layer.update_phase} reductions, of {len(program.reductions)}"
    if layer.deferred:
        yield from _deferred(program, number, layer)


def _deferred(program: Program, number: int, layer: LayerInfo) -> Iterator[str]:
    if program.settings.validation != "deferred" or not program.settings.update_prefetch:
        yield "is validated late, which the settings do not ask for"
    if not 0 <= layer.waits < layer.update_phase or not layer.parameters:
        yield f"is updated early, after {layer.waits} of {layer.update_phase} reductions"
    for other, borrower in enumerate(program.layers):
        if borrower.stage != layer.stage and number in [owner for owner, _ in borrower.borrows]:
            yield f"is validated late, but L{other} on another stage borrows from it"


def _variables(program: Program) -> Iterator[str]:
    for number, variable in enumerate(program.variables):
        if not _in(variable.producer, program.layers):
            yield f"x{number} is made by L{variable.producer}, which does not exist."
        elif number not in program.layers[variable.producer].outputs:
            yield f"x{number} names L{variable.producer}, which does not make it."
        elif not _ascending((variable.producer, *variable.readers)):
            yield f"x{number} is read before it is made, or its readers are out of order."
        for reader in variable.readers:
            if not _in(reader, program.layers) or number not in program.layers[reader].inputs:
                yield f"x{number} names L{reader} as a reader, which does not read it."
        if variable.role not in _ROLES:
            yield f"x{number} has the role {variable.role!r}; it must be one of {_ROLES}."
        joins = ("none",) if variable.role == "boundary" else _JOINS
        if variable.join not in joins:
            yield f"x{number} has the join {variable.join!r}; it must be one of {joins}."
    losses = [variable for variable in program.variables if variable.role == "loss"]
    if len(losses) != 1:
        yield f"{len(losses)} variables have the role 'loss'; one must."


def _operands(program: Program) -> Iterator[str]:
    given = [operand.name for operand in program.operands if not operand.prologue]
    for name, count in Counter(given).items():
        if count > 1:
            yield f"{count} operands are named {name!r}."


def _reductions(program: Program) -> Iterator[str]:
    for number, reduction in enumerate(program.reductions, start=1):
        if reduction.phase != number:
            yield f"reduction {number} has phase {reduction.phase}."
        if not reduction.stages or not _ascending(reduction.stages):
            yield f"reduction {number} goes to no stage, or to stages out of order."
        if not all(0 <= stage < len(program.order) for stage in reduction.stages):
            yield f"reduction {number} goes to a stage that does not exist."
        if not _ascending(reduction.layers):
            yield f"reduction {number} takes layers out of order."
        for layer in reduction.layers:
            if not _in(layer, program.layers):
                yield f"reduction {number} takes from L{layer}, which does not exist."
            elif program.layers[layer].update_phase < number - 1:
                yield f"reduction {number} takes from L{layer}, which has been updated before."
    for number, layer in enumerate(program.layers):
        for reduction in program.reductions[: layer.update_phase]:
            if layer.stage not in reduction.stages:
                yield (
                    f"{named_layer(program, number)} waits for reduction {reduction.phase}, which"
                    f" does not go to its stage {layer.stage}."
                )


def _values(program: Program) -> Iterator[str]:
    for number, value in enumerate(program.values):
        if value.id != number:
            yield f"value %{value.id} stands in place {number}."
        if not 0 <= value.stage < len(program.order):
            yield f"%{number} is on stage {value.stage}, which does not exist."
        if value.layer is not None and not _in(value.layer, program.layers):
            yield f"%{number} belongs to L{value.layer}, which does not exist."
        if value.microbatch is not None and not _is_microbatch(program, value.microbatch):
            yield f"%{number} belongs to microbatch {value.microbatch}, which does not exist."
        if value.aliased and not 0 < value.aliased <= value.bytes + value.aliased:
            yield f"%{number} shares {value.aliased} bytes, more than it has."
        if any(size < 0 for array in value.arrays for size in array.shape):
            yield f"%{number} has an array of negative size."
    for name in ("inputs", "outputs"):
        numbers = getattr(program, name)
        if not all(_in(number, program.values) for number in numbers):
            yield f"{name} names a value that does not exist."
        if len(set(numbers)) != len(numbers):
            yield f"{name} names a value twice."


def _op(program: Program, op: Op, stage: int) -> Iterator[str]:
    stages = op.stages
    if len(stages) == 1:
        if stages[0] != stage:
            yield f"stands in the list of stage {stage}"
    else:
        yield from _group(program, op, stage)
    named = (*op.reads, *op.writes, *op.waits)
    if named and not (min(named) >= 0 and max(named) < len(program.values)):
        yield "names a value that does not exist"
    if isinstance(op, Free):
        if len(op.reads) != 1 or op.writes or op.donates or op.waits:
            yield "must read one value and do nothing else"
        return
    if len(set(op.writes)) != len(op.writes):
        yield "writes a value twice"
    if op.donates and (
        not set(op.donates) <= set(op.reads) or len(set(op.donates)) != len(op.donates)
    ):
        yield "donates a value twice, or one that it does not read"
    if op.waits and not isinstance(op, (Forward, Recover, Backward)):
        yield "waits for a value; only Forward, Recover and Backward may"
    check = _ATTRIBUTES.get(type(op))
    if check is not None:
        yield from check(program, op)


def _group(program: Program, op: Op, stage: int) -> Iterator[str]:
    stages = op.stages
    if not all(0 <= s < len(program.order) for s in stages) or len(set(stages)) != len(stages):
        yield f"runs on stages {', '.join(map(str, stages))}, some of which do not exist or repeat"
    if stage not in stages:
        yield f"stands in the list of stage {stage}"
    elif isinstance(op, GlobalReduce) and op.stage != stages[0]:
        yield f"belongs to stage {op.stage}, not to the first of its group"


def _of_unit(program: Program, op: Any) -> Iterator[str]:
    layers, (first, last) = program.layers, op.layers
    if not 0 <= first < last <= len(layers):
        yield f"covers layers {first} to {last}, which do not exist"
        return
    begin, end = layers[first], layers[last - 1]
    if begin.stage != op.stage or end.stage != op.stage or begin.block != end.block:
        yield "covers layers of several blocks or of another stage"
    if not _is_microbatch(program, op.microbatch):
        yield f"is for microbatch {op.microbatch}, which does not exist"


def _of_layer(program: Program, op: Any) -> Iterator[str]:
    if op.layer is not None and not _in(op.layer, program.layers):
        yield f"is for L{op.layer}, which does not exist"


def _of_microbatch(program: Program, op: Any) -> Iterator[str]:
    if op.microbatch is not None and not _is_microbatch(program, op.microbatch):
        yield f"is for microbatch {op.microbatch}, which does not exist"


def _of_sync(program: Program, op: Any) -> Iterator[str]:
    yield from _of_layer(program, op)
    yield from _of_microbatch(program, op)


def _of_reduction(program: Program, op: Any) -> Iterator[str]:
    if not 1 <= op.phase <= len(program.reductions):
        yield f"is reduction {op.phase}, of {len(program.reductions)}"


def _of_update(program: Program, op: Any) -> Iterator[str]:
    yield from _of_layer(program, op)
    if not 0 <= op.phase <= len(program.reductions):
        yield f"has phase {op.phase}, with {len(program.reductions)} reductions"
    elif op.layer is None:
        for reduction in program.reductions[: op.phase]:
            if op.stage not in reduction.stages:
                yield f"has phase {op.phase}, but its stage does not get reduction {reduction.phase}"


def _of_validation(program: Program, op: Any) -> Iterator[str]:
    if not _in(op.layer, program.layers):
        yield f"is for L{op.layer}, which does not exist"
    elif not program.layers[op.layer].deferred:
        yield f"is for L{op.layer}, whose validation is not deferred"
    if not 1 <= op.phase <= len(program.reductions):
        yield f"has phase {op.phase}, with {len(program.reductions)} reductions"


_ATTRIBUTES: Final[dict[type[Op], Callable[[Program, Any], Iterator[str]]]] = {
    Forward: _of_unit,
    Recover: _of_unit,
    Backward: _of_unit,
    ZeroGradient: _of_layer,
    SendActivation: _of_microbatch,
    SendGradient: _of_microbatch,
    Borrow: _of_layer,
    GradSync: _of_sync,
    GlobalReduce: _of_reduction,
    UpdateShard: _of_update,
    PrefetchView: _of_layer,
    Validate: _of_validation,
}


def _in(number: int, table: tuple[object, ...]) -> bool:
    return 0 <= number < len(table)


def _is_microbatch(program: Program, number: int) -> bool:
    return 0 <= number < program.settings.microbatches


def _ascending(numbers: Iterable[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(numbers))
