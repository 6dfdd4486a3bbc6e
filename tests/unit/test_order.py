"""The list schedule: dependencies, lanes, ranks, window; then frees and the launch order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain_jax.lowering.frees import insert_frees
from ratrain_jax.lowering.order import Task, order_tasks
from ratrain_jax.lowering.program import (
    ArrayType,
    Backward,
    Forward,
    Free,
    GlobalReduce,
    GradSync,
    Kind,
    Metrics,
    PrefetchView,
    SendActivation,
    Value,
)
from ratrain_jax.runtime.merge import launch_order
from tests.programs import make_program


def _ordered(tasks, layers=2, limit=None):
    return order_tasks(tasks, window_layers=layers, window_bytes=limit)


def test_an_op_comes_after_what_it_reads_waits_for_and_follows():
    first = Task(Forward(0, (), (0,)), 5.0, (1,))
    reader = Task(Backward(0, (0,), (1,)), 1.0, (0,))
    waiter = Task(GradSync(0, (), (2,), (), (1,)), 1.0, (0,))
    follower = Task(PrefetchView(0), 1.0, (0,), after=(2,))
    order = _ordered([first, reader, waiter, follower])
    assert order == [t.op for t in (first, reader, waiter, follower)]


def test_a_lower_rank_goes_first_when_both_are_ready():
    late, soon = Task(GradSync(0, layer=1), 1.0, (2,)), Task(GradSync(0, layer=2), 1.0, (1,))
    assert _ordered([late, soon]) == [soon.op, late.op]


def test_lanes_run_side_by_side_and_a_send_needs_both_links():
    long = Task(GradSync(1, layer=0), 10.0, (0,))
    send = Task(SendActivation(0, target=1), 1.0, (1,))
    other = Task(GradSync(0, layer=1), 1.0, (2,))
    assert _ordered([long, send, other]) == [long.op, other.op, send.op]


def _chain(layer, size=1):
    sync = Task(GradSync(0, (), (layer,), layer=layer), 1.0, (0, layer), (), (0, layer), None, size)
    view = Task(PrefetchView(0, (layer,), layer=layer), 1.0, (1, layer), (), None, (0, layer))
    return sync, view


def _most_in_flight(order):
    flying = most = 0
    for op in order:
        flying += 1 if isinstance(op, GradSync) else -1
        most = max(most, flying)
    return most


@given(st.integers(1, 6), st.integers(1, 4))
def test_the_window_bounds_the_chains_in_flight(layers, window):
    tasks = [task for n in range(layers) for task in _chain(n)]
    order = _ordered(tasks, window)
    assert len(order) == 2 * layers
    assert _most_in_flight(order) == min(layers, window)


def test_the_window_bounds_bytes_but_lets_one_chain_alone_be_larger():
    tasks = [task for n in range(4) for task in _chain(n, size=10)]
    assert _most_in_flight(_ordered(tasks, 4, 20)) == 2
    assert _most_in_flight(_ordered(tasks, 4, 5)) == 1


def test_frees_come_right_after_the_last_use():
    kind, array = Kind.BOUNDARY, (ArrayType((1,), "float32"),)
    values = [Value(i, kind, f"x{i}", array, 0) for i in range(4)]
    made = Forward(0, (0,), (1, 2))
    used = Backward(0, (1,), (3,))
    (ops,) = insert_frees([made, used], values, [0], [3], 1)
    assert ops == (made, Free(0, (0,)), Free(0, (2,)), used, Free(0, (1,)))


def test_the_launch_order_keeps_every_stage_s_list():
    program = make_program(stages=4, data_parallel=2, microbatches=6)
    order = launch_order(program)
    for stage, ops in enumerate(program.order):
        assert [op for op in order if stage in op.stages] == list(ops)
    assert len(order) == len(set(map(id, order)))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("clip", [False, True])
def test_results_keep_no_backward_and_no_synchronisation_waiting(stages, zero, clip):
    program = make_program(stages=stages, zero=zero, clip=clip)
    for ops in program.order:
        lasts = [n for n, op in enumerate(ops) if isinstance(op, Backward)]
        results = [n for n, op in enumerate(ops) if isinstance(op, Metrics)]
        # The norm is reduced for updates, the loss for the metrics alone.
        alone = [n for n, op in enumerate(ops) if isinstance(op, GlobalReduce) and not clip]
        assert all(n > max(lasts) for n in (*results, *alone))
    reduced = [op for op in program.ops() if isinstance(op, GlobalReduce)]
    assert reduced


@pytest.mark.parametrize("zero", [1, 2])
def test_a_lone_stage_gathers_first_what_the_next_step_wants_first(zero):
    ops = make_program(stages=1, zero=zero, window_layers=8).order[0]
    state = [op for op in ops if isinstance(op, (GradSync, PrefetchView))]
    gathered = [op.layer for op in state if isinstance(op, PrefetchView)]
    assert gathered == sorted(gathered)
    assert all(isinstance(op, PrefetchView) for op in state[-len(gathered) :])
