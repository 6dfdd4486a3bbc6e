"""What a terminal shows of programs and timelines: cells and repeats, bars, tables, and their JSON."""

import dataclasses
import functools
import io
import itertools
import json
import re

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ratrain_jax as rt
from ratrain_jax.lowering.program import (
    Backward,
    Forward,
    GradSync,
    PrefetchView,
    Recover,
    Settings,
    UpdateShard,
)
from ratrain_jax.views.terminal import (
    Bar,
    MemoryBars,
    cells,
    inspection_view,
    layers_view,
    render,
    schedule_view,
    settings_line,
)
from ratrain_jax.views.terminal_inspection import LayerRow, StageRow, inspection
from ratrain_jax.views.terminal_schedule import Cell, Letter, fold, row_lines, schedule_cells
from ratrain_jax.views.terminal_timeline import summary, timeline_view


@functools.cache
def lowered(stages=2, microbatches=4, **settings):
    layers = 2 * stages

    @rt.train_step(stages=stages, microbatches=microbatches, **settings)
    def step(state, x):
        def loss_fn(params):
            hidden = x
            for n in range(layers):
                hidden = jnp.tanh(rt.layer(hidden, f"l{n}") @ params[f"l{n}"])
            return (hidden**2).mean()

        loss, grads = rt.value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    state = {f"l{n}": jax.ShapeDtypeStruct((8, 8), "float32") for n in range(layers)}
    rows = microbatches * settings.get("data_parallel", 1)
    return step.lower(state, jax.ShapeDtypeStruct((rows, 8), "float32"))


@functools.cache
def timeline(**settings):
    return rt.simulate(lowered(**settings), "a100")


def plain(parts, encoding="utf-8"):
    return render(parts, io.TextIOWrapper(io.BytesIO(), encoding=encoding))


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


# The schedule.

CELLS = st.builds(
    lambda form, numbers: Cell(form, numbers[: form.count("{")], Forward),
    st.sampled_from(["F{}", "B{}", "B{}:{}", "F{}{}", "M"]),
    st.tuples(st.integers(0, 4), st.integers(0, 4)),
)


def written_out(runs):
    """The cells of runs, each time's numbers going on by what the first and last time tell."""
    for run in runs:
        for time in range(run.times):
            for first, last in zip(run.cells, run.last, strict=True):
                steps = [
                    (b - a) // max(run.times - 1, 1)
                    for a, b in zip(first.numbers, last.numbers, strict=True)
                ]
                numbers = tuple(
                    a + time * step for a, step in zip(first.numbers, steps, strict=True)
                )
                yield Cell(first.form, numbers, first.kind)


@given(st.lists(CELLS, max_size=40))
def test_folded_cells_written_out_are_the_cells(row):
    assert list(written_out(fold(row))) == row


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "ratrain"])
@pytest.mark.parametrize("recovery", ["none", "forward"])
@pytest.mark.parametrize("zero", [1, 2])
def test_rows_hold_every_op_of_a_program(schedule, recovery, zero):
    program = lowered(schedule=schedule, recovery=recovery, zero=zero, data_parallel=2).program
    shown = (Forward, Recover, Backward, GradSync, UpdateShard, PrefetchView)
    for ops, row in zip(program.order, schedule_cells(program), strict=True):
        assert [c.kind for c in row if c.kind in shown] == [
            type(op) for op in ops if isinstance(op, shown)
        ]
        assert list(written_out(fold(row))) == list(row)
        assert all(str(cell).startswith("+") == cell.state for cell in row)


def test_a_steady_state_is_one_repeat_however_many_microbatches():
    program = lowered(stages=4, microbatches=64, schedule="1f1b").program
    rows = [" ".join(map(str, fold(row))) for row in schedule_cells(program)]
    for stage, row in enumerate(rows):
        assert re.search(r"\((F|B)\d+ (F|B)\d+\)x\d+", row)
        assert len(row) < 80
        if stage < 3:
            assert f"F0..F{3 - stage}" in row or stage == 2
    assert "(B0 F4)x60 B60..B63" in rows[0]


def test_a_stride_is_not_written_as_a_range():
    row = [Cell("F{}", (n,), Forward) for n in (0, 2, 4, 6)]
    assert ".." not in " ".join(map(str, fold(row)))
    both = [Cell("B{}:{}", (n, n), Backward) for n in range(4)]
    assert ".." not in " ".join(map(str, fold(both)))


def test_blocks_of_a_microbatch_are_one_range():
    row = [
        Cell(f"{name}{{}}{{}}", (microbatch, Letter(place)), Forward)
        for microbatch in range(4)
        for name, places in (("F", range(30)), ("B", range(29, -1, -1)))
        for place in places
    ]
    assert [str(run) for run in fold(row)] == ["(F0a..F0.29 B0.29..B0a)x4"]
    assert [str(run) for run in fold(row[:8])] == ["F0a..F0h"]


