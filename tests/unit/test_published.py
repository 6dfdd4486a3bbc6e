"""Published measurements: how close the model comes, as upper bounds, and that its short cuts are exact."""

import dataclasses

import a100
import calibration
import composed
import megatron_times
import memory
import numpy as np
import pytest
from constants import PUBLISHED
from gpt_kernels import Shape
from kernel_costs import backward_kernels, forward_kernels
from megatron import Framework, Training, iteration, stage_seconds

SHAPE = Shape(hidden=1024, heads=16, sequence=1024, rows=2, vocabulary=50304)


def test_iteration_times_by_published_constants():
    measured = a100.rows()
    assert len(measured) == 54 + 720
    found = calibration.predict(measured, a100.START, PUBLISHED)
    means = a100.mean_errors(measured, found)
    assert means["a100_multi_node"] < 0.08  # the goal: 12 %
    assert means["a100_single_node"] < 0.34  # the goal: 36 %
    chosen = [c for c in a100.choices(measured, found) if c.best.file == "a100_multi_node"]
    assert len(chosen) == 4 and max(choice.loss for choice in chosen) < 0.05


@pytest.mark.slow
def test_iteration_times_calibrated_and_on_rows_that_were_left_out():
    measured = a100.rows()
    constants = calibration.fit(measured, a100.START, PUBLISHED)
    assert len(dataclasses.fields(constants)) == 6
    fitted = calibration.predict(measured, constants, PUBLISHED)
    others = calibration.cross_validate(measured, a100.START, PUBLISHED, folds=3)
    for found in (fitted, others):
        means = a100.mean_errors(measured, found)
        assert means["a100_multi_node"] < 0.08  # the goal: 10 %
        assert means["a100_single_node"] < 0.08  # the goal: 9 %
    assert (np.abs(a100.errors(measured, fitted)) > 0.2).sum() < 40
    chosen = a100.choices(measured, fitted)
    several = [choice.loss for choice in chosen if choice.best.file == "a100_multi_node"]
    assert max(several) < 0.05
    # The goal, at most 5 % more than the best in each group, is missed on one node.
    assert sum(choice.loss <= 0.05 for choice in chosen) >= 104
    assert sum(choice.loss for choice in chosen) / len(chosen) < 0.03


def test_the_rows_of_one_node_are_composed_of_one_time_a_shape():
    measured = [row for row in a100.rows() if row.file == composed.FILE]
    count, most = composed.rounding(measured)
    assert count > 60 and most < 1e-12
    sums = composed.compose(measured)
    assert (len(sums.rows), sums.unknowns) == (364, 100)
    assert np.median(np.abs(sums.errors)) < 2e-4 and np.abs(sums.errors).max() < 0.01
    # Twice the work takes less time: no cost of a layer by what it does can say so.
    assert sums.layers[1024, 2, 4] < 0.9 * sums.layers[1024, 2, 2]
    assert sums.layers[2048, 4, 2] < 0.95 * sums.layers[2048, 4, 1]


def test_rows_that_are_no_sums_are_told_from_rows_that_are():
    measured = [row for row in a100.rows() if row.file == composed.FILE]
    noise = np.random.default_rng(0).normal(1, 0.02, len(measured))
    rows = zip(measured, noise, strict=True)
    noisy = [dataclasses.replace(row, seconds=row.seconds * factor) for row, factor in rows]
    assert composed.rounding(noisy)[1] > 1e-3


def test_a_handed_over_time_changes_the_rows_of_its_shape_alone():
    measured = [row for row in a100.rows() if row.file == composed.FILE]
    exact = np.array([row.seconds for row in measured])
    shape = (1024, 2, 4)
    rows = [composed.shape_of(row.training) == shape for row in measured]
    late = exact + np.array(rows) * 1.0
    chosen = composed.corrected(measured, late, {shape: -1e3, (2048, 1, 1): -1e3}, {shape})
    changed = {id(c.preferred) for c in chosen} - {id(c.best) for c in chosen}
    assert changed and all(
        composed.shape_of(c.preferred.training) == shape
        for c in chosen
        if id(c.preferred) in changed
    )


