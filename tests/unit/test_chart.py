"""What pictures are drawn from: bars, exposed communication, arrows and bytes over time."""

import jax
import jax.numpy as jnp
import pytest

import ratrain_jax as rt
from ratrain_jax.lowering.memory import memory_analysis
from ratrain_jax.lowering.program import Forward, Lane, PrefetchView, Validate


def _step(check=False, **settings):
    @rt.train_step(stages=2, data_parallel=2, microbatches=4, boundaries=("b",), **settings)
    def step(state, x):
        def loss_fn(params):
            hidden = jnp.tanh(x @ params["a"])
            return ((hidden @ params["b"]) ** 2).mean()

        loss, grads = rt.value_and_grad(loss_fn)(state)
        if check:
            grads = rt.select_tree(rt.all_finite(grads), grads, jax.tree.map(jnp.zeros_like, grads))
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    state = {
        "a": jax.ShapeDtypeStruct((64, 64), "float32"),
        "b": jax.ShapeDtypeStruct((64, 64), "float32"),
    }
    return step.lower(state, jax.ShapeDtypeStruct((32, 64), "float32"))


@pytest.fixture(scope="module", params=["gpipe", "1f1b", "ratrain"])
def timeline(request):
    return rt.simulate(_step(schedule=request.param), "a100")


def test_every_op_is_a_bar_in_each_of_its_stages(timeline):
    chart = timeline.chart
    shown = sorted((bar.stage, bar.start, str(bar.op)) for bar in chart.bars if not bar.next_step)
    wanted = sorted((s, e.start, str(e.op)) for e in timeline.events for s in e.op.stages)
    assert shown == wanted
    assert sum(bar.next_step for bar in chart.bars) == 2
    assert chart.seconds == max(e.end for e in timeline.events)


def test_exposed_and_hidden_communication_are_the_timelines(timeline):
    chart = timeline.chart
    for stage, (exposed, _) in enumerate(timeline.communication):
        bars = [b for b in chart.bars if b.stage == stage and b.lane == Lane.LINK]
        # Sends in and out run at once, so what is exposed twice over counts once in the timeline.
        assert sum(b.exposed for b in bars) >= exposed * (1 - 1e-9)
        assert all(0 <= b.exposed <= b.end - b.start + 1e-12 for b in bars)


def test_arrows_lead_from_validations_where_these_are_deferred():
    chart = rt.simulate(_step(check=True, validation="deferred"), "a100").chart
    assert [type(chart.bars[source].op) for source, _ in chart.arrows] == [Validate, Validate]
    assert all(chart.bars[target].next_step for _, target in chart.arrows)


def test_arrows_lead_from_gathers_to_the_forward_that_reads_the_view(timeline):
    chart = timeline.chart
    assert len(chart.arrows) == 2
    for source, target in chart.arrows:
        gather, forward = chart.bars[source], chart.bars[target]
        assert isinstance(gather.op, PrefetchView)
        assert isinstance(forward.op, Forward)
        assert gather.stage == forward.stage
        assert gather.end <= forward.start
        assert forward.op.layers[0] <= gather.op.layer < forward.op.layers[1]


def test_bytes_end_with_the_outputs_and_peak_near_the_analysis(timeline):
    program = timeline.program
    bounds = memory_analysis(program).peaks
    for curve, bound in zip(timeline.chart.memory, bounds, strict=True):
        assert curve.times[0] == 0
        assert (curve.times[1:] > curve.times[:-1]).all()
        assert curve.total[-1] == _bytes(program, curve.stage, program.outputs)
        assert curve.total.min() >= 0
        assert curve.total[curve.peak] == pytest.approx(bound, rel=0.1)
        assert curve.limit == timeline.machine.usable_bytes


def _bytes(program, stage, ids):
    return sum(program.values[v].bytes for v in ids if program.values[v].stage == stage)


def test_without_lookahead_gathers_unblock_forwards_of_their_own_step():
    timeline = rt.simulate(_step(schedule="1f1b", update_prefetch=False), "a100")
    chart = timeline.chart
    assert chart.arrows
    assert not any(chart.bars[target].next_step for _, target in chart.arrows)
