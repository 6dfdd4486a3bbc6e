from typing import Any

import flax.struct
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax.training.train_state import TrainState

from ratrain_jax.errors import UnsupportedError
from ratrain_jax.losses import value_and_grad
from ratrain_jax.lowering.graph import fingerprint
from ratrain_jax.lowering.update import split_update

from .update_runner import gradients, make_case, run_plan, run_whole

LAYERS = ["embed", "block0", "block1"]
BATCH = {"x": np.cos(np.arange(24.0, dtype=np.float32)).reshape(6, 4)}


def layer_of(path):
    return next(i for i, name in enumerate(LAYERS) if name in path)


def make_params(dtype: Any = np.float32) -> Any:
    def array(*shape):
        return jnp.asarray(np.sin(np.arange(np.prod(shape)) + 1).reshape(shape) / 2, dtype)

    params = {"embed": {"w": array(4, 8)}}
    for name in LAYERS[1:]:
        params[name] = {"w": array(8, 8), "b": array(8), "odd": array(3), "scale": array()}
    return params


def model(params, x):
    h = x @ params["embed"]["w"]
    for name in LAYERS[1:]:
        p = params[name]
        h = jnp.tanh(h @ p["w"] + p["b"]) * p["scale"] + jnp.sum(p["odd"] ** 2)
    return h


def loss_of(params, batch):
    return jnp.mean(model(params, batch["x"]) ** 2)


def case_of(step, state, *batch, **kwargs):
    return make_case(step, state, *(batch or [BATCH]), layer_of=layer_of, layers=3, **kwargs)


def compare(case, devices=(2,), steps=2, rtol=2e-6):
    """Runs a plan and the step as it was written, from the same gradients, over some steps."""
    state, *batch = case.inputs
    for step in range(steps):
        inputs = (state, *jax.tree.map(lambda x, n=step: x * (1 + n), batch))
        results, grads = gradients(case, inputs)
        want = run_whole(case, inputs, results, grads)
        for count in devices:
            got = run_plan(case, inputs, results, grads, count)
            assert len(got) == len(want)
            for w, g in zip(want, got, strict=True):
                if jnp.issubdtype(w.dtype, jax.dtypes.extended):
                    w, g = jax.random.key_data(w), jax.random.key_data(g)
                assert (w.dtype, w.shape) == (g.dtype, g.shape)
                largest = float(np.max(np.abs(w), initial=1e-3))
                np.testing.assert_allclose(
                    np.asarray(g, np.float64), np.asarray(w, np.float64), rtol, rtol / 10 * largest
                )
        if case.new_state:
            state = jax.tree.unflatten(jax.tree.structure(state), want[: case.new_state])


def train_step(state, batch):
    loss, grads = value_and_grad(loss_of)(state.params, batch)
    metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
    return state.apply_gradients(grads=grads), metrics


def optax_case(tx):
    state = TrainState.create(apply_fn=model, params=make_params(), tx=tx)
    return case_of(train_step, state)


def check_equal_layers(plan):
    """Equal layers have equal programs, so that they share one executable."""
    first, second = ([fingerprint(p) for p in layer.phases] for layer in plan.layers[1:])
    assert first == second


def waits(plan):
    return [layer.phase for layer in plan.layers]


