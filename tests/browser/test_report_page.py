"""The report in a browser: it opens without a network or a complaint, and can be hovered, zoomed and switched."""

import pytest

from ratrain_jax.lowering.program import Backward, Forward, GradSync, Lane, SendActivation
from ratrain_jax.lowering.text import readable_bytes
from ratrain_jax.views.report.bars import height_of, upper_edge


@pytest.fixture
def opened(page, report):
    return page.open(report)


def middle(chart, op_type, stage=0, **fields):
    """A bar of the chart, and its middle."""
    bar = next(
        bar
        for bar in chart.bars
        if isinstance(bar.op, op_type)
        and bar.stage == stage
        and not bar.next_step
        and all(getattr(bar.op, name) == value for name, value in fields.items())
    )
    return bar, ((bar.start + bar.end) / 2, upper_edge(bar) + height_of(bar) / 2)


def test_it_opens_without_a_complaint_and_asks_for_nothing_else(opened, report):
    assert opened.requests() == {f"file://{report}"}
    assert opened.complaints() == []
    opened.run("console.error('as a check of this check')")
    assert len(opened.complaints()) == 1


@pytest.mark.parametrize("op_type", [Forward, Backward, SendActivation, GradSync])
def test_hovering_a_bar_tells_its_op(opened, timeline, op_type):
    bar, (x, y) = middle(timeline.chart, op_type)
    opened.point(opened.place("bars", x, y))
    told = opened.tooltip()
    name = {SendActivation: "Send activation, stage 0 to 1", GradSync: "Grad sync"}
    assert name.get(op_type, op_type.__name__) in told
    width = bar.end - bar.start
    scale, unit = (1e3, "ms") if width >= 1e-3 else (1e6, "µs")
    assert f"takes: {width * scale:.7g} {unit}" in told
    if op_type is Forward:
        assert "first" in told
        assert f"microbatch: {bar.op.microbatch}" in told
    if op_type is SendActivation:
        value = timeline.program.values[bar.op.writes[0]]
        assert f"bytes: {readable_bytes(value.bytes)} sent" in told


def test_measured_bars_stand_under_the_predicted_ones_at_their_time(opened, timeline, measured):
    assert opened.run("return model('bars').x_range === model('measured').x_range")
    left = [opened.place(name, 0.0, 0.5)[0] for name in ("bars", "memory", "measured")]
    assert max(left) - min(left) < 1
    bar, (x, y) = middle(measured.chart, Forward, microbatch=2)
    opened.point(opened.place("measured", x, y))
    assert "microbatch: 2" in opened.tooltip()
    predicted, _ = middle(timeline.chart, Forward, microbatch=2)
    assert bar.start == pytest.approx(1.1 * predicted.start)


def test_dragging_chooses_a_span_in_all_drawings_and_reset_gives_all_back(opened, timeline):
    whole = opened.times()
    start, end = 0.25 * timeline.chart.seconds, 0.5 * timeline.chart.seconds
    opened.drag(opened.place("bars", start, 0.3), opened.place("bars", end, 0.6))
    pixel = (whole[1] - whole[0]) / 1000
    assert opened.times() == pytest.approx([start, end], abs=2 * pixel)
    assert opened.run("return model('memory').x_range.start") == opened.times()[0]
    opened.run("view('bars').reset()")
    assert opened.times() == pytest.approx(whole)


def test_the_wheel_zooms_around_the_mouse(opened, timeline):
    at = 0.5 * timeline.chart.seconds
    before, place = opened.times(), opened.place("bars", at, 0.3)
    opened.wheel(place, -400)
    opened.until("return model('bars').x_range.start > arguments[0]", before[0])
    start, end = opened.times()
    assert end - start < 0.8 * (before[1] - before[0])
    assert start < at < end
    assert opened.run("return model('bars').y_range.start") == 2  # time alone is zoomed


