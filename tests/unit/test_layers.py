"""Layers: the cuts of known models, and what must hold of the layers of any loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain_jax.errors import OptionError, StepError, UnsupportedError
from ratrain_jax.lowering.graph import fingerprint
from ratrain_jax.lowering.marks import layer
from tests.layering import (
    FREE_LINK,
    GENERIC,
    X,
    assert_equal_gradients,
    assert_equal_results,
    check_layers,
    count,
    dense_params,
    live_equations,
    names,
    run_layers,
    trace_case,
    trace_loss,
)
from tests.models import CASES

# Rows enough that arithmetic counts for more than reading the parameters, as in a real model.
ROWS = 32

# The layers for two stages.
EXPECTED = {
    "gpt": "embedding block_0 block_1 block_2 block_3 norm",
    "llama": "embedding block_0 block_1 block_2 block_3 norm",
    "vit": "patches block_0 block_1 block_2 block_3",
    "encoder_decoder": "embedding encoder_0 encoder_1 encoder_norm decoder_1 norm",
    "encoder_decoder_untied": "embedding encoder_0 encoder_1 encoder_norm decoder_1 norm",
    "skip_mlp": "dense_0 dense_1 dense_2 dense_4 dense_5 dense_6 dense_7",
    "equal_mlp": " ".join(f"dense_{i}" for i in range(8)),
    "tied_mlp": "embedding shared up_0 up_1 up_2 up_3 down_3/kernel down_3/bias",
    "unet": "down_0 down_1 middle grow_1 grow_0 up_0/conv_1 up_0/conv_2 head",
    "mixer": "patches block_0 block_1 block_2 block_3",
    "lstm": "embedding lstm_0 lstm_1 head",
    "nnx": "embedding blocks/0 blocks/1 blocks/2 blocks/3 norm",
}


@functools.cache
def traced(name):
    return trace_case(CASES[name], ROWS)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_model_is_cut_where_expected(name):
    assert names(traced(name).layers(2)) == EXPECTED[name].split()


def test_blocks_are_opened_for_more_stages_but_not_where_more_bytes_live():
    halves = [f"block_{i}/norm_{half}" for i in range(4) for half in (1, 2)]
    found = names(traced("gpt").layers(4))
    assert found[-8:] == [*halves[1:], "norm"]  # the first half goes with the embedding


@pytest.mark.parametrize("name", EXPECTED)
def test_the_layers_of_a_model_in_a_row_are_its_loss(name):
    loss = traced(name)
    layered = loss.layers(2)
    check_layers(layered, loss)
    assert dots(layered) == count(live_equations(loss), "dot_general")

    @jax.jit
    def both(params, operands):
        return loss.results(params, operands)[0], run_layers(layered, params, operands)[0]

    whole, parts = both(loss.params, loss.operands)
    np.testing.assert_allclose(whole, parts, rtol=1e-6)


def dots(layered):
    return sum(count(layer.program.jaxpr.eqns, "dot_general") for layer in layered.layers)


@pytest.mark.parametrize("stages", [1, 3, 4, 8])
@pytest.mark.parametrize("name", EXPECTED)
def test_any_number_of_stages_gives_sound_layers(name, stages):
    layered = traced(name).layers(stages)
    check_layers(layered, traced(name))
    assert dots(layered) == count(live_equations(traced(name)), "dot_general")


@pytest.mark.parametrize(
    ("name", "equal"),
    [
        ("gpt", "block_0 block_1 block_2 block_3"),
        ("llama", "block_0 block_1 block_2 block_3"),
        ("vit", "block_1 block_2"),
        ("mixer", "block_1 block_2"),
        ("encoder_decoder", "encoder_0 encoder_1"),
        ("equal_mlp", " ".join(f"dense_{i}" for i in range(1, 7))),
        ("nnx", "blocks/0 blocks/1 blocks/2 blocks/3"),
    ],
)
def test_equal_blocks_are_equal_layers(name, equal):
    found = {layer.name: layer for layer in traced(name).layers(2).layers}
    blocks = [found[block] for block in equal.split()]
    assert len({fingerprint(block.program) for block in blocks}) == 1
    assert len({(block.cost, block.seconds) for block in blocks}) == 1


def test_equal_blocks_are_equal_wherever_their_side_values_were_computed():
    def loss(params, x):
        mask = None
        for name in sorted(params):
            x = layer(x, name) @ params[name]
            mask = jnp.cos(X) if mask is None else mask  # in the first block, behind its dot
            x = jnp.tanh(x) * mask
        return x.sum()

    layers = trace_loss(loss, dense_params(4), X).layers(4).layers
    assert len({fingerprint(block.program) for block in layers[:3]}) == 1


def test_a_tied_table_is_owned_once_and_borrowed():
    layers = traced("gpt").layers(2).layers
    table = traced("gpt").paths.index(("embedding", "embedding"))
    assert [layer.name for layer in layers if table in layer.reads] == ["embedding", "norm"]
    assert [layer.name for layer in layers if table in layer.owned] == ["embedding"]


def test_a_value_used_late_passes_over_the_layers_between():
    layered = traced("unet").layers(2)
    place = {name: number for number, name in enumerate(names(layered))}
    late = [v for v in layered.variables if v.readers and v.readers[0] > v.producer + 1]
    # The output of the first block down, whose last activation the next layer begins with.
    assert [(v.producer, v.readers) for v in late] == [(place["down_1"], (place["up_0/conv_1"],))]
    assert late[0].differentiable


def test_the_output_of_an_encoder_goes_to_every_decoder_layer():
    layered = traced("encoder_decoder").layers(4)
    place = {name: number for number, name in enumerate(names(layered))}
    decoders = tuple(place[f"decoder_{i}/norm_2"] for i in range(2))
    encoded = [v for v in layered.variables if decoders[1] in v.readers and len(v.readers) > 1]
    assert [v.readers for v in encoded] == [decoders]
    assert encoded[0].producer < place["decoder_0/norm_1"]


# --- results ---------------------------------------------------------------------------------------


def test_auxiliary_results_come_from_where_they_are_made():
    def loss(params, x, scale):
        first = jnp.tanh(x @ params["l0"])
        total = first.sum()
        first = layer(first, "second")
        last = jnp.tanh(first @ params["l1"]).sum() + total
        return last, total, 3.0, scale, params["l0"][0, 0], last, scale * 2

    traced = trace_loss(loss, dense_params(2), X, np.float32(0.5))
    layered = traced.layers(2)
    check_layers(layered, traced)
    assert [v.producer for v in layered.variables if v.role == "aux"] == [0, 1, 1, 1, 1, 1]
    assert_equal_results(traced, layered)
    assert_equal_gradients(traced, layered)


@pytest.mark.parametrize(
    "loss",
    [
        lambda params, x: (params["l0"] ** 2).sum(),
        lambda params, x: x.sum(),
    ],
    ids=["no operand", "no parameter"],
)
def test_a_loss_that_depends_on_less_is_one_layer(loss):
    traced = trace_loss(loss, dense_params(2), X)
    layered = traced.layers(1)
    check_layers(layered, traced)
    assert len(layered.layers) == 1
    assert_equal_results(traced, layered)


def test_a_loss_that_computes_nothing_is_refused():
    with pytest.raises(StepError, match="computes nothing"):
        trace_loss(lambda params, x: jnp.float32(1.0), dense_params(2), X).layers(1)


def test_a_parameter_that_nothing_reads_is_owned_by_the_first_layer():
    params = {**dense_params(2), "unused": np.ones(3, np.float32)}
    traced = trace_loss(lambda p, x: jnp.tanh(x @ p["l0"] @ p["l1"]).sum(), params, X)
    layered = traced.layers(2)
    check_layers(layered, traced)
    assert 2 in layered.layers[0].owned and 2 not in layered.layers[0].reads


def test_integers_are_not_differentiable():
    def loss(params, x):
        best = jnp.argmax(x @ params["l0"], axis=1)
        return (jax.nn.one_hot(best, 8) * jnp.tanh(x @ params["l1"])).sum()

    layered = trace_loss(loss, dense_params(2), X).layers(2)
    boundary = [v for v in layered.variables if v.role == "boundary"]
    assert [(v.aval.dtype, v.differentiable) for v in boundary] == [(jnp.int32, False)]


def test_a_layer_knows_that_it_was_checkpointed():
    def block(w, x):
        return x + jnp.tanh(x @ w)

    def loss(params, x):
        for name in sorted(params):
            x = (jax.checkpoint(block) if name == "l1" else block)(params[name], x)
        return x.sum()

    layered = trace_loss(loss, dense_params(3), X).layers(3)
    assert [layer.checkpointed for layer in layered.layers] == [False, True, False]


def test_constants_travel_with_their_layers():
    table = jnp.arange(8.0)
    traced = trace_loss(lambda p, x: (x @ p["l0"] @ p["l1"] * table).sum(), dense_params(2), X)
    layered = traced.layers(2)
    assert [len(layer.program.consts) for layer in layered.layers] == [0, 1]


# --- names and marks -------------------------------------------------------------------------------


def test_the_key_of_all_parameters_is_left_out_of_names():
    def loss(variables, x):
        return marked(variables["params"], x, {})

    traced = trace_loss(loss, {"params": dense_params(3)}, X)
    assert names(traced.layers(3)) == ["l0", "l1", "l2"]


def test_a_backbone_behind_a_narrow_neck_is_opened():
    """Its inner cuts are heavier than its end: it must be cut there nevertheless."""

    def loss(params, x):
        for name in sorted(params["net"]):
            x = jnp.tanh(x @ params["net"][name])
        return (x[:, :1] @ params["head"]).sum()

    params = {"net": dense_params(8), "head": np.ones((1, 1), np.float32)}
    assert names(trace_loss(loss, params, X).layers(4)) == [
        *(f"net/l{i}" for i in range(8)),
        "head",
    ]


@pytest.mark.parametrize("layers", [4, 6, 10, 14])
def test_equal_blocks_at_the_bound_are_opened_all_or_none(layers):
    """Each block costs just half an even share, however the sums are rounded."""
    rng = np.random.default_rng(0)
    params = {
        f"l{i:02}": {"a": rng.standard_normal((8, 8)), "b": rng.standard_normal((8, 8))}
        for i in range(layers)
    }

    def loss(params, x):
        for name in sorted(params):
            x = (x @ params[name]["a"]) @ params[name]["b"]
        return x

    found = names(trace_loss(loss, params, X).layers(layers // 2))
    assert found == sorted(params)


def marked(params, x, marks):
    for name in sorted(params):
        x = layer(x, marks[name]) if name in marks else x
        x = jnp.tanh(x @ params[name])
    return x.sum()


def test_marks_replace_the_cuts_that_would_be_found():
    marks = {"l1": "middle", "l3": "end"}
    traced = trace_loss(functools.partial(marked, marks=marks), dense_params(5), X)
    layered = traced.layers(4)
    check_layers(layered, traced)
    assert [(la.name, la.reads) for la in layered.layers] == [
        ("l0", (0,)),
        ("middle", (1, 2)),
        ("end", (3, 4)),
    ]
    assert_equal_results(traced, layered)


def test_marks_leave_no_trace_in_the_code():
    marks = {f"l{i}": f"block_{i}" for i in range(4)}
    traced = trace_loss(functools.partial(marked, marks=marks), dense_params(4), X)
    layers = traced.layers(4).layers
    assert [la.name for la in layers] == [f"block_{i}" for i in range(4)]
    assert len({fingerprint(la.program) for la in layers[:3]}) == 1


def test_the_layer_before_the_first_mark_takes_no_name_that_is_taken():
    traced = trace_loss(functools.partial(marked, marks={"l1": "l0"}), dense_params(3), X)
    assert names(traced.layers(2)) == ["l0/input", "l0"]


def test_marks_of_one_name_are_refused():
    marks = {"l1": "block", "l2": "block"}
    traced = trace_loss(functools.partial(marked, marks=marks), dense_params(3), X)
    with pytest.raises(OptionError, match="two layers are marked 'block'"):
        traced.layers(2)


def test_marks_of_one_name_are_two_passes_through_a_layer():
    def loss(params, x, y):
        def net(x):
            x = layer(x, "first") @ params["l0"]
            return jnp.tanh(layer(jnp.tanh(x) * 2, "second") @ params["l1"] @ params["l2"])

        return jnp.mean((net(x) - net(y)) ** 2)

    traced = trace_loss(loss, dense_params(3), X, X[::-1])
    layered = traced.layers(2)
    check_layers(layered, traced)
    assert names(layered) == ["first", "second"]
    assert [found.reads for found in layered.layers] == [(0,), (1, 2)]
    assert_equal_gradients(traced, layered)


def test_a_mark_with_nothing_behind_it_is_refused():
    def loss(params, x):
        x = layer(layer(jnp.tanh(x @ params["l0"]), "one"), "two")
        return (x @ params["l1"]).sum()

    with pytest.raises(OptionError, match="'one' is empty"):
        trace_loss(loss, dense_params(2), X).layers(2)


def test_a_mark_inside_a_loop_is_refused():
    def loss(params, x):
        body = lambda x, _: (layer(jnp.tanh(x @ params["l0"]), "turn"), None)  # noqa: E731
        return jax.lax.scan(body, x, None, 3)[0].sum()

    with pytest.raises(UnsupportedError, match="'turn' begins inside a `scan`"):
        trace_loss(loss, dense_params(1), X).layers(2)


# --- any loss --------------------------------------------------------------------------------------


STEPS = {
    "dense": lambda a, b, group, other: jnp.tanh(a @ group["w"]),
    "bias": lambda a, b, group, other: a + jnp.sin(group["b"]),
    "add": lambda a, b, group, other: a + b,
    "mul": lambda a, b, group, other: a * jnp.tanh(b),
    "mask": lambda a, b, group, other: jnp.where(jnp.cos(other) > 0.5, a, b),
    "hard": lambda a, b, group, other: a * (b > 0),
    "norm": lambda a, b, group, other: a / (1 + (group["w"] ** 2).sum()),
}


@st.composite
def losses(draw):
    """A random network over values of one shape: steps that name earlier values; and settings."""
    steps = []
    for number in range(draw(st.integers(2, 12))):
        kind = draw(st.sampled_from(["dense", *STEPS]))
        group = draw(st.integers(0, 4))
        one, two = (draw(st.integers(0, number)) for _ in range(2))
        steps.append((kind, group, one, two))
    return steps, draw(st.booleans()), draw(st.integers(1, 4))


def random_loss(steps, params, x, other):
    values = [x]
    for kind, group, one, two in steps:
        made = STEPS[kind](values[one], values[two], params[f"g{group}"], other)
        values.append(made)
    return (values[-1] ** 2).mean(), values[1].sum(), values[len(values) // 2].mean()


@settings(max_examples=25)
@given(losses())
def test_the_layers_of_any_loss_in_a_row_are_the_loss(drawn):
    steps, free, stages = drawn
    rng = np.random.default_rng(0)
    params = {
        f"g{i}": {
            "w": rng.standard_normal((8, 8)).astype(np.float32),
            "b": rng.standard_normal(8).astype(np.float32),
        }
        for i in range(5)
    }
    traced = trace_loss(functools.partial(random_loss, steps), params, X, X * 3)
    layered = traced.layers(stages, FREE_LINK if free else GENERIC)
    check_layers(layered, traced)
    assert_equal_results(traced, layered)
    assert_equal_gradients(traced, layered)
