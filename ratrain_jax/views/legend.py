"""What the colours and marks of a picture mean, of those that are there."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ratrain_jax.lowering.program import Lane
from ratrain_jax.views.chart import Chart
from ratrain_jax.views.lanes import ARROW, lighter
from ratrain_jax.views.palette import COLOURS, MEMORY


def add_legends(
    figure: Figure,
    charts: Sequence[Chart],
    in_sight: float,
    folded: bool,
    left: float,
) -> None:
    """Adds two lines at the foot of a figure: of ops, and of bytes.

    Args:
        figure: the figure.
        charts: what it shows.
        in_sight: bytes at the top of a memory lane.
        folded: whether microbatches are left out.
        left: inches at which they start.
    """
    width, height = figure.get_size_inches()
    for down, handles in ((0.34, _ops(charts)), (0.1, _bytes(charts, in_sight, folded))):
        figure.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(left / width, down / height),
            ncols=max(len(handles), 1),
            fontsize=7.5,
            frameon=False,
            handlelength=1.3,
            handletextpad=0.5,
            columnspacing=1.3,
            borderpad=0,
            borderaxespad=0,
        )


def _ops(charts: Sequence[Chart]) -> list[Artist]:
    bars = [bar for chart in charts for bar in chart.bars]
    kinds = {bar.kind for bar in bars}
    handles: list[Artist] = [
        Patch(facecolor=colour, label=kind) for kind, colour in COLOURS.items() if kind in kinds
    ]
    handles.append(Patch(facecolor=COLOURS["idle"], label="idle"))
    blue = COLOURS["transfer"]
    link = [bar for bar in bars if bar.lane == Lane.LINK]
    if any(bar.exposed > 0 for bar in link):
        style = {"facecolor": blue, "edgecolor": COLOURS["exposed"], "linewidth": 0.9}
        handles.append(Patch(**style, label="exposed communication"))
    if any(bar.exposed < bar.end - bar.start for bar in link):
        handles.append(Patch(facecolor=lighter(blue), label="hidden communication"))
    if any(bar.next_step for bar in bars):
        sky = COLOURS["forward"]
        dashed = {"facecolor": lighter(sky), "edgecolor": sky, "linestyle": "--"}
        handles.append(Patch(**dashed, label="next step"))
    if any(chart.arrows for chart in charts):
        style = {"marker": "^", "markersize": 3, "linewidth": 0.8, "color": ARROW}
        handles.append(Line2D([], [], **style, label="view unblocks forward"))
    return handles


def _bytes(charts: Sequence[Chart], in_sight: float, folded: bool) -> list[Artist]:
    curves = [curve for chart in charts for curve in chart.memory]
    there = {kind for c in curves for kind, sizes in c.by_kind.items() if sizes.any()}
    handles: list[Artist] = []
    for colour in dict.fromkeys(MEMORY.values()):
        named = [str(kind) for kind, c in MEMORY.items() if c == colour and kind in there]
        if named:
            name = named[0] if len(named) == 1 else "small values"
            handles.append(Patch(facecolor=colour, label=name))
    if any(curve.limit and curve.limit <= in_sight for curve in curves):
        handles.append(Line2D([], [], color="black", linestyle="--", linewidth=0.8, label="limit"))
    if curves:
        style = {"color": "black", "marker": "v", "markersize": 3, "linestyle": "none"}
        handles.append(Line2D([], [], **style, label="peak"))
    if folded:
        style = {"color": "black", "marker": "x", "markersize": 3.5, "linestyle": "none"}
        handles.append(Line2D([], [], **style, label="n microbatches alike, not drawn"))
    return handles
