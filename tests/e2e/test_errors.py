"""What a user is told: each error names what is wrong, the numbers or names, and what to do.

Everything here only lowers a step, from types alone; nothing is compiled.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import (
    BatchError,
    LayoutError,
    LossError,
    MemoryLimitError,
    OptionError,
    RATrainError,
    StepError,
    UnsupportedError,
)

ROWS = 24


def types(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


STATE = {"first": types(4, 8), "second": types(8, 8), "third": types(8, 4)}
BATCH = {"x": types(ROWS, 4), "y": types(ROWS, 4)}


def loss_of(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["first"])
    hidden = jnp.tanh(hidden @ params["second"])
    return ((hidden @ params["third"] - batch["y"]) ** 2).mean()


def descend(state, grads):
    return jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, state, grads)


def step(state, batch):
    loss, grads = rt.value_and_grad(lambda params: loss_of(params, batch))(state)
    return descend(state, grads), {"loss": loss}


def step_of(loss):
    """A step that descends by `loss(params, state, batch)`."""

    def step(state, batch):
        return descend(state, rt.grad(lambda params: loss(params, state, batch))(state))

    return step


def refused(error, step, *args, words=(), **options):
    """Asserts that lowering is refused with an error of this very class whose message has the words."""
    with pytest.raises(RATrainError) as caught:
        rt.train_step(**options)(step).lower(*(args or (STATE, BATCH)))
    assert type(caught.value) is error
    message = str(caught.value)
    for word in words:
        assert word in message
    assert "let " not in message  # no dumped jaxpr
    return message


# The loss.


def test_a_step_without_value_and_grad_is_shown_the_line_to_change():
    def plain(state, batch):
        return descend(state, jax.grad(lambda params: loss_of(params, batch))(state))

    words = ("does not call it", "jax.value_and_grad(loss_fn)", "rt.value_and_grad(loss_fn)")
    words += (f"the step plain ({__file__}:{plain.__code__.co_firstlineno})",)
    refused(StepError, plain, words=words)


def test_two_losses():
    def twice(state, batch):
        return step(step(state, batch)[0], batch)

    refused(StepError, twice, words=("calls it 2 times", "Join the losses"))


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
    words = ("microbatch_key", where, "test_errors.py:", "as it enters the loss")
    refused(UnsupportedError, step, words=words, microbatches=2)


def test_a_target_network():
    """A leaf that follows a parameter lives in that parameter's layer, where the loss cannot read it."""

    def step(state, batch):
        def loss(params):
            goal = jax.lax.stop_gradient(loss_of(state["target"], batch))
            return (loss_of(params, batch) - goal) ** 2

        params = descend(state["params"], rt.grad(loss)(state["params"]))
        target = jax.tree.map(lambda t, p: 0.9 * t + 0.1 * p, state["target"], params)
        return {"params": params, "target": target}

    words = ("state['target']['first']", "layer `first`", "differentiated")
    refused(UnsupportedError, step, {"params": STATE, "target": STATE}, BATCH, words=words)


def in_scan(state, batch):
    def body(total, part):
        grads = rt.grad(lambda params: loss_of(params, part))(state)
        return jax.tree.map(jnp.add, total, grads), None

    parts = jax.tree.map(lambda leaf: leaf.reshape(2, -1, *leaf.shape[1:]), batch)
    total, _ = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, state), parts)
    return descend(state, total)


def in_cond(state, batch):
    return jax.lax.cond(batch["x"][0, 0] > 0, lambda: step(state, batch)[0], lambda: state)


def in_while(state, batch):
    def body(carry):
        return carry[0] - 1, step(carry[1], batch)[0]

    return jax.lax.while_loop(lambda carry: carry[0] > 0, body, (3, state))[1]


def in_vmap(state, batch):
    def one(x, y):
        return rt.grad(lambda params: loss_of(params, {"x": x[None], "y": y[None]}))(state)

    grads = jax.vmap(one)(batch["x"], batch["y"])
    return descend(state, jax.tree.map(lambda leaf: leaf.mean(0), grads))


def in_jit_in_scan(state, batch):
    inner = jax.jit(lambda carry: step(carry, batch)[0])
    return jax.lax.scan(lambda carry, _: (inner(carry), None), state, length=2)[0]


HIDDEN = {
    "scan": in_scan,
    "cond": in_cond,
    "while": in_while,
    "vmap": in_vmap,
    "jit in scan": in_jit_in_scan,
}


