"""Losses that read other parameters than they are differentiated by train as under plain `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ratrain_jax as rt
from ratrain_jax.kernels import load_machine
from ratrain_jax.lowering.op_costs import OpCoster
from ratrain_jax.lowering.program import Borrow, Kind, PrefetchView, SendActivation
from ratrain_jax.profiling.keys import moved_bytes
from tests.models import held
from tests.models.held import Net, batches, make_state, make_step
from tests.training import TWO_BY_TWO, assert_close, differing, named_leaves, train

pytestmark = pytest.mark.usefixtures("double_precision")

LATE = {"schedule": "1f1b", "recovery": "backward", "zero": 2}
STEPS = 3
WIDTH = held.WIDTH

CASES = {
    "adapters": (held.adapted, None),
    "reference": (held.preferred, None),
    "teacher": (held.taught, None),
    "average": (held.averaged, held.moving),
    "copy": (held.averaged, held.copied),
    "rival": (held.rival, None),
}


def parts(name, net):
    make, after = CASES[name]
    params, others, loss = make(net)
    return make_state(params, others), lambda value_and_grad: make_step(loss, value_and_grad, after)


def lowered(name, net=Net(), **layout):
    state, make = parts(name, net)
    return rt.train_step(**layout)(make(rt.value_and_grad)).lower(state, batches(1)[0])


@pytest.mark.parametrize("stacked", [False, True], ids=["loop", "stacked"])
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_under_plain_jit_in_every_order(name, stacked):
    state, make = parts(name, Net(stacked=stacked))
    wanted = train(jax.jit(make(jax.value_and_grad)), state, batches(STEPS))
    found = train(rt.train_step(**TWO_BY_TWO)(make(rt.value_and_grad)), state, batches(STEPS))
    np.testing.assert_allclose(found.losses(), wanted.losses(), rtol=1e-9)
    theirs = named_leaves(wanted.state)
    for leaf, value in named_leaves(found.state).items():
        assert np.abs(value - theirs[leaf]).max() <= 1e-9 * np.abs(theirs[leaf]).max(), leaf
    again = train(
        rt.train_step(**TWO_BY_TWO, schedule="gpipe")(make(rt.value_and_grad)),
        state,
        batches(STEPS),
    )
    assert differing(found.state, again.state) == []


@pytest.mark.parametrize("name", ["adapters", "average"])
def test_gradients_synchronised_every_microbatch(name):
    state, make = parts(name, Net())
    wanted = train(jax.jit(make(jax.value_and_grad)), state, batches(STEPS))
    found = train(
        rt.train_step(**TWO_BY_TWO, **LATE)(make(rt.value_and_grad)), state, batches(STEPS)
    )
    assert_close(found.state, wanted.state, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_they_lie_where_they_are_read_and_have_no_gradients(name):
    code = lowered(name, **TWO_BY_TWO).code
    program = lowered(name, **TWO_BY_TWO).program
    assert not any(isinstance(op, Borrow) for op in program.ops())
    sent = {value for op in program.ops() if isinstance(op, SendActivation) for value in op.reads}
    assert {program.values[value].kind for value in sent} <= {Kind.BOUNDARY, Kind.OPERAND}
    assert all(operand.argument is not None for operand in code.regions.operands)
    trained = sum(len(update.trained) for update in code.update.layers)
    assert trained == len(code.regions.grads) < len(code.regions.params)
    gradients = [v for v in program.values if v.kind is Kind.ACCUMULATOR and v.microbatch is None]
    arrays = {(v.stage, v.layer): len(v.arrays) for v in gradients}
    assert sum(arrays.values()) == trained


@pytest.mark.parametrize("name", ["adapters", "reference", "teacher", "rival"])
def test_what_never_changes_is_whole_on_every_device_and_never_gathered(name):
    found = lowered(name, data_parallel=2)
    code, program = found.code, found.program
    fixed = sum(
        np.prod(code.regions.step.invars[leaf].aval.shape) * 8 for leaf in sorted(code.fixed)
    )
    views = [program.values[op.writes[0]] for op in program.ops() if isinstance(op, PrefetchView)]
    assert sum(view.aliased for view in views) == fixed > 0
    gathered = sum(view.bytes for view in views)
    assert gathered == sum(
        moved_bytes(op, program) for op in program.ops() if isinstance(op, PrefetchView)
    )
    trained = code.regions.params[: code.regions.trained]
    assert gathered == sum(np.prod(var.aval.shape) * 8 for var in trained)


def test_gradients_of_what_is_only_held_take_no_time():
    found = lowered("teacher", **TWO_BY_TWO)
    coster = OpCoster(found.code, found.program, load_machine("mt3000"))
    nothing = [op for op in found.program.ops() if found.program.runs_nothing(op)]
    assert {type(op).__name__ for op in nothing} >= {"ZeroGradient", "GradSync", "Backward"}
    assert not any(coster.seconds(op) for op in nothing)


def test_an_evaluation_takes_what_never_changes_as_it_lies():
    net = Net()
    state, make = parts("reference", net)
    step = rt.train_step(data_parallel=2)(make(rt.value_and_grad))
    batch = batches(1)[0]
    state, _ = step(state, batch)

    @rt.eval_step(step)
    def predict(state, batch):
        return net.apply(state["held"]["reference"], batch["x"])

    code = predict.lower(state, batch).code
    assert len(code.fixed) == len(code.regions.params)
    assert set(code.param_axes) == {None}
    assert_close(predict(state, batch), predict.__wrapped__(rt.gather(state), batch), atol=1e-12)


def test_layers_of_two_nets_of_one_shape_are_one_row():
    for name in ("adapters", "reference", "average"):
        layers = lowered(name, **TWO_BY_TWO).program.layers
        assert [layer.name for layer in layers] == [*(f"block_{n}" for n in range(4)), "head"]
    seconds = [layer.seconds for layer in lowered("reference", **TWO_BY_TWO).program.layers[:4]]
    assert max(seconds) < 1.3 * min(seconds)


def test_the_layers_of_a_net_behind_another_of_its_names_come_behind():
    layers = lowered("rival", **TWO_BY_TWO).program.layers
    names = [layer.name for layer in layers]
    own = [name for name in names if "/" not in name]
    assert names[: len(own)] == own
    assert all(name.startswith("held/") for name in names[len(own) :])


@pytest.mark.parametrize("name", ["adapters", "average"])
@pytest.mark.parametrize("layout", [TWO_BY_TWO, {"data_parallel": 2, "zero": 2}], ids=str)
def test_the_bytes_really_alive_are_those_predicted(name, layout):
    state, make = parts(name, Net())
    step = rt.train_step(**layout)(make(rt.value_and_grad))
    compiled = step.lower(state, batches(1)[0]).compile()
    for _ in range(2):  # from the user's arrays, then from those handed out
        (state, _), census = compiled.census(state, batches(1)[0])
        assert census.largest_difference <= 0.02


@pytest.mark.parametrize("trained_first", [True, False], ids=["after training", "before training"])
def test_an_evaluation_of_the_average(trained_first):
    net = Net()
    state, make = parts("average", net)
    step = rt.train_step(**TWO_BY_TWO)(make(rt.value_and_grad))
    if trained_first:
        state, _ = step(state, batches(1)[0])

    @rt.eval_step(step)
    def predict(state, batch):
        return net.apply(state["held"]["average"], batch["x"])

    batch = batches(1)[0]
    wanted = jax.jit(predict.__wrapped__)(rt.gather(state), batch)
    assert_close(predict(state, batch), wanted, atol=1e-12)
    program = predict.lower(state, batch).program
    assert [len(layer.parameters) for layer in program.layers] == [4, 4, 4, 4, 2]


def test_an_average_that_only_an_evaluation_reads_lies_with_its_layers():
    net = Net()
    params = held.draw(net, 0)
    state = make_state(params, {"average": held.draw(net, 1)})

    def loss(params, others, batch):
        return jnp.mean((net.apply(params, batch["x"]) - batch["y"]) ** 2)

    step = rt.train_step(**TWO_BY_TWO)(make_step(loss, rt.value_and_grad, held.moving))
    state, _ = step(state, batches(1)[0])

    @rt.eval_step(step)
    def predict(state, batch):
        return net.apply(state["held"]["average"], batch["x"])

    program = predict.lower(state, batches(1)[0]).program
    assert not any(operand.prologue for operand in program.operands)
    wanted = jax.jit(predict.__wrapped__)(rt.gather(state), batches(1)[0])
    assert_close(predict(state, batches(1)[0]), wanted, atol=1e-12)


def test_a_table_of_numbers_is_no_model():
    """A vector that never changes is handed to every stage that reads it."""

    def loss(params, others, batch):
        scaled = batch["x"] * others["levels"][:WIDTH]
        return jnp.mean((Net().apply(params, scaled) - batch["y"] * others["levels"][0]) ** 2)

    state = make_state(held.draw(Net(), 0), {"levels": jnp.linspace(1, 2, 16)})
    step = rt.train_step(**TWO_BY_TWO)(make_step(loss, rt.value_and_grad))
    code = step.lower(state, batches(1)[0]).code
    assert code.regions.trained == len(code.regions.params)
    wanted = train(jax.jit(make_step(loss, jax.value_and_grad)), state, batches(STEPS))
    assert_close(train(step, state, batches(STEPS)).state, wanted.state, atol=1e-12, rtol=1e-9)
