"""The instrumented run counts what the cost model counts and computes what the JAX path does."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain_jax.errors import MachineError
from ratrain_jax.kernels import Gemm, TilePlan, load_machine
from ratrain_jax.kernels.emulator import Arena, emulate_gemm
from ratrain_jax.kernels.gemm_cost import times, transfers
from ratrain_jax.kernels.gemm_plan import plan_for
from ratrain_jax.kernels.gemm_space import candidates
from ratrain_jax.kernels.numerics import product

MT3000 = load_machine("mt3000")
ACCELERATOR = MT3000.accelerator
assert ACCELERATOR is not None
# Four cores and small memories, so that small shapes need many blocks.
SMALL = dataclasses.replace(
    MT3000,
    accelerator=dataclasses.replace(ACCELERATOR, cores=4),
    memories=tuple(
        dataclasses.replace(memory, bytes=memory.bytes // 6) if memory.name != "DDR" else memory
        for memory in MT3000.memories
    ),
)
GEMMS = st.builds(
    Gemm,
    st.integers(1, 60),
    st.integers(1, 230),
    st.integers(1, 130),
    st.just("float16"),
    st.sampled_from(["nn", "nt", "tn"]),
    st.sampled_from(["fp32", "fp16", "promote"]),
    st.sampled_from(["float16", "float32"]),
    st.booleans(),
)


@st.composite
def planned(draw):
    """A product and a plan that need not be good, only fit."""
    gemm = draw(GEMMS)
    machine = draw(st.just(SMALL))
    flow = draw(st.sampled_from(["outer", "dot"])) if gemm.form == "nt" else "outer"
    m, n, ku = {"outer": (6, 3, 2), "dot": (3, 6, 1)}[flow]
    if gemm.accumulator == "fp32" and draw(st.booleans()):
        m, n, ku = 4, 6, 1
    k_a = draw(st.integers(1, 40))
    m_s = m * draw(st.integers(1, 2))
    m_a = m_s * draw(st.integers(1, 2))
    k_g = k_a * draw(st.integers(1, 2)) + draw(st.integers(0, 5))
    width = n * (1 if flow == "dot" else 64)
    depths = [draw(st.integers(1, 3)) for _ in range(4)]
    plan = TilePlan(
        m_a * draw(st.integers(1, 6)),
        k_g,
        m_a,
        width,
        k_a,
        m_s,
        m,
        n,
        ku,
        draw(st.sampled_from(["m", "n"])),
        flow,
        *depths,
    )
    return gemm, plan, machine


def _operands(gemm: Gemm, seed: int = 0):
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((gemm.rows, gemm.depth)).astype(np.float16)
    b = rng.standard_normal((gemm.depth, gemm.cols)).astype(np.float16)
    c = rng.standard_normal((gemm.rows, gemm.cols)).astype(gemm.out_dtype)
    return (a.T if gemm.form == "tn" else a), (b.T if gemm.form == "nt" else b), c


@settings(max_examples=40, deadline=None)
@given(planned())
def test_counted_bytes_and_cycles_are_the_models(case) -> None:
    gemm, plan, machine = case
    try:
        ran = emulate_gemm(*_operands(gemm)[:2], plan, gemm, machine, _operands(gemm)[2])
    except MachineError as error:
        assert "bytes too many" in str(error)
        return
    model = {kind: int(count) for kind, count in transfers(gemm, plan, machine).items() if count}
    assert ran.transfers == model
    took = times(gemm, plan, machine)
    clock = machine.accelerator.clock
    assert ran.cycles == pytest.approx(took.compute * clock, abs=0.5)
    assert ran.start_cycles == pytest.approx(took.starts * clock, abs=0.5)


@settings(max_examples=20, deadline=None)
@given(GEMMS, st.sampled_from(["time", "traffic"]))
def test_chosen_plans_run_and_count_alike(gemm: Gemm, objective: str) -> None:
    plan = plan_for(gemm, SMALL, objective)
    a, b, c = _operands(gemm)
    ran = emulate_gemm(a, b, plan, gemm, SMALL, c)
    model = {kind: int(count) for kind, count in transfers(gemm, plan, SMALL).items() if count}
    assert ran.transfers == model


@pytest.mark.parametrize("accumulator", ["fp32", "fp16", "promote"])
@pytest.mark.parametrize(
    "form, flow", [("nn", "outer"), ("tn", "outer"), ("nt", "outer"), ("nt", "dot")]
)
def test_values_are_those_of_the_jax_path(accumulator: str, form: str, flow: str) -> None:
    gemm = Gemm(31, 70, 150, "float16", form, accumulator)
    plan = TilePlan(24, 140, 6, 192, 61, 6, 6, 3, 2, "m", flow, 2)
    if flow == "dot":
        plan = TilePlan(24, 140, 6, 18, 70, 6, 6, 3, 1, "n", flow, 2)
    a, b, _ = _operands(gemm)
    ran = emulate_gemm(a, b, plan, gemm, SMALL)
    left, right = (a.T if form == "tn" else a), (b.T if form == "nt" else b)
    compute = jax.jit(functools.partial(product, gemm=gemm, plan=plan, mode="exact", lanes=64))
    value = compute(left[None], right[None])[0]
    np.testing.assert_array_equal(ran.value.view("u2"), np.asarray(value).view("u2"))


def test_both_splits_move_what_they_should() -> None:
    """Splitting M broadcasts B; splitting N broadcasts A."""
    gemm = Gemm(48, 768, 64, accumulator="fp16")
    plan = TilePlan(48, 64, 12, 192, 64, 12, 6, 3, 2, "m")
    a, b, _ = _operands(gemm)
    by_rows = emulate_gemm(a, b, plan, gemm, SMALL).transfers
    by_cols = emulate_gemm(
        a, b, dataclasses.replace(plan, split="n", m_a=24), gemm, SMALL
    ).transfers
    assert by_rows["DDR", "AM", "broadcast"] == by_cols["DDR", "AM", "point"] == b.nbytes
    assert by_rows["GSM", "SM", "point"] == 4 * a.nbytes
    assert by_cols["GSM", "SM", "broadcast"] == a.nbytes


def test_arenas_refuse_more_than_they_have() -> None:
    arena = Arena("SM", 100)
    arena.take((10, 4), "float16")
    with pytest.raises(MachineError, match="SM has 100 bytes, 140 too few"):
        arena.take((10, 4), "float32")


def test_only_float16_is_emulated() -> None:
    gemm = Gemm(8, 8, 8, "float32")
    with pytest.raises(MachineError, match="float16"):
        emulate_gemm(np.ones((8, 8)), np.ones((8, 8)), plan_for(gemm, SMALL), gemm, SMALL)


def test_the_space_holds_plans_of_many_blocks() -> None:
    space = candidates(Gemm(90, 300, 130, accumulator="promote"), SMALL, "outer")
    assert (space.m_g < 90).any() and (space.k_g < 130).any() and (space.k_a < space.k_g).any()
