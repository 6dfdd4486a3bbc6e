"""Small real profiles: every op of the program is in them, and the caller's state is left as it was."""

import jax
import numpy as np
import optax
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import OptionError, StateError
from ratrain_jax.lowering.program import Free
from tests.models import CASES
from tests.models.scanned import scanned_gpt
from tests.training import differing

OPTIONS = [
    {},
    {"stages": 2, "microbatches": 2, "recovery": "forward"},
    {"data_parallel": 2, "microbatches": 2, "zero": 2},
    {"stages": 2, "data_parallel": 2, "microbatches": 2, "schedule": "1f1b"},
]


def make(options, name="gpt", optimizer=None):
    case = CASES[name] if name in CASES else scanned_gpt(name, width=8)
    optimizer = optax.adam(1e-3) if optimizer is None else optimizer
    step = rt.train_step(**options)(case.make_step(optimizer, rt.value_and_grad))
    return step, case.make_state(optimizer), case.make_batch(0, 8)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_op_of_the_program_is_found_and_can_be_simulated(options):
    step, state, batch = make(options)
    lowered = step.lower(state, batch)
    told = []
    profile = rt.profile(
        lowered.compile(),
        state,
        batch,
        repetitions=1,
        progress=lambda done, total: told.append((done, total)),
    )
    assert told[-1] == (1, 1)
    assert profile.missing(lowered) == ()
    assert profile.fingerprint == lowered.program.fingerprint
    assert (profile.platform, profile.device_count) == ("cpu", jax.device_count())
    seconds = profile.seconds(lowered)
    assert all(seconds(op) >= 0 for op in lowered.program.ops() if not isinstance(op, Free))
    assert rt.simulate(lowered, "cpu", profile=profile).step_seconds > 0
    busy = [number for number, _ in profile.slowdowns]
    ranks = options.get("data_parallel", 1)
    assert busy == [ranks * n for n in range(1, options.get("stages", 1) + 1)]
    assert all(factor > 0 for _, factor in profile.slowdowns)
    kinds = {line.kind for line in profile.lines}
    assert ("Send" in kinds) == (options.get("stages", 1) > 1)
    assert ("GradSync" in kinds) == (ranks > 1) == ("PrefetchView" in kinds)


@pytest.mark.parametrize("name", ["gpt", "scanned"])
def test_training_goes_on_from_a_profiled_state_as_if_nothing_had_been(name):
    options = {"stages": 2, "data_parallel": 2, "microbatches": 2, "donate_state": True}
    step, state, batch = make(options, name)
    compiled = step.lower(state, batch).compile()
    first, _ = compiled(state, batch)
    before = jax.tree.map(np.asarray, first)
    rt.profile(compiled, first, batch, repetitions=1)
    assert not differing(first, before)
    second, metrics = compiled(first, batch)
    plain, _ = compiled(state, batch)
    again, expected = compiled(plain, batch)
    assert not differing(second, again)
    assert not differing(metrics, expected)


def test_a_profile_serves_other_schedules_recoveries_and_microbatches_of_the_same_layers():
    step, state, batch = make({"stages": 2, "microbatches": 2})
    lowered = step.lower(state, batch)
    profile = rt.profile(lowered, state, batch, repetitions=1)
    for options in ({"schedule": "gpipe"}, {"schedule": "1f1b", "recovery": "backward"}):
        other, _, _ = make({"stages": 2, "microbatches": 2, **options})
        assert profile.missing(other.lower(state, batch)) == ()
    more, _, _ = make({"stages": 2, "microbatches": 4})
    doubled = jax.tree.map(lambda rows: np.concatenate([rows, rows]), batch)
    lowered = more.lower(state, doubled)
    kinds = {key.kind for key in profile.missing(lowered)}
    assert kinds.isdisjoint({"Forward", "Backward", "Send", "UpdateShard", "ZeroGradient"})
    assert rt.simulate(lowered, "cpu", profile=profile).step_seconds > 0


def test_a_step_that_only_evaluates_can_be_profiled():
    def predict(weights, batch):
        return rt.layer(batch @ weights["a"], "b") @ weights["b"]

    @rt.train_step(stages=2, microbatches=2)
    def step(weights, batch):
        loss, grads = rt.value_and_grad(lambda w: (predict(w, batch) ** 2).mean())(weights)
        return jax.tree.map(lambda w, g: w - g, weights, grads), loss

    weights = {name: jax.numpy.ones((4, 4)) for name in "ab"}
    batch = np.ones((4, 4), np.float32)
    step(weights, batch)
    evaluation = rt.eval_step(step)(predict)
    lowered = evaluation.lower(weights, batch)
    profile = rt.profile(lowered, weights, batch, repetitions=1)
    assert profile.missing(lowered) == ()
    assert rt.simulate(lowered, "cpu", profile=profile).step_seconds > 0
    assert not any(leaf.is_deleted() for leaf in weights.values())


def test_wrong_arguments_are_named():
    step, state, batch = make({})
    with pytest.raises(OptionError, match="repetitions is 0; give 1 or more"):
        rt.profile(step.lower(state, batch), state, batch, repetitions=0)
    with pytest.raises(OptionError, match=r"give what `step\.lower\(\.\.\.\)` returns"):
        rt.profile(step, state, batch)
    with pytest.raises(StateError):
        rt.profile(step.lower(state, batch), {}, batch)
