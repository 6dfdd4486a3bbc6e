"""Tile plans: the search finds the best of its space, fits every buffer, and costs add up."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ratrain_jax.errors import MachineError
from ratrain_jax.kernels import (
    Attention,
    Gemm,
    TilePlan,
    check_plan,
    cost_attention,
    cost_gemm,
    gemm_plan,
    load_machine,
    plan_gemm,
)
from ratrain_jax.kernels.gemm_bound import SLACK, close_bound, coarse_bound, with_sums
from ratrain_jax.kernels.gemm_cost import Times, ddr_bytes, times, transfers
from ratrain_jax.kernels.gemm_plan import plan_for
from ratrain_jax.kernels.gemm_space import (
    candidates,
    fitting,
    flows,
    grid_of,
    plans,
    with_shorter_strips,
)
from ratrain_jax.kernels.machine import Machine
from ratrain_jax.kernels.microkernel import fill_cycles, micro_efficiency
from ratrain_jax.kernels.tiles import buffer_bytes

MT3000 = load_machine("mt3000")
FT = load_machine("ft-m7032")


def _one_core(machine: Machine) -> Machine:
    assert machine.accelerator is not None
    return dataclasses.replace(
        machine, accelerator=dataclasses.replace(machine.accelerator, cores=1)
    )


def _with_memory(name: str, machine: Machine = MT3000, **changes: float) -> Machine:
    memories = tuple(
        dataclasses.replace(memory, **changes) if memory.name == name else memory
        for memory in machine.memories
    )
    return dataclasses.replace(machine, memories=memories)


FT_ONE = _one_core(FT)
FP64 = Gemm(1, 1, 1, "float64")
# Few rows, columns or steps of K are as likely as many.
SIZES = st.one_of(st.integers(1, 12), st.integers(1, 3000))
GEMMS = st.builds(
    Gemm,
    SIZES,
    SIZES,
    SIZES,
    st.sampled_from(["float16", "float32"]),
    st.sampled_from(["nn", "nt", "tn"]),
    st.sampled_from(["fp32", "fp16", "promote"]),
)


@pytest.mark.parametrize("k, measured", [(64, 92.0), (512, 98.9), (1024, 99.5)])
def test_fp64_micro_kernel_is_within_3_points_of_the_measured_one(k: int, measured: float) -> None:
    assert FT.accelerator is not None
    ours = 100 * micro_efficiency(6, 3, k, FP64, FT.accelerator)
    assert abs(ours - measured) <= 3


def test_fill_follows_from_the_latencies() -> None:
    assert FT.accelerator is not None
    assert fill_cycles(6, 3, FP64, FT.accelerator) == 7 + 4 + 6 + 4 + 5
    slower = dataclasses.replace(FT.accelerator.latencies, fma=9)
    accelerator = dataclasses.replace(FT.accelerator, latencies=slower)
    assert fill_cycles(6, 3, FP64, accelerator) == 7 + 4 + 9 + 4 + 5


@pytest.mark.parametrize("k_a, measured", [(128, 92.0), (256, 94.0), (512, 96.0)])
@pytest.mark.parametrize("ddr", [10e9, 42.6e9])
def test_fp64_gemm_is_within_3_points_of_the_measured_one(
    k_a: int, measured: float, ddr: float
) -> None:
    """On one core with the authors' blocks; the shape is whole blocks in every dimension."""
    machine = _with_memory("DDR", FT_ONE, bandwidth=ddr)
    gemm = Gemm(3 * 1512, 336 * 48, 4096, "float64", accumulate=True)
    plan = TilePlan(1512, 512, 252, 48, k_a, 6, 6, 3, 2, split="n")
    assert abs(100 * cost_gemm(gemm, machine, plan).efficiency - measured) <= 3


@pytest.mark.parametrize("k, measured", [(512, 74.0), (1024, 84.0), (2048, 89.0)])
def test_fp64_transposed_gemm_is_within_5_points_of_the_measured_one(
    k: int, measured: float
) -> None:
    gemm = Gemm(4032, 4032, k, "float64", "nt", accumulate=True)
    plan = TilePlan(252, k, 126, 16, k, 6, 6, 8, 1, split="n", flow="dot")
    assert abs(100 * cost_gemm(gemm, FT_ONE, plan).efficiency - measured) <= 5


