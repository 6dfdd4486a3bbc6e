"""Live bytes op by op, and the peak of each stage."""

import dataclasses

import pytest

from ratrain_jax.errors import OptionError
from ratrain_jax.lowering.liveness import memory_series
from ratrain_jax.lowering.memory import memory_analysis
from ratrain_jax.lowering.program import (
    ArrayType,
    Backward,
    Forward,
    Free,
    GradSync,
    Kind,
    Op,
    Program,
    SendActivation,
    Settings,
    UpdateShard,
    Value,
    ZeroGradient,
)
from ratrain_jax.lowering.resident import residents
from ratrain_jax.lowering.text import readable_bytes
from tests.programs import make_program


def value(number: int, kind: Kind, count: int, stage: int = 0, aliased: int = 0) -> Value:
    """A value of `count` bytes."""
    array = ArrayType((count,), "uint8")
    return Value(number, kind, "v", (array,), stage, layer=0, aliased=aliased)


def program(values: list[Value], *orders: tuple[Op, ...], inputs=(0,)) -> Program:
    settings = Settings(len(orders), 1, 1)
    return Program(settings, (), (), (), (), tuple(values), orders, inputs, ())


def test_a_value_lives_from_its_op_to_its_free():
    values = [value(0, Kind.VIEW, 10), value(1, Kind.RESIDUALS, 7)]
    ops = (Forward(0, (0,), (1,)), Free(0, (0,)), Free(0, (1,)))
    (series,) = memory_series(program(values, ops))
    assert series.start == {Kind.VIEW: 10}
    assert series.at == {Kind.VIEW: (10, 10, 0), Kind.RESIDUALS: (7, 7, 7)}
    assert series.after == {Kind.VIEW: (10, 0, 0), Kind.RESIDUALS: (7, 7, 0)}
    assert series.total_at == (17, 17, 7)
    assert series.total_after == (17, 7, 0)


@pytest.mark.parametrize(
    "written, at, after", [(10, 10, 10), (4, 10, 4), (13, 13, 13)], ids=["equal", "less", "more"]
)
def test_donated_bytes_are_reused_and_count_until_the_op_ends(written, at, after):
    values = [value(0, Kind.ACCUMULATOR, 10), value(1, Kind.ACCUMULATOR, written)]
    ops = (Backward(0, (0,), (1,), (0,)),)
    (series,) = memory_series(program(values, ops))
    assert (series.total_at, series.total_after) == ((at,), (after,))


def test_donated_bytes_of_another_kind_are_reused_too():
    values = [
        value(0, Kind.GRADIENT, 10),
        value(1, Kind.PARAMETERS, 5),
        value(2, Kind.PARAMETERS, 12),
        value(3, Kind.PARTIALS, 6),
    ]
    ops = (UpdateShard(0, (0, 1), (2, 3), (0, 1), layer=0),)
    (series,) = memory_series(program(values, ops, inputs=(0, 1)))
    assert series.total_at == (18,)  # 15 live, 18 written, 15 of them into donated buffers
    assert series.total_after == (18,)
    assert sum(sizes[0] for sizes in series.at.values()) == 18


def test_aliased_bytes_are_not_counted_twice():
    values = [value(0, Kind.PARAMETERS, 10), value(1, Kind.VIEW, 10, aliased=8)]
    (series,) = memory_series(program(values, (Forward(0, (0,), (1,)),)))
    assert series.total_after == (12,)


def test_an_op_between_stages_counts_on_each_only_what_lives_there():
    values = [value(0, Kind.BOUNDARY, 10), value(1, Kind.BOUNDARY, 10, stage=1)]
    send = SendActivation(0, (0,), (1,), target=1)
    here, there = memory_series(program(values, (send, Free(0, (0,))), (send,)))
    assert (here.total_at, here.total_after) == ((10, 10), (10, 0))
    assert (there.total_at, there.total_after) == ((10,), (10,))


