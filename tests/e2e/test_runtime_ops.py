"""When and where a compiled step runs its ops, and what of an earlier step it uses."""

import threading

import jax

import ratrain_jax as rt
from ratrain_jax.lowering.program import (
    Backward,
    Forward,
    Free,
    GradSync,
    PrefetchView,
    SendActivation,
    SendGradient,
)
from tests.dense import decorated as decorated
from tests.dense import layout as layout
from tests.dense import make_batch, make_params, make_state, mean_square, sgd_step, stack
from tests.training import TWO_BY_TWO, differing


def test_time_stamps_show_gradient_syncs_during_backward():
    """Layers are so large here that to see an op's end a little late makes no difference."""
    layers, width, rows = 6, 768, 1024
    state, batch = make_params(layers, width), make_batch(0, rows, width)
    compiled = rt.train_step(data_parallel=2)(stack(layers)).lower(state, batch).compile()
    overlapped = []
    for _ in range(4):  # a busy machine may hold the link's thread up in one run
        (state, _), run = compiled.trace(state, batch)
        assert all(0 <= m.start <= m.end <= run.seconds for m in run.ops)
        last = max(run.of(Backward), key=lambda m: m.end)
        assert last.op.layers[0] == 0
        early = [m.op.layer for m in run.of(GradSync) if m.end <= last.start]
        assert 0 not in early
        overlapped.append(layers in early or layers - 1 in early)
    assert any(overlapped)


def test_a_traced_step_gives_what_a_called_one_gives(decorated):
    batch = make_batch(3)
    compiled = decorated.lower(make_state(), batch).compile()
    (traced, _), run = compiled.trace(make_state(), batch)
    called, _ = compiled(make_state(), batch)
    assert differing(traced, called) == []
    ops = [op for op in compiled.lowered.program.ops() if type(op).__name__ != "Free"]
    assert len(run.ops) == len(ops)


def watched(compiled):
    """Replaces what each instruction runs by what also notes its op and thread."""
    seen = []

    def noting(op, execute):
        def noted(bundles):
            seen.append((type(op), threading.current_thread().name))
            return execute(bundles)

        return noted

    for instructions in compiled._plan.threads:
        for instruction in instructions:
            instruction.execute = noting(instruction.op, instruction.execute)
    return seen


def test_compute_and_link_ops_are_launched_from_two_threads():
    lowered = rt.train_step(**TWO_BY_TWO)(sgd_step).lower(make_state(), make_batch())
    compiled = lowered.compile()
    seen = watched(compiled)
    compiled(make_state(), make_batch())
    here = threading.current_thread().name
    threads = {kind: {name for k, name in seen if k is kind} for kind, _ in seen}
    assert threads[Forward] == threads[Backward] == {here}
    for kind in (GradSync, SendActivation, SendGradient, PrefetchView):
        (name,) = threads[kind]
        assert name.startswith("ratrain-link")
    assert len(seen) == sum(not isinstance(op, Free) for op in lowered.program.ops())


def test_prefetched_views_are_used_unless_their_leaves_were_swapped():
    compiled = rt.train_step(**TWO_BY_TWO)(sgd_step).lower(make_state(), make_batch()).compile()
    gathered = []
    for view, gather in compiled._handover._gathers.items():
        compiled._handover._gathers[view] = lambda shards, v=view, g=gather: (
            gathered.append(v),
            g(shards),
        )[1]
    state, _ = compiled(make_state(), make_batch())
    assert sorted(gathered) == sorted(
        compiled._handover._gathers
    )  # the user's arrays have no views yet
    gathered.clear()
    state, _ = compiled(state, make_batch())
    assert gathered == []
    kernel = state["params"]["layer_0"]["kernel"]
    state["params"]["layer_0"]["kernel"] = kernel * 0.5
    compiled(state, make_batch())
    assert len(gathered) == 1


def test_accumulators_of_several_devices_are_used_up_in_place():
    compiled = rt.train_step(**TWO_BY_TWO)(sgd_step).lower(make_state(), make_batch()).compile()
    given = []

    def noting(op, execute):
        def noted(bundles):
            made = execute(bundles)
            given.extend(bundles[op.reads.index(v)] for v in op.donates)
            return made

        return noted

    for instruction in compiled._plan.threads[0]:
        if isinstance(instruction.op, Backward):
            instruction.execute = noting(instruction.op, instruction.execute)
    compiled(make_state(), make_batch())
    assert given and all(array.is_deleted() for bundle in given for array in bundle)


def test_no_more_than_two_steps_are_launched_ahead_if_only_the_state_comes_back():
    def step(params, batch):
        loss = lambda p: mean_square(p, batch["x"], batch["y"])  # noqa: E731
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, rt.grad(loss)(params))

    compiled = rt.train_step(**TWO_BY_TWO)(step).lower(make_params(), make_batch()).compile()
    params = make_params()
    for n in range(4):
        params = compiled(params, make_batch(n))
    waited = [len(marks) for marks in compiled._flights._marks]
    assert len(waited) <= 2 and set(waited) == {4}  # a mark on each device
