"""Memory of whole programs: limits and what `auto` makes of them, windows, and what is in flight.

Everything is counted from the ops of lowered programs; the last tests count live buffers of a run.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import MemoryLimitError
from ratrain_jax.lowering.program import (
    Backward,
    Free,
    GradSync,
    Kind,
    PrefetchView,
    Recover,
    UpdateShard,
)
from tests.models import CASES, OPTIMIZERS
from tests.training import differing

WIDTH = 16
ROWS = 240


def make_state(layers, optimizer):
    rng = np.random.default_rng(0)

    def kernel(rows, columns):
        return jnp.asarray(rng.normal(size=(rows, columns)) / np.sqrt(rows), jnp.float32)

    params = {
        f"layer_{n}": {"up": kernel(WIDTH, 4 * WIDTH), "down": kernel(4 * WIDTH, WIDTH)}
        for n in range(layers)
    }
    return {"params": params, "opt_state": optimizer.init(params)}


def make_batch(rows=ROWS):
    x = np.random.default_rng(1).normal(size=(rows, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x)}


@functools.cache
def model(layers, clip=False):
    """A step over residual MLPs, each one layer, and its state."""
    tail = optax.adam(1e-3)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), tail) if clip else tail

    def step(state, batch):
        def loss_fn(params):
            x = batch["x"]
            for n in range(layers):
                x = rt.layer(x, f"layer_{n}")
                own = params[f"layer_{n}"]
                x = x + jax.nn.gelu(x @ own["up"]) @ own["down"]
            return ((x - batch["y"]) ** 2).mean()

        loss, grads = rt.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {"loss": loss}

    return step, make_state(layers, optimizer)


def lower(layers=4, clip=False, **options):
    step, state = model(layers, clip)
    return rt.train_step(**options)(step).lower(state, make_batch())


def recovered(lowered):
    """How many layers each stage recovers."""
    program = lowered.program
    counts = [0] * program.settings.stages
    for layer in program.layers:
        counts[layer.stage] += layer.recovered
    return counts


# Limits.

FOUR = {"stages": 4, "microbatches": 8}


@functools.cache
def peaks(recovery, **options):
    return lower(**{**FOUR, **options}, recovery=recovery).memory_analysis().peaks


def test_without_a_limit_everything_is_saved():
    lowered = lower(**FOUR)
    assert recovered(lowered) == [0, 0, 0, 0]
    assert lowered.memory_analysis().peaks == peaks("none")


def test_earlier_stages_hold_more_and_so_choose_otherwise_under_one_limit():
    saved, least = peaks("none"), peaks("forward")
    assert saved[0] > saved[1] > saved[2] > saved[3]
    limits = [*saved[:3], *(((a + b) // 2) for a, b in itertools.pairwise(saved[:3]))]
    limits = [limit for limit in limits if limit >= max(least)]
    chosen = set()
    for limit in limits:
        lowered = lower(**FOUR, memory_limit=limit)
        assert max(lowered.memory_analysis().peaks) <= limit
        assert recovered(lowered) == [int(peak > limit) for peak in saved]
        chosen.add(tuple(recovered(lowered)))
        assert {op.stage for op in lowered.program.ops() if isinstance(op, Recover)} == {
            stage for stage, peak in enumerate(saved) if peak > limit
        }
    assert {(0, 0, 0, 0), (1, 0, 0, 0), (1, 1, 0, 0)} <= chosen


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_limit_a_stage(stage):
    saved = peaks("none")
    limits = [peak - (number == stage) for number, peak in enumerate(saved)]
    lowered = lower(**FOUR, memory_limit=limits)
    assert recovered(lowered) == [int(number == stage) for number in range(4)]
    found = lowered.memory_analysis().peaks
    assert all(peak <= limit for peak, limit in zip(found, limits, strict=True))
    assert lowered.program.settings.memory_limit == tuple(limits)


def test_a_stage_recovers_as_few_blocks_as_will_do():
    """Each limit is just what recovering the first few blocks of a stage needs, or a little more."""
    options = {"layers": 16, "stages": 2, "microbatches": 4}
    none = lower(**options, recovery="none")
    peaks, layers = none.memory_analysis().peaks, none.program.layers
    blocks = [layer.block for layer in layers if layer.stage == 0]
    firsts = {sum(block < limit for block in blocks) for limit in range(max(blocks) + 2)}
    chosen = {}
    for percent in range(100, 66, -3):
        limit = [percent * peaks[0] // 100, peaks[1]]
        try:
            lowered = lower(**options, memory_limit=limit)
        except MemoryLimitError:
            continue
        assert lowered.memory_analysis().peaks[0] <= limit[0]
        assert recovered(lowered)[1] == 0
        chosen[percent] = recovered(lowered)[0]
    assert chosen[100] == 0
    assert list(chosen.values()) == sorted(chosen.values())
    assert len(firsts) > 3
    assert set(chosen.values()) == firsts


def test_the_smallest_shortfall_and_its_term_are_named():
    least = peaks("forward")
    limits = [peak - short for peak, short in zip(least, (500, 90, 700, 400), strict=True)]
    kinds = lower(**FOUR, recovery="forward").memory_analysis().by_kind[1]
    term = max(kinds, key=lambda kind: kinds[kind])
    words = rf"stage 1 needs {least[1]:,} .*, 90 over .* {limits[1]:,}; .* {term}, {kinds[term]:,} "
    with pytest.raises(MemoryLimitError, match=words):
        lower(**FOUR, memory_limit=limits)


def test_a_limit_holds_under_every_schedule_and_zero():
    for schedule, zero in itertools.product(("gpipe", "1f1b", "ratrain"), (1, 2)):
        options = {"data_parallel": 2, "schedule": schedule, "zero": zero}
        saved, least = peaks("none", **options), peaks("forward", **options)
        limit = max(*least, (saved[0] + least[0]) // 2)
        lowered = lower(**FOUR, **options, memory_limit=limit)
        assert max(lowered.memory_analysis().peaks) <= limit < saved[0]
        assert recovered(lowered)[0]


# In flight.


def live_microbatches(program, stage, kind):
    """The most microbatches of which a stage holds values of a kind while a Backward runs."""
    values = program.values
    mine = {v.id for v in values if v.kind is kind and v.stage == stage}
    live, most = set(), 0
    for op in program.order[stage]:
        live.update(mine.intersection(op.writes))
        if isinstance(op, Backward):
            most = max(most, len({values[v].microbatch for v in live}))
        live.difference_update(op.donates)
        if isinstance(op, Free):
            live.discard(op.reads[0])
    return most


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
def test_residuals_in_flight_are_bounded_by_the_stages_left(stages, microbatches):
    layout = {"stages": stages, "microbatches": microbatches}
    for stage, schedule in itertools.product(range(stages), ("1f1b", "ratrain")):
        program = lower(**layout, schedule=schedule).program
        in_flight = min(microbatches, stages - stage)
        assert live_microbatches(program, stage, Kind.RESIDUALS) == in_flight
    for stage in range(stages):
        program = lower(**layout, schedule="gpipe").program
        assert live_microbatches(program, stage, Kind.RESIDUALS) == microbatches


@pytest.mark.parametrize("recovery", ["backward", "forward"])
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_recovered_residuals_in_flight_are_bounded_by_the_window(recovery, ahead):
    window = rt.Window(microbatches=ahead)
    for schedule in ("1f1b", "ratrain", "gpipe"):
        lowered = lower(**FOUR, schedule=schedule, recovery=recovery, window=window)
        for stage in range(4):
            most = live_microbatches(lowered.program, stage, Kind.RESIDUALS)
            forwarded = 8 if schedule == "gpipe" else 4 - stage
            assert most == (1 if recovery == "backward" else min(ahead, forwarded))
            inputs = live_microbatches(lowered.program, stage, Kind.BOUNDARY)
            assert inputs <= forwarded + 1


# The window of state work.


def chains(program, stage):
    """After each op, the layers whose state is in flight and the bytes that they hold."""
    values, layers = program.values, program.layers
    last = program.settings.microbatches - 1
    flying, seen = {}, []
    view = {
        op.layer: values[op.writes[0]].bytes
        for op in program.order[stage]
        if isinstance(op, PrefetchView)
    }
    gradient = {
        op.layer: values[op.writes[0]].bytes
        for op in program.order[stage]
        if isinstance(op, GradSync)
    }
    for op in program.order[stage]:
        if isinstance(op, GradSync) and layers[op.layer].update_phase == 0:
            opens = op.microbatch in (None, last)
        else:
            opens = isinstance(op, UpdateShard) and op.layer is not None and op.phase > 0
        if opens:
            flying[op.layer] = gradient[op.layer] + view[op.layer]
        elif isinstance(op, PrefetchView):
            flying.pop(op.layer)
        seen.append(dict(flying))
    assert not flying
    return seen


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("layers", [1, 2, 3, 99])
def test_the_window_bounds_the_layers_in_flight(layers, zero, clip):
    options = {"layers": 8, "clip": clip, "stages": 2, "data_parallel": 2, "microbatches": 2}
    window = rt.Window(layers=layers)
    for layerwise in (True, False):
        lowered = lower(**options, zero=zero, window=window, layerwise_state=layerwise)
        for stage in range(2):
            most = max(map(len, chains(lowered.program, stage)))
            assert most <= layers
            if layers < 3 and not clip:
                assert most == layers  # as far ahead as it may


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("layers_held", [0.5, 1, 2.5])
def test_the_window_bounds_the_bytes_in_flight(layers_held, clip):
    options = {"layers": 8, "clip": clip, "stages": 2, "data_parallel": 2, "microbatches": 2}
    free = lower(**options, window=rt.Window(layers=99))
    one = max(max(flying.values(), default=0) for flying in chains(free.program, 0))
    limit = int(layers_held * one)
    lowered = lower(**options, window=rt.Window(layers=99, bytes=limit), layerwise_state=False)
    for stage in range(2):
        seen = chains(lowered.program, stage)
        for flying in seen:
            assert sum(flying.values()) <= limit or len(flying) == 1  # one alone may hold more
        if not clip:
            assert max(map(len, seen)) == max(1, int(layers_held))


# A run.


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "gpipe", "recovery": "none"},
        {"schedule": "gpipe", "recovery": "forward"},
        {"schedule": "1f1b", "recovery": "backward", "data_parallel": 2},
        {"schedule": "ratrain", "recovery": "none", "data_parallel": 2, "zero": 2},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_the_bytes_really_alive_are_those_predicted(options):
    step, state = model(4)
    compiled = (
        rt.train_step(stages=2, microbatches=3, **options)(step)
        .lower(state, make_batch())
        .compile()
    )
    for _ in range(2):  # from the user's arrays, then from those handed out
        (state, metrics), census = compiled.census(state, make_batch())
        assert census.largest_difference <= 1e-3
        peaks = compiled.lowered.memory_analysis().peaks
        for stage, peak in zip(census.stages, peaks, strict=True):
            assert 0.5 * peak < max(stage.counted) <= 1.001 * peak
    assert np.isfinite(metrics["loss"])


QUICK = ("equal_mlp", "lstm")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name, case in CASES.items()
    ],
)
def test_the_bytes_alive_in_every_model(case):
    optimizer = OPTIMIZERS["adamw"]()
    step = rt.train_step(stages=2, data_parallel=2, microbatches=2)(
        case.make_step(optimizer, rt.value_and_grad)
    )
    state, batch = case.make_state(optimizer), case.make_batch(0, 8)
    _, census = step.lower(state, batch).compile().census(state, batch)
    assert census.largest_difference <= 0.02


def test_a_census_leaves_training_as_it_is():
    step, state = model(4)
    train = rt.train_step(stages=2, microbatches=3)(step)
    compiled = train.lower(state, make_batch()).compile()
    after, _ = compiled(state, make_batch())
    (counted, _), _ = compiled.census(state, make_batch())
    assert not differing(jax.tree.map(np.asarray, after), jax.tree.map(np.asarray, counted))


@pytest.mark.parametrize("schedule", ["1f1b", "ratrain"])
@pytest.mark.parametrize("recovery", ["none", "backward", "forward"])
@pytest.mark.parametrize("zero", [1, 2])
def test_layers_checkpointed_behind_others_are_recovered_alone(schedule, recovery, zero):
    def make(checkpointed):
        def step(state, batch):
            def loss_fn(params):
                x = batch["x"]
                for n in range(7):
                    x = rt.layer(x, f"layer_{n}")
                    block = jax.checkpoint(_residual) if n in checkpointed else _residual
                    x = block(params[f"layer_{n}"], x)
                return ((x - batch["y"]) ** 2).mean()

            loss, grads = rt.value_and_grad(loss_fn)(state["params"])
            params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
            return {"params": params}, loss

        options = {"schedule": schedule, "recovery": recovery, "zero": zero}
        return rt.train_step(stages=1, data_parallel=2, microbatches=3, **options)(step)

    state = {"params": make_state(7, optax.sgd(0.1))["params"]}
    lowered = make({2, 3, 5}).lower(state, make_batch(24))
    marks = [layer.recovered for layer in lowered.program.layers]
    assert marks == [recovery != "none" or n in {2, 3, 5} for n in range(7)]
    results, census = lowered.compile().census(state, make_batch(24))
    assert census.largest_difference <= 0.02
    plain = make(set())(state, make_batch(24))
    assert not differing(results, plain)


def _residual(own, x):
    return x + jax.nn.gelu(x @ own["up"]) @ own["down"]
