"""The HTML report as a file: what stands in it, that it loads nothing, and how large it is. tests/browser opens it."""

import dataclasses
import functools
import html.parser
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import SimulationError
from ratrain_jax.kernels import builtin_machines, load_machine
from ratrain_jax.lowering.program import Lane, Settings
from ratrain_jax.models import ModelConfig, language_model
from ratrain_jax.runtime.measured import MeasuredOp, MeasuredRun
from ratrain_jax.views.report import contents
from ratrain_jax.views.report.bars import Entries, columns, exposed_spans
from ratrain_jax.views.report.memory import memory_figure
from tests.programs import make_program

MODEL = ModelConfig("small", layers=4, hidden=256, ffn=512, heads=4, kv_heads=4, vocab=512)


class Reader(html.parser.HTMLParser):
    """Collects the ids, the tables by section, and what the page would load."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.loads, self.tables, self.open, self.section = set(), [], {}, [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids.add(given.get("id"))
        self.loads += [given[k] for k in ("src", "href", "data", "action", "poster") if k in given]
        self.section = given["id"] if tag == "section" else self.section
        if tag == "tr":
            self.tables.setdefault(self.section, []).append([])
        self.open.append(tag)

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[self.section][-1].append(data)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass


def seconds_of(op):
    """Durations with which every kind of op matters."""
    return {"Forward": 1.07, "Recover": 1.07, "Backward": 2.13}.get(type(op).__name__, 0.31)


def measured_of(timeline, factor=1.5):
    ops = tuple(MeasuredOp(e.op, factor * e.start, factor * e.end) for e in timeline.events)
    return MeasuredRun(timeline.program, ops, max(op.end for op in ops))


def written(timeline, tmp_path, **given):
    timeline.report(tmp_path / "report.html", **given)
    return (tmp_path / "report.html").read_text("utf-8")


@functools.cache
def plan():
    lm = language_model(MODEL, sequence=64, dtype="float16")
    return rt.plan(
        lm.step, lm.abstract_state(), lm.abstract_batch(8), machine="mt3000", devices=4, global_batch=8
    )  # fmt: skip


@pytest.fixture(scope="module")
def timeline():
    recovered = {"recovery": "forward", "recovered": (9, 9)}
    return rt.simulate(make_program(clip=True, zero=2, **recovered), "mt3000", seconds=seconds_of)


def test_every_bar_is_in_the_columns_as_it_is(timeline):
    chart = timeline.chart
    entries = Entries(chart.program)
    made = columns(chart.bars, entries)
    for kind in made:
        bars = [bar for bar in chart.bars if bar.kind == kind.kind]
        assert kind.data["x"].tolist() == [bar.start for bar in bars]
        assert kind.data["width"].tolist() == [bar.end - bar.start for bar in bars]
        assert kind.data["exposed"] == pytest.approx([bar.exposed for bar in bars])
        for bar, entry, microbatch in zip(
            bars, kind.data["op"], kind.data["microbatch"], strict=True
        ):
            name, layers, moved, short, layer = entries.rows[entry]
            assert name.replace(" ", "").lower().startswith(type(bar.op).__name__.lower())
            assert microbatch == (
                -1 if getattr(bar.op, "microbatch", None) is None else bar.op.microbatch
            )
            number = microbatch if microbatch >= 0 else layer
            assert bar.label == short + (str(number) if number >= 0 else "")
            assert moved.endswith(("written", "sent"))
            covered = getattr(bar.op, "layers", None)
            assert covered is None or chart.program.layers[covered[0]].name in layers
    assert sum(len(kind.data["x"]) for kind in made) == len(chart.bars)
    assert len(entries.rows) < len(chart.bars)  # microbatches share theirs


@pytest.mark.parametrize("slow", [1, 20])  # so slow that stages compute and wait in turn meanwhile
def test_what_is_exposed_of_bars_is_where_the_stage_computes_nothing(timeline, slow):
    def slowed(op):
        return seconds_of(op) * (slow if op.lane == Lane.LINK else 1)

    chart = rt.simulate(timeline.program, "mt3000", seconds=slowed).chart
    spans = exposed_spans(chart)
    for kind in {bar.kind for bar in chart.bars if bar.lane == Lane.LINK}:
        told = sum(bar.exposed for bar in chart.bars if bar.kind == kind)
        assert told > 0
        assert spans[kind]["width"].sum() == pytest.approx(told)
        for x, width, y in zip(*(spans[kind][name] for name in ("x", "width", "y")), strict=True):
            busy = [b for b in chart.bars if b.lane == Lane.COMPUTE and b.stage == int(y)]
            assert all(b.end <= x + 1e-9 or b.start >= x + width - 1e-9 for b in busy)


def test_the_bytes_drawn_are_those_of_the_curves(timeline):
    from bokeh.models import Range1d

    figure, select = memory_figure(timeline.chart, Range1d(start=0.0, end=1.0))
    stages = select.js_property_callbacks["change:value"][0].args["stages"]
    for (source, limit, top), curve in zip(stages, timeline.chart.memory, strict=True):
        data = source.data
        kinds = [data[name][:-1] for name in data if name not in ("x", "width", "total")]
        assert np.array_equal(np.sum(kinds, axis=0), curve.total)
        assert np.array_equal(data["total"][:-1], curve.total)
        assert data["x"][-1] >= timeline.chart.seconds
        assert limit == [timeline.machine.usable_bytes]
        assert top >= curve.total.max()
    assert select.value == str(max(timeline.chart.memory, key=lambda c: c.total.max()).stage)
    assert figure.plot.name == "memory"


def test_each_part_is_there_with_its_rows(timeline, tmp_path):
    text = written(timeline, tmp_path)
    assert "its peaks may differ" in text
    page = Reader(text)
    assert page.ids >= {
        "summary",
        "timeline",
        "memory",
        "critical-path",
        "stages",
        "layers",
        "assumptions",
    }
    assert not page.ids & {"plan", "measured", "why-not"}
    _, *layers = page.tables["layers"]
    assert [row[0] for row in layers] == [layer.name for layer in timeline.program.layers]
    assert {row[-1] for row in layers} == {"recovered"}
    path = page.tables["critical-path"]
    assert (
        len(path) == len(timeline.critical_path) + 1 + len(contents.path_kinds(timeline).rows) + 1
    )
    assert len(page.tables["memory"]) == len(page.tables["stages"]) == 1 + 2
    keys = [row[0] for row in page.tables["assumptions"]]
    assert set(timeline.machine.assumed) <= set(keys)
    assert {field.name for field in dataclasses.fields(Settings)} <= set(keys)


def test_the_critical_path_by_kind_adds_up(timeline):
    *kinds, whole = contents.path_kinds(timeline).rows
    path = timeline.critical_path
    assert sum(int(row[1]) for row in kinds) == int(whole[1]) == len(path)
    assert whole[2] == contents.duration(sum(e.end - e.start for e in path))
    terms = contents.terms(timeline)
    assert sum(term.share for term in terms) == pytest.approx(100)


def test_a_long_critical_path_is_listed_up_to_a_bound(timeline, tmp_path, monkeypatch):
    monkeypatch.setattr(contents, "MOST_ROWS", 3)
    text = written(timeline, tmp_path)
    assert "The first 3 are listed." in text
    kinds = len(contents.path_kinds(timeline).rows) + 1
    assert len(Reader(text).tables["critical-path"]) == kinds + 1 + 3


def test_nothing_is_loaded_from_elsewhere(timeline, tmp_path):
    text = written(timeline, tmp_path, measured=measured_of(timeline))
    assert all(re.match(r"#|data:", address) for address in Reader(text).loads)
    assert not re.search(r"@import|url\(\s*['\"]?https?:", text.split("</style>")[0])
    assert len(Reader('<img src="https://a/b.png">').loads) == 1


def test_names_cannot_become_markup(timeline, tmp_path):
    hostile = "</script><script>alert('<b>&')</script>"
    layers = tuple(dataclasses.replace(layer, name=hostile) for layer in timeline.program.layers)
    program = dataclasses.replace(timeline.program, layers=layers)
    text = written(rt.simulate(program, "mt3000", seconds=seconds_of), tmp_path)
    assert hostile not in text
    assert Reader(text).tables["layers"][1][0].startswith("</script>")


def test_predicted_stands_beside_measured(timeline, tmp_path):
    rows = Reader(written(timeline, tmp_path, measured=measured_of(timeline))).tables["measured"]
    comparison = timeline.compare(measured_of(timeline))
    for shown, row in zip(rows[1:], comparison.rows, strict=False):
        times = [contents.duration(row.predicted), contents.duration(row.measured)]
        assert shown[:4] == [row.kind, str(row.count), *times]
        assert shown[-1] == "+50.0%"
    step = next(row for row in rows if row[0] == "step")
    assert step[1:3] == [contents.duration(comparison.predicted_step), contents.duration(comparison.measured_step)]  # fmt: skip


def test_a_measured_step_of_another_program_is_refused(timeline, tmp_path):
    other = rt.simulate(make_program(), "mt3000", seconds=seconds_of)
    with pytest.raises(SimulationError, match="another program"):
        timeline.report(tmp_path / "report.html", measured=measured_of(other))
    assert not (tmp_path / "report.html").exists()


def test_a_plan_tells_why_not(tmp_path):
    found = plan()
    text = written(rt.simulate(found.lowered, "mt3000"), tmp_path, plan=found)
    assert str(found.configuration) in text
    page = Reader(text)
    told = {row[0]: row for row in page.tables["plan"]}
    assert found.why_not
    for entry in found.why_not:
        _, beside, term, which = told[entry.kind]
        assert term == (entry.term or "–")
        assert "too much" in beside or "time" in beside or beside == "as fast"
        axis = which.split("=")[0]
        value = getattr(entry.configuration, axis)
        assert f"{axis}={value}" in which
        assert value != getattr(found.configuration, axis)
    stages = [told[str(n)] for n in range(len(found.stages))]
    assert [row[1] for row in stages] == [stage.first for stage in found.stages]


@pytest.mark.parametrize("name", builtin_machines())
def test_every_assumed_value_of_a_machine_is_told(name):
    machine = load_machine(name)
    rows = dict(contents.assumed_table(machine).rows)
    assert set(rows) == set(machine.assumed)
    assert all(value not in ("", "–") for value in rows.values()), rows


@pytest.mark.parametrize("settings", [{"schedule": "forward"}, {"stages": 1, "data_parallel": 1}])
def test_steps_without_some_lanes_have_reports_too(settings, tmp_path):
    timeline = rt.simulate(make_program(**settings), "generic", seconds=seconds_of)
    assert "layers" in Reader(written(timeline, tmp_path)).ids


def test_a_large_step_stays_small(tmp_path):
    names = [f"layer{n}" for n in range(16)]

    @rt.train_step(
        stages=16, data_parallel=2, microbatches=256, zero=2, recovery="forward", boundaries=names[1:]
    )  # fmt: skip
    def step(params, x):
        def loss_fn(params):
            hidden = x
            for name in names:
                hidden = jnp.tanh(rt.layer(hidden, name) @ params[name])
            return (hidden**2).mean()

        loss, grads = rt.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = {name: jax.ShapeDtypeStruct((16, 16), "float32") for name in names}
    lowered = step.lower(params, jax.ShapeDtypeStruct((512, 16), "float32"))
    timeline = rt.simulate(
        lowered, "mt3000", seconds=lambda op: seconds_of(op) * (1 + op.stage / 97)
    )
    text = written(timeline, tmp_path)
    assert len(timeline.chart.bars) > 30_000
    assert 1_000_000 < len(text.encode()) < 5_000_000


def test_bokeh_is_imported_only_when_a_report_is_written():
    code = "import sys, ratrain_jax.views.report; sys.exit('bokeh' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