@settings(max_examples=25, deadline=None)
@given(GEMMS, st.sampled_from(["time", "traffic"]))
def test_chosen_plans_fit(gemm: Gemm, objective: str) -> None:
    check_plan(plan_for(gemm, MT3000, objective), gemm, MT3000)


# Shapes for which thousands of plans take within a thousandth of the best one's time.
NARROW = [
    Gemm(7547, 1, 3078, "float32", "nt"),
    Gemm(48343, 3, 129613, "float32", "nt", "fp16"),
    Gemm(9749, 4, 1972, "float32", "nn", "promote"),
    Gemm(72058, 7, 9381, "float16", "nt", "fp16"),
    Gemm(81886, 838, 7, "float32", "nt"),
    Gemm(14666, 12279, 1, "float32", "nt"),
    Gemm(2, 5351, 60303, "float32", "nt"),
]


@settings(max_examples=20, deadline=None)
@given(GEMMS)
@example(NARROW[0])
@example(NARROW[2])
@example(NARROW[5])
@example(NARROW[6])
@example(Gemm(2500, 46, 17, "float16", "nt", "fp16"))  # the best has more strips than it needs
def test_the_search_finds_the_best_of_its_space(gemm: Gemm) -> None:
    spaces = [with_shorter_strips(candidates(gemm, MT3000, flow)) for flow in flows(gemm)]
    full = [times(gemm, space, MT3000).total for space in spaces]
    moved = [ddr_bytes(gemm, space, MT3000) for space in spaces]
    best = plan_for(gemm, MT3000)
    assert times(gemm, best, MT3000).total == min(total.min() for total in full)
    least = plan_for(gemm, MT3000, "traffic")
    assert ddr_bytes(gemm, least, MT3000) == min(count.min() for count in moved)


def _assert_bounds_are_admissible(gemm: Gemm, machine: Machine) -> None:
    for flow in flows(gemm):
        grid = grid_of(gemm, machine, flow)
        plan = plans(grid, slice(None))
        plan.coarse = coarse_bound(grid, gemm, machine)
        plan = with_sums(fitting(plan, gemm, machine), gemm, machine)
        # What is known of a plan before its strips are chosen holds for all numbers of them.
        plan.any_strips = close_bound(plan, plan.m, gemm, machine)
        plan = with_shorter_strips(plan)
        total = times(gemm, plan, machine).total * SLACK
        assert (plan.coarse <= total).all()
        assert (plan.any_strips <= total).all()
        assert (close_bound(plan, plan.m_s, gemm, machine) <= total).all()


MACHINES = [
    MT3000,
    FT,
    FT_ONE,
    _with_memory("SM", bandwidth=1e9),
    _with_memory("AM", bandwidth=2e9),
    _with_memory("GSM", bandwidth=2e9),
    _with_memory("DDR", bandwidth=1e12),
]


@settings(max_examples=40, deadline=None)
@given(GEMMS, st.sampled_from(MACHINES), st.booleans(), st.sampled_from(["", "float32"]))
@example(Gemm(1, 1, 1, "float32", "nt"), MT3000, False, "")
def test_no_bound_is_over_the_cost_of_a_plan(
    gemm: Gemm, machine: Machine, accumulate: bool, out_dtype: str
) -> None:
    gemm = dataclasses.replace(gemm, accumulate=accumulate, out_dtype=out_dtype or gemm.out_dtype)
    _assert_bounds_are_admissible(gemm, machine)


@pytest.mark.parametrize("gemm", NARROW, ids=str)
def test_few_plans_of_narrow_products_are_costed(
    gemm: Gemm, monkeypatch: pytest.MonkeyPatch
) -> None:
    _assert_bounds_are_admissible(gemm, MT3000)
    costed = []

    def counted(gemm: Gemm, plan: SimpleNamespace, machine: Machine) -> Times:
        costed.append(plan.m.size)
        return times(gemm, plan, machine)

    monkeypatch.setattr(gemm_plan, "times", counted)
    plan_for.__wrapped__(gemm, MT3000)
    assert sum(costed) < 2000


