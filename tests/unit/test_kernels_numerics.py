"""Exact mode is the scalar specification bit for bit; fast mode stays inside the textbook bound."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain_jax.errors import OptionError
from ratrain_jax.kernels import Gemm, TilePlan
from ratrain_jax.kernels.numerics import panels, product, round_to_odd_sum

LANES = 64
ACCUMULATORS = ("fp32", "fp16", "promote")


def _fma(x: np.float16, y: np.float16, total, kind) -> np.floating:
    """One fused multiply-add. Where float64 is exact enough for both formats is shown below."""
    return kind(np.float64(x) * np.float64(y) + np.float64(total))


def _add(x, y, kind):
    return kind(np.float64(x) + np.float64(y))


def scalar_reference(a: np.ndarray, b: np.ndarray, gemm: Gemm, plan: TilePlan) -> np.ndarray:
    """The specification, element by element."""
    step = np.float32 if gemm.accumulator == "fp32" else np.float16
    between = np.float16 if gemm.accumulator == "fp16" else np.float32
    out = np.zeros((a.shape[0], b.shape[1]), gemm.out_dtype)
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            total = between(0)
            for start, length in panels(a.shape[1], plan):
                indices = range(start, start + length)
                if plan.flow == "dot":
                    lane = [step(0)] * LANES
                    for k in indices:
                        at = (k - start) % LANES
                        lane[at] = _fma(a[i, k], b[k, j], lane[at], step)
                    while len(lane) > 1:
                        half = len(lane) // 2
                        lane = [_add(lane[x], lane[x + half], step) for x in range(half)]
                    total = _add(total, lane[0], between)
                elif gemm.accumulator == "promote":
                    inner = np.float16(0)
                    for k in indices:
                        inner = _fma(a[i, k], b[k, j], inner, np.float16)
                    total = _add(total, inner, between)
                else:
                    for k in indices:
                        total = _fma(a[i, k], b[k, j], total, step)
            out[i, j] = total
    return out


@functools.cache
def _jitted(gemm: Gemm, plan: TilePlan, mode: str):
    return jax.jit(functools.partial(product, gemm=gemm, plan=plan, mode=mode, lanes=LANES))


def run(a: np.ndarray, b: np.ndarray, gemm: Gemm, plan: TilePlan, mode: str = "exact"):
    return np.asarray(_jitted(gemm, plan, mode)(a[None], b[None]))[0]


def assert_same_bits(ours: np.ndarray, reference: np.ndarray) -> None:
    """Equal bits, where all NaNs count as one."""
    assert ours.dtype == reference.dtype
    bits = f"u{ours.dtype.itemsize}"
    same = (ours.view(bits) == reference.view(bits)) | (np.isnan(ours) & np.isnan(reference))
    assert same.all(), (ours[~same], reference[~same])


PLANS = (
    TilePlan(6, 7, 6, 256, 3, 6, 6, 4, 2),
    TilePlan(6, 40, 6, 256, 40, 6, 6, 4, 2),
    TilePlan(6, 1, 6, 256, 1, 6, 6, 4, 2),
)
DOT_PLANS = (
    TilePlan(6, 150, 6, 6, 150, 6, 6, 6, flow="dot"),
    TilePlan(6, 70, 6, 6, 33, 6, 6, 6, flow="dot"),
)
# Every float16 there is: zeros of both signs, subnormals, the largest, infinities and NaNs.
ANY_HALF = st.integers(0, 2**16 - 1).map(lambda bits: np.uint16(bits).view(np.float16))
EXTREME = st.sampled_from(
    np.array([0, -0.0, 2**-24, -(2**-24), 2**-14, 65504, -65504, 1, -1, np.inf, 2049 / 4096])
    .astype(np.float16)
    .tolist()
).map(np.float16)
NORMAL = st.floats(-4, 4, width=16).map(np.float16)


@st.composite
def operands(draw, shapes):
    m, n, k = draw(shapes)
    element = draw(st.sampled_from([ANY_HALF, EXTREME, NORMAL]))
    fill = [draw(st.lists(element, min_size=size, max_size=size)) for size in (m * k, k * n)]
    return np.array(fill[0], np.float16).reshape(m, k), np.array(fill[1], np.float16).reshape(k, n)


# Few shapes, as each is compiled; the values are what varies.
SHAPES = st.sampled_from([(1, 1, 1), (2, 3, 8), (3, 2, 17)])


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid:RuntimeWarning")
@settings(max_examples=120, deadline=None)
@given(
    operands(SHAPES),
    st.sampled_from(ACCUMULATORS),
    st.sampled_from(PLANS[:2]),
)
def test_exact_is_the_specification(ab, accumulator: str, plan: TilePlan) -> None:
    a, b = ab
    out = "float32" if accumulator == "promote" else "float16"
    gemm = Gemm(a.shape[0], b.shape[1], a.shape[1], accumulator=accumulator, out_dtype=out)
    assert_same_bits(run(a, b, gemm, plan), scalar_reference(a, b, gemm, plan))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid:RuntimeWarning")
@settings(max_examples=60, deadline=None)
@given(
    operands(st.sampled_from([(1, 2, 3), (2, 1, 70), (1, 1, 200)])),
    st.sampled_from(ACCUMULATORS),
    st.just(DOT_PLANS[1]),
)
def test_exact_is_the_specification_in_the_dot_flow(ab, accumulator: str, plan: TilePlan) -> None:
    a, b = ab
    gemm = Gemm(a.shape[0], b.shape[1], a.shape[1], "float16", "nt", accumulator)
    assert_same_bits(run(a, b, gemm, plan), scalar_reference(a, b, gemm, plan))


def _round_half(x: Fraction) -> float:
    """Rounds an exact number to float16, to nearest, ties to even, by integers alone."""
    if x == 0:
        return 0.0
    size, exponent = abs(x), -14
    while size >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - 10)
    steps = size / unit
    down = steps.numerator // steps.denominator
    rest = steps - down
    down += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and down % 2)
    value = down * unit
    return float("inf") if value > 65504 else float(value if x > 0 else -value)


FINITE = ANY_HALF.filter(np.isfinite)


@settings(max_examples=300, deadline=None)
@given(FINITE, FINITE, FINITE)
def test_one_step_rounds_the_exact_sum_once(x, y, total) -> None:
    """Against exact rationals: the reference's float64 and our round-to-odd are both right."""
    exact = _round_half(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(total)))
    with np.errstate(over="ignore"):
        reference = abs(float(_fma(x, y, total, np.float16)))
    assert reference == abs(exact)
    ours = round_to_odd_sum(jnp.float32(total), jnp.float32(x) * jnp.float32(y))
    assert abs(float(ours.astype(jnp.float16))) == abs(exact)


