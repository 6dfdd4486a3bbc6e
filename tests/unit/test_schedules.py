"""The compute order of each schedule, and the grouping of layers into blocks."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain_jax.errors import OptionError
from ratrain_jax.lowering.blocks import group_blocks
from ratrain_jax.lowering.schedules import SCHEDULES, compute_order


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 8), st.integers(1, 16))
def test_every_slot_once_and_backward_after_forward(schedule, stages, microbatches):
    for slots in compute_order(schedule, stages, microbatches):
        assert len(slots) == len(set(slots)) == 2 * microbatches
        for i in range(microbatches):
            assert slots.index(("F", i)) < slots.index(("B", i))
        for kind in "FB":
            assert [i for k, i in slots if k == kind] == list(range(microbatches))


@given(st.integers(1, 8), st.integers(1, 16))
def test_1f1b_holds_no_more_microbatches_than_stages_to_come(stages, microbatches):
    for stage, slots in enumerate(compute_order("1f1b", stages, microbatches)):
        flying = most = 0
        for kind, _ in slots:
            flying += 1 if kind == "F" else -1
            most = max(most, flying)
        assert most == min(microbatches, stages - stage)


def test_1f1b_as_text():
    text = [" ".join(f"{k}{i}" for k, i in slots) for slots in compute_order("1f1b", 3, 4)]
    assert text == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_an_unknown_schedule_is_named():
    with pytest.raises(OptionError, match="'zigzag' is not known; choose one of 'gpipe'"):
        compute_order("zigzag", 2, 2)


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=24), st.integers(1, 6))
def test_blocks_are_runs_of_at_most_the_limit(prints, limit):
    blocks = group_blocks([0] * len(prints), prints, limit)
    assert blocks[0] == 0
    assert all(later - earlier in (0, 1) for earlier, later in itertools.pairwise(blocks))
    assert max(blocks.count(b) for b in set(blocks)) <= limit


def test_equal_runs_give_equal_blocks():
    assert group_blocks([0] * 12, ["a"] * 12, 4) == (0,) * 4 + (1,) * 4 + (2,) * 4
    assert group_blocks([0] * 9, ["a"] * 9, 4) == (0,) * 3 + (1,) * 3 + (2,) * 3
    assert group_blocks([0, 0, 1, 1], ["a"] * 4, 4) == (0, 0, 0, 0)