def test_blocks_and_single_layers_have_names_of_their_own():
    text = " ".join(str(c) for c in schedule_cells(lowered(data_parallel=2).program)[0])
    assert "B3:1" in text and "B2 " in text


@given(st.lists(CELLS, max_size=60), st.integers(20, 60))
def test_lines_of_a_row_fit_and_lose_nothing(row, width):
    runs = [str(run) for run in fold(row)]
    lines = list(row_lines(runs, width))
    assert all(len(line) <= width for line in lines)
    assert " ".join(lines).split() == " ".join(runs).split()


# Layers and memory.


def test_layers_have_the_sizes_of_the_program():
    found = inspection(lowered(data_parallel=2).program).layers
    assert [layer.name for layer in found] == [f"l{n}" for n in range(4)]
    assert [layer.stage for layer in found] == [0, 0, 1, 1]
    for layer in found:
        assert layer.parameters == 64
        assert layer.state_bytes == 4 * (32 + 64)  # half of the parameters, and the view
        assert layer.residual_bytes > 0


def row(n, **change):
    named = {"name": f"block_{n}", "stage": n // 2, "block": 0, "parameters": 10, "flops": 20}
    named |= {"state_bytes": 30, "residual_bytes": 40, "recovered": False}
    return LayerRow(**(named | change))


def test_many_layers_that_are_alike_are_one_line():
    layers = [row(0, parameters=99), *(row(n) for n in range(1, 40)), row(40, recovered=True)]
    text = plain([layers_view(layers)])
    assert "block_* ×39" in text and "0–19" in text
    assert "block_0" in text and "block_40" in text
    assert text.count("block_") == 3
    assert plain([layers_view(layers, fold=False)]).count("block_") == 41


def test_few_layers_are_all_shown():
    assert plain([layers_view([row(n) for n in range(24)])]).count("block_") == 24


@given(
    st.lists(st.integers(0, 10**9), min_size=1, max_size=4),
    st.integers(1, 2 * 10**9),
    st.integers(10, 60),
)
def test_a_bar_is_as_long_as_its_bytes(sizes, limit, room):
    bar = Bar(
        "0", dict(zip(["parameters", "optimizer", "residuals", "loss"], sizes, strict=False)), limit
    )
    scale = max(bar.total, limit)
    drawn = list(cells(bar, scale, room))
    filled = [kind for kind in drawn if len(kind) > 1]
    assert len(drawn) == room
    assert abs(len(filled) - room * bar.total / scale) <= 0.5 + 1e-6
    assert drawn[: len(filled)] == filled
    for kind, size in zip(["parameters", "optimizer", "residuals"], sizes, strict=False):
        assert abs(filled.count(kind) - room * size / scale) <= 1 + 1e-6


def test_bars_tell_kinds_by_letters_and_what_is_over_the_limit():
    bars = [Bar("0", {"parameters": 50, "optimizer": 30}, 160), Bar("1", {"view": 170}, 160)]
    first, second, legend, *_ = plain([MemoryBars(tuple(bars))]).splitlines()
    assert re.fullmatch(r"stage 0 P+O+\.+ +80 B of 160 B", first)
    assert re.fullmatch(r"stage 1 V+ +170 B of 160 B OVER", second)
    assert "P parameters" in plain([MemoryBars(tuple(bars))])
    assert "R residuals" not in legend


def test_many_bars_that_look_the_same_are_one_line():
    bars = tuple(Bar(str(n), {"view": 500 + n}, 10_000_000) for n in range(48))
    lines = plain([MemoryBars(bars)]).splitlines()
    assert lines[0].startswith("stage 0–47") and "up to 547 B" in lines[0]
    assert (
        sum(line.startswith("stage") for line in plain([MemoryBars(bars, fold=False)]).splitlines())
        == 48
    )


@pytest.mark.parametrize(
    ("settings", "said", "unsaid"),
    [
        ({}, "F forward  B backward", "R recovery"),
        ({"recovery": "forward"}, "R recovery", "layer 7 of microbatch 3"),
        ({"zero": 2, "data_parallel": 2}, "+GS7/3 layer 7 of microbatch 3", "its second block"),
    ],
)
def test_the_legend_names_the_cells_that_are_there(settings, said, unsaid):
    text = plain(inspection_view(inspection(lowered(**settings).program)))
    assert said in text
    assert unsaid not in text
    assert "+GR global reduction" in text and "M metrics" in text


def test_the_legend_names_every_kind_of_cell():
    forms = ["P", "R0b", "+V1", "+BO1", "B3:7", "(F0 B0)x9"]
    text = plain([schedule_view([StageRow(0, tuple(forms), {}, 0, None, None)])])
    for said in ("prologue", "second block", "validate", "borrow", "its layer 7", "nine times"):
        assert said in text


def test_without_colours_kinds_are_told_by_letters(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    text = render(inspection_view(inspection(lowered().program)), Terminal())
    assert "█" not in text
    assert "P parameters" in text


def test_a_summary_is_plain_text_whatever_the_environment_says(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in lowered().summary()


# All of it.


@pytest.mark.parametrize("settings", [{}, {"stages": 8, "microbatches": 32, "recovery": "forward"}])
def test_a_pipe_gets_plain_text_of_80_columns(settings):
    simulated = timeline(**settings)
    shown = inspection(simulated.program, simulated)
    text = plain([*inspection_view(shown), *timeline_view(summary(simulated))])
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    for stage in range(len(shown.stages)):
        assert re.search(rf"^stage {stage}  .*F0", text, re.MULTILINE)


def test_other_encodings_get_ascii_in_the_same_columns():
    simulated = timeline()
    parts = [
        *inspection_view(inspection(simulated.program, simulated)),
        *timeline_view(summary(simulated)),
    ]
    text = plain(parts, "ascii")
    assert text.isascii()
    assert list(map(len, text.splitlines())) == list(map(len, plain(parts).splitlines()))


def test_a_terminal_gets_colours(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = render(inspection_view(inspection(lowered().program)), Terminal())
    assert "\x1b[" in text and "█" in text
    bare = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert max(map(len, bare.splitlines())) <= 100


def test_the_json_of_an_inspection_is_what_is_shown():
    simulated = timeline(data_parallel=2)
    table = json.loads(inspection(simulated.program, simulated).to_json())
    assert (table["format"], table["version"]) == ("ratrain-inspection", 1)
    assert table["settings"]["stages"] == 2
    assert [stage["peak"] for stage in table["stages"]] == list(
        lowered(data_parallel=2).memory_analysis().peaks
    )
    assert all(sum(s["memory"].values()) == s["peak"] for s in table["stages"])
    assert {stage["limit"] for stage in table["stages"]} == {simulated.machine.usable_bytes}
    assert table["step"]["step"] == simulated.step_seconds
    assert table["step"]["text"] == str(simulated.breakdown)


def test_without_a_machine_there_is_no_line_and_no_limit():
    found = inspection(lowered().program)
    assert found.step is None
    assert {stage.limit for stage in found.stages} == {None}
    assert "no limit is given" in plain(inspection_view(found))


def test_limits_of_the_program_come_before_the_machines():
    limited = lowered(memory_limit=10**6)
    found = inspection(limited.program, rt.simulate(limited, "a100"))
    assert {stage.limit for stage in found.stages} == {10**6}


def test_the_summary_of_a_timeline_adds_up():
    simulated = timeline(stages=8, microbatches=32, recovery="forward")
    table = json.loads(summary(simulated).to_json())
    assert (table["format"], table["version"]) == ("ratrain-timeline", 1)
    assert sum(table["critical_path"].values()) == pytest.approx(simulated.step_seconds, rel=1e-6)
    assert table["recovery_on_path"] + table["recovery_off_path"] == pytest.approx(
        sum(simulated.recovery)
    )
    for stage, (exposed, hidden) in zip(table["stages"], simulated.communication, strict=True):
        assert (stage["exposed"], stage["hidden"]) == (exposed, hidden)
    assert [stage["tail"] for stage in table["stages"]] == list(simulated.tails)
    busy = {(u.stage, u.port): u.busy for u in simulated.ports}
    assert {(s["stage"], p): b for s in table["stages"] for p, b in s["busy"].items()} == busy


def test_few_stages_are_all_shown_and_many_by_their_extremes():
    few = plain(timeline_view(summary(timeline(stages=8, microbatches=32, recovery="forward"))))
    assert [line.split()[0] for line in few.splitlines() if re.match(r" +\d ", line)] == list(
        "01234567"
    )
    shown = summary(timeline())
    many = plain(timeline_view(_repeated(shown, 13)))
    assert [w for w in ("min", "mean", "max") if re.search(rf"^ +{w} ", many, re.MULTILINE)] == [
        "min",
        "mean",
        "max",
    ]


def _repeated(shown, times):
    stages = tuple(itertools.islice(itertools.cycle(shown.stages), times))
    return dataclasses.replace(shown, stages=stages)


def test_settings_are_named():
    line = settings_line(Settings(4, 2, 8, schedule="1f1b", zero=2, recovery="none"))
    assert line == "4 stages × 2, 8 microbatches, 1f1b, zero=2, recovery=none"
    assert settings_line(Settings(1, 1, 1)).startswith("1 stage × 1, 1 microbatch, ")