def test_the_peak_its_op_and_its_kinds():
    values = [value(n, Kind.RESIDUALS, 2**n) for n in range(4)]
    ops = (Forward(0, (), (1,)), Forward(0, (), (3,)), Free(0, (3,)), Forward(0, (), (2,)))
    analysis = memory_analysis(program(values, ops))
    (stage,) = analysis.stages
    assert (stage.peak, stage.index, stage.op) == (11, 1, ops[1])
    assert analysis.peaks == (11,) and analysis.by_kind == ({Kind.RESIDUALS: 11},)


def test_a_stage_without_ops_holds_its_inputs():
    (stage,) = memory_analysis(program([value(0, Kind.VIEW, 3)], ())).stages
    assert (stage.peak, stage.index, stage.op) == (3, None, None)


def test_temporaries_are_reported_apart():
    values = [value(0, Kind.VIEW, 10), value(1, Kind.ACCUMULATOR, 4)]
    ops = (Forward(0, (0,), ()), ZeroGradient(0, (), (1,)), GradSync(0, (1,)))
    scratch = {ops[0]: 100, ops[1]: 97}
    (stage,) = memory_analysis(program(values, ops), scratch).stages
    assert (stage.peak, stage.temporaries, stage.peak_with_temporaries) == (14, 100, 111)
    assert memory_analysis(program(values, ops)).stages[0].temporaries is None


def test_the_table_fits_80_columns():
    made = make_program(8, microbatches=2, clip=True)
    scratch = dict.fromkeys(made.ops(), 1 << 33)
    table = str(memory_analysis(made, scratch))
    assert max(map(len, table.splitlines())) <= 80
    for word in ("stage 7", "parameters", "residuals", "peak", "scratch, apart", "8.0 GiB"):
        assert word in table
    assert table.count("peaks at op") == 8


def test_the_series_ends_with_the_outputs():
    made = make_program(2, clip=True)
    for series in memory_series(made):
        kept = (made.values[n] for n in made.outputs)
        assert series.total_after[-1] == sum(v.bytes for v in kept if v.stage == series.stage)
        assert min(min(sizes) for sizes in series.after.values()) >= 0


def test_recovery_needs_less_memory_for_residuals():
    def residuals(depth: int) -> int:
        made = make_program(1, microbatches=4, schedule="gpipe", recovered=(depth,))
        return max(memory_series(made)[0].at[Kind.RESIDUALS])

    assert residuals(3) < residuals(1) < residuals(0)


def test_values_are_counted_by_their_dtype():
    array = ArrayType((3,), "bfloat16")
    values = [dataclasses.replace(value(0, Kind.VIEW, 1), arrays=(array, array))]
    assert memory_series(program(values, ()))[0].start == {Kind.VIEW: 12}


@pytest.mark.parametrize("settings", [{}, {"zero": 2}, {"recovered": (2, 1)}, {"clip": True}])
def test_residents_add_up_to_the_bytes_at_every_op(settings):
    made = make_program(data_parallel=2, microbatches=3, **settings)
    for series in memory_series(made):
        for index in range(len(made.order[series.stage])):
            found: dict[Kind, int] = {}
            for resident in residents(made, series.stage, index):
                found[resident.kind] = (
                    found.get(resident.kind, 0) + resident.copies * resident.bytes
                )
            at = {kind: sizes[index] for kind, sizes in series.at.items() if sizes[index]}
            assert found == at


def test_an_explanation_names_what_is_resident_and_how_often():
    made = make_program(microbatches=4, schedule="gpipe")
    analysis = memory_analysis(made)
    text = analysis.explain(0)
    assert text.startswith(f"stage 0 holds {readable_bytes(analysis.peaks[0])} a device at op")
    for kind, size in analysis.by_kind[0].items():
        assert f"\n{kind} {readable_bytes(size)}\n" in text
    # With all forwards before all backwards, each layer's residuals are there for all microbatches.
    assert "    = 4 × " in text
    assert max(map(len, text.splitlines())) <= 80
    assert analysis.explain().startswith(f"stage {analysis.peaks.index(max(analysis.peaks))} ")
    with pytest.raises(OptionError, match="no stage 7; choose one of 0 to 1"):
        analysis.explain(7)
