"""Pictures of steps: what is drawn is what the chart holds, what is left out is said, and nothing is cut off."""

import dataclasses
import functools
import itertools
import re

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.colors import to_rgb

import ratrain_jax as rt
from ratrain_jax.kernels import load_machine
from ratrain_jax.lowering.program import Backward, Forward, Kind, Lane, PrefetchView, Recover, Send
from ratrain_jax.lowering.schedules import in_order_of_data, one_forward_one_backward
from ratrain_jax.runtime.measured import MeasuredOp, MeasuredRun
from ratrain_jax.views.chart import KINDS, Bar, Chart
from ratrain_jax.views.folding import find_folds, kept_stages
from ratrain_jax.views.lanes import lighter
from ratrain_jax.views.memory_curve import MemoryCurve
from ratrain_jax.views.overview import pixels
from ratrain_jax.views.palette import COLOURS, MEMORY, SMALL
from ratrain_jax.views.picture import draw
from tests.programs import make_program

MACHINE = load_machine("generic")
CASES = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "ratrain": {"clip": True},
    "no prefetch": {"update_prefetch": False},
    "recovery": {"recovered": (2, 1), "recovery": "forward"},
    "zero 2": {"zero": 2},
    "one stage": {"stages": 1},
    "evaluation": {"schedule": "forward"},
}


def seconds_of(op):
    if isinstance(op, (Forward, Recover, Backward)):
        return (2.13 if isinstance(op, Backward) else 1.07) * (op.layers[1] - op.layers[0])
    return 0.11 if isinstance(op, Send) else 0.4


@functools.cache
def timeline(case, microbatches=3):
    program = make_program(microbatches=microbatches, **CASES[case])
    return rt.simulate(program, MACHINE, seconds=seconds_of)


@functools.cache
def picture(case):
    return timeline(case).plot()


def measured(simulated):
    """A run of the same program in which ops take up to 5 % longer, by chance."""
    late = np.random.default_rng(0).uniform(1.0, 1.05, len(simulated.events))
    ops = [
        MeasuredOp(e.op, e.start, e.end * f) for e, f in zip(simulated.events, late, strict=True)
    ]
    last = max(op.end for op in ops)
    return MeasuredRun(simulated.program, tuple(sorted(ops, key=lambda op: op.start)), last)


def long_chart(stages, microbatches):
    """1F1B of many stages, put together by hand."""
    slots = [one_forward_one_backward(s, stages, microbatches) for s in range(stages)]
    ends, free, bars = {}, [0.0] * stages, []

    def read(stage, slot):
        kind, i = slot
        if kind == "F":
            return [(stage - 1, slot)] if stage else []
        return [(stage, ("F", i))] + ([(stage + 1, slot)] if stage + 1 < stages else [])

    for stage, slot in in_order_of_data(
        slots, lambda s, slot: all(r in ends for r in read(s, slot))
    ):
        start = max([free[stage], *(ends[r] for r in read(stage, slot))])
        kind = Forward if slot[0] == "F" else Backward
        op = kind(stage, layers=(stage, stage + 1), microbatch=slot[1])
        ends[stage, slot] = free[stage] = start + (1.0 if kind is Forward else 2.0)
        bars.append(Bar(op, stage, Lane.COMPUTE, KINDS[kind], "", start, free[stage]))
    bars.sort(key=lambda bar: (bar.start, bar.end))
    memory = [
        MemoryCurve(s, np.array([0.0]), {Kind.PARAMETERS: np.array([2**20 + s])}, None)
        for s in range(stages)
    ]
    program = make_program()
    return Chart("long", program, tuple(bars), (), tuple(memory), max(free), False)


def shapes(figure, gid, panel=0):
    """The corners of all that a panel's collections of some gid hold."""
    panels = [axes for axes in figure.axes if not axes.images]
    found = [c for c in panels[panel].collections if c.get_gid() == gid]
    return [path.vertices for c in found for path in c.get_paths()]


