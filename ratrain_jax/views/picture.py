"""A step over time as a picture: for each stage what it computes, what its link carries, and what lies in its memory.

Terms.
    A **panel** holds one chart; panels lie below each other on one time axis. A **row** is a stage of a panel. Where a
    step is too long to number its microbatches, repeated ones are left out of all panels alike (`folding.py`), and each
    row says how many; of many stages, those in the middle are left out.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ratrain_jax.lowering.program import Lane
from ratrain_jax.lowering.text import readable_bytes
from ratrain_jax.views.chart import Bar, Chart
from ratrain_jax.views.folding import Fold, find_folds, kept_stages
from ratrain_jax.views.lanes import Row, draw_lanes, lighter
from ratrain_jax.views.memory_lane import bytes_in_sight, draw_memory
from ratrain_jax.views.palette import COLOURS, MEMORY
from ratrain_jax.views.time_axis import TimeAxis

WIDTH, LEFT, RIGHT = 13.0, 0.85, 1.35
TITLE, BOTTOM, LEGEND_LINE = 0.55, 0.5, 0.2
MOST_ROWS: Final = {1: 8, 2: 6}
"""Stages of a panel that are drawn, by the number of panels; of more panels 4."""

NARROW: Final = 0.11
"""Inches of half of the compute bars under which microbatches are folded."""

HIDDEN_STAGES: Final = 0.32
"""Inches for the line about stages that are left out."""


class Picture(Figure):
    """A figure that a notebook shows, and that is in no list of open figures."""

    def _repr_png_(self) -> bytes:
        target = io.BytesIO()
        self.savefig(target, format="png")
        return target.getvalue()


def draw(charts: Sequence[Chart]) -> Figure:
    """Draws steps below each other on one time axis.

    Args:
        charts: the steps, from top to bottom.

    Returns:
        The figure. It needs no display, and belongs to no `pyplot` state.
    """
    most = MOST_ROWS.get(len(charts), 4)
    kept = [kept_stages(len(chart.memory), most) for chart in charts]
    axis, folds = _time_axis(charts, kept)
    rows = [
        _rows(chart, stages, sum(map(len, kept)))
        for chart, stages in zip(charts, kept, strict=True)
    ]
    heights = [panel[-1].memory[1] + 0.08 for panel in rows]
    handles = _legend(charts, folds)
    columns = 9
    below = BOTTOM + LEGEND_LINE * -(-len(handles) // columns) + 0.1
    height = sum(heights) + TITLE * len(charts) + below
    figure = Picture(figsize=(WIDTH, height), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    in_sight = bytes_in_sight(charts)
    top, row = height, 0
    for chart, panel, tall in zip(charts, rows, heights, strict=True):
        top -= TITLE + tall
        box = (LEFT / WIDTH, top / height, axis.inches / WIDTH, tall / height)
        axes = figure.add_axes(box)
        axes.set(xlim=(0, axis.inches), ylim=(tall, 0), yticks=[])
        axes.spines[:].set_visible(False)
        draw_lanes(axes, chart, panel, axis)
        draw_memory(axes, chart, panel, axis, in_sight)
        counts = [fold.counts[row : row + len(panel)] for fold in folds]
        row += len(panel)
        _gutters(axes, panel, axis, counts, tall)
        _names(axes, chart, panel)
        _ticks(axes, axis, last=chart is charts[-1])
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(LEFT / WIDTH, 0.02),
        ncols=columns,
        fontsize=7.5,
        frameon=False,
        handlelength=1.4,
        columnspacing=1.2,
        borderaxespad=0,
    )
    return figure


def _time_axis(
    charts: Sequence[Chart], kept: Sequence[Sequence[int]]
) -> tuple[TimeAxis, tuple[Fold, ...]]:
    """The axis of all panels; folded only if bars would be too narrow without."""
    bars = [
        bar
        for chart, stages in zip(charts, kept, strict=True)
        for bar in chart.bars
        if bar.stage in stages
    ]
    seconds = max((bar.end for bar in bars), default=0.0)
    inches = WIDTH - LEFT - RIGHT
    axis = TimeAxis.of(seconds, (), inches)
    took = [b.end - b.start for b in bars if b.lane == Lane.COMPUTE and _numbered(b)]
    if took and float(np.median(took)) / axis.inch >= NARROW:
        return axis, ()
    folds = find_folds(charts, kept)
    return TimeAxis.of(seconds, folds, inches), folds


def _numbered(bar: Bar) -> bool:
    return getattr(bar.op, "microbatch", None) is not None


def _rows(chart: Chart, stages: Sequence[int], total: int) -> list[Row]:
    """Where each stage lies: lanes of equal heights, lower ones in a picture of many rows."""
    compute, link, memory = (0.22, 0.17, 0.32) if total <= 10 else (0.19, 0.15, 0.24)
    rows, top = [], 0.14
    for stage, before in zip(stages, (-1, *stages), strict=False):
        top += HIDDEN_STAGES if stage > before + 1 else 0.0
        below = top + compute + 0.07
        last = below + link + 0.05
        rows.append(Row(stage, (top, top + compute), (below, below + link), (last, last + memory)))
        top = last + memory + 0.2
    return rows


def _names(axes: Axes, chart: Chart, rows: Sequence[Row]) -> None:
    """The title, the names of stages and lanes, and what is said of stages that are left out."""
    axes.text(0, -0.24, chart.title, fontsize=10, weight="bold", va="bottom")
    axes.text(0, -0.06, chart.subtitle, fontsize=8, color="#444444", va="bottom")
    for row in rows:
        for name, (top, bottom) in (("", row.compute), ("link", row.link), ("memory", row.memory)):
            style = (
                {"weight": "bold", "fontsize": 8}
                if not name
                else {"fontsize": 6.5, "color": "#555555"}
            )
            axes.text(
                -0.08,
                (top + bottom) / 2,
                name or f"stage {row.stage}",
                ha="right",
                va="center",
                **style,
            )
    for row, after in itertools.pairwise(rows):
        if after.stage > row.stage + 1:
            peaks = [int(c.total.max()) for c in chart.memory[row.stage + 1 : after.stage]]
            few, many = readable_bytes(min(peaks)), readable_bytes(max(peaks))
            text = (
                f"⋮   {len(peaks)} stages, {row.stage + 1} to {after.stage - 1}, not drawn;"
                f" their peaks: {few if few == many else f'{few} to {many}'}   ⋮"
            )
            middle = (row.memory[1] + after.compute[0]) / 2
            axes.text(
                axes.get_xlim()[1] / 2,
                middle,
                text,
                fontsize=7.5,
                ha="center",
                va="center",
                color="#444444",
            )


def _gutters(
    axes: Axes, rows: Sequence[Row], axis: TimeAxis, counts: Sequence[Sequence[int]], tall: float
) -> None:
    """A marked break through all rows at each fold, with the number of microbatches that each row leaves out."""
    for (left, right), numbers in zip(axis.gutters(), counts, strict=True):
        for edge in (left, right):
            down = np.arange(0.06, tall, 0.05)
            along = edge + np.where(np.arange(len(down)) % 2, 0.018, -0.018)
            axes.plot(along, down, color="#888888", linewidth=0.6, clip_on=False)
        for row, number in zip(rows, numbers, strict=True):
            if number:
                axes.text(
                    (left + right) / 2,
                    sum(row.compute) / 2,
                    f"× {number}",
                    fontsize=7,
                    ha="center",
                    va="center",
                )


def _ticks(axes: Axes, axis: TimeAxis, last: bool) -> None:
    """Round moments, written below the last panel alone."""
    whole = float(axis.ends[-1])
    name, factor = next(
        ((n, f) for n, f in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)) if whole * f >= 1), ("ns", 1e9)
    )
    seconds, places = np.array(axis.ticks()).reshape(-1, 2).T
    axes.set_xticks(places, [f"{moment * factor:.6g}" for moment in seconds] if last else [])
    axes.tick_params(labelsize=7.5, length=3)
    axes.vlines(places, *axes.get_ylim(), color="#DDDDDD", linewidth=0.4, zorder=0)
    if last:
        axes.set_xlabel(f"time ({name})", fontsize=8)


def _legend(charts: Sequence[Chart], folds: Sequence[Fold]) -> list[Patch | Line2D]:
    """What the colours mean, of the kinds that are there."""
    bars = [bar for chart in charts for bar in chart.bars]
    kinds = {bar.kind for bar in bars}
    handles: list[Patch | Line2D] = [
        Patch(facecolor=colour, label=kind) for kind, colour in COLOURS.items() if kind in kinds
    ]
    handles.append(Patch(facecolor=COLOURS["idle"], label="idle"))
    if any(bar.lane == Lane.LINK for bar in bars):
        grey = COLOURS["transfer"]
        handles.append(
            Patch(facecolor=grey, edgecolor="black", linewidth=0.8, label="exposed link")
        )
        handles.append(Patch(facecolor=lighter(grey), label="hidden link"))
    if any(bar.next_step for bar in bars):
        blue = COLOURS["forward"]
        handles.append(
            Patch(facecolor=lighter(blue), edgecolor=blue, linestyle="--", label="next step")
        )
    there = {kind for chart in charts for curve in chart.memory for kind in curve.by_kind}
    for colour in dict.fromkeys(MEMORY.values()):
        named = [kind for kind, c in MEMORY.items() if c == colour and kind in there]
        if named:
            name = named[0] if len(named) == 1 else "small values"
            handles.append(Patch(facecolor=colour, label=str(name)))
    return handles
