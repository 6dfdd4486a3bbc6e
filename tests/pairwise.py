"""Covering arrays: few combinations in which every two values of different factors meet.

A fault that needs two particular values (four stages *and* fewer microbatches) shows in one of the
rows, at a small part of what the full product costs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, int], tuple[str, int]]

TRIES = 30
"""Arrays of which the smallest is taken."""


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Rows in which each value of each factor meets each value of every other factor.

    Args:
        factors: the values of each factor; the first ones are the ones to prefer.

    Returns:
        The rows, the same ones in every run.

    Example:
        >>> pairwise({"sign": "+-", "zero": [1, 2]})
        [{'sign': '+', 'zero': 1}, {'sign': '+', 'zero': 2}, {'sign': '-', 'zero': 1}, {'sign': '-', 'zero': 2}]
    """
    arrays = (_array(factors, random.Random(number)) for number in range(TRIES))
    smallest = min(arrays, key=len)
    chosen = sorted(tuple(row[name] for name in factors) for row in smallest)
    return [
        {name: factors[name][index] for name, index in zip(factors, row, strict=True)}
        for row in chosen
    ]


def product(factors: Mapping[str, Sequence[Any]]) -> list[Row]:
    """All combinations."""
    return [
        dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())
    ]


def _array(factors: Mapping[str, Sequence[Any]], chance: random.Random) -> list[dict[str, int]]:
    """Rows of numbers of values, each chosen greedily; `chance` breaks ties."""
    missing = {
        ((one, i), (two, j))
        for one, two in itertools.combinations(factors, 2)
        for i in range(len(factors[one]))
        for j in range(len(factors[two]))
    }
    if not missing:
        return [{name: index} for name in factors for index in range(len(factors[name]))]
    rows = []
    while missing:
        first = chance.choice(sorted(missing))
        row = dict(first)
        rest = [name for name in factors if name not in row]
        chance.shuffle(rest)
        for name in rest:
            gains = [
                sum(_pair(factors, name, index, *other) in missing for other in row.items())
                for index in range(len(factors[name]))
            ]
            best = [index for index, gain in enumerate(gains) if gain == max(gains)]
            row[name] = chance.choice(best)
        missing -= {
            _pair(factors, *one, *two) for one, two in itertools.combinations(row.items(), 2)
        }
        rows.append(row)
    return rows


def _pair(factors: Mapping[str, Sequence[Any]], one: str, i: int, two: str, j: int) -> Pair:
    """Two values, in the order of their factors."""
    names = list(factors)
    if names.index(one) > names.index(two):
        one, i, two, j = two, j, one, i
    return ((one, i), (two, j))