def decayed(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


# The optimizer, how many reductions its updates wait for, and how many leaves stay replicated.
OPTIMIZERS = {
    "sgd": (optax.sgd(0.1), 0, 1),
    "momentum": (optax.sgd(0.1, momentum=0.9, nesterov=True), 0, 1),
    "adam": (optax.adam(0.1), 0, 2),
    "adamw": (optax.adamw(0.1, weight_decay=0.1, mask=decayed), 0, 2),
    "lion": (optax.lion(0.1), 0, 2),
    "rmsprop": (optax.rmsprop(0.1, momentum=0.9), 0, 1),
    "adagrad": (optax.adagrad(0.1), 0, 1),
    "lamb": (optax.lamb(0.1), 0, 2),
    "lars": (optax.lars(0.1), 0, 1),
    "novograd": (optax.novograd(0.1), 0, 2),
    "schedule": (optax.adam(optax.cosine_decay_schedule(0.1, 9)), 0, 3),
    "clip": (optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)), 1, 2),
    "clip_blocks": (optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(0.1)), 0, 1),
    "adaptive_clip": (optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)), 0, 1),
    "multi_steps": (optax.MultiSteps(optax.adam(0.1), 2), 0, 4),
    "if_finite": (optax.apply_if_finite(optax.adam(0.1), 3), 1, 5),
    "freeze": (
        optax.multi_transform(
            {"train": optax.adam(0.1), "freeze": optax.set_to_zero()},
            {name: "freeze" if name == "embed" else "train" for name in LAYERS},
        ),
        0,
        2,
    ),
    "dog": (optax.contrib.dog(0.1), 1, 4),
    "schedule_free": (optax.contrib.schedule_free_adamw(0.1), 0, 6),
}


QUICK = {"momentum", "adamw", "lion", "lamb", "clip", "schedule", "multi_steps", "if_finite"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in OPTIMIZERS],
)
def test_an_optimizer_runs_layer_by_layer_on_shards(name):
    tx, phase, replicated = OPTIMIZERS[name]
    case = optax_case(tx)
    compare(case)
    check_equal_layers(case.plan)
    assert waits(case.plan) == [phase] * 3
    assert len(case.plan.replicated) == replicated
    # One reduction, for the gradients' norm and the loss, whatever the updates wait for.
    assert [reduction.layers for reduction in case.plan.reductions] == [(0, 1, 2)]
    assert case.plan.reductions[0].loss
    assert all(aval.shape == () for aval in case.plan.reductions[0].scalars)


@pytest.mark.parametrize("devices", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_the_number_of_devices_does_not_matter(devices):
    compare(optax_case(OPTIMIZERS["clip"][0]), devices=[devices])


def test_adafactor_runs_layer_by_layer_on_shards():
    case = optax_case(optax.adafactor(0.1, min_dim_size_to_factor=4))
    compare(case, rtol=5e-6)
    check_equal_layers(case.plan)
    assert waits(case.plan) == [0, 0, 0]
    # The two factors of each matrix belong to its layer.
    assert [len(layer.optimizer) for layer in case.plan.layers] == [2, 5, 5]


def test_noise_is_the_same_on_shards():
    def step(state, batch):
        _, grads = value_and_grad(loss_of)(state["params"], batch)
        key, *keys = jax.random.split(state["key"], 4)
        params = dict(state["params"])
        for name, own in zip(LAYERS, keys, strict=True):
            grad = grads[name]["w"] + jax.random.uniform(own, grads[name]["w"].shape)
            params[name] = params[name] | {"w": params[name]["w"] - 0.1 * grad}
        return {"params": params, "key": key}

    case = case_of(step, {"params": make_params(), "key": jax.random.key(0)})
    compare(case)
    assert waits(case.plan) == [0, 0, 0]
    assert case.plan.replicated == (0,)


def test_products_of_matrices_run_layer_by_layer():
    def step(state, batch):
        _, grads = value_and_grad(loss_of)(state, batch)
        precondition = lambda g: g @ g.T @ g if g.ndim == 2 else g  # noqa: E731
        return jax.tree.map(lambda p, g: p - 0.1 * precondition(g), state, grads)

    case = case_of(step, make_params())
    compare(case, rtol=1e-5)
    assert waits(case.plan) == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "mechanize", "prodigy", "noise"])
def test_optimizers_of_other_kinds_run_layer_by_layer(name):
    noise = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1))
    tx = {
        "muon": lambda: optax.contrib.muon(0.1),
        "mechanize": lambda: optax.contrib.mechanize(optax.adam(0.1)),
        "prodigy": lambda: optax.contrib.prodigy(0.1),
        "noise": lambda: noise,
    }[name]()
    case = optax_case(tx)
    compare(case, rtol=5e-5)
    if name != "noise":  # each layer draws other numbers
        check_equal_layers(case.plan)