@settings(max_examples=10, deadline=None)
@given(GEMMS, st.randoms(use_true_random=False))
def test_plans_cost_the_same_alone_and_in_arrays(gemm: Gemm, random) -> None:
    space = candidates(gemm, MT3000, "outer")
    at = random.randrange(space.m.size)
    numbers = {
        name: int(array[at] if np.ndim(array) else array) for name, array in vars(space).items()
    }
    split, flow = ("m", "n")[numbers["split_n"]], ("outer", "dot")[numbers["dot"]]
    names = {field.name for field in dataclasses.fields(TilePlan)}
    fields = {name: number for name, number in numbers.items() if name in names}
    plan = TilePlan(**fields, split=split, flow=flow)
    check_plan(plan, gemm, MT3000)
    assert times(gemm, plan, MT3000).total == times(gemm, space, MT3000).total[at]
    for kind, count in transfers(gemm, plan, MT3000).items():
        assert count == np.broadcast_to(transfers(gemm, space, MT3000)[kind], space.m.shape)[at]


@settings(max_examples=8, deadline=None)
@given(GEMMS, st.sampled_from(["SM", "AM", "GSM"]), st.sampled_from([1.5, 2, 4]))
@example(Gemm(85, 75, 257, "float32", "nt", "fp32"), "AM", 1.5)
def test_a_larger_memory_never_costs_more(gemm: Gemm, name: str, factor: float) -> None:
    larger = _with_memory(name, bytes=int(MT3000.memory(name).bytes * factor))
    slow, fast = plan_for(gemm, MT3000), plan_for(gemm, larger)
    assert times(gemm, fast, larger).total <= times(gemm, slow, MT3000).total
    much, little = (plan_for(gemm, machine, "traffic") for machine in (MT3000, larger))
    assert ddr_bytes(gemm, little, larger) <= ddr_bytes(gemm, much, MT3000)


@settings(max_examples=15, deadline=None)
@given(GEMMS, st.sampled_from(["SM", "AM", "GSM", "DDR"]))
def test_half_the_bandwidth_costs_time_or_is_reported_hidden(gemm: Gemm, name: str) -> None:
    cost = cost_gemm(gemm, MT3000)
    half = _with_memory(name, bandwidth=MT3000.memory(name).bandwidth / 2)
    slower = cost_gemm(gemm, half, plan_for(gemm, MT3000))
    assert (slower.seconds > cost.seconds) != (name in cost.hidden)


def test_traffic_is_the_published_formula_for_whole_blocks() -> None:
    gemm = Gemm(2 * 1512, 4 * 48, 3 * 512, "float64", accumulate=True)
    plan = TilePlan(1512, 512, 252, 48, 512, 6, 6, 3, 2, split="n")
    m, n, k = gemm.rows, gemm.cols, gemm.depth
    elements = m * k + m * k * n / 1512 + 2 * m * k * n / 512
    assert cost_gemm(gemm, FT_ONE, plan).ddr_bytes == 8 * elements


def test_both_splits_are_searched_and_the_better_is_taken() -> None:
    gemm = Gemm(2048, 4096, 4096, accumulator="promote")
    space = candidates(gemm, MT3000, "outer")
    total = times(gemm, space, MT3000).total
    assert set(np.unique(space.split_n)) == {0, 1}
    assert total[space.split_n == 0].min() < total[space.split_n == 1].min()
    assert plan_for(gemm, MT3000).split == "m"


def test_large_fp16_products_reach_what_the_memories_allow() -> None:
    """91 to 94 % in the promoting mode; an FP32 accumulator halves the rate."""
    shapes = [(2048, 4096, 4096), (2048, 11008, 4096), (2048, 4096, 11008)]
    for shape in shapes:
        promote = cost_gemm(Gemm(*shape, accumulator="promote"), MT3000).efficiency
        wide = cost_gemm(Gemm(*shape, accumulator="fp32"), MT3000).efficiency
        assert 0.90 < promote < 0.95
        assert 0.45 < wide <= 0.5


