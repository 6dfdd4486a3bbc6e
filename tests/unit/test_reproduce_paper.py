"""The script that prints the paper's figures beside ours: what it fits, and that it explains what differs."""

import dataclasses
import re

import paper_fit
import paper_memory
import paper_tables
import pytest
from paper_ablation import SWITCHED
from paper_causes import CAUSES
from paper_planning import MACHINE, MINIMUM, STRATEGIES, work_of
from paper_tables import Figure
from reproduce_paper import STRATEGY_SPACES, elsewhere


def linear(machine, recovery):
    """Seconds of a step that has a part that the clock sets, and one that it does not."""
    return {"forward": 40.0, "auto": 30.0}[recovery] + 120e9 / paper_fit.clock_of(machine)


@pytest.mark.parametrize(("recovery", "rest"), [("forward", 40.0), ("auto", 30.0)])
def test_the_clock_is_fitted_to_the_first_row(recovery, rest):
    found = paper_fit.fit(recovery, linear)
    published = 2**22 / 29069.73
    assert found.after == pytest.approx(published, rel=1e-4)
    assert found.before == linear(MACHINE, recovery)
    assert paper_fit.clock_of(found.machine) == pytest.approx(120e9 / (published - rest), rel=1e-4)


def test_nothing_but_the_clock_is_fitted():
    found = paper_fit.fit("forward", linear).machine
    times = paper_fit.clock_of(found) / paper_fit.clock_of(MACHINE)
    for dtype, rate in MACHINE.peak_flops:
        assert found.peak(dtype) == pytest.approx(times * rate)
    inside = dataclasses.replace(found.accelerator, clock=MACHINE.accelerator.clock)
    assert dataclasses.replace(found, accelerator=inside, peak_flops=MACHINE.peak_flops) == MACHINE


def test_a_step_that_no_clock_can_change_is_not_fitted():
    with pytest.raises(ValueError, match="no clock makes"):
        paper_fit.fit("forward", lambda machine, recovery: 100.0)


def test_what_is_open_beside_the_clock_changes_one_value_each():
    seen = []

    def seconds(machine, recovery):
        seen.append(machine)
        return 1.0

    names = [name for name, _, _ in paper_fit.leeway("forward", seconds)]
    assert len(set(names)) == len(names) == len(set(seen[1:])) == 8
    assert set(names) - {"launch_seconds"} <= {*MACHINE.assumed}
    assert all(paper_fit.clock_of(machine) == paper_fit.clock_of(MACHINE) for machine in seen)


@pytest.mark.slow
def test_the_step_of_the_first_row_is_fitted_by_a_clock_near_the_nominal_one():
    found = paper_fit.fit("forward")
    assert found.after == pytest.approx(paper_fit.published_seconds(), rel=1e-3)
    assert 0.95 * paper_fit.NOMINAL < paper_fit.clock_of(found.machine) < 1.05 * paper_fit.NOMINAL


@pytest.mark.parametrize("name", MINIMUM)
def test_the_papers_clusters_follow_from_its_own_terms(name):
    clusters, depth, peak = MINIMUM[name]
    table = work_of(name, paper_memory.BATCH, MACHINE).table(1)
    assert paper_memory.fewest_by_the_papers_terms(table) == clusters
    # The paper's split is not known: no split needs less than this one.
    assert 0.7 * peak < paper_memory.peak_of_the_papers_terms(table, clusters, depth) < peak


def test_differences_and_what_they_come_from():
    figure = Figure("x", 100.0, (104.0, 106.0, 90.0), ("forward", "forward", "clusters"))
    assert figure.differences == pytest.approx((0.04, 0.06, -0.1))
    assert figure.causes() == ("", CAUSES["forward"], CAUSES["clusters"])
    assert Figure("x", None, (1.0, 2.0, 3.0)).causes() == ("", "", "")
    assert Figure("x", 1.0, (2.0,), "?").causes() == (paper_tables.UNEXPLAINED,)
    full = Figure("x", float("inf"), (float("inf"), 7.0), "full-save")
    assert full.differences == (0.0, float("inf"))
    assert full.causes() == ("", CAUSES["full-save"])


def test_a_table_tells_every_large_difference_s_cause_once():
    rows = [
        Figure("a", 100.0, (120.0, 100.0, 70.0), "forward", ".0f"),
        Figure("b", float("inf"), (5.0, 5.0, float("inf")), "full-save", ".0f"),
        Figure("c", 10.0, (9.0, 10.0, 10.0), "forward", ".0f"),
    ]
    with paper_tables.CONSOLE.capture() as captured:
        paper_tables.show(rows, "Title", "A note.")
    lines = captured.get().splitlines()
    cells = [re.split(r"\s{2,}", line.strip()) for line in lines]
    assert ["a", "100", "120", "+20.0% a", "100", "+0.0%", "70", "-30.0% a"] in cells
    assert ["b", "OOM", "5", "differs b", "5", "differs b", "OOM", "+0.0%"] in cells
    assert ["c", "10", "9", "-10.0% a", "10", "+0.0%", "10", "+0.0%"] in cells
    said = " ".join(captured.get().split())
    assert said.count(CAUSES["forward"]) == said.count(CAUSES["full-save"]) == 1
    assert said.endswith("A note.")


def test_another_number_of_clusters_explains_only_where_ours_is_close_there():
    assert elsewhere("tp-heavy", 100.0, (104.0, 106.0)) == ("clusters", "tp-heavy")
    assert elsewhere("tp-heavy", None, (104.0, 106.0)) == ("tp-heavy", "tp-heavy")


def test_what_may_differ_has_a_cause():
    compared = {kind for kinds in STRATEGIES.values() for kind in kinds}
    assert compared <= set(STRATEGY_SPACES) and compared <= set(CAUSES)
    assert {f"{name}, tail" for name in SWITCHED if name != "forward recovery"} <= set(CAUSES)