def test_a_plateau_makes_updates_wait_for_the_loss():
    tx = optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=1))

    def step(state, batch):
        loss, grads = value_and_grad(loss_of)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"], value=loss)
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    params = make_params()
    case = case_of(step, {"params": params, "opt": tx.init(params)})
    compare(case, steps=3)
    assert len(case.plan.reductions) == 1 and case.plan.reductions[0].layers == ()
    # The scale that this step's updates use was made in the last step.
    assert waits(case.plan) == [1, 1, 1] and case.plan.replicated_phase == 1


def test_a_loss_in_the_update_makes_it_wait_for_the_loss_alone():
    def step(state, batch):
        loss, grads = value_and_grad(loss_of)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * loss * g, state, grads)

    case = case_of(step, make_params())
    compare(case)
    (reduction,) = case.plan.reductions
    assert reduction.loss and reduction.layers == ()
    assert waits(case.plan) == [1, 1, 1]
    assert all(not partials for layer in case.plan.layers for partials in layer.partials)


def test_an_average_of_the_parameters_belongs_to_their_layer():
    tx = optax.adam(0.1)

    def step(state, batch):
        loss, grads = value_and_grad(loss_of)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        ema = optax.incremental_update(params, state["ema"], 0.1)
        return {"params": params, "opt": opt, "ema": ema}, {"loss": loss}

    params = make_params()
    case = case_of(step, {"params": params, "opt": tx.init(params), "ema": params})
    compare(case)
    check_equal_layers(case.plan)
    assert [len(layer.optimizer) for layer in case.plan.layers] == [3, 12, 12]


def test_what_training_began_with_belongs_to_its_layer():
    def step(state, batch):
        _, grads = value_and_grad(loss_of)(state["params"], batch)
        pull = lambda p, g, start: p - 0.1 * (g + 0.5 * (p - start))  # noqa: E731
        return state | {"params": jax.tree.map(pull, state["params"], grads, state["start"])}

    params = make_params()
    case = case_of(step, {"params": params, "start": params})
    compare(case)
    assert case.plan.replicated == () and case.plan.reductions == ()
    assert [len(layer.optimizer) for layer in case.plan.layers] == [1, 4, 4]


def test_frozen_state_that_the_loss_reads_stays_replicated():
    def step(state, batch):
        def loss_fn(params):
            return loss_of(params, {"x": batch["x"] * state["frozen"]})

        _, grads = value_and_grad(loss_fn)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        params["embed"]["w"] += 0.01 * state["frozen"][:, None]
        return state | {"params": params}

    case = case_of(step, {"params": make_params(), "frozen": jnp.arange(4.0)})
    compare(case)
    assert case.plan.replicated == (0,)


def test_metrics_do_not_make_updates_wait():
    def step(state, batch):
        loss, grads = value_and_grad(loss_of)(state, batch)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)
        norms = {name: optax.tree.norm(group) for name, group in grads.items()}
        largest = jnp.max(jnp.stack([jnp.max(jnp.abs(p)) for p in jax.tree.leaves(new)]))
        finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
        return new, {"loss": loss, "norms": norms, "largest": largest, "finite": finite}

    case = case_of(step, make_params())
    compare(case)
    assert waits(case.plan) == [0, 0, 0]
    assert len(case.plan.reductions) == 1
    combined = {p.combine for layer in case.plan.layers for p in layer.partials[0]}
    assert {"sum", "max", "and"} <= combined


def test_gradients_and_updates_can_be_returned():
    def step(state, batch):
        loss, grads = value_and_grad(loss_of)(state, batch)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)
        return new, {"grads": grads, "old": state["embed"], "loss": loss}

    case = case_of(step, make_params())
    compare(case)
    # The scalar parameters' gradients come through the reduction, arrays from their layers.
    assert [len(layer.outputs) for layer in case.plan.layers] == [2, 3, 3]


@pytest.mark.parametrize("what", ["grads", "loss", "norm"])
def test_a_step_may_return_no_state(what):
    def step(state, batch):
        loss, grads = value_and_grad(loss_of)(state, batch)
        return {"grads": grads, "loss": loss, "norm": optax.tree.norm(grads)}[what]

    compare(case_of(step, make_params(), returns_state=False), steps=1)


