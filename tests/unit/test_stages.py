"""Stages: the best split against all splits, known balances, boundaries by name and their errors."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain_jax.errors import LayoutError
from ratrain_jax.lowering.cost import Cost, aval_bytes
from ratrain_jax.lowering.layers import Layer, LayeredLoss, LossVariable
from ratrain_jax.lowering.stages import SLACK, split_stages
from tests.layering import GENERIC, trace_loss

NO_CODE = jax.make_jaxpr(lambda: ())()


def layered(seconds, variables=(), names=None):
    """Layers of given seconds; variables are (bytes, producer, readers, differentiable)."""
    names = names or [f"layer_{i}" for i in range(len(seconds))]
    layers = tuple(
        Layer(name, (), (), (), (), (), (), NO_CODE, Cost(), cost, False)
        for name, cost in zip(names, seconds, strict=True)
    )
    made = tuple(
        LossVariable(jax.ShapeDtypeStruct((size,), np.uint8), producer, readers, grad, "boundary")
        for size, producer, readers, grad in variables
    )
    return LayeredLoss(layers, made)


def split(loss, stages, **options):
    return split_stages(loss, stages, machine=GENERIC, **options)


def bottleneck(loss, stage_of):
    return max(
        sum(layer.seconds for layer, own in zip(loss.layers, stage_of, strict=True) if own == stage)
        for stage in set(stage_of)
    )


def traffic(loss, stage_of):
    total = 0
    for variable in loss.variables:
        sender = stage_of[variable.producer]
        receivers = {stage_of[reader] for reader in variable.readers} - {sender}
        ways = 2 if variable.differentiable else 1
        total += len(receivers) * ways * aval_bytes(variable.aval)
    return total


def all_splits(count, stages):
    for firsts in itertools.combinations(range(1, count), stages - 1):
        yield tuple(sum(first <= layer for first in firsts) for layer in range(count))


@st.composite
def losses(draw):
    count = draw(st.integers(1, 8))
    seconds = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    variables = []
    for producer in range(count - 1):
        readers = draw(st.sets(st.integers(producer + 1, count - 1), min_size=1, max_size=3))
        size, grad = draw(st.integers(1, 9)), draw(st.booleans())
        variables.append((size, producer, tuple(sorted(readers)), grad))
    return layered(seconds, variables), draw(st.integers(1, count))


@given(losses())
def test_no_split_is_better(drawn):
    loss, stages = drawn
    found = split(loss, stages)
    options = list(all_splits(len(loss.layers), stages))
    assert found in options
    least = min(bottleneck(loss, other) for other in options)
    good = [other for other in options if bottleneck(loss, other) <= SLACK * least]
    assert found in good
    assert traffic(loss, found) == min(traffic(loss, other) for other in good)


@pytest.mark.parametrize(("layers", "stages", "most"), [(7, 2, 4), (30, 4, 8), (40, 16, 3)])
def test_layers_that_do_not_divide_are_placed_once_each(layers, stages, most):
    stage_of = split(layered([1.0] * layers), stages)
    assert list(stage_of) == sorted(stage_of) and len(stage_of) == layers
    counts = [stage_of.count(stage) for stage in range(stages)]
    assert min(counts) >= 1 and max(counts) == most


def test_of_equal_bottlenecks_the_one_with_less_traffic_is_taken():
    chain = [(9, 0, (1,), True), (1, 1, (2,), True)]
    assert split(layered([2.0, 2.0, 2.0], chain), 2) == (0, 0, 1)
    assert split(layered([2.0, 2.0, 2.0]), 2) == (0, 1, 1)
    # A hundredth slower is as good as equal, two hundredths are not.
    assert split(layered([1.0, 0.01, 0.995], chain), 2) == (0, 0, 1)
    assert split(layered([1.0, 0.02, 0.98], chain), 2) == (0, 1, 1)


def test_a_gradient_that_comes_back_counts_as_much_as_what_was_sent():
    seconds = [2.0, 2.0, 2.0]
    assert split(layered(seconds, [(5, 0, (1,), False), (3, 1, (2,), True)]), 2) == (0, 1, 1)
    assert split(layered(seconds, [(5, 0, (1,), False), (3, 1, (2,), False)]), 2) == (0, 0, 1)


def test_a_variable_is_sent_once_to_each_stage_that_reads_it():
    # The skip from layer 0 costs the same wherever the cuts are; the chain decides.
    skip = (100, 0, (2, 3), True)
    loss = layered([2.0, 1.0, 1.0, 2.0], [skip, (5, 0, (1,), True), (1, 1, (2,), True)])
    assert split(loss, 2) == (0, 0, 1, 1)


def test_a_large_vocabulary_leaves_the_end_stages_fewer_layers():
    def loss(params, tokens, targets):
        x = params["embedding"][tokens]
        for i in range(16):
            x = x + jax.nn.gelu(x @ params[f"h_{i}"]["up"]) @ params[f"h_{i}"]["down"]
        logits = jax.nn.log_softmax(x @ params["head"])
        return -jax.numpy.take_along_axis(logits, targets[..., None], 2).mean()

    def like(*shape):
        return jax.ShapeDtypeStruct(shape, np.float32)

    width, vocabulary = 256, 8192
    params = {f"h_{i}": {"up": like(width, 1024), "down": like(1024, width)} for i in range(16)}
    params |= {"embedding": like(vocabulary, width), "head": like(width, vocabulary)}
    tokens = jax.ShapeDtypeStruct((1, 64), np.int32)
    layers = trace_loss(loss, params, tokens, tokens).layers(4)
    stage_of = split(layers, 4)
    blocks = [
        sum(
            layers.layers[i].name.startswith("h_") for i, own in enumerate(stage_of) if own == stage
        )
        for stage in range(4)
    ]
    assert sum(blocks) == 16 and blocks[0] < blocks[1] and blocks[3] < blocks[2]


NAMES = ["embedding", "h_0", "h_1/attention", "h_1/mlp", "h_10", "norm"]


def named(*boundaries):
    loss = layered([1.0] * len(NAMES), names=NAMES)
    return split(loss, len(boundaries) + 1, boundaries=boundaries)


def test_boundaries_name_the_first_layer_of_each_stage():
    assert named("h_0", "norm") == (0, 1, 1, 1, 1, 2)
    assert named() == (0,) * 6


def test_a_group_that_was_opened_may_be_named():
    assert named("h_1") == (0, 0, 1, 1, 1, 1)
    assert named("h_10") == (0, 0, 0, 0, 1, 1)


def test_an_unknown_boundary_is_refused_with_what_was_meant():
    with pytest.raises(LayoutError) as caught:
        named("h_1/atention")
    message = str(caught.value)
    assert "'h_1/atention'" in message and "Did you mean 'h_1/attention'?" in message
    assert ", ".join(NAMES) in message


@pytest.mark.parametrize(
    "boundaries", [("norm", "h_0"), ("h_0", "h_0"), ("embedding",), ("h_1", "h_1/attention")]
)
def test_boundaries_that_leave_a_stage_empty_are_refused(boundaries):
    with pytest.raises(LayoutError, match="leave a stage without layers"):
        named(*boundaries)


@pytest.mark.parametrize("boundaries", [["h_0"], ["h_0", "h_10", "norm"], "h_0"])
def test_a_wrong_number_of_boundaries_is_refused(boundaries):
    loss = layered([1.0] * len(NAMES), names=NAMES)
    with pytest.raises(LayoutError, match="3 stages need a list of 2 names"):
        split(loss, 3, boundaries=boundaries)


def test_more_stages_than_layers_are_refused_with_the_numbers():
    with pytest.raises(LayoutError, match=r"4 stages need 4 layers .* has 3: .* Use stages=3"):
        split(layered([1.0] * 3), 4)
