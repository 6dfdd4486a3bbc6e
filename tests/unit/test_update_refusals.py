"""Updates that cannot run layer by layer are refused, by the name and place of what joins the layers."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import pytest

from ratrain_jax.errors import UnsupportedError
from ratrain_jax.losses import value_and_grad
from tests.update_runner import make_case
from tests.updates import BATCH, case_of, loss_of, make_params


def test_a_joined_array_that_must_stay_so_is_refused():
    def step(state, batch):
        _, grads = value_and_grad(loss_of)(state, batch)
        flat, _ = jax.flatten_util.ravel_pytree(grads)
        return jax.tree.map(lambda p, g: p - g * jnp.median(flat), state, grads)

    with pytest.raises(UnsupportedError, match=r"`concatenate` .*test_update_refusals\.py"):
        case_of(step, make_params())


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
        UnsupportedError, match=r"layers `layer1`, `layer2` in `add` .*test_update_refusals\.py:\d+"
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
