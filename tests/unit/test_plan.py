"""A plan: its file and its text, the steps that take it, and those that it is refused for."""

import contextlib
import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ratrain_jax as rt
from ratrain_jax.errors import OptionError, PlanError, RATrainError
from ratrain_jax.kernels import Arithmetic, load_machine
from ratrain_jax.models import language_model
from ratrain_jax.planning.plan import Plan
from tests.planning import BATCH, CONFIG, model, plain_plan, planned, scanned


def test_a_plan_reads_back_from_its_file(tmp_path):
    plan = plain_plan()
    plan.save(tmp_path / "plan.json")
    assert rt.Plan.load(tmp_path / "plan.json") == plan
    with pytest.raises(PlanError, match="holds no step"):
        _ = rt.Plan.load(tmp_path / "plan.json").lowered


def test_a_plan_prints_in_80_columns():
    lines = str(plain_plan()).splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for expected in ("predicted step", "why not", "recovery=", "assumed of the machine"):
        assert expected in text


def test_a_plan_cuts_no_number_short():
    plan = plain_plan()
    first = plan.stages[0]
    for size in (10**6, 10**8, 10**9 * 400):
        memory = dataclasses.replace(first.memory, residuals=size, scratch=size // 3)
        stage = dataclasses.replace(first, first="layer_of_a_long_name", memory=memory)
        lines = str(dataclasses.replace(plan, stages=(stage, *plan.stages[1:]))).splitlines()
        assert max(map(len, lines)) <= 80
        at = next(n for n, line in enumerate(lines) if line.endswith("most of it"))
        assert re.search(r" \w+ [0-9.]+ [KMG]iB(, \w+ [0-9.]+ [KMG]iB)?$", lines[at + 1])


def test_a_plan_that_was_edited_must_add_up():
    table = json.loads(plain_plan().to_json())
    table["configuration"]["microbatches"] += 1
    with pytest.raises(PlanError, match=r"global_batch: expected .* found"):
        Plan.from_json(json.dumps(table))


def test_a_plan_is_refused_for_another_model_or_batch():
    plan, lm = plain_plan(), model()
    step = rt.train_step(plan=plan)(lm.step)
    same = step.lower(lm.abstract_state(), lm.abstract_batch(BATCH))
    assert same.program.settings.stages == plan.configuration.stages
    with pytest.raises(PlanError, match="another model or batch"):
        step.lower(lm.abstract_state(), lm.abstract_batch(2 * BATCH))
    other = language_model(dataclasses.replace(CONFIG, hidden=256), sequence=256)
    with pytest.raises(PlanError, match="another model or batch"):
        step.lower(other.abstract_state(), other.abstract_batch(BATCH))


def test_options_beside_a_plan_are_refused_unless_it_leaves_them_open():
    rt.train_step(plan=plain_plan(), donate_state=False, state_layout="layers")
    with pytest.raises(OptionError, match="stages=2 was given beside a plan"):
        rt.train_step(plan=plain_plan(), stages=2)


def test_what_does_not_run_is_only_searched_when_asked_for_and_then_marked():
    plan = planned(include_simulated=True, schedules=("zb-h1",))
    assert not plan.configuration.runs
    assert "only simulated" in str(plan)
    with pytest.raises(PlanError, match="only simulated"):
        rt.train_step(plan=plan)
    assert plain_plan().configuration.runs


def test_tensor_parallelism_is_planned_reported_and_not_run():
    plan = planned(include_simulated=True, tensors=(2, 4), schedules=("1f1b",), zeros=(1,))
    c = plan.configuration
    assert c.tensor in (2, 4)
    assert c.stages * c.data_parallel * c.tensor == 8
    assert f"× {c.tensor} tensor parallel" in str(plan)
    assert any(entry.kind.startswith("tensor=") for entry in plan.why_not)
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(PlanError, match="no tensor parallelism"):
        plan.options()


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_malformed_plans_give_an_error_of_ours(data):
    table = json.loads(plain_plan().to_json())
    spot = table
    while isinstance(spot, (dict, list)) and spot:
        keys = sorted(spot) if isinstance(spot, dict) else range(len(spot))
        key = data.draw(st.sampled_from(list(keys)))
        if not isinstance(spot[key], (dict, list)) or not spot[key] or data.draw(st.booleans()):
            junk = st.none() | st.booleans() | st.floats(allow_nan=False) | st.text() | st.just([])
            spot[key] = data.draw(junk)
            break
        spot = spot[key]
    with contextlib.suppress(RATrainError):
        rt.Plan.from_json(json.dumps(table))


@pytest.mark.parametrize(
    "junk", [b"", b"\xff\x00", b"[]", b"{}", b'{"format": "ratrain-plan"}', b"[" * 99999]
)
def test_files_that_are_no_plan_give_an_error_of_ours(junk, tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(junk)
    with pytest.raises(PlanError):
        rt.Plan.load(path)


def test_a_plan_for_a_machine_of_ones_own_takes_its_kernels_beside_it():
    own = dataclasses.replace(load_machine("mt3000"), name="own")
    step, params, batch = scanned(64, 3, 256)
    found = rt.plan(step, params, batch, machine=own, devices=2, global_batch=8, rows=(2,))
    assert found.program.settings.stages == found.configuration.stages
    with pytest.raises(PlanError, match="kernels of 'own'"):
        rt.train_step(plan=found)
    kernels = Arithmetic.of(own, None, "fast")
    assert rt.train_step(plan=found, backend=kernels)(step).options.kernels() == kernels


def test_a_plan_runs():
    def step(params, batch):
        def loss(p):
            return ((jnp.tanh(batch["x"] @ p["a"]) @ p["b"] - batch["y"]) ** 2).mean()

        value, grads = rt.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    key = jax.random.key(0)
    params = {"a": jax.random.normal(key, (16, 32)), "b": jax.random.normal(key, (32, 16))}
    batch = {"x": np.ones((8, 16), np.float32), "y": np.zeros((8, 16), np.float32)}
    plan = rt.plan(step, params, batch, machine="generic", devices=1, global_batch=8, rows=(2,))
    state, loss = rt.train_step(plan=plan)(step)(params, batch)
    plain, expected = jax.jit(step)(params, batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