def test_metrics_and_learning_rates_may_come_from_the_batch():
    def step(state, batch, rate):
        loss, grads = value_and_grad(loss_of)(state["params"], batch)
        params = jax.tree.map(lambda p, g: p - rate["scale"] * 0.1 * g, state["params"], grads)
        new = {"params": params, "last": rate["scale"], "count": state["count"] + 1}
        metrics = {"mean": jnp.mean(batch["x"]) + loss, "rows": batch["x"][:, 0] * 2}
        return new, metrics | {"rate": rate["scale"]}

    state = {"params": make_params(), "last": jnp.float32(0), "count": jnp.int32(0)}
    case = case_of(step, state, BATCH, {"scale": jnp.float32(2)})
    compare(case)
    assert len(case.plan.reductions[0].batch) == 1
    assert len(case.plan.metrics_batch) == 2
    assert len(set(case.plan.metrics.jaxpr.invars)) == len(case.plan.metrics.jaxpr.invars)
    assert case.plan.replicated_phase == 1


def test_auxiliary_values_pass_through_a_reduction_into_the_state():
    def step(state, batch):
        def loss_fn(params):
            h = model(params, batch["x"])
            return jnp.mean(h**2), {"mean": jnp.mean(h)}

        (loss, aux), grads = value_and_grad(loss_fn, has_aux=True)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        stats = 0.9 * state["stats"] + 0.1 * aux["mean"]
        return {"params": params, "stats": stats}, {"loss": loss, "mean": aux["mean"]}

    case = case_of(step, {"params": make_params(), "stats": jnp.zeros(())})
    compare(case)
    assert waits(case.plan) == [0, 0, 0]


def test_reductions_can_follow_each_other():
    def step(state, batch):
        _, grads = value_and_grad(loss_of)(state, batch)
        clipped: Any = optax.clip_by_global_norm(0.1).update(grads, optax.EmptyState())
        grads = clipped[0]
        mean = sum(jnp.sum(g) for g in jax.tree.leaves(grads)) / 100
        new = jax.tree.map(lambda p, g: p - (g - mean), state, grads)
        return new, {"norm": optax.tree.norm(new), "embed": jnp.sum(grads["embed"]["w"])}

    case = case_of(step, make_params())
    compare(case)
    assert waits(case.plan) == [2, 2, 2]
    assert len(case.plan.reductions) == 3
    check_equal_layers(case.plan)


def test_a_metric_may_need_a_later_phase_than_the_update():
    def step(state, batch):
        _, grads = value_and_grad(loss_of)(state, batch)
        clipped: Any = optax.clip_by_global_norm(0.1).update(grads, optax.EmptyState())
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)
        return new, {"clipped": optax.tree.norm(clipped[0])}

    case = case_of(step, make_params())
    compare(case)
    assert waits(case.plan) == [1, 1, 1]
    assert len(case.plan.reductions) == 2


def test_arrays_that_grow_from_global_scalars_are_not_sent():
    def step(state, batch, key):
        _, grads = value_and_grad(loss_of)(state, batch)
        norm = optax.tree.norm(grads)
        noise = jax.random.uniform(key["noise"], (8, 8))
        new = jax.tree.map(lambda p, g: p - 0.1 * g / jnp.broadcast_to(norm, g.shape), state, grads)
        new["block0"]["w"] = new["block0"]["w"] + noise * norm
        return new

    case = case_of(step, make_params(), BATCH, {"noise": jax.random.key(3)})
    results, grads = gradients(case, case.inputs)
    got = run_plan(case, case.inputs, results, grads, 2)
    want = run_whole(case, case.inputs, results, grads)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-6, atol=1e-7)
    assert sorted(str(aval) for aval in case.plan.reductions[0].scalars) == [
        "float32[]",
        "key<fry>[]",
    ]


