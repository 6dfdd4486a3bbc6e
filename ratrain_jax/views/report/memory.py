"""The bytes of a stage over time, by kind, with a choice of stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ratrain_jax.lowering.program import Kind
from ratrain_jax.lowering.text import readable_bytes
from ratrain_jax.views.chart import Chart
from ratrain_jax.views.memory_curve import MemoryCurve
from ratrain_jax.views.palette import MEMORY, SMALL
from ratrain_jax.views.report.figures import Figure, add_legend, empty_figure, script

if TYPE_CHECKING:
    from bokeh.models import Range1d, Select

_HEIGHT: Final = 330
_OTHER: Final = "other"
# The page's colours, which follow the reader's scheme.
_SELECT: Final = "select.bk-input { background-color: var(--ground); color: var(--ink); border-color: var(--quiet) }"


def memory_figure(chart: Chart, times: Range1d) -> tuple[Figure, Select]:
    """Bytes of one stage by kind, and what chooses the stage.

    Args:
        chart: whose bytes.
        times: the axis of time.
    """
    from bokeh.models import (
        AdaptiveTicker,
        ColumnDataSource,
        CustomJS,
        CustomJSTickFormatter,
        Range1d,
        Select,
        Stack,
    )

    kinds = _kinds(chart)
    sources = [ColumnDataSource(_columns(curve, chart.seconds, kinds)) for curve in chart.memory]
    fullest = max(chart.memory, key=lambda curve: curve.total[curve.peak]).stage
    shown = ColumnDataSource(dict(sources[fullest].data))
    plot = empty_figure(times, _HEIGHT, "memory", wheel=False)
    items: dict[str, list[Any]] = {}
    for n, (kind, colour) in enumerate(kinds.items()):
        below, upto = Stack(fields=list(kinds)[:n]), Stack(fields=list(kinds)[: n + 1])
        area = plot.varea_step(
            x="x", y1={"expr": below}, y2={"expr": upto}, source=shown, fill_color=colour,
            step_mode="after", name=kind,
        )  # fmt: skip
        items[kind] = [area]
    total = plot.step(x="x", y="total", source=shown, mode="after", line_width=1, name="total")
    limits = [[] if curve.limit is None else [curve.limit] for curve in chart.memory]
    limit = plot.hspan(y="y", source=ColumnDataSource({"y": limits[fullest]}), line_dash="dashed")
    tops = [_top(curve) for curve in chart.memory]
    plot.y_range = Range1d(start=0, end=tops[fullest])
    plot.yaxis.ticker = AdaptiveTicker(base=1024, mantissas=[2**n for n in range(10)])
    plot.yaxis.formatter = CustomJSTickFormatter(code=script("byte_ticks.js"))
    plot.yaxis.axis_label = "bytes on each device"
    _add_hover(plot, shown, list(kinds))
    legend = add_legend(plot, items)
    options: list[Any] = [(str(c.stage), _option(c)) for c in chart.memory]
    select = Select(
        title="stage",
        value=str(fullest),
        options=options,
        name="stage",
        width=420,
        stylesheets=[_SELECT],
    )
    choose = CustomJS(
        args={
            "plot": plot,
            "shown": shown,
            "limit": limit.data_source,
            "stages": [list(some) for some in zip(sources, limits, tops, strict=True)],
        },
        code=script("stage.js"),
    )
    select.js_on_change("value", choose)
    return Figure(plot, legend, (total.glyph, limit.glyph)), select


def _kinds(chart: Chart) -> dict[str, str]:
    """The kinds that some stage has bytes of, with their colours; the small ones as one."""
    here = {kind for curve in chart.memory for kind, size in curve.by_kind.items() if size.any()}
    kinds = {kind.value: MEMORY[kind] for kind in Kind if kind in here and MEMORY[kind] != SMALL}
    return kinds | ({_OTHER: SMALL} if any(MEMORY[kind] == SMALL for kind in here) else {})


def _columns(curve: MemoryCurve, seconds: float, kinds: dict[str, str]) -> dict[str, np.ndarray]:
    """A curve's steps; the last goes on to the end of the step."""
    zeros = np.zeros(len(curve.times))
    sizes = dict.fromkeys(kinds, zeros)
    for kind, size in curve.by_kind.items():
        name = _OTHER if MEMORY[kind] == SMALL else kind.value
        if name in sizes:
            sizes[name] = sizes[name] + size
    found = {"x": curve.times, "total": curve.total.astype(float), **sizes}
    found = {name: np.append(column, column[-1:]) for name, column in found.items()}
    found["x"][-1] = max(seconds, found["x"][-1])
    return found | {"width": np.diff(found["x"], append=found["x"][-1:])}


def _top(curve: MemoryCurve) -> float:
    """Where the axis of bytes ends: above the limit too, unless that is far away."""
    peak = float(curve.total[curve.peak])
    near = curve.limit is not None and curve.limit < 2 * peak
    return 1.06 * max(peak, curve.limit if near and curve.limit else 0.0, 1.0)


def _option(curve: MemoryCurve) -> str:
    peak = int(curve.total[curve.peak])
    limit = "" if curve.limit is None else f" of {readable_bytes(curve.limit)}"
    return f"stage {curve.stage}: at most {readable_bytes(peak)}{limit}"


def _add_hover(plot: Any, source: Any, kinds: list[str]) -> None:
    """Adds a tooltip that tells all kinds at a moment, from unseen blocks under the total."""
    from bokeh.models import CustomJSHover, HoverTool

    steps = plot.block(
        x="x", y=0, width="width", height="total", source=source, fill_alpha=0, line_color=None
    )
    written = CustomJSHover(args={"entries": []}, code=script("hover.js"))
    rows = [(kind, f"@{kind}{{bytes}}") for kind in kinds]
    plot.add_tools(
        HoverTool(
            renderers=[steps],
            mode="vline",
            tooltips=[("from", "@x{seconds}"), ("all", "@total{bytes}"), *rows],
            formatters=dict.fromkeys(["@x", "@total", *(f"@{kind}" for kind in kinds)], written),
            point_policy="follow_mouse",
        )
    )
