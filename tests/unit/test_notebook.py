"""What notebooks and prompts show: HTML that parses, holds the facts and escapes names; short reprs."""

import base64
import dataclasses
import html.parser
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ratrain_jax as rt
from ratrain_jax.kernels import load_machine
from ratrain_jax.lowering.grid import grid
from ratrain_jax.lowering.markup import preformatted, table
from ratrain_jax.lowering.program import Free
from ratrain_jax.lowering.text import readable_bytes
from ratrain_jax.runtime.measured import MeasuredOp, MeasuredRun
from tests.programs import make_program

ODD = "<a> & 'b'"
"""A layer's name that would be a tag."""

VOID = {"img", "br"}


class Reader(html.parser.HTMLParser):
    """Fails on tags that do not match; keeps the text, the cells of tables, and the sources of images."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.rows, self.images = [], [], [], []

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "img":
            self.images.append(dict(attrs))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def read(shown):
    """What HTML holds, if it is balanced and needs nothing from elsewhere."""
    reader = Reader()
    reader.feed(shown)
    reader.close()
    assert reader.open == []
    assert not re.search(r"(src|href)=\"(?!data:)|<script|<style|<link", shown)
    return reader


@pytest.fixture(scope="module")
def step():
    @rt.train_step(stages=2, data_parallel=2, microbatches=4, boundaries=(ODD,))
    def step(state, x):
        def loss_fn(params):
            hidden = jnp.tanh(x @ params["first"])
            return ((hidden @ params[ODD]) ** 2).mean()

        loss, grads = rt.value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    return step


@pytest.fixture(scope="module")
def arguments():
    shape = jax.ShapeDtypeStruct((64, 64), "float32")
    return {"first": shape, ODD: shape}, shape


@pytest.fixture(scope="module")
def lowered(step, arguments):
    return step.lower(*arguments)


@pytest.fixture(scope="module")
def timeline(lowered):
    return rt.simulate(lowered, "a100")


@pytest.fixture(scope="module")
def plan(step, arguments):
    return rt.plan(step, *arguments, machine="a100", devices=4, global_batch=64)


def test_a_lowered_step_shows_its_layers_and_its_memory(lowered):
    shown = read(lowered._repr_html_())
    assert "2 layers in 2 stages × 2, 4 microbatches, ratrain, zero=1" in "".join(shown.text)
    layers = [row[:3] for row in shown.rows if len(row) == 6]
    assert layers == [["stage", "layer", "arrays"], ["0", "first", "1"], ["1", ODD, "1"]]
    head, *memory = (row for row in shown.rows if len(row) != 6)
    for number, stage in enumerate(lowered.memory_analysis().stages):
        assert memory[number][head.index("peak")] == readable_bytes(stage.peak)
        for kind, size in stage.by_kind.items():
            assert memory[number][head.index(kind)] == readable_bytes(size)


def test_a_lowered_step_says_what_is_not_on_shards():
    @rt.train_step(data_parallel=2)
    def step(state, x):
        loss, grads = rt.value_and_grad(lambda w: ((x @ w) ** 2).mean())(state)
        return state - grads, loss

    shape = jax.ShapeDtypeStruct
    lowered = step.lower(shape((3, 5), "float32"), shape((4, 3), "float32"))
    assert str(lowered.unsharded()) in "".join(read(lowered._repr_html_()).text)


def test_a_program_shows_its_settings_and_its_schedule(lowered):
    text = "".join(read(lowered.program._repr_html_()).text)
    assert "layerwise_state=True, update_prefetch=True" in text
    assert grid(lowered.program) in text


def test_a_long_program_is_cut():
    program = make_program(stages=8, microbatches=96)
    text = "".join(read(program._repr_html_()).text)
    lines = grid(program).splitlines()
    assert lines[59] in text
    assert f"{len(lines) - 60} more lines" in text
    assert "too long" in make_program(stages=8, microbatches=256)._repr_html_()


def test_a_timeline_shows_where_the_time_goes(timeline):
    shown = read(timeline._repr_html_())
    line = timeline.breakdown
    cells = {row[0]: row[1:] for row in shown.rows}
    for name in ("ideal", "bubble", "recovery", "tail", "step"):
        seconds = getattr(line, name)
        assert cells[name] == [f"{1e3 * seconds:.4g}", f"{seconds / line.step:.1%}"]
    assert cells["exposed communication"][0] == f"{1e3 * line.exposed:.4g}"
    assert f"paced by stage {line.stage} of 2, on a100" in "".join(shown.text)
    (image,) = shown.images
    assert image["alt"] == timeline.chart.title
    picture = base64.b64decode(image["src"].removeprefix("data:image/png;base64,"))
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(picture) > 10_000


def test_a_plan_shows_the_choice_its_stages_and_why_not_the_others(plan):
    odd = dataclasses.replace(plan.stages[0], first=ODD)
    shown = read(dataclasses.replace(plan, stages=(odd, *plan.stages[1:]))._repr_html_())
    text = "".join(shown.text)
    assert str(plan.configuration) in text
    assert f"predicted step {plan.step_seconds:.4g} s" in text
    stages = [row for row in shown.rows if len(row) == 8][1:]
    assert [row[0] for row in stages] == [str(n) for n in range(len(plan.stages))]
    assert stages[0][1] == ODD
    assert [row[5] for row in stages] == [readable_bytes(s.memory.total) for s in plan.stages]
    why = {row[0]: row[2] for row in shown.rows if len(row) == 3}
    assert len(plan.why_not) > 1
    assert all(why[entry.kind] == entry.term for entry in plan.why_not)
    assert all(word in text for word in plan.assumed)
    assert "Only simulated" not in text


def test_a_plan_that_does_not_run_says_so(plan):
    configuration = dataclasses.replace(plan.configuration, zero=3)
    shown = dataclasses.replace(plan, configuration=configuration)._repr_html_()
    assert "Only simulated" in "".join(read(shown).text)


def test_long_tables_and_texts_are_cut():
    shown = read(table(("n", "name"), ((str(n), ODD) for n in range(1000)), left=("name",)))
    assert len(shown.rows) == 201
    assert "800 more rows" in "".join(shown.text)
    text = "".join(read(preformatted("\n".join([ODD] * 100))).text)
    assert text.count(ODD) == 60
    assert "40 more lines" in text
    assert "more" not in preformatted(ODD)


def test_notebooks_keep_their_own_colours(lowered, timeline, plan):
    for shown in (lowered, lowered.program, timeline, plan):
        found = shown._repr_html_().partition("<img")[0]
        assert not re.search(r"color(?!:inherit)|background", found)


def test_reprs_are_short(step, lowered, timeline, plan):
    ops = tuple(MeasuredOp(e.op, e.start, e.end) for e in timeline.events)
    run = MeasuredRun(lowered.program, ops, 1.0)
    memory, cost = lowered.memory_analysis(), lowered.cost_analysis("a100")
    machine = load_machine("mt3000")
    for shown, says in (
        (step, "2 stages × 2, 4 microbatches"),
        (lowered, "2 layers in 2 stages × 2, 4 microbatches"),
        (lowered.program, f"{sum(not isinstance(op, Free) for op in lowered.program.ops())} ops"),
        (lowered.code, lowered.code.fingerprint),
        (lowered.trace, "3 inputs"),
        (lowered.signature, "2 leaves of the state, 1 others"),
        (timeline, "on a100"),
        (timeline.made, f"{len(timeline.events)} of a step"),
        (timeline.run, "tasks"),
        (timeline.compare(run), "1 s measured"),
        (timeline.chart, f"{len(timeline.chart.bars)} bars"),
        (timeline.chart.memory[1], "stage 1"),
        (run, f"{len(ops)} ops"),
        (plan, f"{plan.step_seconds:.4g} s on a100"),
        (memory, readable_bytes(max(memory.peaks))),
        (memory.stages[0].series, "stage 0"),
        (cost, "on a100"),
        (cost.layers[0], "first on stage 0"),
        (machine, "mt3000: 20 GB DDR"),
    ):
        assert re.fullmatch(r"<[^\n]*>", repr(shown)), repr(shown)
        assert says in repr(shown)
        # A test's function has a long path.
        assert len(repr(shown)) < 130 + len(lowered.trace.where)
    assert len(repr(memory.stages[0])) < 600
    assert "devices" not in repr(ops[0])


def test_a_census_has_a_short_repr(step):
    state = {"first": jnp.eye(64), ODD: jnp.eye(64)}
    compiled = step.lower(state, np.ones((64, 64), np.float32)).compile()
    _, census = compiled.census(state, np.ones((64, 64), np.float32))
    assert f"2 stages: at most {census.largest_difference:.2%}" in repr(census)
    assert len(repr(census)) < 80
    assert len(repr(census.stages)) < 200
    assert repr(compiled).endswith(f"{compiled.executables} executables>")
