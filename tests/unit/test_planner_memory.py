"""The memory of a planned stage: counted as that of its program, and explained part by part."""

import functools

import jax
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import OptionError
from ratrain_jax.lowering.lower import lower_step
from ratrain_jax.lowering.memory import memory_analysis
from ratrain_jax.lowering.text import readable_bytes
from ratrain_jax.planning.configuration import Configuration
from ratrain_jax.planning.memory_parts import memory_parts
from ratrain_jax.planning.plan import Plan
from ratrain_jax.planning.planner import workload
from ratrain_jax.planning.search import look_at
from ratrain_jax.planning.simulated import costs_of
from ratrain_jax.planning.stage_costs import TERMS
from ratrain_jax.tracing import trace_step
from tests.models import held
from tests.planning import A100, plain_plan, planned, scanned


def test_arrays_that_no_axis_divides_are_said_to_be_whole():
    plan = planned(devices=7, stages=(1,), global_batch=49, rows=(1,))
    assert "whole on all 7" in plan.explain()
    assert "1/8 each" in planned(stages=(1,)).explain()


def counted_as_the_program_does(step, params, batch, global_batch, rows, stages):
    """Holds a split's memory to its program's; returns how many layers each stage recovers."""
    table = workload(step, (params, batch), A100, global_batch).table(rows)
    c = Configuration(stages=stages, data_parallel=2, rows=rows, microbatches=4, recovery="none")
    found = look_at(c, table, A100, 10**12)
    options = {"stages": stages, "data_parallel": 2, "microbatches": 4, "recovery": "none"}
    decorated = rt.train_step(**options)(step)
    trace, _ = trace_step(step, (params, batch), decorated.options)
    names = [table.rows[s.layers[0]].name for s in found.split.stages[1:]]
    _, program = lower_step(trace, decorated.options.settings(), A100, names)
    for stage, peak in zip(found.split.stages, memory_analysis(program).peaks, strict=True):
        assert 0.97 * peak <= stage.memory.total - stage.memory.scratch <= 1.05 * peak
    recovered = [sum(x.recovered for x in program.layers if x.stage == s) for s in range(stages)]
    assert [stage.recovered for stage in found.split.stages] == recovered
    return recovered


@pytest.mark.parametrize(("remat", "tied"), [(True, False), (False, True)])
@pytest.mark.parametrize("stages", [1, 2])
def test_checkpoints_and_tied_parameters_are_counted_as_the_program_does(remat, tied, stages):
    step, params, batch = scanned(128, 6, 512, remat, tied)
    recovered = counted_as_the_program_does(step, params, batch, 8, 1, stages)
    assert any(recovered) == remat


@pytest.mark.parametrize("stages", [1, 2])
def test_late_checkpoints_are_counted_as_the_program_does(stages):
    def block(own, x):
        return x + jax.nn.gelu(x @ own["up"]) @ own["down"]

    def step(params, batch):
        def loss(params):
            x = batch
            for n in range(12):
                x = rt.layer(x, f"layer_{n:02}")
                again = jax.checkpoint(block) if n in {2, 3, 5, 10} else block
                x = again(params[f"layer_{n:02}"], x)
            return (x**2).mean()

        value, grads = rt.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    leaf = jax.ShapeDtypeStruct
    layer = {"up": leaf((64, 256), "float32"), "down": leaf((256, 64), "float32")}
    params = {f"layer_{n:02}": layer for n in range(12)}
    batch = leaf((64, 64), "float32")
    recovered = counted_as_the_program_does(step, params, batch, 64, 8, stages)
    assert sum(recovered) == 4


@pytest.mark.parametrize("stacked", [False, True], ids=["loop", "stacked"])
@pytest.mark.parametrize(
    ("make", "after"),
    [(held.adapted, None), (held.taught, None), (held.averaged, held.moving)],
    ids=["adapters", "teacher", "average"],
)
def test_parameters_without_gradients_are_counted_as_the_program_does(make, after, stacked):
    params, others, loss = make(held.Net(6, stacked=stacked))
    step = held.make_step(loss, rt.value_and_grad, after)
    state, batch = held.make_state(params, others), held.batches(1)[0]
    for stages in (1, 2):
        counted_as_the_program_does(step, state, batch, 8, 1, stages)


@pytest.mark.parametrize("schedule", ["1f1b", "ratrain", "gpipe", "interleaved", "zb-h1"])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("recovery", ["none", "auto", "forward"])
@pytest.mark.parametrize(("remat", "tied"), [(True, False), (False, True)])
def test_every_term_of_memory_is_the_sum_of_its_parts(schedule, zero, recovery, remat, tied):
    table = scanned_table(remat, tied)
    chunks = 2 if schedule == "interleaved" else 1
    c = Configuration(
        stages=2,
        data_parallel=2,
        rows=1,
        microbatches=4,
        schedule=schedule,
        zero=zero,
        recovery=recovery,
        chunks=chunks,
    )
    limit = 10**12 if recovery != "auto" else 2_400_000
    found = look_at(c, table, A100, limit)
    assert found.split is not None
    costs = costs_of(table, c, A100)
    for number, stage in enumerate(found.split.stages):
        sums = dict.fromkeys(TERMS, 0)
        for part in memory_parts(costs, number, stage):
            sums[part.term] += part.times * part.bytes
        assert sums == {term: getattr(stage.memory, term) for term in TERMS}


@functools.cache
def scanned_table(remat, tied):
    step, params, batch = scanned(64, 6, 512, remat, tied)
    return workload(step, (params, batch), A100, 8).table(1)


def test_a_plan_explains_its_memory():
    plan = plain_plan()
    text = plan.explain()
    totals = [stage.memory.total for stage in plan.stages]
    assert text.startswith(f"stage {totals.index(max(totals))} needs ")
    for term in TERMS:
        size = getattr(plan.stages[0].memory, term)
        assert (f"\n{term} {readable_bytes(size)}\n" in plan.explain(0)) == bool(size)
    assert max(map(len, text.splitlines())) <= 80
    assert Plan.from_json(plan.to_json()).explain() == text
    with pytest.raises(OptionError, match="the plan has no stage 99"):
        plan.explain(99)
