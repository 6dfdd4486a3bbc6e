"""What of a report is drawn: the bars of every stage, and the bytes of one, above one axis of time."""

from __future__ import annotations

import dataclasses
import importlib.resources
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from ratrain_jax.lowering.program import Op
from ratrain_jax.views.chart import Chart
from ratrain_jax.views.palette import COLOURS, ink_on
from ratrain_jax.views.report.bars import (
    COMPUTE_AT,
    COMPUTE_HEIGHT,
    LINK_AT,
    Columns,
    Entries,
    columns,
    exposed_spans,
    height_of,
    upper_edge,
)

if TYPE_CHECKING:
    from bokeh.models import GlyphRenderer, Legend, Range1d
    from bokeh.plotting import figure

HIDDEN_ALPHA: Final = 0.35
"""How opaque communication is while its stage computes, and an op of the next step."""

LEFT: Final = 100
RIGHT: Final = 16
"""Pixels beside the axes of all figures, so that their times are above one another."""

_ROW: Final = 60
_HEIGHTS: Final = (150, 740)
_LABELLED: Final = 20  # stages whose lanes are each labelled


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """A figure and what of it follows the reader's colour scheme.

    Attributes:
        plot: the figure.
        legend: its legend.
        outlines: glyphs whose lines have the colour of text.
    """

    plot: figure
    legend: Legend
    outlines: tuple[Any, ...] = ()


def script(name: str) -> str:
    """The text of a file of this package."""
    return importlib.resources.files("ratrain_jax.views.report").joinpath(name).read_text("utf-8")


def time_unit(seconds: float) -> tuple[float, str]:
    """How many of which unit make a second, on an axis of that length.

    Example:
        >>> time_unit(0.25)
        (1000.0, 'ms')
    """
    if seconds >= 2:
        return 1.0, "s"
    return (1e3, "ms") if seconds >= 2e-3 else (1e6, "µs")


def time_range(charts: Iterable[Chart]) -> Range1d:
    """The axis of time of some charts, with no way to leave it."""
    from bokeh.models import Range1d

    last = max((bar.end for chart in charts for bar in chart.bars), default=0.0) or 1.0
    start, end = -0.005 * last, 1.005 * last
    return Range1d(start=start, end=end, reset_start=start, reset_end=end, bounds=(start, end))


def empty_figure(times: Range1d, height: int, name: str, wheel: bool) -> figure:
    """A figure over time, without data.

    Args:
        times: the axis of time.
        height: in pixels.
        name: by which the page's scripts find it.
        wheel: whether the mouse's wheel zooms without being asked to.
    """
    from bokeh.models import CustomJSTickFormatter, WheelZoomTool
    from bokeh.plotting import figure

    plot = figure(
        x_range=times,
        height=height,
        name=name,
        sizing_mode="stretch_width",
        tools="xpan,xbox_zoom,box_zoom,reset,save",
        active_drag="xbox_zoom",
        toolbar_location="above",
        min_border_left=LEFT,
        min_border_right=RIGHT,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        output_backend="canvas",
    )
    zoom = WheelZoomTool(dimensions="width")
    plot.add_tools(zoom)
    if wheel:
        plot.toolbar.active_scroll = zoom
    plot.toolbar.logo = None
    scale, unit = time_unit(cast(float, times.end))
    plot.xaxis.axis_label = f"time, {unit}"
    plot.xaxis.formatter = CustomJSTickFormatter(args={"scale": scale}, code=script("ticks.js"))
    return plot


def add_legend(plot: figure, items: Mapping[str, list[Any]]) -> Legend:
    """A legend above a figure whose entries hide and show what they name."""
    from bokeh.models import Legend, LegendItem

    legend = Legend(
        items=[LegendItem(label=label, renderers=some) for label, some in items.items()],
        orientation="horizontal",
        click_policy="hide",
        background_fill_color=None,
        border_line_color=None,
        margin=2,
        spacing=10,
        glyph_width=14,
        label_text_font_size="12px",
    )
    plot.add_layout(legend, "above")
    return legend