def test_sums_that_float32_would_round_onto_a_tie_are_rounded_once() -> None:
    """Products a hair off half a unit of the sum: two roundings get many of them wrong."""
    rng = np.random.default_rng(0)
    size = 20_000
    signs = rng.choice([-1, 1], (2, size))
    x, total = ((sign * rng.uniform(1, 2, size)).astype(np.float16) for sign in signs)
    y = (rng.choice([-1, 1], size) * 2.0**-11 / x.astype(np.float64)).astype(np.float16)
    product = x.astype(np.float64) * y.astype(np.float64)
    right = (total.astype(np.float64) + product).astype(np.float16)
    twice = (total.astype(np.float32) + product.astype(np.float32)).astype(np.float16)
    wrong = right != twice
    assert wrong.sum() > 400
    upwards = (right > twice)[wrong] == (right > 0)[wrong]
    assert 100 < upwards.sum() < wrong.sum() - 100
    step = jax.jit(lambda t, p: round_to_odd_sum(t, p).astype(jnp.float16))
    ours = step(total[wrong].astype(np.float32), product[wrong].astype(np.float32))
    np.testing.assert_array_equal(ours, right[wrong])


def test_fast_promotion_rounds_each_panel_to_float16() -> None:
    ones = np.ones((1, 2049), np.float16)
    plan = TilePlan(6, 2049, 6, 256, 2049, 6, 6, 4, 2)
    for accumulator, total in (("fp32", 2049.0), ("promote", 2048.0), ("fp16", 2048.0)):
        gemm = Gemm(1, 1, 2049, accumulator=accumulator, out_dtype="float32")
        assert run(ones, ones.T, gemm, plan, "fast")[0, 0] == total