@pytest.mark.parametrize("where", HIDDEN)
def test_a_loss_inside_a_loop_a_branch_or_a_map(where):
    name = where.split()[-1]
    words = (f"`{name}`", "Remove your own accumulation loop", "microbatches")
    refused(UnsupportedError, HIDDEN[where], words=words)


def test_a_loss_that_is_differentiated_again():
    def again(state, batch):
        def penalty(params):
            grads = rt.grad(lambda params: loss_of(params, batch))(params)
            return sum((grad**2).sum() for grad in grads.values())

        return descend(state, jax.grad(penalty)(state))

    refused(UnsupportedError, again, words=("value_and_grad", "differentiated"))


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


# The batch.


@pytest.mark.parametrize(
    ("rows", "ranks", "microbatches", "nearest"),
    [(8, 1, 3, 9), (24, 2, 7, 28), (10, 4, 1, 8), (3, 2, 4, 8)],
)
def test_a_batch_that_does_not_divide(rows, ranks, microbatches, nearest):
    batch = {"x": types(rows, 4), "y": types(rows, 4)}
    options = {"data_parallel": ranks, "microbatches": microbatches}
    words = (
        f"batch of {rows}",
        f"data_parallel={ranks}",
        f"microbatches={microbatches}",
        f"nearest batch that does is {nearest}",
    )
    refused(BatchError, step, STATE, batch, words=words, **options)


def test_leaves_that_disagree_on_the_batch():
    batch = {"x": types(24, 4), "y": types(12, 4)}
    words = ("argument 1", "12, 24", "batch_argnums")
    refused(BatchError, step, STATE, batch, words=words, microbatches=2)


def test_a_batch_size_written_down():
    loss = step_of(lambda p, _, b: loss_of(p, {"x": b["x"].reshape(ROWS, 4), "y": b["y"]}))
    words = ("one microbatch", "writes the batch size down", "(12, 4)")
    refused(StepError, loss, words=words, microbatches=2)


def test_an_operand_that_grows_along_another_axis():
    def turned(state, batch):
        x = batch["x"].T
        loss = lambda params: loss_of(params, {"x": x.T, "y": batch["y"]})  # noqa: E731
        return descend(state, rt.grad(loss)(state))

    words = ("`transpose`", f"(4, {ROWS})", "(4, 12)", "axis 0")
    refused(UnsupportedError, turned, words=words, microbatches=2)


def test_batch_arguments_that_are_none():
    for argnums in [(0,), (2,)]:
        words = (f"batch_argnums={argnums}", "argument 0 is the state")
        refused(OptionError, step, words=words, batch_argnums=argnums)


# The layout.


def test_more_stages_than_layers():
    words = ("7 stages", "has 3", "first, second, third", "stages=3", "ratrain_jax.layer")
    refused(LayoutError, step, words=words, stages=7)


def test_fewer_devices_than_needed():
    devices = len(jax.devices())
    lowered = rt.train_step(stages=3, data_parallel=8)(step).lower(STATE, BATCH)
    setting = "XLA_FLAGS=--xla_force_host_platform_device_count=24"
    with pytest.raises(LayoutError, match=re.escape(setting)) as caught:
        lowered.compile()
    assert f"needs 24 devices, but there are {devices}" in str(caught.value)


BOUNDARIES = [
    (2, ["seconds"], ("'seconds'", "'second'", "first, second, third")),
    (2, ["second", "third"], ("['second', 'third']", "list of 1 names")),
    (2, "second", ("'second'", "list of 1 names")),
    (3, ["third", "second"], ("'second' does not come after 'third'", "first, second, third")),
]


@pytest.mark.parametrize(("stages", "boundaries", "words"), BOUNDARIES)
def test_boundaries_that_name_no_split(stages, boundaries, words):
    refused(LayoutError, step, words=words, stages=stages, boundaries=boundaries)


# Options.