def test_one_layer_may_scale_by_a_norm_of_another():
    def step(state, batch):
        _, grads = value_and_grad(loss_of)(state, batch)
        norm = jnp.linalg.norm(grads["embed"]["w"])
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)
        new["block1"]["b"] = state["block1"]["b"] - grads["block1"]["b"] * norm
        return new

    case = case_of(step, make_params())
    compare(case)
    assert waits(case.plan) == [0, 0, 1]
    assert case.plan.reductions[0].layers == (0,)


def test_gradients_arrive_in_the_accumulators_dtype():
    tx = optax.sgd(0.1)
    state = TrainState.create(apply_fn=model, params=make_params(jnp.bfloat16), tx=tx)
    case = case_of(train_step, state)
    grads = case.plan.layers[1].phases[0].in_avals[:4]
    assert {aval.dtype for aval in grads} == {jnp.dtype("float32")}
    compare(case, rtol=1e-2)


def test_layers_without_parameters_have_empty_updates():
    case = case_of(
        train_step, TrainState.create(apply_fn=None, params=make_params(), tx=optax.sgd(0.1))
    )
    plan = split_update(
        case.regions,
        owner=[3 * layer_of(name) for name in ["block0"] * 4 + ["block1"] * 4 + ["embed"]],
        layers=8,
        state_out=range(case.new_state),
        metrics_out=range(case.new_state, case.new_state + 2),
    )
    assert [len(layer.params) for layer in plan.layers] == [1, 0, 0, 4, 0, 0, 4, 0]
    assert plan.layers[1].phase == 0 and len(plan.layers[1].phases) == 1


def primitives(closed):
    return [eqn.primitive.name for eqn in closed.jaxpr.eqns]


@pytest.mark.parametrize("every", ["step", "finite"])
def test_a_branch_around_heavy_work_becomes_one_branch_a_layer(every):
    def step(state, batch):
        _, grads = value_and_grad(loss_of)(state["params"], batch)
        finite = jnp.isfinite(sum(jnp.sum(g) for g in jax.tree.leaves(grads)))
        count = state["count"] + 1
        update = lambda p, g: p - 0.1 * (g @ g.T @ g if g.ndim == 2 else g)  # noqa: E731
        params, count = jax.lax.cond(
            finite if every == "finite" else count % 2 == 0,
            lambda params, grads: (jax.tree.map(update, params, grads), count),
            lambda params, grads: (params, count * 2),
            state["params"],
            grads,
        )
        return {"params": params, "count": count}

    case = case_of(step, {"params": make_params(), "count": jnp.int32(0)})
    compare(case, rtol=1e-5)
    check_equal_layers(case.plan)
    waiting = 1 if every == "finite" else 0
    assert waits(case.plan) == [waiting] * 3
    for layer in case.plan.layers:
        assert primitives(layer.phases[-1]).count("cond") == 1
        assert "dot_general" not in primitives(layer.phases[-1])
    assert case.plan.replicated_phase == waiting


def test_a_heavy_branch_that_joins_layers_is_computed_and_selected():
    def step(state, batch):
        _, grads = value_and_grad(loss_of)(state["params"], batch)

        def update(params, grads):
            norm = optax.tree.norm(grads)
            precondition = lambda g: g @ g.T @ g if g.ndim == 2 else g  # noqa: E731
            return jax.tree.map(lambda p, g: p - precondition(g) / norm, params, grads)

        params = jax.lax.cond(
            state["count"] % 2 == 0, update, lambda params, _: params, state["params"], grads
        )
        return {"params": params, "count": state["count"] + 1}

    case = case_of(step, {"params": make_params(), "count": jnp.int32(0)})
    compare(case, rtol=1e-5)
    assert waits(case.plan) == [1, 1, 1]