def test_float32_subnormals_are_flushed_by_xla_and_never_needed() -> None:
    """The smallest product of two float16 numbers is far above float32's subnormals."""
    smallest = np.float32(2.0**-24) ** 2
    assert smallest > np.finfo(np.float32).tiny
    tiny = np.array([[2.0**-24]], np.float16)
    gemm = Gemm(1, 1, 1, out_dtype="float32")
    assert run(tiny, tiny, gemm, PLANS[0])[0, 0] == smallest


def _gamma(steps: int, unit: float) -> float:
    return steps * unit / (1 - steps * unit)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from(ACCUMULATORS),
    st.just((8, 9, 257)),
    st.sampled_from([TilePlan(6, 64, 6, 256, 32, 6, 6, 4, 2), PLANS[1]]),
    st.floats(0.01, 4),
)
def test_fast_differs_from_exact_by_no_more_than_the_bound(
    seed: int, accumulator: str, shape: tuple[int, int, int], plan: TilePlan, scale: float
) -> None:
    m, n, k = shape
    rng = np.random.default_rng(seed)
    a = (scale * rng.standard_normal((m, k))).astype(np.float16)
    b = (scale * rng.standard_normal((k, n))).astype(np.float16)
    gemm = Gemm(m, n, k, accumulator=accumulator, out_dtype="float32")
    exact, fast = (run(a, b, gemm, plan, mode).astype(np.float64) for mode in ("exact", "fast"))
    sizes = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
    blocks, longest = len(panels(k, plan)), min(plan.k_a, k)
    wide, narrow = 2.0**-24, 2.0**-11
    error = {
        "fp32": _gamma(k, wide) + _gamma(longest + blocks, wide),
        "fp16": _gamma(k, narrow) + _gamma(longest, wide) + _gamma(2 * blocks, narrow),
        "promote": _gamma(longest, narrow)
        + narrow
        + _gamma(longest, wide)
        + 2 * _gamma(blocks, wide) * (1 + narrow),
    }[accumulator]
    underflow = 0 if accumulator == "fp32" else k * 2.0**-25
    assert (np.abs(exact - fast) <= error * sizes + underflow).all()


def test_fast_and_exact_agree_where_every_sum_is_exact() -> None:
    rng = np.random.default_rng(0)
    a = rng.integers(-3, 4, (9, 100)).astype(np.float16)
    b = rng.integers(-3, 4, (100, 11)).astype(np.float16)
    for accumulator in ACCUMULATORS:
        for plan in (PLANS[0], DOT_PLANS[0]):
            form = "nt" if plan.dot else "nn"
            gemm = Gemm(9, 11, 100, "float16", form, accumulator)
            whole = (a.astype(np.float32) @ b.astype(np.float32)).astype(np.float16)
            for mode in ("exact", "fast"):
                np.testing.assert_array_equal(run(a, b, gemm, plan, mode), whole)


def test_accumulators_differ_where_they_should() -> None:
    """4096 ones: float16 stops at 2048, promotion does not."""
    ones = np.ones((1, 4096), np.float16)
    plan = TilePlan(6, 512, 6, 256, 512, 6, 6, 4, 2)
    sums = {
        accumulator: float(run(ones, ones.T, Gemm(1, 1, 4096, accumulator=accumulator), plan)[0, 0])
        for accumulator in ACCUMULATORS
    }
    assert sums == {"fp32": 4096.0, "fp16": 2048.0, "promote": 4096.0}


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(OptionError, match="quick"):
        run(
            np.ones((1, 1), np.float16),
            np.ones((1, 1), np.float16),
            Gemm(1, 1, 1),
            PLANS[0],
            "quick",
        )
