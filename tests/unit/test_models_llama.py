"""The decoder against one written in NumPy float64, its positions, and that kernels take its products."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ratrain_jax as rt
from ratrain_jax.models import Llama, ModelConfig, language_model
from ratrain_jax.models.attention import attend
from ratrain_jax.models.positions import alibi_bias, alibi_slopes, rotary_tables, rotate

ROTARY = ModelConfig(
    "rotary",
    layers=2,
    hidden=24,
    ffn=40,
    heads=4,
    kv_heads=2,
    vocab=50,
    head_dim=8,
    qkv_bias=True,
    rope_theta=1000.0,
    norm_eps=1e-3,
)
ALIBI = ModelConfig(
    "alibi",
    layers=2,
    hidden=24,
    ffn=40,
    heads=6,
    kv_heads=3,
    vocab=50,
    positions="alibi",
    tied_embeddings=True,
)
CONFIGS = [ROTARY, ALIBI]
LENGTH = 11
by_name = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)


def draw_params(config, **fields):
    """Parameters large enough that every part of the model shows in its logits, and tokens."""
    tokens = np.random.default_rng(1).integers(0, config.vocab, (2, LENGTH), np.int32)
    shapes = jax.eval_shape(Llama(config, "float32", **fields).init, jax.random.key(0), tokens)[
        "params"
    ]
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(0.3, 0.4, x.shape).astype(np.float32), shapes), tokens


# The same model in NumPy, as `transformers` writes it: angles doubled along the features, heads repeated, layer by layer.


def numpy_norm(x, scale, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def numpy_rotated(x, theta):
    size = x.shape[-1]
    rates = 1.0 / theta ** (np.arange(0, size, 2) / size)
    angles = np.outer(np.arange(x.shape[1]), rates)
    angles = np.concatenate([angles, angles], axis=-1)[None, :, None]
    half = np.concatenate([-x[..., size // 2 :], x[..., : size // 2]], axis=-1)
    return x * np.cos(angles) + half * np.sin(angles)


def numpy_attention(config, params, x):
    def project(name):
        made = np.einsum("blh,hnd->blnd", x, params[name]["kernel"])
        return made + params[name]["bias"] if config.qkv_bias else made

    query, key, value = (project(name) for name in ("query", "key", "value"))
    if config.positions == "rotary":
        query, key = (numpy_rotated(heads, config.rope_theta) for heads in (query, key))
    key, value = (
        np.repeat(heads, config.heads // config.kv_heads, axis=2) for heads in (key, value)
    )
    scores = np.einsum("bqnd,bknd->bnqk", query, key) / np.sqrt(config.head_dim)
    places = np.arange(x.shape[1])
    if config.positions == "alibi":
        slopes = {6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]}[config.heads]
        scores += np.array(slopes)[:, None, None] * (places[None, :] - places[:, None])
    scores[..., places[None, :] > places[:, None]] = -np.inf
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("bnqk,bknd->bqnd", powers / powers.sum(-1, keepdims=True), value)
    return np.einsum("bqnd,ndh->bqh", mixed, params["out"]["kernel"])


def numpy_logits(config, params, tokens):
    params = jax.tree.map(lambda leaf: leaf.astype(np.float64), params)
    x = params["embedding"]["embedding"][tokens]
    for index in range(config.layers):
        layer = jax.tree.map(lambda leaf, index=index: leaf[index], params["blocks"])
        normed = numpy_norm(x, layer["attention_norm"]["scale"], config.norm_eps)
        x = x + numpy_attention(config, layer["attention"], normed)
        normed = numpy_norm(x, layer["mlp_norm"]["scale"], config.norm_eps)
        gate, up = (normed @ layer["mlp"][name]["kernel"] for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp"]["down"]["kernel"]
    x = numpy_norm(x, params["norm"]["scale"], config.norm_eps)
    tied = config.tied_embeddings
    return x @ (params["embedding"]["embedding"].T if tied else params["head"]["kernel"])


def relative(found, wanted):
    return np.abs(np.asarray(found, np.float64) - wanted).max() / np.abs(wanted).max()


@by_name
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-5), ("float16", 0.02), ("bfloat16", 0.1)]
)
def test_logits_are_those_of_the_model_in_numpy(config, dtype, tolerance):
    params, tokens = draw_params(config)
    logits = jax.jit(Llama(config, dtype).apply)({"params": params}, tokens)
    assert logits.dtype == dtype
    assert relative(logits, numpy_logits(config, params, tokens)) < tolerance


@by_name
def test_unrolled_layers_compute_the_same(config):
    params, tokens = draw_params(config)
    unrolled = {key: value for key, value in params.items() if key != "blocks"}
    for index in range(config.layers):
        layer = jax.tree.map(lambda leaf, index=index: leaf[index], params["blocks"])
        unrolled[f"block_{index}"] = layer
    one = jax.jit(Llama(config, "float32").apply)({"params": params}, tokens)
    other = jax.jit(Llama(config, "float32", scan=False).apply)({"params": unrolled}, tokens)
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(one).max())


@by_name
def test_a_position_sees_no_later_one(config):
    params, tokens = draw_params(config)
    apply = jax.jit(Llama(config, "float32").apply)
    other = tokens.copy()
    other[:, 7:] = (other[:, 7:] + 1) % config.vocab
    one, two = (np.asarray(apply({"params": params}, x)) for x in (tokens, other))
    np.testing.assert_array_equal(one[:, :7], two[:, :7])
    assert (one[:, 7:] != two[:, 7:]).any()


@by_name
def test_a_deeper_model_is_traced_by_as_many_equations(config):
    def equations(layers):
        model = Llama(dataclasses.replace(config, layers=layers), "float32")
        tokens = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
        params = jax.eval_shape(model.init, jax.random.key(0), tokens)
        return len(jax.make_jaxpr(model.apply)(params, tokens).eqns)

    assert equations(2) == equations(64)


# Attention and positions.


def test_scores_beyond_float16_are_no_infinities():
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(0, scale, (1, 5, 2, 8)) for scale in (200, 200, 1))
    half = [jnp.asarray(x, jnp.float16) for x in (query, key, value)]
    wanted = attend(*(x.astype(jnp.float32) for x in half))
    assert np.abs(np.einsum("bqhd,bkhd->bhqk", query, key)).max() > 65504
    np.testing.assert_allclose(attend(*half), wanted, rtol=1e-2, atol=1e-2)


def test_rotated_products_depend_on_the_distance_alone():
    rng = np.random.default_rng(0)
    query, key = (np.tile(rng.normal(size=(1, 1, 1, 8)), (1, 9, 1, 1)) for _ in range(2))
    tables = rotary_tables(9, 8, 100.0)
    turned = [rotate(jnp.asarray(x, jnp.float32), tables)[0, :, 0] for x in (query, key)]
    products = turned[0] @ turned[1].T
    np.testing.assert_allclose(products[:-1, :-1], products[1:, 1:], rtol=1e-5, atol=1e-6)
    assert abs(products[0, 3] - products[3, 0]) > 1e-2


@pytest.mark.parametrize("heads", [1, 8, 12, 40, 52])
def test_slopes_of_alibi(heads):
    slopes = alibi_slopes(heads)
    assert slopes.shape == (heads,) and len(set(slopes)) == heads
    below = 2 ** int(np.log2(heads))
    np.testing.assert_allclose(slopes[:below], [2 ** (-8 * (i + 1) / below) for i in range(below)])
    rest = [2 ** (-4 * (2 * i + 1) / below) for i in range(heads - below)]
    np.testing.assert_allclose(slopes[below:], rest)


def test_the_bias_is_exact_over_a_long_sequence():
    """Slopes of a power of two times whole numbers: what is left of float32's digits holds the differences."""
    bias = np.asarray(alibi_bias(8, 4096))[0, :, 0]
    np.testing.assert_array_equal(np.diff(bias, axis=1), np.tile(alibi_slopes(8)[:, None], 4095))


# Kernels.


@by_name
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_kernels_take_every_product_and_attention(config, dtype):
    lm = language_model(config, sequence=LENGTH, dtype=dtype)
    step = rt.train_step(stages=2, microbatches=2, backend="mt3000")(lm.step)
    routing = step.lower(lm.abstract_state(), lm.abstract_batch(4)).code.routing
    kinds = [part.kind for part in routing.parts]
    assert kinds.count("attention") == config.layers
    assert kinds.count("dot_general") == 7 * config.layers + 1
    assert {part.reason for part in routing.parts} == {""}
