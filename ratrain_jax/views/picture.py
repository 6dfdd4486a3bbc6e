"""A step over time as a picture: for each stage what it computes, what its link carries, and what lies in its memory.

Terms.
    A **panel** holds one chart; panels lie below each other on one time axis. A **row** is a stage of a panel. Where a
    step is too long to number its microbatches, repeated ones are left out of all panels alike (`folding.py`), and each
    row says how many; of many stages, those in the middle are left out. A strip above such a panel shows the step whole.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ratrain_jax.lowering.program import Lane
from ratrain_jax.lowering.text import readable_bytes
from ratrain_jax.views.chart import Bar, Chart
from ratrain_jax.views.folding import Fold, find_folds, kept_stages
from ratrain_jax.views.lanes import Row, draw_lanes
from ratrain_jax.views.legend import add_legends
from ratrain_jax.views.memory_lane import bytes_in_sight, draw_memory
from ratrain_jax.views.overview import draw_overview
from ratrain_jax.views.time_axis import GUTTER, TimeAxis, readable_seconds, unit_of

LEFT: Final = 0.85
RIGHT: Final = 1.3
TITLE: Final = 0.55
BOTTOM: Final = 1.1
STRIP: Final = 0.45
"""Inches: of the figure, its margins, the titles of a panel, the axis with the legends, and a strip."""

INCHES: Final = 10.85
"""Of the time axis."""

WIDEST: Final = 16.0
"""To how many inches the axis grows for the sake of narrow bars."""

ROWS: Final = {1: (8, 3), 2: (6, 2)}
"""By the number of panels: up to how many stages are all drawn, and of more how many of the first and of the last."""

MANY_PANELS: Final = (4, 1)
"""Likewise of more panels."""

NARROW: Final = 0.11
"""Inches of half of the compute bars under which microbatches are folded."""

OMITTED: Final = 0.28
"""Inches for the line about stages that are left out."""


class Picture(Figure):
    """A figure that a notebook shows, and that is in no list of open figures."""

    def _repr_png_(self) -> bytes:
        target = io.BytesIO()
        self.savefig(target, format="png")
        return target.getvalue()


@dataclasses.dataclass(frozen=True, slots=True)
class _Panel:
    """A chart and where it is drawn.

    Attributes:
        chart: the chart.
        rows: the stages that are drawn.
        counts: for each fold, how many microbatches each row leaves out.
        height: inches of the lanes.
        strip: inches of the strip above them; 0 for none.
    """

    chart: Chart
    rows: list[Row]
    counts: list[tuple[int, ...]]
    height: float
    strip: float

    @property
    def whole(self) -> float:
        return TITLE + self.strip + self.height


def draw(charts: Sequence[Chart]) -> Figure:
    """Draws steps below each other on one time axis.

    Args:
        charts: the steps, from top to bottom.

    Returns:
        The figure. It needs no display, and belongs to no `pyplot` state.
    """
    kept = [kept_stages(chart, *ROWS.get(len(charts), MANY_PANELS)) for chart in charts]
    axis, folds = _time_axis(charts, kept)
    panels = _panels(charts, kept, folds)
    height = sum(panel.whole for panel in panels) + BOTTOM
    figure = Picture(figsize=(LEFT + axis.inches + RIGHT, height), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    in_sight = bytes_in_sight(charts)
    top = height
    for panel in panels:
        top -= panel.whole
        axes = _axes(figure, top, panel.height)
        axes.set(xlim=(0, axis.inches), ylim=(panel.height, 0), yticks=[])
        draw_lanes(axes, panel.chart, panel.rows, axis)
        draw_memory(axes, panel.chart, panel.rows, axis, in_sight)
        _gutters(axes, panel, axis)
        _names(axes, panel)
        _ticks(axes, axis, last=panel is panels[-1])
        if panel.strip:
            strip = _axes(figure, top + panel.height + 0.1, panel.strip - 0.1)
            draw_overview(strip, panel.chart, axis)
    add_legends(figure, charts, in_sight, bool(folds), LEFT)
    return figure


def _axes(figure: Figure, bottom: float, tall: float) -> Axes:
    width, height = figure.get_size_inches()
    along = width - LEFT - RIGHT
    axes = figure.add_axes((LEFT / width, bottom / height, along / width, tall / height))
    axes.spines[:].set_visible(False)
    return axes


def _time_axis(
    charts: Sequence[Chart], kept: Sequence[Sequence[int]]
) -> tuple[TimeAxis, tuple[Fold, ...]]:
    """The axis of all panels; folded only if bars would be too narrow without, and no more than it takes."""
    bars = [
        bar
        for chart, stages in zip(charts, kept, strict=True)
        for bar in chart.bars
        if bar.stage in stages
    ]
    seconds = max((bar.end for bar in bars), default=0.0)
    took = [b.end - b.start for b in bars if b.lane == Lane.COMPUTE and _numbered(b)]
    usual = float(np.median(took)) if took else np.inf
    folds: tuple[Fold, ...] = ()
    for beside in (None, 2, 1):
        if beside is not None:
            folds = _worthwhile(find_folds(charts, kept, beside), seconds)
        axis = TimeAxis.of(seconds, folds, INCHES)
        if usual / axis.inch >= NARROW:
            return axis, folds
    gutters = GUTTER * len(folds)
    wanted = gutters + (INCHES - gutters) * NARROW * axis.inch / usual
    return TimeAxis.of(seconds, folds, min(wanted, WIDEST)), folds


def _worthwhile(folds: tuple[Fold, ...], seconds: float) -> tuple[Fold, ...]:
    """Without those that would hardly be wider than their gutter."""
    inch = TimeAxis.of(seconds, folds, INCHES).inch
    return tuple(fold for fold in folds if fold.end - fold.start > 2 * GUTTER * inch)


def _numbered(bar: Bar) -> bool:
    return getattr(bar.op, "microbatch", None) is not None


def _panels(
    charts: Sequence[Chart], kept: Sequence[Sequence[int]], folds: Sequence[Fold]
) -> list[_Panel]:
    panels: list[_Panel] = []
    first, total = 0, sum(map(len, kept))
    for chart, stages in zip(charts, kept, strict=True):
        rows = _rows(stages, total)
        counts = [fold.counts[first : first + len(rows)] for fold in folds]
        first += len(rows)
        folded = folds or len(rows) < len(chart.memory)
        strip = STRIP + 0.004 * len(chart.memory) if folded else 0.0
        panels.append(_Panel(chart, rows, counts, rows[-1].memory[1] + 0.1, min(strip, 1.0)))
    return panels


def _rows(stages: Sequence[int], total: int) -> list[Row]:
    """Where each stage lies: lanes of equal heights, lower ones in a picture of many rows."""
    compute, link, memory = (0.23, 0.18, 0.36) if total <= 8 else (0.19, 0.15, 0.26)
    rows, top = [], 0.16
    for stage, before in zip(stages, (-1, *stages), strict=False):
        top += OMITTED if stage > before + 1 else 0.0
        below = top + compute + 0.07
        last = below + link + 0.05
        rows.append(Row(stage, (top, top + compute), (below, below + link), (last, last + memory)))
        top = last + memory + 0.2
    return rows


def _names(axes: Axes, panel: _Panel) -> None:
    """The title, the names of stages and lanes, and what is said of stages that are left out."""
    chart, rows, over = panel.chart, panel.rows, -panel.strip
    axes.text(0, over - 0.24, chart.title, fontsize=10, weight="bold", va="bottom")
    axes.text(0, over - 0.06, chart.subtitle, fontsize=8, color="#444444", va="bottom")
    names = {"fontsize": 6.5, "color": "#555555", "ha": "right", "va": "center"}
    if over:
        text = f"all {len(chart.memory)} stages,\nwhole step" if len(chart.memory) > 1 else "whole"
        axes.text(-0.08, over / 2 - 0.05, text, **names)
    for row in rows:
        stage = {**names, "fontsize": 8, "color": "black", "weight": "bold"}
        axes.text(-0.08, sum(row.compute) / 2, f"stage {row.stage}", **stage)
        axes.text(-0.08, sum(row.link) / 2, "link", **names)
        axes.text(-0.08, sum(row.memory) / 2, "memory", **names)
    for row, after in itertools.pairwise(rows):
        if after.stage > row.stage + 1:
            peaks = [int(c.total.max()) for c in chart.memory[row.stage + 1 : after.stage]]
            few, many = readable_bytes(min(peaks)), readable_bytes(max(peaks))
            text = (
                f"⋮    stages {row.stage + 1} to {after.stage - 1} not drawn,"
                f" peak {few if few == many else f'{few} to {many}'}    ⋮"
            )
            middle = (row.memory[1] + after.compute[0]) / 2 - 0.04
            names = {**names, "fontsize": 7.5, "ha": "center"}
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            axes.text(axes.get_xlim()[1] / 2, middle, text, zorder=6, bbox=box, **names)


def _gutters(axes: Axes, panel: _Panel, axis: TimeAxis) -> None:
    """A marked break through all rows at each fold: how long it is, and how many microbatches each row leaves out."""
    hidden = axis.starts[1:] - axis.ends[:-1]
    for (left, right), seconds, numbers in zip(axis.gutters(), hidden, panel.counts, strict=True):
        down = np.arange(0.12, panel.height - 0.05, 0.05)
        for edge in (left, right):
            along = edge + np.where(np.arange(len(down)) % 2, 0.018, -0.018)
            axes.plot(along, down, color="#888888", linewidth=0.6, gid="break")
        style: dict[str, Any] = {"ha": "center", "va": "center"}
        middle = (left + right) / 2
        length = readable_seconds(float(seconds))
        axes.text(middle, 0.06, length, fontsize=6, color="#555555", **style)
        for row, number in zip(panel.rows, numbers, strict=True):
            if number:
                axes.text(middle, sum(row.compute) / 2, f"× {number}", fontsize=7, **style)


def _ticks(axes: Axes, axis: TimeAxis, last: bool) -> None:
    """Round moments, written below the last panel alone."""
    name, factor = unit_of(float(axis.ends[-1]))
    seconds, places = np.array(axis.ticks()).reshape(-1, 2).T
    axes.set_xticks(places, [f"{moment * factor:.6g}" for moment in seconds] if last else [])
    axes.tick_params(labelsize=7.5, length=3 if last else 0)
    axes.vlines(places, *axes.get_ylim(), color="#DDDDDD", linewidth=0.4, zorder=0)
    if last:
        axes.set_xlabel(f"time ({name})", fontsize=8)