def written(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


@pytest.mark.parametrize("case", CASES)
def test_each_bar_is_drawn_once_in_the_colour_of_its_kind(case):
    chart, figure = timeline(case).chart, picture(case)
    for kind, colour in COLOURS.items():
        bars = [b for b in chart.bars if b.kind == kind and not b.next_step]
        assert len(shapes(figure, f"bars {kind}")) == len(bars)
        for made in figure.axes[0].collections:
            if made.get_gid() == f"bars {kind}":
                face = tuple(made.get_facecolor()[0][:3])
                assert face in (pytest.approx(to_rgb(colour)), pytest.approx(lighter(colour)))
    assert len(shapes(figure, "next step")) == sum(b.next_step for b in chart.bars)
    assert len(shapes(figure, "arrows")) == len(chart.arrows)
    ended = max(b.end for b in chart.bars)
    for kind in COLOURS:  # places are to scale
        wanted = sorted(b.end - b.start for b in chart.bars if b.kind == kind and not b.next_step)
        inches = sorted(np.ptp(box[:, 0]) for box in shapes(figure, f"bars {kind}"))
        scale = figure.axes[0].get_xlim()[1] / ended
        assert inches == pytest.approx([scale * w for w in wanted])


@pytest.mark.parametrize("case", CASES)
def test_exposed_communication_is_as_wide_as_it_is_long(case):
    chart, figure = timeline(case).chart, picture(case)
    inch = max(b.end for b in chart.bars) / figure.axes[0].get_xlim()[1]
    for kind in COLOURS:
        wanted = sum(b.exposed for b in chart.bars if b.kind == kind)
        drawn = sum(np.ptp(box[:, 0]) for box in shapes(figure, f"exposed {kind}"))
        assert drawn * inch == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("case", ["one stage", "zero 2", "evaluation"])
def test_nothing_is_cut_off(case):
    assert inside(picture(case))


def inside(figure):
    """Whether all shapes lie within their panel, and all that is written within the figure."""
    for axes in figure.axes:
        (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
        for made in axes.collections:
            for path in made.get_paths() if made.get_gid() else ():
                assert left - 1e-9 <= path.vertices[:, 0].min() <= path.vertices[:, 0].max()
                assert path.vertices[:, 0].max() <= right + 1e-9
                assert top <= path.vertices[:, 1].min() <= path.vertices[:, 1].max() <= bottom
    figure.draw_without_rendering()
    page = figure.bbox
    texts = [*itertools.chain(*(axes.texts for axes in figure.axes)), *figure.legends]
    boxes = [text.get_window_extent() for text in texts]
    return all(page.x0 <= b.x0 and b.x1 <= page.x1 and page.y0 <= b.y0 for b in boxes)


def test_colours_differ_for_colour_blind_eyes_too():
    normal = np.eye(3)
    # G. Machado, M. Oliveira, L. Fernandes, A Physiologically-based Model for Simulation of Color Vision Deficiency, 2009.
    deuteranope = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413]]
    deuteranope += [[-0.011820, 0.042940, 0.968881]]
    protanope = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216]]
    protanope += [[-0.003882, -0.048116, 1.051998]]
    memory = {c for c in MEMORY.values() if c != SMALL}
    for eyes in (normal, deuteranope, protanope):
        for colours in (COLOURS.values(), memory):
            seen = [_lab(np.array(eyes) @ _linear(to_rgb(c))) for c in colours]
            apart = [np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)]
            assert min(apart) > 14  # of two colours side by side, 2 can be told apart
    assert set(MEMORY) == set(Kind)
    assert set(COLOURS) == {*KINDS.values(), "idle", "exposed"}


