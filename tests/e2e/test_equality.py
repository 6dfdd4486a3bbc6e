"""A pipelined step trains as the plain step does: the same losses and states after 20 steps.

The reference is `jax.jit` of the undecorated step on one device. In float32 each leaf's difference
is at most 1e-5 of its norm; in float64, where rounding leaves more room, each element's difference
is at most 1e-9 of the leaf's largest value. The configurations are a pairwise covering array; with the
`slow` marker all combinations run.
"""

import functools

import jax
import numpy as np
import pytest

import ratrain_jax as rt
from tests.models.case import OPTIMIZERS, linen_case
from tests.models.encoder_decoder import EncoderDecoder
from tests.models.encoder_decoder import loss as encoder_decoder_loss
from tests.models.encoder_decoder import make_batch as make_pairs
from tests.models.gpt import GPT, make_batch
from tests.models.gpt import loss as token_loss
from tests.models.images import ViT, label_loss, make_labelled
from tests.models.llama import Llama
from tests.models.mlp import SKIP_MLP_CASE
from tests.pairwise import pairwise, product
from tests.training import named_leaves, train

STEPS = 20

text = functools.partial(linen_case, inputs=("inputs",), loss=token_loss, make_batch=make_batch)
MODELS = {
    "gpt": text("gpt", GPT(width=8, layers=2)),
    "llama": text("llama", Llama(width=8, heads=2, groups=1, hidden=24, layers=2)),
    "vit": linen_case(
        "vit",
        ViT(width=8, layers=2, patch=8),
        inputs=("images",),
        loss=label_loss,
        make_batch=make_labelled,
    ),
    "encoder-decoder": linen_case(
        "encoder_decoder",
        EncoderDecoder(share_embedding=True, width=8, layers=1),
        inputs=("source", "inputs"),
        loss=encoder_decoder_loss,
        make_batch=make_pairs,
    ),
    "skip mlp": SKIP_MLP_CASE,
}
FACTORS = {
    "model": list(MODELS),
    "optimizer": ["adamw", "sgd", "lion"],
    "stages": [1, 2, 3, 4],
    "data_parallel": [1, 2, 3, 4],
    "microbatches": [1, 2, 3, 8],
    "zero": [1, 2],
    "dtype": ["float32", "float64"],
}
SPLIT = ("stages", "data_parallel", "microbatches", "zero")


@pytest.fixture
def precision():
    """Sets the default float type. The context manager would not reach the runtime's threads."""

    def use(dtype):
        jax.config.update("jax_enable_x64", dtype == "float64")

    yield use
    use("float32")


def name_of(row):
    return "-".join(str(value) for value in row.values())


def check(row):
    case, optimizer = MODELS[row["model"]], OPTIMIZERS[row["optimizer"]]()
    rows = 2 * row["data_parallel"] * row["microbatches"]
    batches = [case.make_batch(seed, rows) for seed in range(STEPS)]
    state = case.make_state(optimizer)
    options = {name: row[name] for name in SPLIT}
    piped = rt.train_step(**options)(case.make_step(optimizer, rt.value_and_grad))
    found = train(piped, state, batches)
    plain = jax.jit(case.make_step(optimizer, jax.value_and_grad))
    wanted = train(plain, state, batches)
    compare = {"float32": compare_norms, "float64": compare_elements}[row["dtype"]]
    compare(found, wanted)


def compare_norms(found, wanted):
    np.testing.assert_allclose(found.losses(), wanted.losses(), rtol=1e-5, atol=0)
    theirs = named_leaves(wanted.state)
    for name, ours in named_leaves(found.state).items():
        assert ours.dtype == theirs[name].dtype
        wide, reference = ours.astype(np.float64), theirs[name].astype(np.float64)
        difference = np.linalg.norm(wide - reference)
        assert difference <= 1e-5 * np.linalg.norm(reference), name


def compare_elements(found, wanted):
    np.testing.assert_allclose(found.losses(), wanted.losses(), rtol=1e-9, atol=0)
    theirs = named_leaves(wanted.state)
    for name, ours in named_leaves(found.state).items():
        assert ours.dtype == theirs[name].dtype
        assert name.endswith("count") or "step" in name or ours.dtype == np.float64
        largest = np.abs(theirs[name]).max()
        assert np.abs(ours - theirs[name]).max() <= 1e-9 * largest, name


@pytest.mark.parametrize("row", pairwise(FACTORS), ids=name_of)
def test_trains_as_plain_jit_does(row, precision):
    precision(row["dtype"])
    check(row)


FIXED = {name: FACTORS[name] for name in ("model", "optimizer", "stages", "dtype")}
FREE = {
    "data_parallel": FACTORS["data_parallel"],
    "microbatches": list(range(1, 9)),
    "zero": FACTORS["zero"],
}


@pytest.mark.slow
@pytest.mark.parametrize("fixed", product(FIXED), ids=name_of)
def test_all_combinations_train_as_plain_jit_does(fixed, precision):
    precision(fixed["dtype"])
    failed = {}
    for free in product(FREE):
        try:
            check({**fixed, **free})
        except AssertionError as error:
            failed[name_of(free)] = str(error)
        finally:
            jax.clear_caches()
    assert failed == {}
