"""A whole step in a strip: a line of pixels for every stage, each pixel the mean colour of what is computed in its time."""

from __future__ import annotations

from typing import Final

import numpy as np
from matplotlib.axes import Axes

from ratrain_jax.lowering.program import Lane
from ratrain_jax.views.chart import Chart
from ratrain_jax.views.palette import COLOURS
from ratrain_jax.views.time_axis import TimeAxis

PIXELS: Final = 1600
"""Along the strip."""


def pixels(chart: Chart, seconds: float, count: int) -> np.ndarray:
    """The colours of the strip.

    Args:
        chart: the step.
        seconds: when the strip ends.
        count: pixels along it.

    Returns:
        Red, green and blue from 0 to 1, (stages, count, 3).
    """
    edges = np.linspace(0.0, seconds, count + 1)
    # Seconds of each stage and kind up to each edge; what is not of any kind is idle.
    spans: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for bar in chart.bars:
        if bar.lane == Lane.COMPUTE and bar.end > bar.start:
            spans.setdefault((bar.stage, bar.kind), []).append((bar.start, bar.end))
    idle, width = _rgb(COLOURS["idle"]), seconds / count
    found = np.tile(idle, (len(chart.memory), count, 1))
    for (stage, kind), some in spans.items():
        times = np.array(some)
        took = np.cumsum(times[:, 1] - times[:, 0])
        sums = np.stack([np.append(0.0, took[:-1]), took], 1)
        busy = np.diff(np.interp(edges, times.ravel(), sums.ravel())) / width
        found[stage] += busy[:, None] * (_rgb(COLOURS[kind]) - idle)
    return np.clip(found, 0.0, 1.0)


def draw_overview(axes: Axes, chart: Chart, axis: TimeAxis) -> None:
    """Draws the strip, and below it a line along what the panel shows of it.

    Args:
        axes: where to.
        chart: the step.
        axis: the panel's time axis.
    """
    seconds = float(axis.ends[-1])
    colours = pixels(chart, seconds, PIXELS)
    axes.imshow(
        colours,
        extent=(0.0, seconds, len(colours), 0.0),
        aspect="auto",
        interpolation="nearest",
    )
    below = len(colours) * 1.09
    axes.hlines([below] * len(axis.starts), axis.starts, axis.ends, color="black", linewidth=1.6)
    axes.set(xlim=(0.0, seconds), ylim=(len(colours) * 1.12, 0.0), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def _rgb(colour: str) -> np.ndarray:
    return np.array([int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)])