@pytest.mark.parametrize(
    "change, words",
    [
        ({"m_g": 99984}, ["GSM", "6291456 bytes", "bytes too many"]),
        ({"m_a": 2400}, ["AM", "786432 bytes", "bytes too many"]),
        ({"m_s": 36, "m_a": 36}, ["SM", "65536 bytes", "8192 bytes too many"]),
        ({"n": 12, "n_a": 768}, ["registers", "64", "too many"]),
        ({"m": 3, "n": 1}, ["accumulators", "18"]),
        ({"m": 8, "n": 4, "ku": 1}, ["multiple of 3"]),
        ({"m_s": 7}, ["m_s", "multiple", "12"]),
        ({"k_a": 2048, "k_g": 512}, ["k_a", "k_g"]),
        ({"split": "k"}, ["split", "'k'"]),
        ({"flow": "dot"}, ["'nt'"]),
        ({"k_g": 0}, ["k_g", "int >= 1"]),
    ],
)
def test_plans_that_do_not_fit_are_refused_with_the_excess(change: dict, words: list[str]) -> None:
    good = TilePlan(576, 1024, 24, 256, 512, 24, 6, 4, 2)
    gemm = Gemm(4096, 4096, 4096, accumulator="fp16")
    check_plan(good, gemm, MT3000)
    with pytest.raises(MachineError) as error:
        check_plan(dataclasses.replace(good, **change), gemm, MT3000)
    for word in words:
        assert word in str(error.value)


def test_a_single_buffer_is_never_faster_than_two() -> None:
    gemm = Gemm(4096, 4096, 4096, accumulator="fp16")
    plan = TilePlan(576, 1024, 24, 256, 512, 24, 6, 4, 2, gsm_depth=2)
    full = cost_gemm(gemm, MT3000, plan).seconds
    for name in ("gsm_depth", "sm_depth", "b_depth", "c_depth"):
        fewer = dataclasses.replace(plan, **{name: 1})
        assert cost_gemm(gemm, MT3000, fewer).seconds > full


def test_products_that_fit_nowhere_are_refused() -> None:
    tiny = _with_memory("SM", bytes=16)
    with pytest.raises(MachineError, match=r"SM, which has 16 bytes: \d+ bytes too many"):
        plan_gemm(64, 64, 64, "float16", tiny)
    with pytest.raises(MachineError, match="no accelerator"):
        plan_gemm(64, 64, 64, "float16", load_machine("generic"))
    with pytest.raises(MachineError, match="objective"):
        plan_gemm(64, 64, 64, "float16", MT3000, objective="fun")
    with pytest.raises(MachineError, match="rows"):
        plan_gemm(0, 64, 64, "float16", MT3000)
    with pytest.raises(MachineError, match="bfloat16"):
        plan_gemm(64, 64, 64, "bfloat16", MT3000)


def test_reports_list_the_assumptions_they_used() -> None:
    cost = cost_gemm(Gemm(64, 64, 64), MT3000)
    assert "memories.GSM.bandwidth" in cost.assumed
    assert "links.interconnect.latency" not in cost.assumed
    assert "accelerator.exp_operations" not in cost.assumed
    attention = cost_attention(Attention(1, 2, 2, 64, 64, 64), MT3000)
    assert "accelerator.exp_operations" in attention.assumed


def test_buffers_are_counted_for_arrays_too() -> None:
    plan = TilePlan(576, 1024, 24, 256, 512, 24, 6, 4, 2)
    gemm = Gemm(64, 64, 64, accumulator="fp16")
    fields = {
        field.name: np.array([getattr(plan, field.name)])
        for field in dataclasses.fields(plan)
        if field.name not in ("split", "flow")
    }
    arrays = SimpleNamespace(**fields, dot=np.array([0]))
    for name, count in buffer_bytes(plan, gemm).items():
        assert buffer_bytes(arrays, gemm)[name][0] == count


def test_buffers_follow_the_published_capacity_rules() -> None:
    """M_G·K_G·d in GSM, (2·K_A·d + 3·M_A·d_acc)·N_A in AM, 2·M_S·K_A·d in SM."""
    plan = TilePlan(576, 1024, 24, 256, 512, 12, 6, 4, 2)
    for accumulator, acc_bytes in (("fp16", 2), ("fp32", 4), ("promote", 4)):
        assert buffer_bytes(plan, Gemm(8, 8, 8, accumulator=accumulator)) == {
            "GSM": 576 * 1024 * 2,
            "AM": (2 * 512 * 2 + 3 * 24 * acc_bytes) * 256,
            "SM": 2 * 12 * 512 * 2,
        }