def _linear(colour):
    c = np.array(colour)
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def _lab(linear):
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ np.clip(linear, 0, 1) / [0.9505, 1.0, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("case", ["gpipe", "ratrain", "recovery", "evaluation"])
def test_what_is_kept_and_what_is_folded_make_all(case):
    simulated = timeline(case, microbatches=70)
    chart, figure = simulated.chart, simulated.plot()
    found = [find_folds([chart], [range(len(chart.memory))], beside) for beside in (2, 1)]
    said = {tuple(sorted(n for f in folds for n in f.counts if n)): folds for folds in found}
    folds = said[tuple(sorted(numbers(figure)))]
    assert folds
    shown = list(
        zip([0.0, *(f.end for f in folds)], [*(f.start for f in folds), np.inf], strict=True)
    )
    for curve in chart.memory:
        bars = [b for b in chart.bars if b.stage == curve.stage and not b.next_step]
        for kind in (Forward, Recover, Backward):
            for unit in {b.op.layers for b in bars if isinstance(b.op, kind)}:
                starts = [b.start for b in bars if isinstance(b.op, kind) and b.op.layers == unit]
                kept = sum(first <= s < last for s in starts for first, last in shown)
                hidden = [sum(f.start <= s < f.end for s in starts) for f in folds]
                assert kept + sum(hidden) == len(starts)
                # The number that is written says how many of each unit are left out.
                said = [fold.counts[curve.stage] for fold in folds]
                assert all(h in (0, n) for h, n in zip(hidden, said, strict=True))
                assert kind is not Forward or (sum(hidden) > 55 and kept < 15)
    for kind in set(KINDS.values()):
        bars = [b for b in chart.bars if b.kind == kind and not b.next_step]
        seen = [sum(b.end > first and b.start < last for first, last in shown) for b in bars]
        assert len(shapes(figure, f"bars {kind}")) == sum(seen)
    assert inside(figure)


def numbers(figure):
    """The numbers of microbatches that are said to be left out."""
    return [int(m[1]) for text in written(figure) if (m := re.fullmatch(r"× (\d+)", text))]


def test_what_belongs_to_no_microbatch_is_never_folded():
    chart = timeline("ratrain", microbatches=70).chart
    (fold,) = find_folds([chart], [(0, 1)], beside=1)
    middle = (fold.start + fold.end) / 2
    gather = next(bar for bar in chart.bars if isinstance(bar.op, PrefetchView))
    moved = dataclasses.replace(gather, start=middle, end=middle + 1.0)
    bars = sorted((*chart.bars, moved), key=lambda bar: bar.start)
    before, after = find_folds([dataclasses.replace(chart, bars=tuple(bars))], [(0, 1)], beside=1)
    assert before.end <= moved.start and moved.end <= after.start
    for bar in bars:
        if bar.next_step or getattr(bar.op, "microbatch", None) is None:
            for found in (before, after):
                assert bar.end <= found.start or found.end <= bar.start


def test_short_steps_are_not_folded():
    assert not numbers(picture("ratrain"))
    assert "break" not in {line.get_gid() for line in picture("ratrain").axes[0].lines}


def test_many_stages_and_microbatches_stay_legible():
    chart = long_chart(64, 256)
    figure = draw([chart])
    assert inside(figure)
    width, height = figure.get_size_inches()
    assert width <= 18.5 and height <= 12
    assert sum(len(shapes(figure, f"bars {kind}")) for kind in COLOURS) < 400
    assert max(numbers(figure)) > 150
    assert any("stages 3 to 60 not drawn" in text for text in written(figure))
    widths = [np.ptp(box[:, 0]) for box in shapes(figure, "bars backward")]
    assert np.median(widths) > 0.11  # wide enough for a number
    assert {"0", "255"} <= set(written(figure))


def test_the_strip_is_the_mean_of_what_is_computed():
    chart = long_chart(4, 4)
    strip = pixels(chart, seconds=chart.seconds, count=1)
    idle, forward, backward = (
        np.array(to_rgb(COLOURS[k])) for k in ("idle", "forward", "backward")
    )
    busy = 4 * (1.0 * (forward - idle) + 2.0 * (backward - idle))
    assert strip[:, 0] == pytest.approx(np.tile(idle + busy / chart.seconds, (4, 1)))


def test_of_many_stages_the_first_the_last_and_the_fullest_are_drawn():
    chart = long_chart(8, 4)
    assert kept_stages(chart, most=8, few=3) == tuple(range(8))
    assert kept_stages(chart, most=6, few=2) == (0, 1, 6, 7)
    fuller = dataclasses.replace(chart.memory[4], by_kind={Kind.VIEW: np.array([2**30])})
    chart = dataclasses.replace(chart, memory=(*chart.memory[:4], fuller, *chart.memory[5:]))
    assert kept_stages(chart, most=6, few=2) == (0, 1, 4, 6, 7)


@pytest.mark.parametrize("microbatches", [3, 70])
def test_steps_below_each_other_share_their_time_axis(microbatches):
    first, second = timeline("1f1b", microbatches), timeline("ratrain", microbatches)
    figure = first.plot(second, measured(second))
    panels = [axes for axes in figure.axes if not axes.images]
    assert len(panels) == 3
    assert len({axes.get_xlim() for axes in panels}) == 1
    assert len({tuple(axes.get_xticks()) for axes in panels}) == 1
    if microbatches == 3:
        for n, chart in enumerate((first.chart, second.chart, measured(second).chart)):
            wanted = max(b.end for b in chart.bars)
            drawn = max(box[:, 0].max() for box in shapes(figure, "idle", n))
            longest = max(b.end for c in (first.chart, second.chart) for b in c.bars)
            longest = max(longest, *(b.end for b in measured(second).chart.bars))
            assert drawn / panels[0].get_xlim()[1] == pytest.approx(wanted / longest)
    else:
        assert len(numbers(figure)) >= 6  # each stage of each panel says what it leaves out
    assert inside(figure)


def limited(chart, limit):
    curves = tuple(dataclasses.replace(curve, limit=limit) for curve in chart.memory)
    return dataclasses.replace(chart, memory=curves)


def test_a_limit_in_sight_is_drawn_to_scale():
    chart = timeline("ratrain").chart
    peak = max(int(curve.total.max()) for curve in chart.memory)
    figure = draw([limited(chart, 5 * peak // 4)])
    ground, limits = shapes(figure, "ground"), shapes(figure, "limit")
    assert len(ground) == len(limits) == len(chart.memory)
    tops = {}
    for made in figure.axes[0].collections:
        if (made.get_gid() or "").startswith("memory"):
            for path in made.get_paths():
                stage = int(np.argmin([abs(g[0, 1] - path.vertices[:, 1].max()) for g in ground]))
                # Of the areas that lie on each other, one reaches highest.
                tops[stage] = min(tops.get(stage, np.inf), path.vertices[:, 1].min())
    fullest = int(np.argmax([curve.total.max() for curve in chart.memory]))
    base, line = ground[fullest][0, 1], limits[fullest][0, 1]
    assert (base - line) / (base - tops[fullest]) == pytest.approx((5 * peak // 4) / peak)


def test_a_limit_out_of_sight_is_written_down_alone():
    figure = draw([limited(timeline("ratrain").chart, 2**30)])
    assert not shapes(figure, "limit")
    assert sum("limit 1.0 GiB" in text for text in written(figure)) == 2
    assert not any(
        "limit" in text for text in written(draw([limited(timeline("1f1b").chart, None)]))
    )


def test_the_peak_says_what_is_resident():
    chart = timeline("ratrain").chart
    texts = "\n".join(written(picture("ratrain")))
    for curve in chart.memory:
        whole = curve.total[curve.peak]
        kind, sizes = max(curve.by_kind.items(), key=lambda item: item[1][curve.peak])
        assert f"{kind} {100 * sizes[curve.peak] / whole:.0f} %" in texts


def test_the_legend_names_what_is_there_alone():
    def named(case):
        return {t.get_text() for legend in picture(case).legends for t in legend.get_texts()}

    assert {"forward", "backward", "sync", "update", "residuals", "next step"} <= named("ratrain")
    assert "recovery" in named("recovery") and "recovery" not in named("ratrain")
    assert not {"backward", "update", "accumulator"} & named("evaluation")


def test_figures_show_in_notebooks_and_leave_nothing_open():
    figure = picture("one stage")
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert pyplot.get_fignums() == []
