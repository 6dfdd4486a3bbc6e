"""The loss scale alone: when it grows, shrinks and stops, and what it does to trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ratrain_jax as rt
from ratrain_jax.errors import OptionError


@given(
    st.lists(st.booleans(), max_size=40),
    st.integers(1, 5),
    st.sampled_from([2.0, 4.0]),
    st.sampled_from([1.0, 16.0]),
)
def test_the_scale_is_that_of_the_textbook(finite, interval, factor, minimum):
    scale, good = 256.0, 0
    loss_scale = rt.DynamicLossScale.create(
        scale, growth_interval=interval, factor=factor, minimum=minimum, maximum=4096.0
    )
    for fine in finite:
        loss_scale = loss_scale.adjust(jnp.bool_(fine))
        if fine:
            good += 1
            if good == interval:
                scale, good = min(scale * factor, 4096.0), 0
        else:
            scale, good = max(scale / factor, minimum), 0
        assert (float(loss_scale.scale), int(loss_scale.good_steps)) == (scale, good)


def test_it_is_a_pytree_whose_arrays_alone_are_leaves():
    loss_scale = rt.DynamicLossScale.create(8.0, growth_interval=7)
    leaves, tree = jax.tree.flatten(loss_scale)
    assert [leaf.dtype for leaf in leaves] == [jnp.float32, jnp.int32]
    assert jax.tree.unflatten(tree, leaves).growth_interval == 7
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(loss_scale)]
    assert paths == [".scale", ".good_steps"]


def test_half_precision_is_scaled_and_unscaled_in_float32():
    loss_scale = rt.DynamicLossScale.create(2.0**20)
    scaled = loss_scale.scaled(jnp.float16(3.0))
    assert scaled.dtype == jnp.float32
    assert float(scaled) == 3 * 2.0**20
    tree = {"half": jnp.float16([1.0]), "wide": jnp.float32([2.0]), "count": jnp.int32(7)}
    back = loss_scale.unscale(tree)
    assert {name: str(leaf.dtype) for name, leaf in back.items()} == {
        "half": "float32",
        "wide": "float32",
        "count": "int32",
    }
    assert float(back["half"][0]) == 2.0**-20
    assert int(back["count"]) == 7


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_one_element_that_is_not_finite_is_found(bad, dtype):
    tree = {"a": jnp.ones((3, 4), dtype), "n": jnp.int32(5), "none": jnp.zeros((0,), dtype)}
    assert bool(rt.all_finite(tree))
    assert not bool(rt.all_finite({**tree, "a": tree["a"].at[2, 1].set(bad)}))
    assert bool(rt.all_finite({}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"growth_interval": 0}, "growth_interval is 0; it must be at least 1 step"),
        ({"factor": 1.0}, "factor is 1.0; it must be over 1"),
        ({"scale": 0.0}, "scale is 0.0; it must be over 0"),
        ({"scale": 2.0**30}, "between minimum=1.0 and maximum=16777216.0"),
    ],
)
def test_arguments_out_of_range_are_named(arguments, message):
    with pytest.raises(OptionError, match=message):
        rt.DynamicLossScale.create(**arguments)
