"""Attention's plans fit, its costs follow the tile loops, and keeping scores on chip pays."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain_jax.errors import MachineError
from ratrain_jax.kernels import load_machine
from ratrain_jax.kernels.attention_cost import steps
from ratrain_jax.kernels.attention_plan import (
    Attention,
    AttentionPlan,
    attention_plans,
    check_attention_plan,
)
from ratrain_jax.kernels.attention_search import cost_attention, plan_attention

MT3000 = load_machine("mt3000")
LANES = 64
SHAPES = st.builds(
    Attention,
    st.integers(1, 3),
    st.just(6),
    st.sampled_from([1, 2, 3, 6]),
    st.integers(1, 400),
    st.integers(1, 400),
    st.sampled_from([16, 64, 128]),
    st.booleans(),
)


def _sees(shape: Attention, row: int) -> int:
    """Keys that a folded row sees."""
    return min(row % shape.queries + 1, shape.keys) if shape.causal else shape.keys


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.sampled_from([1, 2, 4, 12, 24]), st.sampled_from([8, 32, 100]), st.integers(1, 3))
def test_tiles_are_those_of_a_plain_loop(
    shape: Attention, groups: int, block_q: int, vectors: int
) -> None:
    team = 24 // groups
    tiles = [range(at, min(at + block_q, shape.rows)) for at in range(0, shape.rows, block_q)]
    seen = [max(_sees(shape, row) for row in tile) for tile in tiles]
    forward = AttentionPlan("forward", groups, block_q, vectors * LANES)
    cores = [0] * team
    for index, keys in enumerate(seen):
        cores[index % team] += len(range(0, keys, forward.block_k))
    count = steps(shape, forward, 24, LANES)
    assert (count.tiles, count.passes) == (max(cores), -(-len(tiles) // team))
    backward = AttentionPlan("backward", groups, block_q, vectors * LANES)
    busy = slices = passes = 0
    for start in range(0, shape.keys, team * vectors * LANES):
        passes += 1
        for keys in seen:
            here = [
                at
                for at in range(start, min(start + team * vectors * LANES, shape.keys), LANES)
                if at < keys
            ]
            busy += bool(here)
            slices += -(-len(here) // team)
    count = steps(shape, backward, 24, LANES)
    assert (count.tiles, count.slices, count.passes) == (busy, slices, passes)


@settings(max_examples=20, deadline=None)
@given(SHAPES)
def test_visible_pairs_are_counted(shape: Attention) -> None:
    assert shape.visible == sum(_sees(shape, row) for row in range(shape.rows))


@settings(max_examples=10, deadline=None)
@given(SHAPES, st.sampled_from(["forward", "backward"]))
def test_the_plan_is_the_best_of_those_that_fit(shape: Attention, which: str) -> None:
    best = plan_attention(shape, MT3000, which)
    check_attention_plan(best, shape, MT3000)
    least = min(
        cost_attention(shape, MT3000, plan=p).seconds for p in attention_plans(shape, MT3000, which)
    )
    assert cost_attention(shape, MT3000, plan=best).seconds == least


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("accumulator", ["fp32", "promote"])
def test_keeping_scores_on_chip_pays_from_512_to_4096(causal: bool, accumulator: str) -> None:
    for length in (512, 1024, 2048, 4096):
        shape = Attention(1, 32, 32, length, length, 128, causal, accumulator=accumulator)
        resident = cost_attention(shape, MT3000, which="backward")
        staged = cost_attention(shape, MT3000, which="staged")
        assert staged.seconds > 2 * resident.seconds
        assert staged.ddr_bytes > 5 * resident.ddr_bytes
        # S and dP in float32, P and dS in float16, each out and back.
        assert staged.ddr_bytes > 32 * length * length * 2 * (4 + 2 + 4 + 2)


def test_ddr_bytes_of_the_forward_pass_are_its_operands_where_keys_pass_by_once() -> None:
    shape = Attention(1, 4, 4, 512, 512, 64)
    plan = AttentionPlan("forward", 1, 32, 128)
    tensors = 4 * 4 * 512 * 64 * 2
    assert cost_attention(shape, MT3000, plan=plan).ddr_bytes == tensors + 4 * 512 * 4


def test_grouped_heads_move_fewer_bytes_backward() -> None:
    plan = AttentionPlan("backward", 4, 32, 192)
    many, few = (
        cost_attention(Attention(1, 32, kv, 2048, 2048, 128), MT3000, plan=plan) for kv in (32, 8)
    )
    # K and V in, dK and dV out, of 24 heads fewer.
    assert many.ddr_bytes - few.ddr_bytes == 24 * 4 * 2048 * 128 * 2
    assert few.flops == many.flops


def test_a_larger_memory_or_bandwidth_never_costs_more() -> None:
    shape = Attention(1, 32, 32, 1024, 1024, 128, True)
    for name, which in itertools.product(("SM", "AM", "GSM", "DDR"), ("forward", "backward")):
        memories = tuple(
            dataclasses.replace(m, bytes=2 * m.bytes, bandwidth=2 * m.bandwidth)
            if m.name == name
            else m
            for m in MT3000.memories
        )
        larger = dataclasses.replace(MT3000, memories=memories)
        before, after = (cost_attention(shape, m, which=which) for m in (MT3000, larger))
        assert after.seconds <= before.seconds


@pytest.mark.parametrize(
    "plan, words",
    [
        (AttentionPlan("forward", 1, 32, 100 * LANES), ["AM", "786432 bytes", "bytes too many"]),
        (AttentionPlan("forward", 1, 512, 64), ["SM", "65536 bytes", "bytes too many"]),
        (AttentionPlan("backward", 24, 32, 16 * LANES), ["AM", "bytes too many"]),
        (AttentionPlan("forward", 5, 32, 64), ["groups", "24 cores"]),
        (AttentionPlan("sideways", 1, 32, 64), ["sideways"]),
    ],
)
def test_plans_that_do_not_fit_are_refused_with_the_excess(
    plan: AttentionPlan, words: list[str]
) -> None:
    with pytest.raises(MachineError) as error:
        check_attention_plan(plan, Attention(1, 1, 1, 2048, 2048, 128), MT3000)
    for word in words:
        assert word in str(error.value)


def test_head_sizes_that_fit_nowhere_are_refused() -> None:
    with pytest.raises(MachineError, match="bytes too many"):
        plan_attention(Attention(1, 1, 1, 64, 64, 4096), MT3000, "backward")
    with pytest.raises(MachineError, match="evenly"):
        Attention(1, 3, 2, 64, 64, 64)
