"""Steps beside JAX's own ways to spread work: a mesh in context, sharding constraints, mapped axes, jits that are disabled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen.spmd import with_logical_constraint
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ratrain_jax as rt
from ratrain_jax.errors import BatchError, StepError, UnsupportedError
from tests.refusals import BATCH, STATE, descend, loss_of, refused, step, step_of, types

LAYOUTS = (
    {"stages": 2, "microbatches": 2},
    {"stages": 2, "data_parallel": 2, "microbatches": 2},
)


def made(tree, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda t: jnp.asarray(rng.normal(size=t.shape), t.dtype), tree)


def check(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_a_mesh_in_context_is_set_aside(kind, options):
    state, batch = made(STATE), made(BATCH, 1)
    wanted = jax.jit(step)(state, batch)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(getattr(AxisType, kind),))
    inside, before = rt.train_step(**options)(step), rt.train_step(**options)(step)
    value = rt.eval_step(before)(lambda state, batch: loss_of(state, batch))
    with jax.set_mesh(mesh):
        check(inside(state, batch), wanted)
    check(before(state, batch), wanted)
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(value(state, batch), wanted[1]["loss"], rtol=1e-5)
        new, _ = before(state, batch)
        check(rt.gather(new), wanted[0])
        lowered = before.lower(new, batch)
        assert rt.profile(lowered, new, batch, repetitions=1, progress=False).measured
        _, traced = lowered.compile(progress=False).trace(new, batch)
        assert traced.ops
        assert jax.sharding.get_abstract_mesh().axis_names == ("data",)


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_sharding_constraints_change_nothing(options):
    sharding = NamedSharding(
        jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,)), PartitionSpec("data")
    )

    def laid(state, batch):
        put = lambda tree: jax.tree.map(  # noqa: E731
            lambda leaf: jax.lax.with_sharding_constraint(leaf, sharding), tree
        )
        loss, grads = rt.value_and_grad(lambda p: loss_of(put(p), put(batch)))(state)
        return descend(state, put(grads)), {"loss": loss}

    state, batch = made(STATE), made(BATCH, 1)
    check(rt.train_step(**options)(laid)(state, batch), jax.jit(step)(state, batch))


MEAN = step_of(lambda p, _, b: jax.lax.pmean(loss_of(p, b), "data"))
INDEX = step_of(lambda p, _, b: loss_of(p, b) * jax.lax.axis_index("data"))


def mean_gradients(state, batch):
    grads = rt.grad(lambda params: loss_of(params, batch))(state)
    return descend(state, jax.lax.pmean(grads, "data"))


@pytest.mark.parametrize("stepped", [MEAN, INDEX, mean_gradients], ids=["loss", "index", "grads"])
def test_a_mapped_axis_is_refused(stepped):
    words = ("uses a mapped axis", "unbound axis name: data", "Remove the collective", "the step ")
    refused(UnsupportedError, stepped, words=words, microbatches=2)


def test_a_collective_in_an_evaluation_is_refused():
    evaluated = rt.eval_step(rt.train_step()(step))(
        lambda state, batch: jax.lax.pmean(loss_of(state, batch), "data")
    )
    with pytest.raises(UnsupportedError, match="Remove the collective"):
        evaluated.lower(STATE, BATCH)


def test_code_that_is_mapped_over_devices_is_refused():
    mesh, spec = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,)), PartitionSpec("data")
    tanh = jax.shard_map(jnp.tanh, mesh=mesh, in_specs=spec, out_specs=spec)
    stepped = step_of(lambda p, _, b: loss_of(p, {"x": tanh(b["x"]), "y": b["y"]}))
    refused(UnsupportedError, stepped, words=("maps a function over devices", "data_parallel="))


def test_a_constraint_by_partition_spec_is_refused():
    def laid(p, _, b):
        return loss_of(p, jax.lax.with_sharding_constraint(b, PartitionSpec("data")))

    refused(UnsupportedError, step_of(laid), words=("by a PartitionSpec", "Remove the constraint"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of `with mesh`
@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_constraints_by_partition_spec_or_logical_axes_within_a_mesh_are_dropped(options):
    def laid(state, batch):
        x = jax.lax.with_sharding_constraint(batch["x"], PartitionSpec("data"))
        y = with_logical_constraint(batch["y"], ("rows", None), rules=[("rows", "data")])
        return step(state, {"x": x, "y": y})

    def in_loss(state, batch):
        loss, grads = rt.value_and_grad(lambda p: loss_of(p, laid_batch(batch)))(state)
        return descend(state, grads), {"loss": loss}

    def laid_batch(batch):
        return jax.tree.map(
            lambda leaf: jax.lax.with_sharding_constraint(leaf, PartitionSpec("data")), batch
        )

    state, batch = made(STATE), made(BATCH, 1)
    wanted = jax.jit(step)(state, batch)
    with jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",)):
        for stepped in (laid, in_loss):
            lowered = rt.train_step(**options)(stepped).lower(state, batch)
            assert "sharding_constraint" not in str(lowered.trace.whole)
            check(lowered.compile(progress=False)(state, batch), wanted)


# Calls.


def test_arguments_may_be_given_by_name():
    state, batch = made(STATE), made(BATCH, 1)
    wanted = jax.jit(step)(state, batch)
    piped = rt.train_step(stages=2, microbatches=2, donate_state=False)(step)
    check(piped(state, batch=batch), wanted)
    check(piped(batch=batch, state=state), wanted)
    assert piped.lower(state, batch=batch).program == piped.lower(state, batch).program
    value = rt.eval_step(piped)(lambda state, batch: loss_of(state, batch))
    np.testing.assert_allclose(value(state, batch=batch), wanted[1]["loss"], rtol=1e-5)


def test_an_argument_that_has_no_place_is_refused():
    def named(state, batch, *, rate=0.1):
        return step(state, batch)

    with pytest.raises(StepError, match="rate by name only"):
        rt.train_step()(named)(STATE, BATCH, rate=0.2)
    with pytest.raises(TypeError, match="missing a required argument: 'batch'"):
        rt.train_step()(step)(STATE, bach=BATCH)


def test_a_call_while_jits_are_disabled_is_refused_and_uses_nothing_up():
    state, batch = made(STATE), made(BATCH, 1)
    piped = rt.train_step()(step)
    state, _ = piped(state, batch)
    with jax.disable_jit(), pytest.raises(StepError, match="__wrapped__"):
        piped(state, batch)
    piped(state, batch)


# What is cut, and should not be; or is not, and should be.


def test_a_state_with_a_row_an_example():
    def carried(state, batch):
        loss, grads = rt.value_and_grad(
            lambda p: loss_of(p, {**batch, "x": batch["x"] + state[1]})
        )(state[0])
        return (descend(state[0], grads), state[1]), loss

    state = (STATE, types(24, 4))
    words = ("state[1] has 24 rows like the batch", "an argument beside the batch")
    refused(StepError, carried, state, BATCH, words=words, microbatches=2)


def test_an_optimizer_state_beside_the_parameters():
    def optax_style(params, moments, batch):
        grads = rt.grad(lambda p: loss_of(p, batch))(params)
        moments = jax.tree.map(jnp.add, moments, grads)
        return descend(params, moments), moments

    state = {name: types(8, 8) for name in ("first", "second", "third")}
    batch = {"x": types(24, 8), "y": types(24, 8)}
    words = ("Arguments 1, 2 are all cut", "batch_argnums")
    refused(StepError, optax_style, state, state, batch, words=words, microbatches=2)
    given = (made(state), made(state, 1), made(batch, 2))
    piped = rt.train_step(stages=2, microbatches=2, batch_argnums=(2,), donate_state=False)
    check(piped(optax_style)(*given), jax.jit(optax_style)(*given))


@pytest.mark.parametrize(("parts", "error"), [(2, StepError), (4, BatchError)])
def test_a_raw_random_key_beside_the_batch(parts, error):
    def noisy(state, batch, key):
        noise = jax.random.normal(rt.microbatch_key(jax.random.wrap_key_data(key)), (4,))
        return descend(
            state, rt.grad(lambda p: loss_of(p, {**batch, "x": batch["x"] + noise}))(state)
        )

    words = ("Argument 2 looks like a raw random key", "jax.random.key", "batch_argnums")
    key = types(2, dtype="uint32")
    refused(error, noisy, STATE, BATCH, key, words=words, microbatches=parts)


def test_a_loss_in_a_loop_is_told_of_whatever_the_microbatch():
    def accumulated(state, batch):
        parts = jax.tree.map(lambda leaf: leaf.reshape(4, -1, leaf.shape[-1]), batch)
        body = lambda state, part: (step(state, part)[0], None)  # noqa: E731
        return jax.lax.scan(body, state, parts)[0]

    batch = {"x": types(12, 4), "y": types(12, 4)}
    words = ("inside a `scan`", "Remove your own accumulation loop")
    refused(UnsupportedError, accumulated, STATE, batch, words=words, microbatches=2)


def test_a_gradient_by_the_input():
    def adversarial(state, batch):
        loss, (grads, _) = rt.value_and_grad(
            lambda p, x: loss_of(p, {**batch, "x": x}), argnums=(0, 1)
        )(state, batch["x"])
        return descend(state, grads), loss

    words = ("differentiated by batch['x'], which is part of the batch", "jax.grad")
    refused(UnsupportedError, adversarial, STATE, BATCH, words=words, stages=2, microbatches=2)
