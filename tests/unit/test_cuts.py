"""The rule that chooses cuts, step by step, on made-up costs."""

import itertools

import pytest

from ratrain_jax.lowering.cuts import Costs, Span, automatic_spans


def _costs(before, live, stages, codes=None):
    """Equations that cost the same are the same, unless they are said to be others."""
    seconds = [round(after - start, 9) for start, after in itertools.pairwise(before)]
    return Costs(before, live, codes or seconds, stages)


def spans(groups, weights, stages, seconds=None):
    """Layers of groups that are read by one equation each; `weights` of the cuts between them."""
    seconds = seconds or [1.0] * len(groups)
    live = [0, *weights, 0]
    reads = [(tuple(path.split("/")), (place,)) for place, path in enumerate(groups)]
    before = list(itertools.accumulate(seconds, initial=0.0))
    return [span.name for span in automatic_spans(reads, _costs(before, live, stages))]


def test_a_cut_lies_where_the_fewest_bytes_live_and_earliest_of_equals():
    reads = [(("a",), (0, 1)), (("b",), (5,))]
    costs = _costs([float(i) for i in range(8)], [0, 1, 9, 4, 3, 3, 9, 0], 1)
    assert automatic_spans(reads, costs) == [Span("a", 0, 4), Span("b", 4, 7)]


def test_later_reads_do_not_move_a_cut():
    reads = [(("a",), (0, 6)), (("b",), (2,)), (("c",), (4,))]
    costs = _costs([float(i) for i in range(8)], [0, 2, 3, 2, 3, 3, 3, 0], 1)
    found = [(span.name, span.start) for span in automatic_spans(reads, costs)]
    assert found == [("a", 0), ("b", 1), ("c", 3)]


def test_groups_come_in_order_of_first_read_not_of_the_tree():
    reads = [(("a",), (4,)), (("b",), (0,)), (("c",), (2,))]
    costs = _costs([float(i) for i in range(6)], [0, 1, 1, 1, 1, 0], 1)
    assert [span.name for span in automatic_spans(reads, costs)] == ["b", "c", "a"]


def test_groups_that_one_equation_reads_first_begin_one_layer():
    reads = [(("a",), (0,)), (("b",), (2,)), (("c",), (2, 3)), (("d",), (4,))]
    costs = _costs([float(i) for i in range(6)], [0, 1, 1, 1, 1, 0], 1)
    found = [(span.name, span.start) for span in automatic_spans(reads, costs)]
    assert found == [("a", 0), ("b", 1), ("d", 4)]


def test_parameters_that_nothing_reads_make_no_layer():
    reads = [(("a",), (0,)), (("b",), ()), (("c",), (1,))]
    assert [s.name for s in automatic_spans(reads, _costs([0, 1, 2], [0, 1, 0], 1))] == ["a", "c"]
    assert automatic_spans(reads[1:2], _costs([0, 1, 2], [0, 1, 0], 1)) == [Span("input", 0, 2)]


def test_a_dear_cut_is_removed_and_one_within_a_quarter_is_not():
    groups = [f"g{i}" for i in range(16)]
    weights = [4] * 15
    assert len(spans(groups, weights, 2)) == 16
    weights[6] = 6
    assert spans(groups, weights, 2) == [name for name in groups if name != "g7"]
    weights[6] = 5
    assert spans(groups, weights, 2) == groups


def test_the_dearest_cut_goes_first_and_its_neighbours_are_looked_at_afresh():
    groups = [f"g{i}" for i in range(16)]
    # Once 9 is gone, 6 and 6 are neighbours; each is dear beside 4.
    weights = [4, 4, 4, 6, 9, 6, 4, *[4] * 8]
    assert spans(groups, weights, 1) == [g for g in groups if g not in ("g4", "g5", "g6")]
    # Where joining on would make a coarse layer, what is left stays.
    assert spans(groups, weights, 3) == [g for g in groups if g != "g5"]


def test_no_cut_is_removed_where_only_as_many_layers_as_stages_would_remain():
    seconds = [0.2, 0.2, 0.2, 20.0, 0.2]
    groups = ["a", "b", "c", "d", "e"]
    assert spans(groups, [1, 2, 1, 1], 4, seconds) == groups
    assert spans(groups, [1, 2, 1, 1], 3, seconds) == ["a", "b", "d", "e"]