def test_bars_are_labelled_once_they_are_wide_enough(opened, timeline):
    labels = "return view('bars').model.renderers.find((r) => r.name == 'labels')"
    source = f"{labels}.data_source.data.text"
    bars = [b for b in timeline.chart.bars if b.lane == Lane.COMPUTE]
    bar = next(b for b in bars if b.label == "F3")
    opened.run(
        "model('bars').x_range.setv({start: arguments[0], end: arguments[1]})", bar.start, bar.end
    )
    opened.until(f"{source}.length > 0 && {source.removeprefix('return ')}.length < 10")
    assert "F3" in opened.run(source)
    assert "B0" not in opened.run(source)


def test_the_legend_switches_the_critical_path_on(opened, timeline):
    outline = "model('bars').renderers.find((r) => r.name == 'critical path')"
    assert opened.run(f"return {outline}.visible") is False
    path = {event.op for event in timeline.critical_path}
    shown = sum(bar.op in path and not bar.next_step for bar in timeline.chart.bars)
    assert opened.run(f"return {outline}.data_source.data.x.length") == shown
    place = opened.run(
        "const legend = model('bars').above.find((p) => p.type == 'Legend');"
        "const el = view('bars').views.find_one(legend).el;"
        "el.scrollIntoView({block: 'center'});"
        "const all = [...el.shadowRoot.querySelectorAll('*')];"
        "const item = all.find((e) => e.textContent == 'critical path');"
        "const box = item.getBoundingClientRect();"
        "return [box.x + box.width / 2, box.y + box.height / 2]"
    )
    opened.drag(place, place)
    opened.until(f"return {outline}.visible")


def test_choosing_a_stage_shows_its_bytes(opened, timeline):
    for stage in ("0", "1"):
        opened.run("model('stage').value = arguments[0]", stage)
        curve = timeline.chart.memory[int(stage)]
        total = opened.run(
            "const r = model('memory').renderers.find((r) => r.name == 'total');"
            "return [...r.data_source.data.total]"
        )
        assert total[:-1] == curve.total.tolist()
        assert opened.run("return model('memory').y_range.end") > max(total)


def test_hovering_the_memory_tells_bytes_by_kind(opened, timeline):
    opened.run("model('stage').value = '0'")
    curve = timeline.chart.memory[0]
    n = len(curve.times) // 2
    x = (curve.times[n] + curve.times[n + 1]) / 2
    opened.point(opened.place("memory", float(x), float(curve.total[n]) / 3))
    told = opened.tooltip()
    assert f"all: {curve.total[n] / 2**20:.1f} MiB" in told
    for kind, size in curve.by_kind.items():
        if size[n] > 2**20:
            assert f"{kind}: {size[n] / 2**20:.1f} MiB" in told


def test_text_of_drawings_follows_the_colour_scheme(opened):
    ink = "return model('bars').xaxis?.major_label_text_color ?? model('bars').below[0].major_label_text_color"
    light = opened.run(ink)
    scheme = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    opened.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
    try:
        opened.until(ink + " != arguments[0]", light)
        ground = "return getComputedStyle(document.body).backgroundColor"
        assert opened.run(ground) == "rgb(23, 25, 28)"
    finally:
        opened.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    opened.until(ink + " == arguments[0]", light)


def test_without_javascript_words_and_tables_are_there(page, report, timeline):
    page.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        page.driver.get(f"file://{report}")
        text = page.driver.find_element("tag name", "body").text
    finally:
        page.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert str(timeline.breakdown) in text
    assert "Without JavaScript" in text
    assert all(layer.name in text for layer in timeline.program.layers)


def test_only_what_is_in_view_is_drawn_and_all_again_after_a_reset(opened, timeline):
    bars = [b for b in timeline.chart.bars if b.kind == "forward" and not b.next_step]
    start, end = bars[1].start, bars[-1].start
    found = "view('bars').views.find_one(model('bars').renderers[0])"
    drawn = f"return [...{found}.all_indices].length"
    assert opened.run(drawn) == len(bars)
    opened.run("model('bars').x_range.setv({start: arguments[0], end: arguments[1]})", start, end)
    opened.until(drawn + " == arguments[0]", sum(b.start < end and b.end > start for b in bars))
    opened.run("view('bars').reset()")
    opened.until(drawn + " == arguments[0]", len(bars))