def test_joined_gradients_are_taken_apart():
    def step(state, batch):
        _, grads = value_and_grad(loss_of)(state, batch)
        flat, restore = jax.flatten_util.ravel_pytree(grads)
        norm, largest = jnp.sqrt(jnp.vdot(flat, flat)), jnp.max(jnp.abs(flat))
        flat = jnp.where(norm < 1e-3, flat, flat / norm) + jnp.full_like(flat, 0.1)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state, restore(flat))
        stacked = jnp.stack([new["block0"]["w"], new["block1"]["w"]])
        new["block0"]["b"], new["block1"]["b"] = jnp.unstack(
            jnp.stack([new["block0"]["b"], new["block1"]["b"]], axis=1) * 2, axis=1
        )
        return new, {"norm": norm, "largest": largest, "mean": jnp.mean(stacked**2)}

    case = case_of(step, make_params())
    compare(case)
    assert waits(case.plan) == [1, 1, 1]
    for layer in case.plan.layers:
        assert not {"concatenate", "split"} & set(primitives(layer.phases[-1]))


def test_a_joined_array_that_must_stay_so_is_refused():
    def step(state, batch):
        _, grads = value_and_grad(loss_of)(state, batch)
        flat, _ = jax.flatten_util.ravel_pytree(grads)
        return jax.tree.map(lambda p, g: p - g * jnp.median(flat), state, grads)

    with pytest.raises(UnsupportedError, match=r"`concatenate` .*test_update\.py"):
        case_of(step, make_params())


@flax.struct.dataclass
class Scaled:
    params: dict
    scale: jax.Array
    steps: jax.Array


def test_a_dynamic_loss_scale_is_replicated_and_waits():
    def step(state, batch):
        def loss_fn(params):
            return loss_of(params, batch) * state.scale

        loss, grads = value_and_grad(loss_fn)(state.params)
        grads = jax.tree.map(lambda g: g / state.scale, grads)
        finite = jnp.all(jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
        new = jax.tree.map(lambda p, g: jnp.where(finite, p - 0.1 * g, p), state.params, grads)
        scale = jnp.where(finite, state.scale, state.scale / 2)
        return Scaled(new, scale, state.steps + finite), {"loss": loss / state.scale}

    state = Scaled(make_params(), jnp.float32(8), jnp.int32(0))
    case = case_of(step, state)
    compare(case)
    assert waits(case.plan) == [1, 1, 1]
    assert len(case.plan.replicated) == 2 and case.plan.replicated_phase == 1
    check_equal_layers(case.plan)
    inputs = (state, {"x": BATCH["x"].copy()})
    results, grads = gradients(case, inputs)
    grads[0] = grads[0].at[0].set(jnp.inf)
    got, want = run_plan(case, inputs, results, grads, 2), run_whole(case, inputs, results, grads)
    assert float(want[9]) == 4.0
    jax.tree.map(np.testing.assert_allclose, got, want)


def test_a_computed_parameter_is_refused():
    def step(state, batch):
        _, grads = value_and_grad(loss_of)(jax.tree.map(lambda p: p * 2, state), batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)

    with pytest.raises(UnsupportedError, match=r"float32\[8\], is computed from the state"):
        make_case(step, make_params(), BATCH, layer_of=lambda _: 0, layers=1)


def test_arrays_of_several_layers_that_meet_are_refused_by_name_and_place():
    def step(state, batch):
        _, grads = value_and_grad(loss_of)(state, batch)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)
        new["block0"]["w"] = new["block0"]["w"] + new["block1"]["w"]
        return new

    with pytest.raises(
        UnsupportedError, match=r"layers `layer1`, `layer2` in `add` .*test_update\.py:\d+"
    ):
        case_of(step, make_params())


def test_a_swap_of_parameters_between_layers_is_refused():
    def step(state, batch):
        _, grads = value_and_grad(loss_of)(state, batch)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)
        return new | {"block0": new["block1"], "block1": new["block0"]}

    with pytest.raises(
        UnsupportedError, match=r"\['block0'\]\['b'\] in the state, .*`layer1`, .* `layer2`"
    ):
        case_of(step, make_params())


def test_an_effect_in_the_update_is_refused():
    def step(state, batch):
        loss, grads = value_and_grad(loss_of)(state, batch)
        jax.debug.print("loss {}", loss)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)

    with pytest.raises(UnsupportedError, match="side effect outside the loss"):
        case_of(step, make_params())
