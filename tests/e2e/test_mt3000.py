"""Trains a GPT on real text on the MT-3000 backend: bits, losses, and what it costs to run there.

The long form, 300 steps with other accumulators beside, is `examples/mt3000_gpt.py`.
"""

import itertools

import jax
import numpy as np
import optax
import pytest

import ratrain_jax as rt
from examples.text_data import VOCABULARY, batches, read_sources
from ratrain_jax.errors import OptionError
from ratrain_jax.kernels import Arithmetic
from ratrain_jax.lowering.program import Kind
from tests.models import CASES
from tests.models.case import OPTIMIZERS, linen_case
from tests.models.gpt import GPT, loss
from tests.training import differing, train

STEPS, ROWS, LENGTH = 20, 4, 32
LOSS_SCALE = 1024.0


def scaled(apply, params, batch):
    return LOSS_SCALE * loss(apply, params, batch)


MODEL = GPT(vocabulary=VOCABULARY, width=32, heads=2, layers=2)
BATCHES = list(itertools.islice(batches(read_sources(), batch_size=ROWS, length=LENGTH), STEPS))
CASE = linen_case("text", MODEL, inputs=("inputs",), loss=scaled, make_batch=lambda *_: BATCHES[0])
OPTIMIZER = optax.chain(
    optax.scale(1 / LOSS_SCALE), optax.clip_by_global_norm(1.0), optax.adamw(1e-3)
)


@pytest.fixture(scope="module")
def state():
    return CASE.make_state(OPTIMIZER)


def on_backend(accumulator="fp32", **options):
    options = {"stages": 2, "microbatches": 2} | options
    backend = Arithmetic.of("mt3000", accumulator, "fast")
    return rt.train_step(**options, backend=backend)(CASE.make_step(OPTIMIZER, rt.value_and_grad))


@pytest.fixture(scope="module")
def plain(state):
    return train(jax.jit(CASE.make_step(OPTIMIZER, jax.value_and_grad)), state, BATCHES)


@pytest.fixture(scope="module")
def ours(state):
    return train(on_backend(), state, BATCHES)


def test_its_loss_stays_within_half_a_percent_of_float32s(plain, ours):
    np.testing.assert_allclose(ours.losses(), plain.losses(), rtol=0.005)
    assert plain.losses()[-1] < 0.95 * plain.losses()[0]
    assert ours.losses() != plain.losses()


@pytest.mark.parametrize("options", [{"schedule": "1f1b"}, {"recovery": "forward"}])
def test_schedules_and_recoveries_agree_to_the_last_bit(state, ours, options):
    other = train(on_backend(**options), state, BATCHES)
    assert differing(ours.state, other.state) == []
    assert differing(ours.metrics, other.metrics) == []


def test_it_trains_over_data_parallel_groups_with_sharded_gradients(state, plain):
    options = {"data_parallel": 2, "microbatches": 1, "zero": 2}
    two = train(on_backend("promote", **options), state, BATCHES[:5])
    np.testing.assert_allclose(two.losses(), plain.losses()[:5], rtol=0.005)


def test_views_and_residuals_are_float16_and_half_the_bytes(state):
    found = on_backend().lower(state, BATCHES[0])
    wide = rt.train_step(stages=2, microbatches=2)(
        CASE.make_step(OPTIMIZER, rt.value_and_grad)
    ).lower(state, BATCHES[0])

    def count(program, kind):
        return sum(value.bytes for value in program.values if value.kind is kind)

    matrices = [
        dtype
        for path, dtype in zip(found.code.paths, found.code.view_dtypes, strict=True)
        if path.endswith("kernel")
    ]
    assert {str(dtype) for dtype in matrices} == {"float16"}
    # Attention's probabilities are not kept at all.
    assert count(found.program, Kind.RESIDUALS) < 0.5 * count(wide.program, Kind.RESIDUALS)
    assert found.code.fingerprint != wide.code.fingerprint


def test_all_products_and_attentions_of_the_model_are_kernels(state):
    routing = on_backend().lower(state, BATCHES[0]).code.routing
    kinds = [part.kind for part in routing.parts]
    assert kinds.count("attention") == 2
    assert kinds.count("dot_general") == 2 * 6 + 1
    assert not any(part.reason for part in routing.parts)
    assert routing.share > 0.9


@pytest.mark.parametrize(
    ("name", "attentions"),
    [
        ("vit", 4),
        ("unet", 0),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in [("encoder_decoder", 6), ("llama", 4), ("nnx", 4), ("lstm", 0)]
        ),
    ],
)
def test_other_models_lower_with_every_attention_a_kernel_and_a_reason_for_the_rest(
    name, attentions
):
    case, optimizer = CASES[name], OPTIMIZERS["adamw"]()
    step = case.make_step(optimizer, rt.value_and_grad)
    found = rt.train_step(stages=2, microbatches=2, backend="mt3000")(step).lower(
        case.make_state(optimizer), case.make_batch(0, 4)
    )
    routing = found.code.routing
    assert [part.kind for part in routing.parts].count("attention") == attentions
    reasons = {part.reason for part in routing.parts} - {""}
    assert reasons == {
        "vit": {"not a matrix product"},
        "unet": {"not a matrix product"},
        "lstm": {"inside a scan"},
    }.get(name, set())
    assert all(reason in str(found.cost_analysis()) for reason in reasons)


def test_an_unknown_backend_is_refused_with_the_choices():
    with pytest.raises(OptionError, match=r"backend='mt4000' is not known; .* 'xla', 'mt3000'"):
        rt.train_step(backend="mt4000")