def test_a_coarse_group_is_opened_into_its_children():
    groups = ["a", "b/x", "b/y", "b/z", "c"]
    assert spans(groups, [3, 3, 4, 3], 2) == ["a", "b/x", "b/y", "c"]
    assert spans(groups, [3, 3, 4, 3], 1) == ["a", "b/x", "b/y", "c"]


def test_a_group_that_is_not_coarse_stays_closed():
    groups = ["a", "b/x", "b/y", "c", "d", "e", "f"]
    assert spans(groups, [1] * 6, 1) == ["a", "b", "c", "d", "e", "f"]


def test_what_has_one_child_is_opened_further():
    groups = ["a", "b/only/x", "b/only/y", "c"]
    assert spans(groups, [1] * 3, 2) == ["a", "b/only/x", "b/only/y", "c"]


def test_a_group_with_light_ends_is_cut_at_its_lightest_if_a_stage_could_not_hold_it():
    groups = ["net/a", "net/b", "net/c", "net/d", "head"]
    assert spans(groups, [7, 8, 7, 1], 2) == ["net/a", "net/b", "net/d", "head"]
    assert spans(groups, [7, 8, 7, 1], 4) == groups
    # Two thirds of an even share: coarse, but a stage holds it.
    groups = ["a", "b/x", "b/y", "c", "d", "e"]
    assert spans(groups, [1, 8, 1, 1, 1], 2) == ["a", "b", "c", "d", "e"]


def test_a_trifle_is_joined_with_the_next_and_the_last_with_the_one_before():
    seconds = [0.01, 1.0, 0.01, 2.0, 0.01]
    groups = ["a", "b", "c", "d", "e"]
    assert spans(groups, [1] * 4, 1, seconds) == ["a", "c"]
    assert spans(groups, [1] * 4, 4, seconds) == ["a", "c", "d", "e"]


@pytest.mark.parametrize(
    ("seconds", "names"),
    [
        ([0.01, 1.0, 1.0, 0.01], ["a", "b", "c", "d"]),  # repeated blocks stay as they are
        ([0.01, 1.0, 1.001, 0.01], ["a", "c"]),  # other blocks
        ([0.5, 0.01, 1.0, 1.0, 0.01, 0.5], ["a", "c", "d", "e"]),  # the neighbour that is none
        ([1.0, 1.0, 0.01, 1.0, 1.0], ["a", "b", "c", "d", "e"]),  # between two
        ([1.0, 1.0, 0.01, 0.01, 1.0, 1.0], ["a", "b", "c", "e", "f"]),  # with each other
        ([2.0, 0.01, 0.01, 0.01, 0.01, 3.0], ["a", "b"]),  # trifles are no blocks
    ],
)
def test_a_trifle_does_not_make_a_repeated_block_another_one(seconds, names):
    assert spans(list("abcdef")[: len(seconds)], [1] * (len(seconds) - 1), 1, seconds) == names


@pytest.mark.parametrize(("codes", "names"), [("tbb", ["a", "b", "c"]), ("tbc", ["a", "c"])])
def test_blocks_are_the_same_by_their_equations_not_by_what_they_are_charged_with(codes, names):
    """The first block of a model is charged with tables that are made again in each."""
    reads = [((path,), (place,)) for place, path in enumerate("abc")]
    costs = _costs([0.0, 0.01, 1.11, 2.11], [0, 1, 1, 0], 1, codes)
    assert [span.name for span in automatic_spans(reads, costs)] == names


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        (["model/a", "model/b"], ["model/a", "model/b"]),
        (["a", "b"], ["a", "b"]),
        (["only"], ["only"]),
    ],
)
def test_the_top_of_the_tree_is_where_it_branches(groups, names):
    assert spans(groups, [1] * (len(groups) - 1), 1) == names


def test_a_bare_array_has_a_name():
    assert automatic_spans([((), (0,))], _costs([0.0, 1.0], [0, 0], 1)) == [Span("params", 0, 1)]