OPTIONS = [
    ({"stages": 0}, ("stages", "at least 1", "got 0")),
    ({"data_parallel": 1.5}, ("data_parallel", "whole number", "1.5")),
    ({"microbatches": True}, ("microbatches", "whole number", "True")),
    ({"schedule": "zigzag"}, ("'zigzag'", "'gpipe', '1f1b', 'ratrain'")),
    ({"recovery": "some"}, ("'some'", "'auto', 'none', 'backward', 'forward'")),
    ({"zero": 3}, ("zero=3", "zero=1 or zero=2")),
    ({"zero": 0}, ("zero=0", "1, 2")),
    ({"window": 2}, ("window", "Window", "2")),
    ({"memory_limit": [1000, 1000]}, ("2 entries", "stages=1", "one a stage")),
    ({"memory_limit": 0}, ("memory_limit", "at least 1", "0")),
    ({"memory_limit": 0.5}, ("memory_limit", "whole number", "0.5")),
    ({"batch_argnums": 1}, ("batch_argnums", "1", "(1,)")),
    ({"devices": 3}, ("devices", "3", "jax.devices()")),
]


@pytest.mark.parametrize(("options", "words"), OPTIONS, ids=lambda o: str(o))
def test_an_option_out_of_range(options, words):
    with pytest.raises(OptionError) as caught:
        rt.train_step(**options)
    for word in words:
        assert word in str(caught.value)


def test_a_window_out_of_range():
    for values, words in [
        ({"layers": 0}, ("Window.layers", "at least 1", "0")),
        ({"bytes": -1}, ("Window.bytes", "-1")),
        ({"microbatches": 0}, ("Window.microbatches", "0")),
    ]:
        with pytest.raises(OptionError) as caught:
            rt.Window(**values)
        for word in words:
            assert word in str(caught.value)


# The state.


def test_a_state_leaf_that_is_no_array():
    words = ("'adam'", "str", "structure")
    refused(UnsupportedError, step, {**STATE, "name": "adam"}, BATCH, words=words)


def test_a_step_without_arguments():
    with pytest.raises(StepError, match="state as its first argument"):
        rt.train_step()(lambda: 0).lower()


# Memory. Microbatches are large here, so that activations and not the state decide the peak.


LARGE = {"x": types(4000, 4), "y": types(4000, 4)}


def lowered(**options):
    return rt.train_step(stages=2, microbatches=4, **options)(step).lower(STATE, LARGE)


def needs(**options):
    return lowered(**options).memory_analysis().peaks


def test_a_memory_limit_that_recovery_cannot_meet():
    smallest = needs(recovery="forward")
    short = smallest[0] - 100
    message = refused(
        MemoryLimitError,
        step,
        STATE,
        LARGE,
        words=("stage 0", f"{smallest[0]:,}", "100 over", f"{short:,}", "raise the limit"),
        stages=2,
        microbatches=4,
        memory_limit=[short, max(needs(recovery="none"))],
    )
    term, held = re.search(r"largest term is (\w+), ([\d,]+) bytes", message).groups()
    kinds = lowered(recovery="forward").memory_analysis().by_kind[0]
    assert kinds[term] == max(kinds.values()) == int(held.replace(",", ""))
    assert 'recovery="auto"' not in message  # it is on already


def test_a_memory_limit_under_a_fixed_recovery():
    peaks = needs(recovery="none")
    words = ("stage 0", f"{peaks[0]:,}", "1 over", f"{peaks[0] - 1:,}", 'recovery="auto"')
    limit = [peaks[0] - 1, peaks[1]]
    options = {"stages": 2, "microbatches": 4, "memory_limit": limit, "recovery": "none"}
    refused(MemoryLimitError, step, STATE, LARGE, words=words, **options)


def test_the_smallest_shortfall_is_named():
    """Of all that recovery can do: where a checkpoint is no smaller than the residuals, nothing."""
    peaks = [
        min(both) for both in zip(*(needs(recovery=r) for r in ("none", "forward")), strict=True)
    ]
    limit = [peaks[0] - 300, peaks[1] - 7]
    options = {"stages": 2, "microbatches": 4, "memory_limit": limit}
    refused(MemoryLimitError, step, STATE, LARGE, words=("stage 1", "7 over"), **options)


def test_only_a_stage_that_cannot_be_helped_is_blamed():
    """Stage 0 is over its limit by less, but recovery helps it."""
    saved = needs(schedule="gpipe", recovery="none")
    recovered = needs(schedule="gpipe", recovery="forward")
    assert recovered[0] < saved[0] - 1
    limit = [saved[0] - 1, recovered[1] - 1000]
    options = {"stages": 2, "microbatches": 4, "schedule": "gpipe", "memory_limit": limit}
    words = ("stage 1", "1,000 over", "raise the limit")
    refused(MemoryLimitError, step, STATE, LARGE, words=words, **options)


# Outside a step.


