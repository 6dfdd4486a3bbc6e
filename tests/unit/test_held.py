"""Which leaves of the state a loss holds, and what their paths are."""

import jax
import jax.numpy as jnp
import optax
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import UnsupportedError
from ratrain_jax.lowering.graph import inline
from ratrain_jax.lowering.held import hold
from ratrain_jax.lowering.held_paths import aligned
from ratrain_jax.lowering.regions import one_region, parameters_of
from ratrain_jax.options import Options
from ratrain_jax.tracing import trace_step

X = jnp.ones((4, 8))
PARAMS = {f"l{n}": {"w": jnp.eye(8), "b": jnp.zeros(8)} for n in range(3)}


def net(params, x):
    for layer in params.values():
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x


def step_of(after, loss=None):
    """A step whose loss compares the parameters' net with that of `other`."""

    def plain(params, state, x):
        return jnp.mean((net(params, x) - net(state["other"], x)) ** 2)

    def step(state, x):
        value, grads = rt.value_and_grad(lambda p: (loss or plain)(p, state, x))(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {**state, "params": params, **after(params, grads, state)}, value

    return step


def held(step, state):
    """The path of each held leaf, by its path in the state."""
    trace, _ = trace_step(step, (state, X), Options(microbatches=2))
    marked = hold(trace)
    graph = inline(marked.whole)
    region = one_region(graph)
    small = one_region(inline(marked.small))
    assert small.params["held"] == region.params["held"]
    count = len(region.params["diff"])
    leaves = [graph.invars.index(region.invars[i]) for i in parameters_of(region)[count:]]
    paths = region.params["paths"][count:]
    return {"/".join(trace.paths[leaf]): "/".join(p) for leaf, p in zip(leaves, paths, strict=True)}


def of_all_layers(before, after=""):
    return {f"{before}l{n}/{name}": f"{after}l{n}/{name}" for n in range(3) for name in ("b", "w")}


STATE = {"params": PARAMS, "other": PARAMS}


@pytest.mark.parametrize(
    "after",
    [
        lambda params, grads, state: {},
        lambda params, grads, state: {
            "other": optax.incremental_update(params, state["other"], 0.1)
        },
        lambda params, grads, state: {"other": params},
        lambda params, grads, state: {"other": optax.periodic_update(params, state["other"], 3, 2)},
        lambda params, grads, state: {
            "other": jax.tree.map(
                lambda g, e: e + jnp.minimum(1, optax.tree.norm(grads)) * g, grads, state["other"]
            )
        },
    ],
    ids=["never changes", "moving average", "copy", "copy now and then", "scaled by a norm of all"],
)
def test_what_follows_a_parameter_or_never_changes_is_held_at_its_path(after):
    assert held(step_of(after), STATE) == of_all_layers("other/")


def test_what_is_made_from_two_parameters_is_not_held_and_refused_by_name():
    def mixed(params, grads, state):
        both = {"w": params["l0"]["w"] + params["l1"]["w"], "b": params["l2"]["b"]}
        return {"other": {**params, "l0": both}}

    step = step_of(mixed)
    assert "other/l0/w" not in held(step, STATE)
    with pytest.raises(UnsupportedError, match=r"joins arrays of the layers `l0.*`, `l1"):
        rt.train_step(stages=2, microbatches=2)(step).lower(STATE, X)


def test_what_the_loss_reads_otherwise_than_as_it_is_is_not_held_and_refused_by_name():
    def step(state, x):
        doubled = jax.tree.map(lambda leaf: leaf * 2, state["other"])
        value, grads = rt.value_and_grad(
            lambda p: jnp.mean((net(p, x) - net(doubled, x)) ** 2),
        )(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params, "other": params}, value

    assert held(step, STATE) == {}
    with pytest.raises(
        UnsupportedError, match=r"state\['other'\]\['l0'\].* Read it inside the loss"
    ):
        rt.train_step(stages=2, microbatches=2)(step).lower(STATE, X)


def test_a_tree_of_vectors_is_not_held_but_vectors_beside_matrices_are():
    def loss(params, state, x):
        return jnp.mean(net(params, x * state["levels"]) * net(state["other"], x))

    state = {**STATE, "levels": jnp.ones(8)}
    assert held(step_of(lambda *_: {}, loss), state) == of_all_layers("other/")


def test_keys_and_what_results_of_the_loss_are_put_in_are_not_held():
    def step(state, x):
        def loss(params):
            mean = x.mean(0) + state["mean"]
            noise = jax.random.normal(rt.microbatch_key(state["key"]), x.shape)
            return jnp.mean((net(params, x + noise) - mean) ** 2), mean

        (value, mean), grads = rt.value_and_grad(loss, has_aux=True)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {**state, "params": params, "mean": mean}, value

    state = {"params": PARAMS, "mean": jnp.zeros(8), "key": jax.random.key(0)}
    assert held(step, state) == {}


def test_a_net_behind_one_of_equal_names_stands_apart():
    def behind(params, state, x):
        return jnp.mean(net(state["other"], net(params, x)) ** 2)

    def before_and_again(params, state, x):
        return jnp.mean(net(params, net(state["other"], x)) - net(params, x))

    for loss in (behind, before_and_again):
        found = held(step_of(lambda *_: {}, loss), STATE)
        assert found == of_all_layers("other/", "other/")


def layers_of(step, state, stages=2):
    program = rt.train_step(stages=stages, microbatches=2)(step).lower(state, X).program
    return program.layers


def assert_side_by_side(layers):
    """Asserts that every layer has of both nets what it has of one."""
    for layer in layers:
        own = {name for name in layer.parameters if not name.startswith("state")}
        theirs = {name for name in layer.parameters if "mean" not in name} - own
        paths = (name.replace("/", "']['") for name in own)
        assert theirs == {f"state['other']['{path}']" for path in paths}
        assert not layer.borrows


def test_what_is_also_read_before_the_loss_is_not_held():
    def step(state, x):
        size = jnp.sum(state["other"]["l0"]["w"] ** 2)
        loss, grads = rt.value_and_grad(
            lambda p: jnp.mean((net(p, x) - net(state["other"], x)) ** 2) / size
        )(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {**state, "params": params}, loss

    wanted = of_all_layers("other/")
    del wanted["other/l0/w"]
    assert held(step, STATE) == wanted
    layers_of(step, STATE)


def test_a_net_behind_that_the_update_joins_with_the_parameters_is_not_held():
    def behind(params, state, x):
        return jnp.mean(net(state["other"], net(params, x)) ** 2)

    def towards(params, grads, state):
        pulled = jax.tree.map(lambda p, o: p + 0.1 * (o - p), params, state["other"])
        return {"params": pulled}

    assert held(step_of(towards, behind), STATE) == {}
    layers_of(step_of(towards, behind), STATE)
    assert held(step_of(towards), STATE) == of_all_layers("other/")
    layers_of(step_of(towards), STATE)


def test_what_moves_towards_a_leaf_that_is_held_lies_with_it():
    def loss(params, state, x):
        return jnp.mean(net(params, x) * net(state["other"], x) * net(state["moving"], x))

    def towards(params, grads, state):
        moving = jax.tree.map(lambda m, o: m + 0.1 * (o - m), state["moving"], state["other"])
        return {"moving": moving}

    state = {**STATE, "moving": PARAMS}
    found = held(step_of(towards, loss), state)
    assert found == of_all_layers("other/") | of_all_layers("moving/")
    assert all(not layer.borrows for layer in layers_of(step_of(towards, loss), state))


def test_what_follows_a_follower_is_held():
    def loss(params, state, x):
        return jnp.mean(net(params, x) * net(state["other"], x) * net(state["older"], x))

    def follow(params, grads, state):
        other = optax.incremental_update(params, state["other"], 0.1)
        return {"other": other, "older": state["other"]}

    state = {**STATE, "older": PARAMS}
    found = held(step_of(follow, loss), state)
    assert found == of_all_layers("other/") | of_all_layers("older/")


@pytest.mark.parametrize("renamed", [False, True])
def test_scalars_that_follow_are_told_apart_where_a_norm_joins_them(renamed):
    gates = {f"l{n}": {**PARAMS[f"l{n}"], "gate": jnp.ones(())} for n in range(3)}

    def gated(params, x):
        for layer in params.values():
            x = x + layer["gate"] * jnp.tanh(x @ layer["w"] + layer["b"])
        return x

    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))

    def to_state(params):
        return {f"m{name}": layer for name, layer in params.items()} if renamed else params

    def from_state(other):
        return {name.lstrip("m"): layer for name, layer in other.items()}

    def step(state, x):
        old = from_state(state["other"])
        loss, grads = rt.value_and_grad(lambda p: jnp.mean((gated(p, x) - gated(old, x)) ** 2))(
            state["params"]
        )
        updates, _ = tx.update(grads, tx.init(state["params"]))
        params = optax.apply_updates(state["params"], updates)
        other = to_state(optax.incremental_update(params, old, 0.1))
        return {"params": params, "other": other}, loss

    state = {"params": gates, "other": to_state(gates)}
    assert held(step, state)["other/ml1/gate" if renamed else "other/l1/gate"] == "l1/gate"
    layers_of(step, state)


