"""The compute and link lanes of a picture: bars, what is written in them, arrows and tails.

Along the picture everything is in inches (see `TimeAxis`), and so it is downwards; a row's lanes lie below each other. What
a stage sends lies in the upper half of its link lane, what it receives in the lower half, and collectives fill both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection

from ratrain_jax.lowering.program import Backward, Borrow, Forward, Lane, Send
from ratrain_jax.views.chart import Bar, Chart
from ratrain_jax.views.palette import COLOURS, ink_on
from ratrain_jax.views.time_axis import TimeAxis

FONT_SIZES: Final = (7.0, 6.0, 5.0)
"""Of what is written in bars: the largest that fits."""

HIDDEN: Final = 0.45
"""How much of a colour is left in hidden communication and in the next step's ops; the rest is white."""


ARROW: Final = "#7A4F00"
"""The colour of arrows: that of gathers, darker."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """Where a stage lies in its panel, in inches from the panel's top.

    Attributes:
        stage: the stage.
        compute: top and bottom of its compute lane.
        link: likewise of its link lane.
        memory: likewise of its memory lane.
    """

    stage: int
    compute: tuple[float, float]
    link: tuple[float, float]
    memory: tuple[float, float]

    def lane(self, bar: Bar) -> tuple[float, float]:
        """Top and bottom of a bar."""
        if bar.lane == Lane.COMPUTE:
            return self.compute
        top, bottom = self.link
        if isinstance(bar.op, (Send, Borrow)):
            middle = (top + bottom) / 2
            return (top, middle) if bar.op.stage == bar.stage else (middle, bottom)
        return self.link


def lighter(colour: str) -> tuple[float, float, float]:
    """A colour mixed with white."""
    red, green, blue = (int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5))
    return tuple(1 - HIDDEN * (1 - part) for part in (red, green, blue))  # type: ignore[return-value]


def draw_lanes(axes: Axes, chart: Chart, rows: Sequence[Row], axis: TimeAxis) -> None:
    """Draws the compute and link lanes of a panel.

    Collections carry what they hold in their gid: `idle`, `link`, `bars KIND`, `exposed KIND`, `next step`, `arrows`.

    Args:
        axes: the panel; both directions in inches, downwards growing.
        chart: what to draw.
        rows: the stages that are drawn, and where.
        axis: the time axis.
    """
    of = {row.stage: row for row in rows}
    bars = [bar for bar in chart.bars if bar.stage in of and bar.lane != Lane.NONE]
    _backgrounds(axes, bars, rows, axis)
    which, left, right = axis.pieces([b.start for b in bars], [b.end for b in bars])
    tops, bottoms = np.array([of[b.stage].lane(b) for b in bars]).reshape(-1, 2).T
    boxes = _boxes(left, right, tops[which], bottoms[which])
    kinds = np.array([b.kind for b in bars])[which]
    late = np.array([b.next_step for b in bars], bool)[which]
    link = np.array([b.lane == Lane.LINK for b in bars], bool)[which]
    for kind, colour in COLOURS.items():
        for chosen, face in ((link, lighter(colour)), (~link, colour)):
            _add(axes, boxes[chosen & (kinds == kind) & ~late], f"bars {kind}", face)
        pale = boxes[late & (kinds == kind)]
        edge = {"edgecolors": colour, "linewidths": 0.9, "linestyles": "--"}
        _add(axes, pale, "next step", lighter(colour), **edge)
    _exposed(axes, bars, of, axis)
    _numbers(axes, [bars[n] for n in which], boxes)
    _arrows(axes, chart, of, axis)
    _tails(axes, bars, rows, axis)


def idle_spans(bars: Iterable[Bar]) -> tuple[np.ndarray, np.ndarray]:
    """When a stage computes nothing: starts and ends, ascending, before its first op and after its last too."""
    starts, ends = [-np.inf], []
    for bar in bars:
        if bar.lane == Lane.COMPUTE and bar.end > bar.start:
            if bar.start > starts[-1]:
                ends.append(bar.start)
                starts.append(bar.end)
            else:
                starts[-1] = max(starts[-1], bar.end)
    return np.array(starts), np.array([*ends, np.inf])


def _backgrounds(axes: Axes, bars: Sequence[Bar], rows: Sequence[Row], axis: TimeAxis) -> None:
    """Lanes that nothing runs in: grey up to the panel's last op."""
    _, left, right = axis.pieces([0.0], [max((bar.end for bar in bars), default=0.0)])
    for gid, lane, shade in (("idle", "compute", COLOURS["idle"]), ("link", "link", "#F8F8F8")):
        spans = np.array([getattr(row, lane) for row in rows]).repeat(len(left), axis=0)
        tiled = np.tile(left, len(rows)), np.tile(right, len(rows))
        _add(axes, _boxes(*tiled, spans[:, 0], spans[:, 1]), gid, shade)


def _boxes(
    left: np.ndarray, right: np.ndarray, tops: np.ndarray, bottoms: np.ndarray
) -> np.ndarray:
    """Corners of boxes, (number, 4, 2)."""
    along = np.stack([left, right, right, left], 1)
    return np.stack([along, np.stack([tops, tops, bottoms, bottoms], 1)], 2)


