"""A state comes back from a checkpoint to the last bit, where its like lies; a state of another model is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ratrain_jax as rt
from ratrain_jax.errors import CheckpointError
from tests.checkpoints import bits, make_state, restored, saved
from tests.training import differing


def test_a_state_comes_back_to_the_last_bit(tmp_path):
    saved(tmp_path, 1, 2)
    state, step, extras = restored(tmp_path)
    assert (step, extras) == (2, {"at": [2, 2**80]})
    assert jax.tree.structure(state) == jax.tree.structure(make_state())
    assert differing(bits(state), bits(make_state(2))) == []
    assert state.key.dtype == jax.random.key(0).dtype
    assert jax.random.bits(state.key) == jax.random.bits(jax.random.key(2))
    first, step, _ = restored(tmp_path, jax.eval_shape(make_state), step=1)
    assert step == 1 and differing(bits(first), bits(make_state(1))) == []


def test_the_first_run_begins_with_what_it_was_given(tmp_path):
    state = make_state()
    found = restored(tmp_path, state)
    assert found.state is state and found[1:] == (0, {})
    with pytest.raises(CheckpointError, match="no checkpoint, and what was given are types"):
        restored(tmp_path, jax.eval_shape(make_state))


def test_numbers_keys_and_types_come_back_as_they_were(tmp_path):
    state = {
        "int": 3,
        "weak": jnp.full((2,), 0.5),
        "numpy": np.arange(2.0),
        "scalar": np.float64(0.1),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), (2, 2)),
        "no keys": jax.random.split(jax.random.key(0), 2)[:0],
    }
    saved(tmp_path, 1, state=lambda _: state)
    found = restored(tmp_path, state).state
    assert differing(bits(found), bits(state)) == []
    assert found["int"].weak_type and found["weak"].weak_type
    assert type(found["numpy"]) is np.ndarray and found["numpy"].dtype == np.float64
    assert found["scalar"] == np.float64(0.1)
    assert jax.random.key_impl(found["keys"]) == "rbg"


def test_a_state_of_one_array(tmp_path):
    saved(tmp_path, 1, state=lambda _: jnp.arange(3))
    assert restored(tmp_path, jnp.zeros(3, int)).state.tolist() == [0, 1, 2]


def test_a_state_whose_first_leaves_were_numpys(tmp_path):
    """Without 64 bits, a step makes float32 of numpy's float64; the state to begin with still fits."""
    saved(tmp_path, 1, state=lambda _: {"x": jnp.ones(2)})
    assert restored(tmp_path, {"x": np.zeros(2)}).state["x"].dtype == np.float32


def mesh(*shape):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, ("a", "b")[: len(shape)])


def test_leaves_come_back_where_the_like_ones_lie(tmp_path):
    four = NamedSharding(mesh(2, 2), PartitionSpec("a", "b"))
    half = NamedSharding(mesh(2, 2), PartitionSpec(None, "b"))  # each part twice
    state = {"x": jax.device_put(jnp.arange(24.0).reshape(4, 6), four), "y": jnp.ones(2)}
    saved(tmp_path, 1, state=lambda _: state)
    types = {"x": jax.ShapeDtypeStruct((4, 6), jnp.float32, sharding=half), "y": state["y"]}
    found = restored(tmp_path, types).state
    assert found["x"].sharding == half and not found["y"].committed
    assert differing(found, state) == []
    saved(tmp_path, 2, state=lambda _: found)
    again = restored(tmp_path, state).state
    assert again["x"].sharding == four and differing(again, state) == []


def test_stacked_leaves_are_saved_stacked(tmp_path):
    rows = jnp.arange(12.0).reshape(2, 3, 2)
    nested = rt.StackedLeaf([rt.StackedLeaf(list(part)) for part in rows])
    saved(tmp_path, 1, state=lambda _: {"x": nested})
    assert differing(restored(tmp_path, {"x": rows}).state, {"x": rows}) == []
    saved(tmp_path, 2, state=lambda _: {"x": rows})
    found = restored(tmp_path, {"x": nested}).state["x"]
    assert isinstance(found[1], rt.StackedLeaf) and isinstance(found[1][2], jax.Array)
    assert differing({"x": np.asarray(found)}, {"x": rows}) == []


def test_orbax_alone_reads_a_checkpoint(tmp_path):
    saved(tmp_path, 7)
    with ocp.PyTreeCheckpointer() as checkpointer:
        args = {"w": ocp.RestoreArgs(restore_type=np.ndarray)}
        tree = checkpointer.restore(
            tmp_path / "7/state",
            item={"params": {"w": 0}},
            restore_args={"params": args},
            partial_restore=True,
        )
    assert differing(tree["params"], {"w": make_state(7).params["w"]}) == []


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    saved(tmp_path, 1, state=lambda _: {"a": jnp.ones(3), "b": jnp.ones(2), "c": jnp.ones(1)})
    like = {"a": jnp.ones(4), "b": jnp.ones(2, int), "d": jnp.ones(1), "e": jnp.ones(1)}
    with pytest.raises(CheckpointError) as caught:
        restored(tmp_path, like)
    text = str(caught.value)
    assert f"{tmp_path}/1 is of another model or optimizer" in text
    assert "d is missing in it; e is missing in it; c is only in it; and 2 more" in text
    with pytest.raises(CheckpointError) as caught:
        restored(tmp_path, {"a": jnp.ones(4), "b": jnp.ones(2, int), "c": jnp.ones(1)})
    assert "a is float32[3] in it and float32[4] in the state; b is float32[2]" in str(caught.value)


def test_other_random_keys_are_refused(tmp_path):
    saved(tmp_path, 1, state=lambda _: {"key": jax.random.key(0)})
    with pytest.raises(CheckpointError, match=r"key is key<fry>\[\] in it and key<rbg>\[\]"):
        restored(tmp_path, {"key": jax.random.key(0, impl="rbg")})
    with pytest.raises(CheckpointError, match=r"key<fry>\[\] in it and uint32\[2\]"):
        restored(tmp_path, {"key": jax.random.PRNGKey(0)})


def test_double_precision_is_not_cut_in_silence(tmp_path, double_precision):
    saved(tmp_path, 1, state=lambda _: {"x": jnp.ones(2)})
    jax.config.update("jax_enable_x64", False)
    with pytest.raises(CheckpointError, match=r"x is float64\[2\] in it and float32\[2\]"):
        restored(tmp_path, {"x": jnp.ones(2)})
