"""Hypothesis strategies: programs of any content, right or wrong, that the forms must carry, and tasks to simulate."""

import dataclasses
import typing

from hypothesis import strategies as st

from ratrain_jax.lowering.program import (
    OP_TYPES,
    ArrayType,
    Kind,
    LayerInfo,
    Op,
    OperandInfo,
    Program,
    Reduction,
    Settings,
    Value,
    Variable,
)
from ratrain_jax.simulation.tasks import Port, Tasks

_counts = st.integers(-1, 1 << 70)
_small = st.integers(-1, 40)
_names = st.text(max_size=6) | st.sampled_from(
    [
        "params/Dense_0",
        "batch['inputs']",
        "a b",
        "x(",
        "->",
        "none",
        "",
        "#",
        'a"b',
        "\n",
        "é",
        "L0",
    ]
)
_dtypes = st.sampled_from(
    ["float32", "bfloat16", "bool", "int8", "float8_e4m3fn", "key<fry>", "int4"]
)

_scalars = {int: _counts, str: _names, bool: st.booleans(), float: st.floats(0, 1e9)}


def _hinted(hint):
    """A strategy for a field's type."""
    arguments = typing.get_args(hint)
    if hint in _scalars:
        return _scalars[hint]
    if hint is ArrayType:
        return st.builds(ArrayType, st.lists(_small, max_size=3).map(tuple), _dtypes)
    if hint is Kind:
        return st.sampled_from(Kind)
    if not arguments:
        return records(hint)
    if type(None) in arguments:
        return st.none() | _hinted(arguments[0])
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return st.lists(_hinted(arguments[0]), max_size=3).map(tuple)
    return st.tuples(*map(_hinted, arguments))


def records(cls):
    """A strategy for a dataclass with any content in each field."""
    hints = typing.get_type_hints(cls)
    fields = {field.name: _hinted(hints[field.name]) for field in dataclasses.fields(cls)}
    return st.builds(cls, **fields)


ops = st.one_of([records(op) for op in OP_TYPES.values()])


def _lists(strategy, size=3):
    return st.lists(strategy, max_size=size).map(tuple)


programs = st.builds(
    Program,
    records(Settings),
    _lists(records(LayerInfo)),
    _lists(records(Variable)),
    _lists(records(OperandInfo)),
    _lists(records(Reduction)),
    _lists(records(Value), 5),
    _lists(_lists(ops, 5)),
    _lists(_small, 40),
    _lists(_small, 40),
    _names,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
"""Small values of any kind that JSON has."""


def put_somewhere(table, junk, data):
    """Puts a value in place of one of a table's, at any depth."""
    spot, key = table, data.draw(st.sampled_from(sorted(table)))
    while isinstance(spot[key], (list, dict)) and spot[key] and data.draw(st.booleans()):
        spot = spot[key]
        keys = range(len(spot)) if isinstance(spot, list) else sorted(spot)
        key = data.draw(st.sampled_from(keys))
    spot[key] = junk


__all__ = ["Op", "json_values", "ops", "programs", "put_somewhere", "records"]


@st.composite
def task_graphs(draw):
    """Tasks of the simulator's engine that hold ports of a few devices and wait for earlier ones."""
    tasks = Tasks()
    for number in range(draw(st.integers(1, 30))):
        earlier = st.integers(0, number - 1) if number else st.nothing()
        few = st.lists(earlier, max_size=3, unique=True) if number else st.just([])
        devices = draw(st.lists(st.integers(0, 3), max_size=2, unique=True))
        holds = [(device, draw(st.sampled_from(Port))) for device in devices]
        seconds = draw(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.25]))
        tasks.add(seconds, holds, draw(few), draw(few)[:1])
    return tasks
