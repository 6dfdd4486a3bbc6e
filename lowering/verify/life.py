"""Checks every value's life: written before it is read, ended once, at home, and nothing left over.

Each stage's list is followed in order. A value lives on its home stage, so only the list of that
stage can read it or end its life.
"""

from __future__ import annotations

from collections.abc import Iterator

from ratrain_jax.lowering.program import Free, Kind, Lane, Op, PrefetchView, Program, Validate

from .fault import Place, named_op, named_value, refuse


def check_life(program: Program) -> None:
    """Refuses a program that reads a value before or after its life, or leaves one over."""
    lives = _Lives(program)
    for stage, ops in enumerate(program.order):
        for index, op in enumerate(ops):
            lives.follow((stage, index), op)
    lives.check_end()


class _Lives:
    """What is known of each value's life so far.

    Args:
        program: the program.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.born: dict[int, Place | None] = dict.fromkeys(program.inputs)
        self.dead: dict[int, Place] = {}
        self.sources = _aliased_views(program)

    def follow(self, at: Place, op: Op) -> None:
        """Applies one op of a stage's list."""
        stage, values, frees = at[0], self.program.values, isinstance(op, Free)
        for number in (*op.reads, *op.waits):
            home = values[number].stage
            if home == stage:
                if number not in self.born or number in self.dead:
                    self._refuse_read(at, op, number)
                if number in self.sources and not frees:
                    self._check_source(at, op, number)
            elif home not in op.stages:
                self._refuse_home(at, op, number)
        for number in op.reads if frees else op.donates:
            if values[number].stage == stage:
                self.dead[number] = at
        for number in op.writes:
            home = values[number].stage
            if home == stage:
                self.born[number] = at
            elif home not in op.stages:
                self._refuse_home(at, op, number)

    def _refuse_home(self, at: Place, op: Op, number: int) -> None:
        what = f"{named_op(op)} names {named_value(self.program, number)}, which lives elsewhere."
        refuse(self.program, what, "Send the value, or name its copy on this stage.", at)

    def _refuse_read(self, at: Place, op: Op, number: int) -> None:
        name = named_value(self.program, number)
        if number not in self.born:
            what = f"{named_op(op)} reads {name} before it is written."
            refuse(self.program, what, "Move it behind the op that writes the value.", at)
        self._refuse_dead(at, op, number, name)

    def _check_source(self, at: Place, op: Op, number: int) -> None:
        """A view may not be read when the parameters that hold its buffers were donated."""
        source = self.sources[number]
        if source in self.dead:
            name = named_value(self.program, number)
            what = (
                f"{named_op(op)} reads {name}, whose buffers are those of %{source}, which"
                f" {self._end(source)}."
            )
            refuse(self.program, what, "Move it before that op.", at)

    def _refuse_dead(self, at: Place, op: Op, number: int, name: str) -> None:
        end = self._end(number)
        if isinstance(op, Free):
            what = f"{named_op(op)} frees {name}, which {end}."
            refuse(self.program, what, "End each life once.", at)
        what = f"{named_op(op)} reads {name}, which {end}."
        refuse(self.program, what, "Move it before that op.", at)

    def _end(self, number: int) -> str:
        stage, index = self.dead[number]
        op = self.program.order[stage][index]
        verb = "is freed" if op.lane is Lane.NONE else f"is donated to {named_op(op)}"
        return f"{verb} before, at op {index}"

    def check_end(self) -> None:
        """Outputs are alive at the end, and nothing else is."""
        program = self.program
        for number in program.outputs:
            if number not in self.born or number in self.dead:
                what = f"The output {named_value(program, number)} is not alive at the end."
                at = self.dead.get(number)
                refuse(program, what, "Do not free or donate it.", at)
        kept = self.dead.keys() | set(program.outputs)
        for number, at in self.born.items():
            if number not in kept:
                what = f"{named_value(program, number)} is a leak: nothing frees it."
                refuse(program, what, "Free it after its last reader.", at)


def _aliased_views(program: Program) -> dict[int, int]:
    """The parameters whose buffers each view shares."""
    writers = {op.writes[0]: op.reads[0] for op in _gathers(program) if op.writes and op.reads}
    writers |= _validated_views(program)
    entry = {
        (value.layer, value.stage): value.id
        for value in (program.values[number] for number in program.inputs)
        if value.kind is Kind.PARAMETERS
    }
    sources = {}
    for value in program.values:
        if value.aliased:
            source = writers.get(value.id, entry.get((value.layer, value.stage)))
            if source is not None:
                sources[value.id] = source
    return sources


def _validated_views(program: Program) -> dict[int, int]:
    """The parameters that each Validate writes, by the view that it writes with them."""
    found = {}
    for op in (op for ops in program.order for op in ops if isinstance(op, Validate)):
        kinds = {program.values[number].kind: number for number in op.writes}
        if Kind.VIEW in kinds and Kind.PARAMETERS in kinds:
            found[kinds[Kind.VIEW]] = kinds[Kind.PARAMETERS]
    return found


def _gathers(program: Program) -> Iterator[PrefetchView]:
    return (op for ops in program.order for op in ops if isinstance(op, PrefetchView))
