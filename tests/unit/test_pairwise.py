"""The covering arrays that the end-to-end tests draw their configurations from."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.pairwise import pairwise, product

FACTORS = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3),
    st.lists(st.integers(), min_size=1, max_size=5, unique=True),
    min_size=1,
    max_size=5,
)


def missing(factors, rows):
    """Pairs of values that no row holds."""
    met = {
        frozenset(pair) for row in rows for pair in itertools.combinations(sorted(row.items()), 2)
    }
    wanted = [
        frozenset(((one, i), (two, j)))
        for one, two in itertools.combinations(factors, 2)
        for i in factors[one]
        for j in factors[two]
    ]
    return [pair for pair in wanted if pair not in met]


@given(FACTORS)
def test_every_two_values_meet(factors):
    rows = pairwise(factors)
    assert missing(factors, rows) == []
    for row in rows:
        assert row.keys() == factors.keys()
        assert all(row[name] in factors[name] for name in factors)
    for name, values in factors.items():
        assert {row[name] for row in rows} == set(values)


@given(FACTORS)
def test_no_row_is_there_twice_and_all_runs_agree(factors):
    rows = pairwise(factors)
    assert rows == pairwise(factors)
    assert all(row not in rows[:number] for number, row in enumerate(rows))
    assert len(rows) <= len(product(factors))


def test_the_array_is_small():
    """At best it has as many rows as the two largest factors have pairs."""
    factors = {
        name: list(range(size)) for name, size in zip("abcdefg", (5, 4, 4, 4, 3, 2, 2), strict=True)
    }
    assert 20 <= len(pairwise(factors)) <= 23
    assert len(product(factors)) == 3840


def test_a_missing_pair_is_seen():
    factors = {"a": [1, 2], "b": [3, 4]}
    assert missing(factors, pairwise(factors)[:-1]) != []
