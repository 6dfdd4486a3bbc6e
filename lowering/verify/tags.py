"""Tags: what a value is for, derived from the op that writes it.

A tag is a tuple whose first item names its role. Two values of a right program never have the same
tag, arguments apart. In the tags below l is an owning layer, s the stage where the value lives,
v a variable, i a microbatch, o an operand and k a reduction.

    ("parameters" | "optimizer", l, age)    age is "old" (the step's inputs), "new", or "early":
                                            new, but not validated
    ("replicated", s, age)
    ("view", l, s, step)                    of "this" step or the "next"; "early" as above
    ("operand", o, s)                       an operand of the loss
    ("argument", s)                         a leaf of the batch, for other readers than the loss
    ("variable", v, i, s)                   what Forward made of a variable, and its copies
    ("recovered", v, i)                     what Recover made of it
    ("residuals", l, i, maker)              maker is "Forward" or "Recover"; l any layer
    ("cotangent", v, i, n, s)               summed over the readers of v from layer n on
    ("accumulator", l, s, n)                after n additions (ZeRO-1)
    ("whole", l, s, i, n)                   a gradient of i after n units added to it (ZeRO-2)
    ("shard", l, s, n)                      the gradient shard after n syncs (ZeRO-2)
    ("share", l, t)                         what stage t adds to a tied gradient, at home
    ("gradient", l)                         the final gradient shard
    ("partials", l, k), ("scalars", k, s), ("metrics", s), ("layer metrics", l)
    ("early partials", l, k), ("early metrics", l)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Final

from ratrain_jax.lowering.program import ArrayType, Kind, Program, Value

Tag = tuple[Any, ...]

OLD: Final = "old"
NEW: Final = "new"
EARLY: Final = "early"
THIS: Final = "this"
NEXT: Final = "next"


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One place, or several, among an op's reads.

    Attributes:
        tags: the tags that may stand there.
        optional: whether the place may be left out.
        many: whether any number may stand there.
        donated: whether the op donates what stands there.
    """

    tags: tuple[Tag, ...]
    optional: bool = False
    many: bool = False
    donated: bool = False


def slots(tags: Iterable[Tag], donated: bool = False) -> list[Slot]:
    """One slot a tag."""
    return [Slot((tag,), donated=donated) for tag in tags]


_PHRASES: Final = {
    "parameters": "the {1} parameters of L{0}",
    "optimizer": "the {1} optimizer state of L{0}",
    "replicated": "the {1} replicated state",
    "view": "{1} view of L{0}",
    "operand": "operand o{0}",
    "argument": "an argument of the step",
    "variable": "x{0} of microbatch {1}",
    "recovered": "the recovered x{0} of microbatch {1}",
    "residuals": "the residuals that {2} made of L{0} for microbatch {1}",
    "cotangent": "the cotangent of x{0} for microbatch {1}, summed over its readers from L{2} on",
    "accumulator": "the accumulator of L{0} after {2} additions",
    "whole": "the gradient of L{0} for microbatch {2} after {3} additions",
    "shard": "the gradient shard of L{0} after {2} syncs",
    "share": "the share of stage {1} in the tied gradient of L{0}",
    "gradient": "the final gradient of L{0}",
    "partials": "the partials of L{0} for reduction {1}",
    "scalars": "the scalars of reduction {0}",
    "metrics": "the metrics",
    "layer metrics": "the metrics of L{0}",
    "early partials": "the early partials of L{0} for reduction {1}",
    "early metrics": "the early metrics of L{0}",
}

_STEPS: Final = {THIS: "this step's", NEXT: "the next step's", EARLY: "the early"}


def phrase(tag: Tag | None) -> str:
    """A tag in a sentence.

    Example:
        >>> phrase(("view", 3, 0, "next"))
        "the next step's view of L3"
    """
    if tag is None:
        return "what no op writes"
    name, *items = tag
    if name == "view":
        items = [items[0], _STEPS[items[2]]]
    return _PHRASES[name].format(*items)


