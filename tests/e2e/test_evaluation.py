"""`eval_step`: forward only, through the stages of a train step, against `jax.jit` of the same function."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import BatchError, OptionError, StepError
from ratrain_jax.lowering.jsonform import from_json
from ratrain_jax.lowering.program import Forward, Kind, Metrics, SendActivation
from ratrain_jax.lowering.text import parse
from ratrain_jax.lowering.verify import verify
from tests.models.case import OPTIMIZERS, linen_case
from tests.models.gpt import GPT, loss, make_batch
from tests.models.llama import Llama
from tests.models.scanned import mlp_case
from tests.training import TWO_BY_TWO, assert_close, differing, train

SMALL = {"width": 8, "layers": 2, "heads": 2}


def text(name, model):
    return linen_case(name, model, inputs=("inputs",), loss=loss, make_batch=make_batch)


CASE = text("small_llama", Llama(groups=1, hidden=24, **SMALL))
TIED_CASE = text("small_gpt", GPT(**SMALL))
ROUNDING = 5e-6  # of logits of size 1 to 3
LAYOUTS = [{"stages": 3, "microbatches": 2}, {**TWO_BY_TWO, "zero": 2}]


def piped(case, optimizer, **layout):
    return rt.train_step(**layout)(case.make_step(optimizer, rt.value_and_grad))


def scores(state, batch):
    """Results of every sort: a mean, a count, rows, what no layer makes, and what stands in no batch."""
    logits = state.apply_fn({"params": state.params}, batch["inputs"])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return {
        "loss": each.mean(),
        "hits": (logits.argmax(-1) == batch["targets"]).sum(),
        "logits": logits,
        "targets": batch["targets"],
        "count": batch["targets"].shape[0],  # the first of them
        "tokens": jnp.float32(batch["targets"].size) / 2,
        "step": state.step,
        "largest": jnp.abs(state.params["norm"]["scale"]).max(),
        "fixed": np.arange(3),
    }


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_before_and_after_training_it_gives_what_jit_gives(layout):
    optimizer = OPTIMIZERS["adamw"]()
    step = piped(CASE, optimizer, **layout)
    evaluate, plain = rt.eval_step(step)(scores), jax.jit(scores)
    state, batch = CASE.make_state(optimizer), CASE.make_batch(0, 8)
    assert_close(evaluate(state, batch), plain(state, batch), ROUNDING)
    for seed in range(2):
        state, _ = step(state, CASE.make_batch(seed, 8))
    assert_close(evaluate(state, batch), plain(rt.gather(state), batch), ROUNDING)


def test_a_tied_table_is_borrowed():
    optimizer = OPTIMIZERS["adamw"]()
    step = piped(TIED_CASE, optimizer, stages=3, microbatches=2)

    @rt.eval_step(step)
    def logits(state, batch):
        return state.apply_fn({"params": state.params}, batch["inputs"])

    state, batch = TIED_CASE.make_state(optimizer), TIED_CASE.make_batch(0, 4)
    state, _ = step(state, batch)
    assert any(layer.borrows for layer in logits.lower(state, batch).program.layers)
    assert_close(
        logits(state, batch), jax.jit(logits.__wrapped__)(rt.gather(state), batch), ROUNDING
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_goes_on_as_if_there_had_been_no_evaluation(layout):
    """At another sequence length and another number of rows."""
    optimizer = OPTIMIZERS["adamw"]()
    step = piped(CASE, optimizer, **layout)
    evaluate = rt.eval_step(step)(scores)
    batches = [CASE.make_batch(seed, 8) for seed in range(6)]
    start = CASE.make_state(optimizer)
    wanted = train(step, start, batches)
    state, metrics = start, []
    for batch in batches:
        state, made = step(state, batch)
        metrics.append(made)
        short = jax.tree.map(lambda leaf: leaf[:4, :5], batch)
        twice = [evaluate(state, short) for _ in range(2)]
        assert differing(*twice) == []
    assert differing(metrics, wanted.metrics) == []
    assert differing(state, wanted.state) == []


def test_layers_run_where_training_keeps_their_parameters():
    optimizer = OPTIMIZERS["adamw"]()
    batch = CASE.make_batch(0, 4)
    state = CASE.make_state(optimizer)
    layers = [layer.name for layer in piped(CASE, optimizer).lower(state, batch).program.layers]
    # No split that would be chosen: the first stage has one layer.
    step = piped(CASE, optimizer, stages=2, microbatches=2, boundaries=layers[1:2])

    @rt.eval_step(step)
    def logits(state, batch):
        return state.apply_fn({"params": state.params}, batch["inputs"])

    def stages(lowered):
        return {name: layer.stage for layer in lowered.program.layers for name in layer.parameters}

    assert stages(logits.lower(state, batch)) != stages(step.lower(state, batch))
    assert stages(logits.lower(state, batch)) == stages(step.lower(state, batch))


def test_the_program_goes_forward_only_and_needs_less_memory():
    optimizer = OPTIMIZERS["adamw"]()
    step = piped(CASE, optimizer, **TWO_BY_TWO)
    state, batch = CASE.make_state(optimizer), CASE.make_batch(0, 16)
    trained = step.lower(state, batch)

    @rt.eval_step(step)
    def loss(state, batch):
        logits = state.apply_fn({"params": state.params}, batch["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    lowered = loss.lower(state, batch)
    program = lowered.program
    moving = [type(op) for op in program.ops() if type(op) in (Forward, SendActivation, Metrics)]
    blocks = {(layer.stage, layer.block) for layer in program.layers}
    assert moving.count(Forward) == 2 * len(blocks)
    assert moving.count(Metrics) == 1
    kinds = {value.kind for value in program.values if value.bytes}
    assert kinds.isdisjoint({Kind.RESIDUALS, Kind.COTANGENT, Kind.ACCUMULATOR, Kind.OPTIMIZER})
    ours, theirs = lowered.memory_analysis().peaks, trained.memory_analysis().peaks
    assert all(less < more for less, more in zip(ours, theirs, strict=True))
    assert parse(lowered.as_text()) == program == from_json(lowered.as_json())
    verify(program)
    result, census = lowered.compile().census(state, batch)
    assert float(result) == float(loss(state, batch))
    assert census.largest_difference <= 0.02


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_nothing_of_the_state_is_used_up(layout):
    optimizer = OPTIMIZERS["adamw"]()
    state, batch = CASE.make_state(optimizer), CASE.make_batch(0, 4)
    step = piped(CASE, optimizer, **layout)
    evaluate = rt.eval_step(step)(scores)
    state, _ = step(state, batch)
    before = jax.tree.map(np.array, state)
    evaluate(state, batch)
    assert differing(before, state) == []
    step(state, batch)


@pytest.mark.parametrize("layout", ["stacked", "layers"])
def test_stacked_layers(layout):
    case, optimizer = mlp_case(), optax.sgd(0.1, momentum=0.9)
    step = piped(case, optimizer, **TWO_BY_TWO, state_layout=layout)
    state, batch = case.make_state(optimizer), case.make_batch(0, 8)

    @rt.eval_step(step)
    def norms(state, batch):
        with_loss = case.make_step(optimizer, jax.value_and_grad)
        return with_loss(state, batch)[1]["loss"]

    wanted = jax.jit(norms.__wrapped__)
    assert_close(norms(state, batch), wanted(state, batch), ROUNDING)
    state, _ = step(state, batch)
    assert_close(norms(state, batch), wanted(rt.gather(state), batch), ROUNDING)
    stages = [layer.stage for layer in norms.lower(state, batch).program.layers]
    assert stages == [layer.stage for layer in step.lower(state, batch).program.layers]


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, training):
        for _ in range(3):
            x = nn.Dense(6)(x)
            x = nn.BatchNorm(use_running_average=not training, momentum=0.5)(x)
            x = nn.Dropout(0.5, deterministic=not training)(nn.tanh(x))
        return x


def test_running_averages_are_read_and_dropout_is_off():
    net = Normed()
    x = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)

    @rt.train_step(**TWO_BY_TWO)
    def step(state, batch):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state["batch_stats"]}
            rngs = {"dropout": rt.microbatch_key(jax.random.key(0))}
            out, new = net.apply(variables, batch, True, mutable=["batch_stats"], rngs=rngs)
            return (out**2).mean(), new["batch_stats"]

        (loss, stats), grads = rt.value_and_grad(loss_fn, has_aux=True)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params, "batch_stats": stats}, loss

    @rt.eval_step(step)
    def predict(state, batch):
        return net.apply(state, batch, False)

    state = {**net.init(jax.random.key(1), x, False)}
    for _ in range(2):
        assert_close(predict(state, x), jax.jit(predict.__wrapped__)(rt.gather(state), x), ROUNDING)
        state, _ = step(state, x)


def test_it_runs_on_the_kernels_of_the_train_steps_backend():
    optimizer = OPTIMIZERS["adamw"]()
    step = piped(CASE, optimizer, stages=2, microbatches=2, backend="mt3000")
    state, batch = CASE.make_state(optimizer), CASE.make_batch(0, 4)
    evaluate = rt.eval_step(step)(scores)
    lowered = evaluate.lower(state, batch)
    assert lowered.code.routing is not None
    ours, theirs = evaluate(state, batch)["loss"], jax.jit(scores)(state, batch)["loss"]
    assert ours != theirs
    np.testing.assert_allclose(ours, theirs, rtol=5e-3)


def test_microbatches_and_batch_arguments_of_its_own():
    @rt.train_step(stages=2, data_parallel=2, microbatches=4)
    def step(params, batch):
        loss, grads = rt.value_and_grad(lambda p: (predict(p, batch) ** 2).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    def predict(params, x):
        for kernel in params.values():
            x = jnp.tanh(x @ kernel)
        return x

    @rt.eval_step(step, microbatches=1, batch_argnums=(1,))
    def scaled(params, batch, scale):
        return predict(params, batch) * scale

    params = {f"layer_{n}": np.eye(4, dtype=np.float32) for n in range(3)}
    batch, scale = np.ones((2, 4), np.float32), np.arange(4, dtype=np.float32)
    np.testing.assert_allclose(
        scaled(params, batch, scale), predict(params, batch) * scale, rtol=1e-6
    )
    with pytest.raises(BatchError, match="batch of 3 does not divide"):
        scaled(params, np.ones((3, 4), np.float32), scale)


# Errors.


def test_what_is_no_train_step_is_refused():
    with pytest.raises(OptionError, match=r"decorated with ratrain_jax\.train_step"):
        rt.eval_step(lambda state: state)


def test_an_evaluation_that_reads_no_parameter_is_refused():
    optimizer = OPTIMIZERS["sgd"]()
    step = piped(CASE, optimizer)
    count = rt.eval_step(step)(lambda state, batch: state.step + batch["inputs"].sum())
    with pytest.raises(StepError, match=r"reads no parameter.*jax\.jit"):
        count(CASE.make_state(optimizer), CASE.make_batch(0, 2))
