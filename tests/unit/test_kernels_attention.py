"""Attention against float64: values and gradients, masks, bias, ALiBi, grouped heads."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ratrain_jax.errors import OptionError
from ratrain_jax.kernels import vmac_attention

HALF = 2.0**-11  # unit roundoff of float16
TINY = 2.0**-25  # half its smallest number


def _expand(x, heads: int):
    return np.repeat(x.astype(np.float64), heads // x.shape[2], axis=2)


def reference(q, k, v, grad, bias=None, mask=None, causal=False, slopes=None, scale=None):
    """Attention and its gradients in float64, with the bounds that float16 rounding gives.

    A probability, a score's gradient and each stored result are rounded to float16 once; D is made
    from the rounded output.
    """
    q, k, v, grad = (np.asarray(x) for x in (q, k, v, grad))
    (_, queries, heads, size), (_, keys, kv_heads, _) = q.shape, k.shape
    scale = size**-0.5 if scale is None else scale
    q = q.astype(np.float64)
    kx, vx, grad = _expand(k, heads), _expand(v, heads), grad.astype(np.float64)
    scores = scale * np.einsum("bthd,bshd->bhts", q, kx)
    if bias is not None:
        scores = scores + np.asarray(bias, np.float64)
    distance = np.arange(keys)[None, :] - np.arange(queries)[:, None]
    if slopes is not None:
        scores = scores - np.asarray(slopes, np.float64)[:, None, None] * np.abs(distance)
    seen = np.ones(scores.shape, bool) if mask is None else np.broadcast_to(mask, scores.shape)
    if causal:
        seen = seen & (distance <= 0)
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    p = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = p.sum(-1, keepdims=True)
    p = p / np.where(total == 0, 1, total)
    out = np.einsum("bhts,bshd->bthd", p, vx)
    dp = np.einsum("bthd,bshd->bhts", grad, vx)
    dots = np.einsum("bthd,bthd->bht", grad, out)[..., None]
    ds = p * (dp - dots)

    def group(x):  # sum over the heads that share a key head
        return x.reshape(*x.shape[:2], kv_heads, heads // kv_heads, size).sum(3)

    values = {
        "out": out,
        "dq": scale * np.einsum("bhts,bshd->bthd", ds, kx),
        "dk": group(scale * np.einsum("bhts,bthd->bshd", ds, q)),
        "dv": group(np.einsum("bhts,bthd->bshd", p, grad)),
        "ds": ds,
    }
    small = 1e-5  # float32 sums and exponentials
    p_error = (HALF + small) * p + TINY * seen
    dot_error = (HALF + small) * np.einsum("bthd,bthd->bht", abs(grad), abs(out))[..., None]
    dp_size = np.einsum("bthd,bshd->bhts", abs(grad), abs(vx))
    ds_raw = p * (dot_error + small * (dp_size + abs(dots)))
    ds_error = ds_raw + HALF * (abs(ds) + ds_raw) + TINY * seen
    bounds = {
        "out": np.einsum("bhts,bshd->bthd", p_error, abs(vx)),
        "dq": scale * np.einsum("bhts,bshd->bthd", ds_error, abs(kx)),
        "dk": group(scale * np.einsum("bhts,bthd->bshd", ds_error, abs(q))),
        "dv": group(np.einsum("bhts,bthd->bshd", p_error, abs(grad))),
        "ds": ds_raw,
    }
    return values, {
        name: 1.01 * bound + HALF * abs(values[name]) + TINY + 1e-6 * abs(values[name]).max()
        for name, bound in bounds.items()
    }


def _inputs(batch=2, queries=40, keys=40, heads=4, kv_heads=4, size=16, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(batch, queries, heads, size), *[(batch, keys, kv_heads, size)] * 2]
    shapes.append(shapes[0])
    return [jnp.asarray(rng.standard_normal(shape), jnp.float16) for shape in shapes]


def _run(q, k, v, grad, **options):
    @jax.jit
    def both(q, k, v, grad):
        attend = functools.partial(vmac_attention, accumulator="fp32", **options)
        out, pullback = jax.vjp(attend, q, k, v)
        return (out, *pullback(grad))

    return dict(zip(("out", "dq", "dk", "dv"), both(q, k, v, grad), strict=True))


def _check(inputs, ours, **options) -> None:
    values, bounds = reference(*inputs, **options)
    for name, value in ours.items():
        assert value.dtype == jnp.float16
        error = np.abs(np.asarray(value, np.float64) - values[name])
        assert (error <= bounds[name]).all(), (name, float((error / bounds[name]).max()))


RNG = np.random.default_rng(7)
PADDING = (np.arange(40)[None, :] < np.array([40, 23])[:, None])[:, None, None, :]
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "full": ({}, {}),
    "causal": ({}, {"causal": True}),
    "padding": ({}, {"mask": PADDING, "causal": True}),
    "bias": ({}, {"bias": RNG.standard_normal((2, 4, 40, 40)).astype(np.float32)}),
    "shared bias": ({}, {"bias": RNG.standard_normal((4, 1, 40)).astype(np.float32)}),
    "alibi": ({}, {"slopes": 2.0 ** -np.arange(1, 5, dtype=np.float32), "causal": True}),
    "grouped": ({"kv_heads": 2}, {"causal": True}),
    "grouped alibi": (
        {"kv_heads": 1},
        {"slopes": 2.0 ** -np.arange(1, 5, dtype=np.float32), "causal": True, "mask": PADDING},
    ),
    "more keys": ({"keys": 150, "size": 40}, {"causal": True, "scale": 0.3}),
    "more queries": ({"queries": 150, "size": 8}, {"causal": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_within_rounding_of_float64(case: str) -> None:
    sizes, options = CASES[case]
    inputs = _inputs(**sizes)
    names = {"causal": "is_causal", "slopes": "alibi_slopes"}
    ours = _run(*inputs, **{names.get(name, name): x for name, x in options.items()})
    _check(inputs, ours, **options)


def test_long_sequences_go_through_many_tiles() -> None:
    inputs = _inputs(1, 330, 330, 2, 1, 16)
    resident = _run(*inputs, is_causal=True)
    _check(inputs, resident, causal=True)
    staged = _run(*inputs, is_causal=True, backward="staged")
    for name, value in resident.items():
        np.testing.assert_array_equal(np.asarray(value).view("u2"), staged[name].view("u2"))


@pytest.mark.parametrize("accumulator", ["fp16", "promote"])
def test_narrow_accumulators_are_close_and_both_backward_forms_agree(accumulator: str) -> None:
    inputs = _inputs()
    values, _ = reference(*inputs, causal=True)
    results = []
    for backward in ("resident", "staged"):
        attend = functools.partial(
            vmac_attention, is_causal=True, accumulator=accumulator, backward=backward
        )
        out, pullback = jax.vjp(attend, *inputs[:3])
        results.append((out, *pullback(inputs[3])))
    for name, one, other in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, values[name], atol=2e-2)


def test_exact_mode_stays_within_the_same_bound() -> None:
    inputs = _inputs(1, 20, 20, 2, 2, 8)
    _check(inputs, _run(*inputs, mode="exact", is_causal=True), causal=True)


@pytest.mark.parametrize("backward", ["resident", "staged"])
def test_rows_without_a_key_give_zeros(backward: str) -> None:
    inputs = _inputs()
    mask = np.ones((2, 1, 40, 40), bool)
    mask[0, :, 5], mask[1, :, :, :] = False, False
    ours = _run(*inputs, mask=mask, backward=backward)
    _check(inputs, ours, mask=mask)
    assert (ours["out"][0, 5] == 0).all() and (ours["dq"][0, 5] == 0).all()
    assert all((value[1] == 0).all() for value in ours.values())
    infinite = np.where(mask, 0, -np.inf).astype(np.float32)
    for name, value in _run(*inputs, bias=infinite, backward=backward).items():
        np.testing.assert_array_equal(value, ours[name])


@pytest.mark.parametrize("shape", [(2, 4, 40, 40), (1, 4, 1, 40), (1, 1, 40, 40), (40,)])
def test_bias_has_its_gradient(shape: tuple[int, ...]) -> None:
    q, k, v, grad = _inputs()
    bias = jnp.asarray(RNG.standard_normal(shape), jnp.float32)

    def loss(bias):
        out = vmac_attention(q, k, v, bias, accumulator="fp32")
        return (out.astype(jnp.float32) * grad).sum()

    values, bounds = reference(q, k, v, grad, bias=bias)
    full = (1,) * (4 - len(shape)) + shape
    axes = tuple(axis for axis in range(4) if full[axis] == 1)
    ours = jax.jit(jax.grad(loss))(bias)
    wanted, bound = (x["ds"].sum(axes, keepdims=True).reshape(shape) for x in (values, bounds))
    assert (np.abs(ours - wanted) <= bound).all()


def test_slopes_have_their_gradient() -> None:
    q, k, v, grad = _inputs(kv_heads=2)
    slopes = jnp.asarray(2.0 ** -np.arange(1, 5), jnp.float32)

    def loss(slopes):
        out = vmac_attention(q, k, v, alibi_slopes=slopes, is_causal=True, accumulator="fp32")
        return (out.astype(jnp.float32) * grad).sum()

    values, bounds = reference(q, k, v, grad, slopes=slopes, causal=True)
    far = np.abs(np.arange(40)[None, :] - np.arange(40)[:, None])
    wanted, bound = ((x["ds"] * far).sum((0, 2, 3)) for x in (values, bounds))
    assert (np.abs(jax.grad(loss)(slopes) + wanted) <= bound).all()


def test_float32_inputs_keep_their_dtype() -> None:
    q, k, v, grad = (jnp.asarray(x, jnp.float32) for x in _inputs())
    out, pullback = jax.vjp(functools.partial(vmac_attention, accumulator="fp32"), q, k, v)
    assert {x.dtype for x in (out, *pullback(grad))} == {jnp.dtype("float32")}


def test_scores_never_leave_the_chip_in_the_resident_form() -> None:
    """The staged form's program holds arrays of rows × keys, the resident one's does not."""
    q, k, v, grad = _inputs(1, 512, 512, 1, 1, 16)

    def program(backward: str) -> str:
        def gradients(q, k, v):
            attend = functools.partial(vmac_attention, backward=backward)
            return jax.vjp(attend, q, k, v)[1](grad)

        return jax.jit(gradients).lower(q, k, v).as_text()

    assert "tensor<1x512x512xf" in program("staged")
    assert "tensor<1x512x512xf" not in program("resident")


def test_it_agrees_with_jaxs_own_attention_under_vmap_and_checkpoint() -> None:
    q, k, v, _ = (jnp.asarray(x, jnp.float32) for x in _inputs(kv_heads=2))

    def loss(attend, q, k, v):
        return (jax.checkpoint(functools.partial(attend, is_causal=True))(q, k, v) ** 2).sum()

    ours = jax.grad(lambda q: loss(vmac_attention, q, k, v))(q)
    theirs = jax.grad(lambda q: loss(jax.nn.dot_product_attention, q, k, v))(q)
    np.testing.assert_allclose(ours, theirs, atol=2e-2)
    mapped = jax.vmap(lambda q, k, v: vmac_attention(q[None], k[None], v[None])[0])(q, k, v)
    np.testing.assert_allclose(mapped, vmac_attention(q, k, v), atol=2e-3)


def test_bad_arguments_are_refused() -> None:
    q, k, v, _ = _inputs()
    with pytest.raises(OptionError, match="heads"):
        vmac_attention(q, k[:, :, :3], v[:, :, :3])
    with pytest.raises(OptionError, match="query"):
        vmac_attention(q[0], k, v)
    with pytest.raises(OptionError, match="fit together"):
        vmac_attention(q, k, v[:, :-1])
    with pytest.raises(OptionError, match="broadcast"):
        vmac_attention(q, k, v, mask=jnp.ones((3, 1, 1, 40), bool))
    with pytest.raises(OptionError, match="alibi_slopes"):
        vmac_attention(q, k, v, alibi_slopes=jnp.ones(3))
    with pytest.raises(OptionError, match="backward"):
        vmac_attention(q, k, v, backward="lazy")