@pytest.mark.parametrize("where", HIDDEN)
def test_outside_a_step_value_and_grad_is_that_of_jax(where, monkeypatch):
    state = {name: jnp.linspace(-1, 1, 32).reshape(4, 8) for name in ("first", "third")}
    state = {"first": state["first"], "second": jnp.eye(8), "third": state["third"].T}
    batch = {"x": jnp.linspace(0, 1, 96).reshape(24, 4), "y": jnp.ones((24, 4))}
    ours = jax.jit(HIDDEN[where])(state, batch)
    monkeypatch.setattr(rt, "grad", jax.grad, raising=False)
    monkeypatch.setattr(rt, "value_and_grad", jax.value_and_grad, raising=False)
    theirs = jax.jit(lambda state, batch: HIDDEN[where](state, batch))(state, batch)
    for name in state:
        assert jnp.array_equal(ours[name], theirs[name])


def test_outside_a_step_a_loss_may_have_effects_and_be_differentiated_again(capfd):
    def square(x):
        jax.debug.print("x is {}", x)
        return x * x

    value, grad = jax.jit(rt.value_and_grad(square))(3.0)
    jax.effects_barrier()
    assert (value, grad) == (9.0, 6.0)
    assert "x is 3.0" in capfd.readouterr().out
    assert jax.jit(jax.grad(rt.grad(lambda x: x**3)))(2.0) == 12.0
    with pytest.raises(TypeError, match="scalar"):
        jax.jit(rt.grad(lambda x: x * jnp.ones(2)))(1.0)


# What is called another way than it can be.


def test_a_loss_with_aux_that_was_not_announced():
    refused(
        LossError, lambda p, b: rt.grad(lambda p: (loss_of(p, b), 1.0))(p), words=("has_aux=True",)
    )


@pytest.mark.parametrize("call", [lambda f, x: f(x), lambda f, x: jax.jit(f)(x)], ids=["", "jit"])
@pytest.mark.parametrize(
    "loss",
    [lambda x: (x, 1.0), lambda x: None, lambda x: {"loss": x}],
    ids=["pair", "none", "dict"],
)
def test_a_loss_that_is_a_tree(call, loss):
    with pytest.raises(LossError, match=r"only a scalar can be differentiated.*has_aux=True"):
        call(rt.grad(loss), 3.0)


@pytest.mark.parametrize("call", [lambda f, x: f(x), lambda f, x: jax.jit(f)(x)], ids=["", "jit"])
def test_jaxs_own_errors_and_freedoms(call):
    with pytest.raises(TypeError, match="two-element tuple"):
        call(rt.value_and_grad(lambda x: x * x, has_aux=True), 3.0)
    with pytest.raises(TypeError, match="argnums"):
        call(rt.grad(lambda x: x * x, argnums=1), 3.0)
    assert call(rt.grad(lambda x: x * x, argnums=np.int64(0)), 3.0) == 6.0
    assert call(rt.value_and_grad(lambda x: [x * x, x], has_aux=True), 3.0)[0] == (9.0, 3.0)


def test_a_leaf_of_the_state_whose_dtype_changes():
    def step(params, batch):
        grads = rt.grad(lambda p: (batch @ p["w"]).sum())(params)
        return jax.tree.map(lambda p, g: (p - g).astype(jnp.bfloat16), params, grads)

    with pytest.raises(StepError, match=r"\['w'\] is float32.*bfloat16.*\.astype\('float32'\)"):
        rt.train_step()(step)({"w": jnp.ones(3)}, np.ones((2, 3), np.float32))


@pytest.mark.parametrize("boundaries", [3, [1]])
def test_boundaries_that_are_no_names(boundaries):
    with pytest.raises(OptionError, match="boundaries must be"):
        rt.train_step(stages=2, boundaries=boundaries)


def test_a_decorated_step_inside_jit():
    step = rt.train_step()(lambda p, b: rt.grad(lambda p: (b @ p).sum())(p))
    with pytest.raises(StepError, match=r"inside jax\.jit.*call it directly"):
        jax.jit(step)(jnp.ones(3), jnp.ones((2, 3)))


def test_a_memory_limit_may_be_a_numpy_number():
    step = rt.train_step(memory_limit=np.int64(10**9))(
        lambda p, b: rt.grad(lambda p: (b @ p).sum())(p)
    )
    assert step.lower(jnp.ones(3), jnp.ones((2, 3))).program.settings.memory_limit == (10**9,)
