"""Small wrong (or merely reordered) versions of programs, and a judge of them that shares no code with the verifier.

The judge runs a program on paper. A value is a *term*: what made it, of which terms. Each stage runs its list in order; an op
between stages runs when it stands at the head of the lists of all of them. A program is right if it comes to an end,
reads only what is alive, leaves nothing alive but its outputs, and these are the terms that the original makes.
"""

import dataclasses
import random

from ratrain_jax.lowering.program import Free, Kind, Op, Program, Recover, Validate

KINDS = ("drop", "double", "swap", "move", "aim read", "aim write", "aim attribute", "donate")


class Wrong(Exception):
    """The program is wrong; the message says how."""


def outcome(program: Program) -> tuple:
    """The terms of a program's outputs.

    Raises:
        Wrong: it hangs, reads what is not there, or leaks.
    """
    terms = {number: ("input", number) for number in program.inputs}
    dead: set[int] = set()
    sources = _sources(program)
    heads = [0] * len(program.order)
    while any(head < len(ops) for head, ops in zip(heads, program.order, strict=True)):
        ready = [
            program.order[stage][head]
            for stage, head in enumerate(heads)
            if head < len(program.order[stage])
            and _can_run(program, heads, program.order[stage][head], terms)
        ]
        if not ready:
            raise Wrong("hangs")
        op = ready[0]
        for stage in op.stages:
            heads[stage] += 1
        _run(op, terms, dead, sources, program)
    left = {number for number in terms if number not in dead} - set(program.outputs)
    if left:
        raise Wrong(f"leaks {sorted(left)[:4]}")
    for number in program.outputs:
        if number not in terms or number in dead:
            raise Wrong("has an output that is not there")
    return tuple(terms[number] for number in program.outputs)


def _can_run(program: Program, heads: list[int], op: Op, terms: dict) -> bool:
    def at_head(stage: int) -> bool:
        ops = program.order[stage] if 0 <= stage < len(program.order) else ()
        return bool(ops) and op in ops[heads[stage] : heads[stage] + 1]

    known = all(number in terms for number in (*op.reads, *op.waits))
    return known and all(at_head(stage) for stage in op.stages)


def _run(op: Op, terms: dict, dead: set[int], sources: dict[int, int], program: Program) -> None:
    for number in op.reads:
        if number in dead or sources.get(number) in dead:
            raise Wrong(f"reads %{number} after its end")
        if program.values[number].stage not in op.stages:
            raise Wrong(f"reads %{number} on another stage")
    if isinstance(op, Free):
        dead.add(op.reads[0])
        return
    fields = {f.name: getattr(op, f.name) for f in dataclasses.fields(op)}
    what = tuple(v for k, v in fields.items() if k not in ("reads", "writes", "donates", "waits"))
    read = tuple(terms[number] for number in op.reads)
    # Recover runs Forward's program: what it makes is what Forward made.
    name = "Forward" if isinstance(op, Recover) else type(op).__name__
    for place, number in enumerate(op.writes):
        if number in terms:
            raise Wrong(f"writes %{number} again")
        terms[number] = hash((name, what, read, place))
    dead.update(op.donates)


def _sources(program: Program) -> dict[int, int]:
    """For each view that shares its buffers with parameters, these."""
    found = {}
    inputs = {
        program.values[n].layer: n
        for n in program.inputs
        if program.values[n].kind is Kind.PARAMETERS
    }
    writers = {n: op for ops in program.order for op in ops for n in op.writes}
    for value in program.values:
        if value.kind is Kind.VIEW and value.aliased:
            op = writers.get(value.id)
            if isinstance(op, Validate):  # beside the view it writes them
                (found[value.id],) = (
                    n for n in op.writes if program.values[n].kind is Kind.PARAMETERS
                )
                continue
            found[value.id] = op.reads[0] if op and op.reads else inputs.get(value.layer, -1)
    return found


def mutant(program: Program, kind: str, chance: random.Random) -> Program:
    """A program with one thing changed; an op between stages is changed in the lists of all of them.

    Args:
        program: a right program.
        kind: one of `KINDS`.
        chance: where to draw from.
    """
    stage = chance.choice([s for s, ops in enumerate(program.order) if ops])
    ops = list(program.order[stage])
    at = chance.randrange(len(ops))
    op = ops[at]
    if kind == "drop":
        return _mapped(program, op, [])
    if kind == "double":
        return _mapped(program, op, [op, op])
    if kind == "swap":
        at = min(at, len(ops) - 2)
        ops[at], ops[at + 1] = ops[at + 1], ops[at]
        return _with_list(program, stage, ops)
    if kind == "move":
        ops.insert(chance.randrange(len(ops)), ops.pop(at))
        return _with_list(program, stage, ops)
    return _mapped(program, op, [_changed(program, op, kind, chance)])


def _changed(program: Program, op: Op, kind: str, chance: random.Random) -> Op:
    if kind == "aim read":
        return dataclasses.replace(op, reads=_aimed(program, op.reads, chance))
    if kind == "aim write":
        return dataclasses.replace(op, writes=_aimed(program, op.writes, chance))
    if kind == "donate":
        given = set(op.donates) ^ {chance.choice(op.reads)} if op.reads else set()
        return dataclasses.replace(op, donates=tuple(n for n in op.reads if n in given))
    names = [f.name for f in dataclasses.fields(op) if type(getattr(op, f.name)) is int]
    name = chance.choice(names)
    step = chance.choice([-1, 1])
    return dataclasses.replace(op, **{name: max(0, getattr(op, name) + step)})


def _aimed(program: Program, numbers: tuple[int, ...], chance: random.Random) -> tuple[int, ...]:
    """One number changed to another value, of the same kind where there is one, or two swapped."""
    if not numbers:
        return numbers
    at = chance.randrange(len(numbers))
    if len(numbers) > 1 and chance.random() < 0.3:
        other = chance.choice([n for n in range(len(numbers)) if n != at])
        changed = list(numbers)
        changed[at], changed[other] = changed[other], changed[at]
        return tuple(changed)
    kind = program.values[numbers[at]].kind
    alike = [v.id for v in program.values if v.kind is kind and v.id != numbers[at]]
    new = chance.choice(alike or range(len(program.values)))
    return (*numbers[:at], new, *numbers[at + 1 :])


def _mapped(program: Program, op: Op, into: list[Op]) -> Program:
    order = tuple(
        tuple(new for old in ops for new in (into if old is op or old == op else [old]))
        for ops in program.order
    )
    return dataclasses.replace(program, order=order)


def _with_list(program: Program, stage: int, ops: list[Op]) -> Program:
    order = (*program.order[:stage], tuple(ops), *program.order[stage + 1 :])
    return dataclasses.replace(program, order=order)
