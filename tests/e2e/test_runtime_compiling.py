"""How a step is compiled: verified before, each executable once, and nothing more after the first steps."""

import dataclasses
import gc

import jax
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import StepError, VerificationError
from ratrain_jax.lowering import lower
from ratrain_jax.lowering.program import Backward
from tests.dense import decorated as decorated
from tests.dense import layout as layout
from tests.dense import make_batch, make_params, make_state, mean_square, sgd_step, stack
from tests.training import assert_close


def test_nothing_is_compiled_after_the_first_steps(decorated):
    compiled = []

    def count(event, _, **__):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    state = make_state()
    for n in range(2):  # the first takes the user's arrays, the second its own
        state, _ = decorated(state, make_batch(n))
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        for n in range(3):
            state, metrics = decorated(state, make_batch(n))
        assert compiled == []
        jax.jit(lambda x: x + 1)(metrics["loss"])
        assert len(compiled) == 1
    finally:
        jax.monitoring.unregister_event_duration_listener(count)


def test_a_loss_cached_in_a_jit_outside_is_still_found():
    """Its trace is reused by the step, which must find the loss in it."""

    @jax.jit
    def loss_and_grads(params, batch):
        return rt.value_and_grad(lambda p: mean_square(p, batch["x"], batch["y"]))(params)

    params, batch = make_params(), make_batch()
    loss, grads = loss_and_grads(params, batch)

    @rt.train_step(stages=2)
    def step(params, batch):
        value, grads = loss_and_grads(params, batch)
        return grads, value

    found, value = step(params, batch)
    assert_close((found, value), (grads, loss))

    @rt.train_step()
    def without(params, batch):
        return jax.jit(jax.grad(lambda p: mean_square(p, batch["x"], batch["y"])))(params)

    with pytest.raises(StepError):
        without(params, batch)


def test_equal_layers_share_one_executable():
    counts = {}
    for ranks in (1, 2):
        for layers in (9, 13):
            state, batch = make_params(layers), make_batch()
            step = rt.train_step(data_parallel=ranks, microbatches=2)(stack(layers))
            compiled = step.lower(state, batch).compile()
            counts[ranks, layers] = compiled.executables
            gc.collect()
    assert counts[1, 9] == counts[1, 13]
    assert counts[2, 9] == counts[2, 13]


def test_progress_tells_of_every_executable(capsys):
    lowered = rt.train_step(stages=2, microbatches=2)(sgd_step).lower(make_state(), make_batch())
    told = []
    compiled = lowered.compile(progress=lambda done, total: told.append((done, total)))
    assert told == [(n, compiled.executables) for n in range(1, compiled.executables + 1)]
    lowered.compile()
    assert capsys.readouterr().err == ""  # standard error is no terminal
    lowered.compile(progress=True)
    assert "compiling" in capsys.readouterr().err


def test_compiler_options_reach_the_compiler():
    lowered = rt.train_step(stages=2, microbatches=2)(sgd_step).lower(make_state(), make_batch())
    one = lowered.compile()
    other = lowered.compile({"xla_cpu_enable_fast_math": True})
    assert one._library is not other._library
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        lowered.compile({"xla_no_such_option": True})


def test_every_lowered_program_is_verified(monkeypatch):
    right = lower.program_within_limit

    def short_of_an_op(*args):
        program = right(*args)
        first, *others = program.order
        dropped = next(op for op in first if isinstance(op, Backward))
        kept = tuple(op for op in first if op is not dropped)
        return dataclasses.replace(program, order=(kept, *others))

    monkeypatch.setattr(lower, "program_within_limit", short_of_an_op)
    with pytest.raises(VerificationError, match="has no Backward"):
        rt.train_step(stages=2, microbatches=2)(sgd_step).lower(make_state(), make_batch())