def bars_figure(chart: Chart, path: Iterable[Op], times: Range1d, name: str) -> Figure:
    """The bars of every stage.

    Args:
        chart: what is drawn.
        path: ops on the critical path; none where it is not known.
        times: the axis of time.
        name: by which the page's scripts find it.
    """
    from bokeh.models import Range1d

    stages = len(chart.program.order)
    height = min(max(_ROW * stages, _HEIGHTS[0]), _HEIGHTS[1]) + 90
    plot = empty_figure(times, height, name, wheel=True)
    plot.y_range = Range1d(start=stages, end=0, bounds=(0, stages))
    _label_stages(plot, stages)
    entries = Entries(chart.program)
    this_step = [bar for bar in chart.bars if not bar.next_step]
    next_step = [bar for bar in chart.bars if bar.next_step]
    items: dict[str, list[Any]] = {}
    labelled, hovered, spans = [], [], exposed_spans(chart)
    for kind in columns(this_step, entries):
        full, *parts = _add_kind(plot, kind, spans.get(kind.kind))
        look = {"fill_color": COLOURS[kind.kind], "line_color": None}
        items[kind.kind] = [_add_swatch(plot, [full, *parts], **look)]
        hovered.append(full)
        if kind.height == COMPUTE_HEIGHT:
            labelled.append((full, kind.height, ink_on(COLOURS[kind.kind])))
    for kind in columns(next_step, entries):
        hovered.append(_add_blocks(plot, kind.data, kind.height, kind.kind, HIDDEN_ALPHA))
        look = {"fill_color": COLOURS[kind.kind], "fill_alpha": HIDDEN_ALPHA, "line_color": None}
        items["next step"] = [_add_swatch(plot, [hovered[-1]], **look)]
    outlines = _add_outlines(plot, chart, set(path), items)
    _add_hover(plot, entries, hovered)
    _follow_view(plot, entries, labelled)
    return Figure(plot, add_legend(plot, items), tuple(outlines))


def _label_stages(plot: figure, stages: int) -> None:
    from bokeh.models import FixedTicker

    every = max(1, math.ceil(stages / (2 * _LABELLED)))
    labels: dict[float | str, Any] = {s + COMPUTE_AT: f"stage {s}" for s in range(0, stages, every)}
    if stages <= _LABELLED:
        labels |= {s + LINK_AT: "link" for s in range(stages)}
    plot.yaxis.ticker = FixedTicker(ticks=cast(list[float], list(labels)))
    plot.yaxis.major_label_overrides = labels
    plot.yaxis.major_tick_line_color = None
    plot.ygrid.ticker = FixedTicker(ticks=list(range(stages + 1)))


def _add_kind(
    plot: figure, kind: Columns, spans: Mapping[str, np.ndarray] | None
) -> list[GlyphRenderer]:
    """Adds the bars of a kind; those of the link lane pale, with what is exposed of them in full colour."""
    alpha = 1.0 if kind.height == COMPUTE_HEIGHT else HIDDEN_ALPHA
    added = [_add_blocks(plot, kind.data, kind.height, kind.kind, alpha)]
    if spans is not None:
        added.append(_add_blocks(plot, dict(spans), kind.height, kind.kind, 1.0))
    return added


def _add_blocks(
    plot: figure, data: Mapping[str, np.ndarray], height: float, kind: str, alpha: float
) -> GlyphRenderer:
    from bokeh.models import CDSView, ColumnDataSource, IndexFilter

    return plot.block(
        x="x",
        y="y",
        width="width",
        height=height,
        source=ColumnDataSource(dict(data)),
        view=CDSView(filter=IndexFilter()),
        fill_color=COLOURS[kind],
        fill_alpha=alpha,
        line_color=None,
        hover_line_color="#ff00aa",
        hover_fill_color=COLOURS[kind],
        hover_fill_alpha=alpha,
        name=kind,
    )


def _add_swatch(plot: figure, renderers: list[GlyphRenderer], **look: Any) -> GlyphRenderer:
    """Adds what a legend shows of some blocks, for it shows none of which nothing is in view; it hides and shows them."""
    swatch = plot.block(x=[math.nan], y=[0.0], width=[0.0], height=[0.0], **look)
    for renderer in renderers:
        swatch.js_link("visible", renderer, "visible")
    return swatch


