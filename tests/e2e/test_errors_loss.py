"""What a user is told of a loss that cannot be cut: its value, what it returns beside it, what it reads, and its layers."""

import jax
import jax.numpy as jnp
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import LossError, OptionError, StepError, UnsupportedError
from tests.refusals import BATCH, ROWS, STATE, descend, loss_of, refused, step, step_of


def test_an_integer_loss():
    loss = step_of(lambda params, _, batch: jnp.round(loss_of(params, batch)).astype(jnp.int32))
    refused(LossError, loss, words=("int32", "float"))


@pytest.mark.parametrize("has_aux", [False, True])
def test_a_loss_that_is_no_scalar(has_aux):
    def rows(state, batch):
        def loss(params):
            each = ((batch["x"] @ params["first"]) ** 2).mean(axis=1)
            return (each, 1.0) if has_aux else each

        grads = rt.grad(loss, has_aux=has_aux)(state)
        return descend(state, grads[0] if has_aux else grads)

    refused(LossError, rows, words=(f"({ROWS},)", "mean"))


def test_a_loss_that_computes_nothing():
    refused(StepError, step_of(lambda params, _, batch: jnp.float32(1)), words=("loss", "depend"))


def with_aux(make):
    """A step whose loss returns beside it what `make(params, batch)` gives."""

    def step(state, batch):
        def loss(params):
            return loss_of(params, batch), make(params, batch)

        grads, made = rt.grad(loss, has_aux=True)(state)
        return descend(state, grads), made

    return step


def test_an_auxiliary_array_with_the_batch_on_another_axis():
    words = ("auxiliary", f"(8, {ROWS})", f"(8, {ROWS // 2})", "axis to the front")
    step = with_aux(lambda params, batch: (batch["x"] @ params["first"]).T)
    refused(UnsupportedError, step, words=words, microbatches=2)


def test_an_auxiliary_array_with_the_batch_on_two_axes():
    words = ("auxiliary", f"({ROWS}, {ROWS})", f"({ROWS // 2}, {ROWS // 2})", "axis to the front")
    step = with_aux(lambda params, batch: batch["x"] @ batch["x"].T)
    refused(UnsupportedError, step, words=words, microbatches=2)


def test_an_auxiliary_truth_value():
    step = with_aux(lambda params, batch: {"ok": jnp.isfinite(batch["x"]).all()})
    refused(UnsupportedError, step, words=("truth value", "integer", "float"), data_parallel=2)


def test_a_weight_that_depends_on_the_parameters():
    def weighted(state, batch):
        def loss(params):
            scores = jax.nn.softmax(batch["x"] @ params["first"])
            return loss_of(params, batch) * scores.sum(), (scores * batch["x"][:, :1]).sum()

        return descend(state, rt.grad(loss, reduction="weighted")(state))

    for microbatches in (1, 2):
        words = ("weight", "depends", "from the batch alone", "stop_gradient")
        refused(UnsupportedError, weighted, words=words, microbatches=microbatches)


def key_before_the_loss(state, batch):
    key = rt.microbatch_key(jax.random.key(0))
    noise = jax.random.normal(key, (4,))
    return descend(state, rt.grad(lambda p: loss_of(p, {**batch, "x": batch["x"] + noise}))(state))


def key_in_a_loop(state, batch):
    def loss(params):
        def body(x, key):
            return x + jax.random.normal(rt.microbatch_key(key), x.shape), None

        x, _ = jax.lax.scan(body, batch["x"], jax.random.split(jax.random.key(0), 3))
        return loss_of(params, {**batch, "x": x})

    return descend(state, rt.grad(loss)(state))


@pytest.mark.parametrize(
    ("step", "where"), [(key_before_the_loss, "before the loss"), (key_in_a_loop, "loop")]
)
def test_a_microbatch_key_where_no_microbatch_is_at_hand(step, where):
    words = ("microbatch_key", where, "test_errors_loss.py:", "as it enters the loss")
    refused(UnsupportedError, step, words=words, microbatches=2)


def test_what_is_made_of_a_target_network_before_the_loss():
    """A leaf that follows a parameter lives in that parameter's layer: nothing can be made of it on stage 0."""

    def step(state, batch):
        goal = loss_of(jax.tree.map(lambda t: 2 * t, state["target"]), batch)
        params = state["params"]
        params = descend(params, rt.grad(lambda p: (loss_of(p, batch) - goal) ** 2)(params))
        target = jax.tree.map(lambda t, p: 0.9 * t + 0.1 * p, state["target"], params)
        return {"params": params, "target": target}

    words = ("state['target']['first']", "layer `first`", "Read it inside the loss")
    refused(UnsupportedError, step, {"params": STATE, "target": STATE}, BATCH, words=words)


def test_an_effect_inside_the_loss_and_one_outside():
    def inside(params, _, batch):
        loss = loss_of(params, batch)
        jax.debug.print("{}", loss)
        return loss

    def outside(state, batch):
        state, metrics = step(state, batch)
        jax.debug.print("{}", metrics["loss"])
        return state

    refused(UnsupportedError, step_of(inside), words=("effect", "loss", "Remove"))
    refused(UnsupportedError, outside, words=("side effect", "`debug_print`", "metric"))


def test_a_state_leaf_read_beside_the_parameters():
    loss = step_of(
        lambda params, state, batch: loss_of(params, batch) + (state["first"] ** 2).sum()
    )
    refused(UnsupportedError, loss, words=("state['first']", "differentiated argument"))


def test_parameters_computed_before_the_loss():
    def cast(state, batch):
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state)
        return descend(state, rt.grad(lambda params: loss_of(params, batch))(half))

    refused(UnsupportedError, cast, words=("bfloat16[4,8]", "compute inside the loss"))


def test_a_layer_mark_inside_a_loop():
    def loss(params, _, batch):
        def body(hidden, _):
            return rt.layer(jnp.tanh(hidden @ params["second"]), "again"), None

        hidden, _ = jax.lax.scan(body, batch["x"] @ params["first"], length=3)
        return ((hidden @ params["third"] - batch["y"]) ** 2).mean()

    refused(UnsupportedError, step_of(loss), words=("'again'", "`scan`", "outside"))


def test_two_layers_of_one_name():
    def loss(params, _, batch):
        hidden = rt.layer(jnp.tanh(batch["x"] @ params["first"]), "same")
        hidden = rt.layer(jnp.tanh(hidden @ params["second"]), "same")
        return ((hidden @ params["third"] - batch["y"]) ** 2).mean()

    refused(OptionError, step_of(loss), words=("'same'", "a name of its own"))