def _add(axes: Axes, boxes: np.ndarray, gid: str, face: object, **style: object) -> None:
    if len(boxes):
        # White edges keep neighbours apart, unless they would cover narrow bars.
        wide = float(np.median(boxes[:, 1, 0] - boxes[:, 0, 0])) > 0.05
        edges = {"edgecolors": "white", "linewidths": 0.4 if wide else 0.0}
        made = PolyCollection(list(boxes), facecolors=face, **{**edges, **style})  # type: ignore[arg-type]
        made.set_gid(gid)
        axes.add_collection(made, autolim=False)


def _exposed(axes: Axes, bars: Sequence[Bar], of: Mapping[int, Row], axis: TimeAxis) -> None:
    """Over bars of the link lane, the parts during which their stage computes nothing."""
    parts: dict[str, list[tuple[float, float, float, float]]] = {}
    for stage, row in of.items():
        mine = [bar for bar in bars if bar.stage == stage]
        starts, ends = idle_spans(mine)
        for bar in mine:
            if bar.lane == Lane.LINK and bar.exposed > 0:
                first = int(np.searchsorted(ends, bar.start, side="right"))
                after = int(np.searchsorted(starts, bar.end, side="left"))
                for n in range(first, after):
                    span = max(bar.start, float(starts[n])), min(bar.end, float(ends[n]))
                    parts.setdefault(bar.kind, []).append((*span, *row.lane(bar)))
    for kind, found in parts.items():
        starts, ends, tops, bottoms = np.array(found).T
        which, left, right = axis.pieces(starts, ends)
        boxes = _boxes(left, right, tops[which], bottoms[which])
        # An outline as wide as its bar would hide the colour.
        widths = np.minimum(0.7, 72 * (right - left) / 6)
        style = {"edgecolors": COLOURS["exposed"], "linewidths": widths}
        _add(axes, boxes, f"exposed {kind}", COLOURS[kind], **style)


def _numbers(axes: Axes, bars: Sequence[Bar], boxes: np.ndarray) -> None:
    """The microbatch in each bar, or what else it is, where there is room."""
    for bar, box in zip(bars, boxes, strict=True):
        (left, top), (right, bottom) = box[0], box[2]
        number = getattr(bar.op, "microbatch", None)
        text = bar.label if number is None or bar.lane == Lane.LINK else str(number)
        width, height = 72 * (right - left), 72 * (bottom - top)
        fits = (s for s in FONT_SIZES if 0.62 * s * len(text) + 1.5 <= width and s <= height)
        size = next(fits, None)
        if size is not None:
            pale = bar.next_step or (bar.lane == Lane.LINK and bar.exposed < bar.end - bar.start)
            axes.text(
                (left + right) / 2,
                (top + bottom) / 2,
                text,
                fontsize=size,
                color="black" if pale else ink_on(COLOURS[bar.kind]),
                ha="center",
                va="center_baseline",
            )


def _arrows(axes: Axes, chart: Chart, of: Mapping[int, Row], axis: TimeAxis) -> None:
    """From the end of each gather to the start of the forward that waited for it."""
    lines, heads = [], []
    for source, target in chart.arrows:
        gather, forward = chart.bars[source], chart.bars[target]
        left, right = axis.place(gather.end), axis.place(forward.start)
        if gather.stage in of and left is not None and right is not None:
            row = of[gather.stage]
            below = (row.compute[1] + row.link[0]) / 2
            lines.append([(left, row.link[0]), (left, below), (right, below)])
            heads.append((right, row.compute[1]))
    if lines:
        made = LineCollection(lines, colors=ARROW, linewidths=0.7)
        made.set_gid("arrows")
        axes.add_collection(made, autolim=False)
        along, down = np.array(sorted(set(heads))).T
        axes.scatter(along, down + 0.025, s=9, marker="^", color=ARROW, linewidths=0, zorder=4)


def _tails(axes: Axes, bars: Sequence[Bar], rows: Sequence[Row], axis: TimeAxis) -> None:
    """A line over each stage's compute lane from its last backward to its first forward of the next step."""
    for row in rows:
        mine = [bar for bar in bars if bar.stage == row.stage]
        body = [b.end for b in mine if isinstance(b.op, (Backward, Forward)) and not b.next_step]
        again = [b.start for b in mine if b.next_step and isinstance(b.op, Forward)]
        if not body or not again:
            continue
        left, right = axis.place(max(body)), axis.place(min(again))
        if left is not None and right is not None and right - left > 0.12:
            over = row.compute[0] - 0.035
            axes.annotate(
                "",
                (left, over),
                (right, over),
                arrowprops={
                    "arrowstyle": "|-|,widthA=0.15,widthB=0.15",
                    "lw": 0.7,
                    "shrinkA": 0,
                    "shrinkB": 0,
                },
            )
            if right - left > 0.3:
                axes.text(
                    (left + right) / 2, over - 0.02, "tail", fontsize=6, ha="center", va="bottom"
                )