_KINDS: Final = {
    "parameters": Kind.PARAMETERS,
    "optimizer": Kind.OPTIMIZER,
    "replicated": Kind.REPLICATED,
    "view": Kind.VIEW,
    "operand": Kind.OPERAND,
    "argument": Kind.OPERAND,
    "residuals": Kind.RESIDUALS,
    "cotangent": Kind.COTANGENT,
    "accumulator": Kind.ACCUMULATOR,
    "whole": Kind.ACCUMULATOR,
    "shard": Kind.GRADIENT,
    "gradient": Kind.GRADIENT,
    "partials": Kind.PARTIALS,
    "scalars": Kind.SCALARS,
    "metrics": Kind.METRICS,
    "layer metrics": Kind.METRICS,
    "early partials": Kind.PARTIALS,
    "early metrics": Kind.METRICS,
}

_WITHOUT_LAYER: Final = frozenset(
    (
        "replicated",
        "operand",
        "argument",
        "variable",
        "recovered",
        "cotangent",
        "scalars",
        "metrics",
    )
)
_MICROBATCH: Final = {"variable": 2, "recovered": 2, "residuals": 2, "cotangent": 2, "whole": 3}
_STAGE: Final = {
    "replicated": 1,
    "view": 2,
    "operand": 2,
    "argument": 1,
    "variable": 3,
    "cotangent": 4,
    "accumulator": 2,
    "whole": 2,
    "shard": 2,
    "scalars": 2,
    "metrics": 1,
}


def kind_of(program: Program, tag: Tag) -> Kind:
    """The kind of a value with this tag."""
    name = tag[0]
    if name in ("variable", "recovered"):
        boundary = program.variables[tag[1]].role == "boundary"
        return Kind.BOUNDARY if boundary else Kind.LOSS
    if name == "share":
        return Kind.ACCUMULATOR if program.settings.zero == 1 else Kind.GRADIENT
    return _KINDS[name]


def problem(program: Program, value: Value, tag: Tag) -> str | None:
    """What of a value's row in the table does not fit its tag, if anything."""
    name = tag[0]
    if name in _STAGE:
        stage = tag[_STAGE[name]]
    elif name == "recovered":
        stage = program.layers[program.variables[tag[1]].producer].stage
    else:
        stage = program.layers[tag[1]].stage
    expected = {
        "kind": kind_of(program, tag),
        "stage": stage,
        "layer": None if name in _WITHOUT_LAYER else tag[1],
        "microbatch": tag[_MICROBATCH[name]] if name in _MICROBATCH else None,
    }
    if name in ("variable", "recovered", "cotangent"):
        expected["name"] = f"x{tag[1]}"
    for field, wanted in expected.items():
        found = getattr(value, field)
        if found != wanted:
            return f"its {field} is {_word(found)} where {_word(wanted)} belongs"
    if value.aliased and name != "view":
        return "it shares bytes, which only a view may"
    return None


def _word(item: Any) -> str:
    return item.value if isinstance(item, Kind) else str(item)


def type_key(program: Program, tag: Tag) -> tuple[Any, ...] | None:
    """What all values of the same type share; None if nothing is known of the type."""
    name = tag[0]
    match name:
        case "parameters" | "optimizer" | "residuals":
            return (name, tag[1])
        case "replicated":
            return (name,)
        case "view":
            return (name, tag[1], tag[2])
        case "accumulator" | "whole" | "shard":
            return ("shard" if name == "shard" else "whole", tag[1], tag[2])
        case "share":
            return ("whole" if program.settings.zero == 1 else "shard", tag[1], tag[2])
        case "gradient":
            return ("shard", tag[1], program.layers[tag[1]].stage)
        case "variable" | "recovered" | "cotangent":
            return ("variable", tag[1])
        case "operand" | "scalars":
            return (name, tag[1])
    return None


def known_types(program: Program) -> dict[tuple[Any, ...], tuple[ArrayType, ...]]:
    """Types that the tables give."""
    types: dict[tuple[Any, ...], tuple[ArrayType, ...]] = {}
    for number, variable in enumerate(program.variables):
        types["variable", number] = (variable.array,)
    for number, operand in enumerate(program.operands):
        types["operand", number] = (operand.array,)
    return types
