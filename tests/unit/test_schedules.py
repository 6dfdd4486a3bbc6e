"""The compute order of each schedule, and the grouping of layers into blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain_jax.errors import OptionError
from ratrain_jax.lowering.blocks import block_ends, group_blocks
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


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(0, 6))
def test_a_short_stage_is_one_block_and_a_long_one_a_block_a_layer(sizes, limit):
    stages = [stage for stage, size in enumerate(sizes) for _ in range(size)]
    blocks = group_blocks(stages, limit)
    for stage, size in enumerate(sizes):
        mine = [b for b, s in zip(blocks, stages, strict=True) if s == stage]
        assert mine == ([0] * size if size <= limit else list(range(size)))
        ends = block_ends(size, limit)
        assert ends == tuple(n + 1 for n in range(size) if n + 1 == size or mine[n + 1] != mine[n])
