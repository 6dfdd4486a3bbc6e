"""The page: its parts put together, and written."""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING, Any

from ratrain_jax import __version__
from ratrain_jax.views.comparison import compare
from ratrain_jax.views.report import contents
from ratrain_jax.views.report.figures import Figure, bars_figure, script, time_range
from ratrain_jax.views.report.memory import memory_figure

if TYPE_CHECKING:
    from ratrain_jax.planning.plan import Plan
    from ratrain_jax.runtime.measured import MeasuredRun
    from ratrain_jax.simulation.timeline import Timeline


def write_report(
    path: str | os.PathLike[str],
    timeline: Timeline,
    *,
    plan: Plan | None = None,
    measured: MeasuredRun | None = None,
) -> None:
    """Writes a report of a simulated step.

    Args:
        path: where to.
        timeline: the step.
        plan: the plan it is from, for its assumptions and what was not taken.
        measured: the step as it ran, to be compared.

    Raises:
        SimulationError: the measured step is of another program.
        OSError: the file cannot be written.
    """
    pathlib.Path(path).write_text(report_page(timeline, plan, measured), encoding="utf-8")


def report_page(timeline: Timeline, plan: Plan | None, measured: MeasuredRun | None) -> str:
    """The HTML of a report; the arguments are those of `write_report`."""
    import jinja2
    from bokeh.resources import Resources
    from markupsafe import Markup

    comparison = compare(timeline, measured) if measured is not None else None
    scripts, parts = _drawings(timeline, measured)
    resources = Resources(mode="inline", components=["bokeh", "bokeh-widgets"])
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ratrain_jax.views", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        timeline=timeline,
        chart=timeline.chart,
        machine=timeline.machine,
        plan=plan,
        comparison=comparison,
        contents=contents,
        version=__version__,
        style=Markup(script("report.css")),
        bokeh=Markup(resources.render_js()),
        scripts=Markup(scripts),
        parts={name: Markup(part) for name, part in parts.items()},
    )


def _drawings(timeline: Timeline, measured: MeasuredRun | None) -> tuple[str, dict[str, Any]]:
    """The script that draws, and for each drawing the element that it appears in."""
    from bokeh.document import Document
    from bokeh.embed import components
    from bokeh.events import DocumentReady
    from bokeh.models import CustomJS

    charts = [timeline.chart, *([measured.chart] if measured is not None else [])]
    times = time_range(charts)
    path = [event.op for event in timeline.critical_path]
    memory, stage = memory_figure(timeline.chart, times)
    drawn = {"bars": bars_figure(timeline.chart, path, times, "bars"), "memory": memory}
    if measured is not None:
        drawn["measured"] = bars_figure(measured.chart, (), times, "measured")
    document = Document()
    roots = {"stage": stage, **{name: figure.plot for name, figure in drawn.items()}}
    for root in roots.values():
        document.add_root(root)
    follow = CustomJS(args=_scheme(list(drawn.values())), code=script("scheme.js"))
    document.js_on_event(DocumentReady, follow)
    scripts, parts = components(roots)
    return scripts, parts


def _scheme(figures: list[Figure]) -> dict[str, Any]:
    """What follows the reader's colour scheme."""
    return {
        "axes": [axis for figure in figures for axis in figure.plot.axis],
        "grids": [grid for figure in figures for grid in figure.plot.grid],
        "legends": [figure.legend for figure in figures],
        "outlines": [glyph for figure in figures for glyph in figure.outlines],
    }
