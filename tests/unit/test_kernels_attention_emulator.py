"""An instrumented run of attention moves the bytes that the model counts, and computes attention."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain_jax.errors import MachineError
from ratrain_jax.kernels import Attention, AttentionPlan, cost_attention, load_machine
from ratrain_jax.kernels.attention_emulator import _Backward, _Forward, emulate_attention
from ratrain_jax.kernels.attention_plan import attention_buffers

MT3000 = load_machine("mt3000")
LANES = 64


@st.composite
def planned(draw):
    """An attention, a plan of one of its passes, and its arrays."""
    heads = draw(st.sampled_from([(1, 1), (2, 1), (4, 2)]))
    shape = Attention(
        1, *heads, draw(st.integers(1, 90)), draw(st.integers(1, 330)),
        draw(st.sampled_from([8, 16])), causal=draw(st.booleans()), bias=draw(st.booleans()),
    )  # fmt: skip
    plan = AttentionPlan(
        draw(st.sampled_from(["forward", "backward"])),
        draw(st.sampled_from([1, 6, 12, 24])),
        draw(st.integers(1, 40)),
        LANES * draw(st.integers(1, 2)),
    )
    return shape, plan, arrays_of(shape, draw(st.integers(0, 99)))


def arrays_of(shape, seed):
    rng = np.random.default_rng(seed)
    rows, keys, size, count = shape.rows, shape.keys, shape.head_size, shape.count
    drawn = [rng.standard_normal((count, n, size)) for n in (rows, keys, keys, rows)]
    bias = rng.standard_normal((count, rows, keys)) if shape.bias else None
    return tuple(x.astype(np.float16) for x in drawn), bias


def reference(shape, arrays, bias):
    """O, the log-sum-exp, dQ, dK and dV in float64."""
    q, k, v, grad = (x.astype(np.float64) for x in arrays)
    scale = shape.head_size**-0.5
    scores = q @ k.swapaxes(1, 2) * scale
    if bias is not None:
        scores += bias
    if shape.causal:
        queries = np.arange(shape.rows) % shape.queries
        scores[:, np.arange(shape.keys)[None, :] > queries[:, None]] = -np.inf
    most = scores.max(-1, keepdims=True)
    total = np.exp(scores - most).sum(-1, keepdims=True)
    p = np.exp(scores - most) / total
    out = p @ v
    dp = grad @ v.swapaxes(1, 2)
    ds = p * (dp - (grad * out).sum(-1, keepdims=True))
    dv, dq, dk = p.swapaxes(1, 2) @ grad, ds @ k * scale, ds.swapaxes(1, 2) @ q * scale
    return out, (most + np.log(total))[..., 0], dq, dk, dv


@settings(max_examples=60)
@given(planned())
def test_counted_bytes_equal_the_models(case):
    shape, plan, (arrays, bias) = case
    out, lse, *grads = reference(shape, arrays, bias)
    given_arrays = arrays[:3]
    wanted = (out, lse)
    if plan.which == "backward":
        given_arrays = (*arrays, out.astype(np.float16), lse.astype(np.float32))
        wanted = tuple(grads)
    ran = emulate_attention(shape, plan, MT3000, given_arrays, bias)
    cost = cost_attention(shape, MT3000, plan.which, plan)
    assert ran.transfers == dict(cost.transfers)
    for ours, theirs in zip(ran.values, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0.01, atol=0.02)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("which", "kind"), [("forward", _Forward), ("backward", _Backward)])
def test_buffers_are_those_that_plans_are_checked_for(which, kind, bias):
    shape = Attention(1, 2, 1, 50, 200, 16, bias=bias)
    plan = AttentionPlan(which, 2, 24, 128)
    run = object.__new__(kind)
    run.shape, run.plan = shape, plan
    for name in ("SM", "AM"):
        buffers = run.buffers(name).values()
        count = sum(int(np.prod(size)) * np.dtype(dtype).itemsize for size, dtype in buffers)
        assert count == attention_buffers(plan, shape)[name]


def test_a_plan_too_large_or_a_missing_bias_is_refused():
    shape = Attention(1, 1, 1, 8, 8, 16)
    arrays, _ = arrays_of(shape, 0)
    with pytest.raises(MachineError, match="bytes of AM"):
        emulate_attention(shape, AttentionPlan("forward", 1, 4096, 64), MT3000, arrays[:3])
    with pytest.raises(MachineError, match="bias"):
        biased = dataclasses.replace(shape, bias=True)
        emulate_attention(biased, AttentionPlan("forward", 1, 8, 64), MT3000, arrays[:3])