def test_a_penalty_on_the_distance_to_held_weights_leaves_layers_as_they_are():
    def loss(params, state, x):
        apart = jax.tree.map(lambda p, o: jnp.sum((p - o) ** 2), params, state["other"])
        return jnp.mean(net(params, x) ** 2) + 0.1 * sum(jax.tree.leaves(apart))

    state = {name: {f"l{n}": {"w": jnp.eye(64)} for n in range(4)} for name in STATE}

    def net(params, x):
        for layer in params.values():
            x = jnp.tanh(x @ layer["w"])
        return x

    step = step_of(lambda *_: {}, loss)
    program = rt.train_step(stages=2, microbatches=2)(step).lower(state, jnp.ones((4, 64))).program
    assert [layer.name for layer in program.layers] == [f"l{n}" for n in range(4)]
    assert not any(layer.borrows for layer in program.layers)


def test_weights_scaled_by_a_number_of_the_state_are_weights():
    def loss(params, state, x):
        scaled = jax.tree.map(lambda leaf: leaf / (1 - state["decay"]), state["other"])
        return jnp.mean(net(params, x) * net(scaled, x))

    state = {**STATE, "decay": jnp.float32(0.5)}
    layers = layers_of(step_of(lambda *_: {}, loss), state)
    assert_side_by_side(layers)


