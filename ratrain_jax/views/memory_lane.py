"""The memory lanes of a picture: bytes by kind over time, the limit, and what is resident at the peak."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection

from ratrain_jax.lowering.text import readable_bytes
from ratrain_jax.views.chart import Chart
from ratrain_jax.views.lanes import Row
from ratrain_jax.views.memory_curve import MemoryCurve
from ratrain_jax.views.palette import MEMORY
from ratrain_jax.views.time_axis import TimeAxis

IN_SIGHT: Final = 1.6
"""A limit is drawn if it is at most so many times the highest peak, else it is only written down."""

WRITTEN: Final = 0.05
"""The least share of the peak that is written down."""

Line = list[tuple[float, float]]


def bytes_in_sight(charts: Iterable[Chart]) -> float:
    """What the height of a memory lane stands for: the highest peak, or the highest limit not far above it."""
    curves = [curve for chart in charts for curve in chart.memory]
    peak = max((float(curve.total.max()) for curve in curves), default=0.0)
    limits = [curve.limit for curve in curves if curve.limit and curve.limit <= IN_SIGHT * peak]
    return max([peak, *limits, 1.0]) * 1.05


def draw_memory(
    axes: Axes, chart: Chart, rows: Sequence[Row], axis: TimeAxis, in_sight: float
) -> None:
    """Draws the memory lanes of a panel, with their peaks written beside them.

    Collections carry in their gid what they hold: `memory COLOUR`, `ground`, `limit`.

    Args:
        axes: the panel; both directions in inches, downwards growing.
        chart: what to draw.
        rows: the stages that are drawn, and where.
        axis: the time axis.
        in_sight: bytes at the top of each lane.
    """
    last = max((bar.end for bar in chart.bars), default=0.0)
    _, left, right = axis.pieces([0.0], [last])
    areas: dict[str, list[np.ndarray]] = {}
    ground: list[Line] = []
    limits: list[Line] = []
    for row in rows:
        curve = chart.memory[row.stage]
        bottom = row.memory[1]
        inch = in_sight / (bottom - row.memory[0])
        for colour, along, lower, upper in _bands(curve, axis, last):
            down = bottom - np.concatenate([upper, lower[::-1]]) / inch
            edge = np.stack([np.concatenate([along, along[::-1]]), down], 1)
            areas.setdefault(colour, []).append(edge)
        for size, lines in ((0, ground), (curve.limit, limits)):
            if size is not None and size <= in_sight:
                down = bottom - size / inch
                lines += [[(a, down), (b, down)] for a, b in zip(left, right, strict=True)]
        _peak(axes, curve, row, axis, bottom - float(curve.total[curve.peak]) / inch)
    for colour, found in areas.items():
        made = PolyCollection(found, facecolors=colour, linewidths=0)
        made.set_gid(f"memory {colour}")
        axes.add_collection(made, autolim=False)
    _lines(axes, ground, "ground", colors="#777777", linewidths=0.5)
    _lines(axes, limits, "limit", colors="black", linewidths=0.8, linestyles="--")


def _lines(axes: Axes, lines: Sequence[Line], gid: str, **style: Any) -> None:
    if lines:
        made = LineCollection(lines, **style)
        made.set_gid(gid)
        axes.add_collection(made, autolim=False)


def _bands(
    curve: MemoryCurve, axis: TimeAxis, last: float
) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
    """For each colour and shown span: inches along, lower and upper bytes, at the corners of the steps."""
    by_colour: dict[str, np.ndarray] = {}
    for kind, sizes in curve.by_kind.items():
        by_colour[MEMORY[kind]] = by_colour.get(MEMORY[kind], 0) + sizes
    for start, end, place in zip(axis.starts, axis.ends, axis.places, strict=True):
        if last <= start:
            return
        inner = (curve.times > start) & (curve.times < min(end, last))
        first = max(int(np.searchsorted(curve.times, start, side="right")) - 1, 0)
        steps = np.repeat(np.append(first, np.flatnonzero(inner)), 2)
        corners = np.repeat(np.append(start, curve.times[inner]), 2)[1:]
        along = place + (np.append(corners, min(end, last)) - start) / axis.inch
        upper = np.zeros(len(along))
        for colour in dict.fromkeys(MEMORY.values()):
            if colour in by_colour:
                lower, upper = upper, upper + by_colour[colour][steps]
                yield colour, along, lower, upper


def _peak(axes: Axes, curve: MemoryCurve, row: Row, axis: TimeAxis, height: float) -> None:
    """A mark at the peak, and beside the lane what is resident then."""
    at = axis.place(float(curve.times[curve.peak]))
    if at is not None:
        mark = {"s": 10, "marker": "v", "color": "black", "linewidths": 0, "zorder": 4}
        axes.scatter([at], [height - 0.03], **mark)
    lines = peak_shares(curve)
    if curve.limit:
        lines.append(f"limit {readable_bytes(curve.limit)}")
    beside = axis.inches + 0.1
    peak = f"peak {readable_bytes(int(curve.total[curve.peak]))}"
    axes.text(beside, row.compute[0], peak, fontsize=7.5, weight="bold", va="top")
    style = {"fontsize": 6.5, "color": "#333333", "linespacing": 1.2}
    axes.text(beside, row.compute[0] + 0.15, "\n".join(lines), va="top", **style)


def peak_shares(curve: MemoryCurve) -> list[str]:
    """What is resident at the peak, the largest first."""
    whole = int(curve.total[curve.peak]) or 1
    shares = {kind: float(sizes[curve.peak]) / whole for kind, sizes in curve.by_kind.items()}
    largest = sorted(shares, key=lambda kind: -shares[kind])
    return [f"{kind} {100 * shares[kind]:.0f} %" for kind in largest[:4] if shares[kind] >= WRITTEN]