def _add_outlines(
    plot: figure, chart: Chart, path: set[Op], items: dict[str, list[Any]]
) -> list[Any]:
    """Adds the critical path, which is hidden at first, and the arrows from gathers to forwards."""
    from bokeh.models import CDSView, IndexFilter

    glyphs = []
    on_path = [bar for bar in chart.bars if not bar.next_step and bar.op in path]
    if on_path:
        rows = [(b.start, upper_edge(b), b.end - b.start, height_of(b)) for b in on_path]
        data = dict(zip(("x", "y", "width", "height"), np.array(rows).T, strict=True))
        look = {"fill_color": None, "line_color": "#000000", "line_width": 2, "visible": False}
        outline = plot.block(
            x="x", y="y", width="width", height="height", name="critical path",
            source=data, view=CDSView(filter=IndexFilter()), **look,
        )  # fmt: skip
        swatch = _add_swatch(plot, [outline], **look)
        items["critical path"] = [swatch]
        glyphs += [outline.glyph, swatch.glyph]
    if chart.arrows:
        ends = [(chart.bars[gather], chart.bars[forward]) for gather, forward in chart.arrows]
        rows = [(g.end, g.stage + LINK_AT, f.start, f.stage + COMPUTE_AT) for g, f in ends]
        data = dict(zip(("x0", "y0", "x1", "y1"), np.array(rows).T, strict=True))
        lines = plot.segment(source=data, x0="x0", y0="y0", x1="x1", y1="y1", line_alpha=0.6)
        heads = plot.scatter(
            source=data, x="x1", y="y1", marker="triangle", size=6, fill_color=None
        )
        items["gather → forward"] = [lines, heads]
        glyphs += [lines.glyph, heads.glyph]
    return glyphs


def _add_hover(plot: figure, entries: Entries, renderers: list[Any]) -> None:
    from bokeh.models import CustomJSHover, HoverTool

    written = CustomJSHover(args={"entries": entries.rows}, code=script("hover.js"))
    fields = ("@op", "@microbatch", "@x", "@width", "@exposed")
    plot.add_tools(
        HoverTool(
            renderers=renderers,
            tooltips=[
                ("op", "@op{name}"),
                ("layers", "@op{layers}"),
                ("microbatch", "@microbatch{microbatch}"),
                ("start", "@x{seconds}"),
                ("takes", "@width{seconds}"),
                ("exposed", "@exposed{seconds}"),
                ("bytes", "@op{moved}"),
            ],
            formatters=dict.fromkeys(fields, written),
            point_policy="follow_mouse",
        )
    )


def _follow_view(
    plot: figure, entries: Entries, bars: list[tuple[GlyphRenderer, float, str]]
) -> None:
    """Adds the labels in bars, and the script that chooses them and what is drawn by what is in view."""
    from bokeh.models import ColumnDataSource, CustomJS, GlyphRenderer, IndexFilter

    drawn = [r for r in plot.renderers if isinstance(r, GlyphRenderer)]
    source = ColumnDataSource({"x": [], "y": [], "text": [], "ink": []})
    plot.text(
        x="x", y="y", text="text", text_color="ink", source=source, text_font_size="11px",
        text_align="center", text_baseline="middle", level="annotation", name="labels",
    )  # fmt: skip
    follow = CustomJS(
        args={
            "plot": plot,
            "x_range": plot.x_range,
            "y_range": plot.y_range,
            "entries": entries.rows,
            "source": source,
            "bars": [list(bar) for bar in bars],
            "blocks": [r for r in drawn if isinstance(r.view.filter, IndexFilter)],
        },
        code=script("view.js"),
    )
    plot.x_range.js_on_change("start", follow)
    plot.x_range.js_on_change("end", follow)
    for renderer, _, _ in bars:
        renderer.js_on_change("visible", follow)
    plot.js_on_change("inner_width", follow)
