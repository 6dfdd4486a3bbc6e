"""The memory lanes of a picture: bytes by kind over time, the limit, and what is resident at the peak."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

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

WRITTEN: Final = 0.08
"""The least share of the peak that is written down."""


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

    Collections carry in their gid what they hold: `memory KIND`, `limit`.

    Args:
        axes: the panel; both directions in inches, downwards growing.
        chart: what to draw.
        rows: the stages that are drawn, and where.
        axis: the time axis.
        in_sight: bytes at the top of each lane.
    """
    areas: dict[str, list[np.ndarray]] = {}
    limits = []
    for row in rows:
        curve = chart.memory[row.stage]
        top, bottom = row.memory
        scale = (bottom - top) / in_sight
        for colour, lower, upper, places in _bands(curve, axis):
            for piece in range(len(places)):
                edge = np.concatenate([upper[piece], lower[piece][::-1]])
                along = np.concatenate([places[piece], places[piece][::-1]])
                areas.setdefault(colour, []).append(np.stack([along, bottom - scale * edge], 1))
        if curve.limit and curve.limit <= in_sight:
            limits.append(
                [(0, bottom - scale * curve.limit), (axis.inches, bottom - scale * curve.limit)]
            )
        _peak(axes, curve, row, axis, scale)
        axes.plot([0, axis.inches], [bottom, bottom], color="#999999", linewidth=0.5)
    for colour, found in areas.items():
        made = PolyCollection(found, facecolors=colour, linewidths=0)
        made.set_gid(f"memory {colour}")
        axes.add_collection(made, autolim=False)
    if limits:
        made = LineCollection(limits, colors="black", linewidths=0.8, linestyles="--")
        made.set_gid("limit")
        axes.add_collection(made, autolim=False)


def _bands(
    curve: MemoryCurve, axis: TimeAxis
) -> Iterable[tuple[str, list[np.ndarray], list[np.ndarray], list[np.ndarray]]]:
    """For each colour, lower and upper bytes and inches along each shown span, as corners of steps."""
    spans = []
    for start, end, place in zip(axis.starts, axis.ends, axis.places, strict=True):
        inner = (curve.times > start) & (curve.times < end)
        first = max(int(np.searchsorted(curve.times, start, side="right")) - 1, 0)
        picked = np.append(first, np.flatnonzero(inner))
        times = np.append(start, curve.times[inner])
        along = place + (np.append(np.repeat(times, 2)[1:], end) - start) / axis.inch
        spans.append((np.repeat(picked, 2), along))
    total = np.zeros(len(curve.times))
    by_colour: dict[str, np.ndarray] = {}
    for kind, sizes in curve.by_kind.items():
        by_colour[MEMORY[kind]] = by_colour.get(MEMORY[kind], 0) + sizes
    for colour in dict.fromkeys(MEMORY.values()):
        if colour in by_colour:
            lower, total = total, total + by_colour[colour]
            yield (
                colour,
                [lower[picked] for picked, _ in spans],
                [total[picked] for picked, _ in spans],
                [along for _, along in spans],
            )


def _peak(axes: Axes, curve: MemoryCurve, row: Row, axis: TimeAxis, scale: float) -> None:
    """A mark at the peak, and what is resident then."""
    peak, total = curve.peak, curve.total
    at = axis.place(float(curve.times[peak]))
    if at is not None:
        down = row.memory[1] - scale * float(total[peak])
        axes.scatter([at], [down - 0.03], s=10, marker="v", color="black", linewidths=0, zorder=4)
    lines = [f"peak {readable_bytes(int(total[peak]))}", *peak_shares(curve)]
    if curve.limit:
        lines.append(f"limit {readable_bytes(curve.limit)}")
    axes.text(
        axis.inches + 0.1,
        (row.compute[0] + row.memory[1]) / 2,
        "\n".join(lines),
        fontsize=6.5,
        va="center",
        linespacing=1.25,
    )


def peak_shares(curve: MemoryCurve) -> list[str]:
    """What is resident at the peak, the largest first."""
    whole = int(curve.total[curve.peak]) or 1
    shares = {kind: float(sizes[curve.peak]) / whole for kind, sizes in curve.by_kind.items()}
    largest = sorted(shares, key=lambda kind: -shares[kind])
    return [f"{kind} {shares[kind]:.0%}" for kind in largest[:4] if shares[kind] >= WRITTEN]