@pytest.mark.slow
def test_three_times_decide_most_of_the_plans_that_are_missed():
    everything = a100.rows()
    measured = [row for row in everything if row.file == composed.FILE]
    constants = calibration.fit(everything, a100.START, PUBLISHED)
    found = calibration.predict(measured, constants, PUBLISHED)
    by = composed.corrections(measured, composed.compose(measured).layers, constants)
    three = {(1024, 2, 4), (2048, 2, 2), (2048, 4, 2)}
    assert composed.within(composed.corrected(measured, found, by, three)) >= 117


def test_megatron_iteration_times():
    errors = [abs(row.error) for row in megatron_times.times()]
    assert len(errors) == 8
    assert sum(errors) / len(errors) < 0.045  # the goal: 8 %
    assert max(errors) < 0.095


@pytest.mark.parametrize(
    "row", megatron_times.read("megatron_times")[::2], ids=lambda r: r["model"]
)
def test_activation_memory_follows_the_closed_forms(row):
    run = megatron_times.training(row)
    for found in megatron_times.activations(row["model"], run.shape, run.tensor):
        assert abs(found.error) < 1e-6, found
    assert megatron_times.runtime_bytes(run.shape) < 0.75 * found_whole(row)


def found_whole(row):
    run = megatron_times.training(row)
    return megatron_times.activations(row["model"], run.shape, run.tensor)[0].published


def test_peak_memory():
    found = memory.peaks()
    assert len(found) == 4
    assert max(abs(peak.error) for peak in found) < 0.025  # the goal: 5 %


def test_an_iteration_is_the_sum_along_its_longest_path():
    framework = Framework(launch=3e-5, exposed=0.2)
    for stages, microbatches in ((1, 4), (2, 8), (4, 16), (4, 2)):
        run = Training(SHAPE, 8, tensor=2, data=1, stages=stages, microbatches=microbatches)
        path = calibration.path_of(run, PUBLISHED, framework)
        exact = iteration(run, PUBLISHED, framework).seconds
        assert calibration.along(path, run, PUBLISHED, framework) == pytest.approx(exact)


def test_small_layers_are_bound_by_launches_and_large_ones_hide_them():
    run = Training(SHAPE, 8, tensor=1, data=1, stages=1, microbatches=1)
    one, two = (stage_seconds(run, PUBLISHED, Framework(launch))[0] for launch in (1e-3, 2e-3))
    assert two.forward == pytest.approx(2 * one.forward)
    fast, none = (stage_seconds(run, PUBLISHED, Framework(launch))[0] for launch in (1e-7, 0.0))
    assert fast == none


def test_recomputation_costs_what_it_runs_again():
    def seconds(recompute):
        run = Training(SHAPE, 8, 1, 1, 1, 1, recompute=recompute)
        return stage_seconds(run, PUBLISHED, Framework(0.0))[0]

    none, selective, full = map(seconds, ("none", "selective", "full"))
    assert none.forward == selective.forward == full.forward
    assert none.backward < selective.backward < full.backward < none.backward + none.forward


def test_kernels_of_a_layer_by_hand():
    # Four matrices and two products of the attention; two norms, a bias, softmax, dropout, a copy of the heads,
    # GELU and two residual additions; two all-reduces.
    layer = Training(SHAPE, 8, 2, 1, 1, 1).parts[1]
    forward, backward = forward_kernels(layer, 2), backward_kernels(layer, 2)
    assert (len(forward.flops), forward.count) == (6, 6 + 9 + 2)
    assert len(backward.flops) == 12
    s, b, h = SHAPE.sequence, SHAPE.rows, SHAPE.hidden
    assert forward.flops.sum() == (24 * s * b * h**2 + 4 * b * s**2 * h) / 2
    assert backward.flops.sum() == 2 * forward.flops.sum()
    assert forward.reduced == backward.reduced == (2 * s * b * h,) * 2


def test_the_softmax_is_one_kernel_only_for_multiples_of_four():
    one, five = (Training(dataclasses.replace(SHAPE, rows=r), 8, 8, 1, 1, 1) for r in (2, 1))
    counts = [forward_kernels(run.parts[1], 8).count for run in (one, five)]
    assert counts[1] - counts[0] == 4


def test_layers_that_do_not_divide_evenly_are_refused():
    with pytest.raises(ValueError, match="do not divide evenly"):
        Training(SHAPE, 10, 1, 1, 4, 4)