def test_a_number_that_one_net_alone_has_goes_with_its_layer():
    params = {f"l{n}": PARAMS["l0"] for n in range(6)}  # none so dear that it is opened
    means = {name: {**layer, "mean": jnp.ones(8)} for name, layer in params.items()}

    def centred(params, x):
        for layer in params.values():
            x = jnp.tanh((x - layer["mean"]) @ layer["w"] + layer["b"])
        return x

    def loss(params, state, x):
        return jnp.mean(net(params, x) * centred(state["other"], x))

    layers = layers_of(step_of(lambda *_: {}, loss), {"params": params, "other": means})
    assert [len(layer.parameters) for layer in layers] == [5] * 6
    assert_side_by_side(layers)


def test_marked_layers_keep_their_places_and_a_follower_its_layer():
    """With marks nothing is moved: what is read in a later layer than its parameter's is borrowed there."""

    def loss(params, state, x):
        y = net(params, rt.layer(x, "student"))
        return jnp.mean((y - net(state["other"], rt.layer(x, "teacher"))) ** 2)

    def follow(params, grads, state):
        return {"other": optax.incremental_update(params, state["other"], 0.1)}

    lowered = rt.train_step(stages=2, microbatches=2)(step_of(follow, loss)).lower(STATE, X)
    student, teacher = lowered.program.layers
    assert len(student.parameters) == 12
    assert teacher.parameters == ()
    assert [owner for owner, _ in teacher.borrows] == [0]


@pytest.mark.parametrize(
    ("leaves", "trained", "wanted"),
    [
        ({0: ("ref", "a", "w"), 1: ("ref", "b", "w")}, [("a", "w")], "a/w b/w"),
        ({0: ("ref", "params", "a", "w")}, [("params", "a", "w")], "params/a/w"),
        ({0: ("base", "params", "a", "w")}, [("a", "lora")], "a/w"),
        (
            {0: ("base", "a", "w"), 1: ("base", "b", "w")},
            [("params", "a", "l")],
            "params/a/w params/b/w",
        ),
        ({0: ("block_0", "w"), 1: ("block_0", "b")}, [("x", "y")], "block_0/w block_0/b"),
        ({0: ("w",)}, [("x", "y")], "w"),
    ],
)
def test_what_is_the_trees_own_is_taken_from_paths(leaves, trained, wanted):
    assert ["/".join(path) for path in aligned(leaves, trained).values()] == wanted.split()
