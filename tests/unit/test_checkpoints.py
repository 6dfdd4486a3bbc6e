"""Checkpoints hold a state to the last bit; damage, full disks, other models and second writers are noticed."""

import dataclasses
import errno
import json
import os
import resource
import shutil
import threading
import warnings
from pathlib import Path

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ratrain_jax as rt
from ratrain_jax.checkpoints import store as module
from ratrain_jax.checkpoints.manifest import Manifest
from ratrain_jax.checkpoints.storage import UNFINISHED
from ratrain_jax.errors import CheckpointError, OptionError, RATrainWarning
from tests.training import differing


@flax.struct.dataclass
class State:
    params: object
    scale: DynamicScale
    key: jax.Array


def make_state(seed=0):
    rng = np.random.default_rng(seed)
    params = {
        "w": jnp.asarray(rng.normal(size=(4, 6)), jnp.float32),
        "half": jnp.asarray(rng.normal(size=(3,)), jnp.bfloat16),
        "a.b/c%": (jnp.arange(3, dtype=jnp.uint8), None, [jnp.asarray(True)]),
        "none of it": jnp.zeros((0, 3)),
    }
    return State(params, DynamicScale(scale=jnp.float32(2.0**seed)), jax.random.key(seed))


def bits(tree):
    """The tree with random keys as their data, which compares, and Python numbers as JAX takes them."""
    return jax.tree.map(_comparable, tree)


def _comparable(leaf):
    leaf = jnp.asarray(leaf) if isinstance(leaf, int) else leaf
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def saved(folder, *steps, keep=3, state=make_state):
    with rt.Checkpoints(folder, keep=keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, state(step), {"at": [step, 2**80]})


def restored(folder, like=None, step=None):
    with rt.Checkpoints(folder) as checkpoints:
        return checkpoints.restore(make_state() if like is None else like, step)


# What comes back.


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


# Saving while the run goes on.


@pytest.fixture
def held(monkeypatch):
    """Holds every write back until it is set."""
    event = threading.Event()
    write = module.write

    def late(*args):
        assert event.wait(60)
        write(*args)

    monkeypatch.setattr(module, "write", late)
    return event


def test_saving_does_not_wait_for_the_disk_nor_mind_donation(tmp_path, held):
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = step({"x": jnp.zeros(1000), "n": jnp.int32(0)})
    with rt.Checkpoints(tmp_path) as checkpoints:
        address = state["x"].unsafe_buffer_pointer()
        checkpoints.save(1, state)
        new = step(state)
        assert state["x"].is_deleted()
        assert new["x"].unsafe_buffer_pointer() == address, (
            "the copy kept the buffer from being used"
        )
        assert checkpoints.steps == ()
        held.set()
        checkpoints.wait()
        assert checkpoints.steps == (1,)
        found = checkpoints.restore(new).state
        assert set(found["x"].tolist()) == {1.0} and found["n"] == 1
        assert step(found)["n"] == 2
        with pytest.raises(CheckpointError, match="n was used up by a later step"):
            checkpoints.save(2, {"n": state["n"]})


def test_numpy_arrays_may_change_once_saved(tmp_path, held):
    array = np.zeros(3)
    with rt.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": array})
        array += 1
        held.set()
    assert restored(tmp_path, {"x": array}).state["x"].tolist() == [0, 0, 0]


def test_the_newest_are_kept(tmp_path):
    saved(tmp_path, 1, 5, 10, keep=2)
    with rt.Checkpoints(tmp_path, keep=None) as checkpoints:
        assert checkpoints.steps == (5, 10)
        checkpoints.save(11, make_state())
        checkpoints.wait()
        assert checkpoints.steps == (5, 10, 11)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["10", "11", "5", "lock"]


def test_steps_go_up(tmp_path):
    saved(tmp_path, 5)
    with rt.Checkpoints(tmp_path) as checkpoints:
        for step in (4, 5):
            with pytest.raises(CheckpointError, match=f"step {step} is not after step 5"):
                checkpoints.save(step, make_state())
        with pytest.raises(CheckpointError, match="step -1 must be at least 0"):
            checkpoints.save(-1, make_state())
        checkpoints.save(jnp.int32(6), make_state())
    assert restored(tmp_path).step == 6


def test_what_cannot_be_saved_is_said_at_once(tmp_path):
    with rt.Checkpoints(tmp_path) as checkpoints:
        for extras, where in [
            ({"a": [1, (2,)]}, r"extras\['a'\]\[1\] is \(2,\) of type tuple"),
            ({"a": {1: 2}}, r"extras\['a'\] has the key 1"),
            ({"a": np.int64(3)}, "of type int64"),
            ({"a": float("nan")}, "is nan"),
        ]:
            with pytest.raises(CheckpointError, match=where):
                checkpoints.save(1, make_state(), extras)
        with pytest.raises(CheckpointError, match="the state has no arrays"):
            checkpoints.save(1, {"x": None, "y": jnp.zeros((0, 2))})
        with pytest.raises(CheckpointError, match=r"a/name: str is no array: 'x'"):
            checkpoints.save(1, {"a": {"name": "x"}})
    with pytest.raises(CheckpointError, match="is closed"):
        checkpoints.save(1, make_state())
    with pytest.raises(CheckpointError, match="is closed"):
        checkpoints.restore(make_state())
    checkpoints.close()
    with pytest.raises(OptionError, match="keep=0"):
        rt.Checkpoints(tmp_path, keep=0)
    assert restored(tmp_path).step == 0


# Two writers, and what a killed one leaves.


def test_a_second_writer_is_refused_by_name(tmp_path):
    with rt.Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match=f"written in by process {os.getpid()} on "):
            rt.Checkpoints(tmp_path)
        checkpoints.save(1, make_state())
    assert restored(tmp_path).step == 1


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file cannot hold checkpoints"):
        rt.Checkpoints(tmp_path / "file")


def test_what_was_not_finished_is_removed(tmp_path):
    saved(tmp_path, 1, 2)
    shutil.copytree(tmp_path / "2", tmp_path / f"3{UNFINISHED}-17")
    (tmp_path / "notes").mkdir()
    with rt.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps == (1, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2", "lock", "notes"]


# A full disk.


def full(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_told_by_the_next_call(tmp_path, monkeypatch):
    saved(tmp_path, 1)
    checkpoints = rt.Checkpoints(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(module, "write", full)
        checkpoints.save(2, make_state())
        with pytest.raises(CheckpointError, match=r"step 2 .*No space left(.|\n)*whole: step 1\."):
            checkpoints.save(3, make_state())
        checkpoints.save(3, make_state())
        with pytest.raises(CheckpointError, match="step 3 could not be written"):
            checkpoints.close()
    assert restored(tmp_path).step == 1


def test_a_write_that_the_system_stops(tmp_path):
    """No file may grow beyond 64 KiB: TensorStore meets the error halfway."""
    saved(tmp_path, 1)
    large = {"x": np.random.default_rng(0).random(100_000)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with rt.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, make_state(2))
        checkpoints.wait()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
            checkpoints.save(3, large)
            with pytest.raises(CheckpointError, match="step 3 could not be written"):
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2", "lock"]
        assert differing(bits(checkpoints.restore(make_state()).state), bits(make_state(2))) == []
        checkpoints.save(3, make_state(3))
    assert restored(tmp_path).step == 3


def test_the_error_that_ended_a_run_comes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "write", full)
    with (
        pytest.raises(ZeroDivisionError) as caught,
        rt.Checkpoints(tmp_path) as checkpoints,
    ):
        checkpoints.save(1, make_state())
        _ = 1 / 0
    assert "No space left" in "".join(caught.value.__notes__)


# Damage.


def parts_of(folder):
    return sorted(p for p in Path(folder).rglob("*") if p.is_file())


def cut(data):
    return data[: len(data) // 2]


def flip(place):
    def change(data):
        changed = bytearray(data)
        changed[int(place * (len(data) - 1))] ^= 0x10
        return bytes(changed)

    return change


DAMAGE = {
    "cut": cut,
    "empty": lambda data: b"",
    "begin": flip(0),
    "middle": flip(0.5),
    "end": flip(1),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_never_gives_another_state(tmp_path, name):
    saved(tmp_path, 1, 2)
    whole = tmp_path / "whole"
    shutil.copytree(tmp_path / "2", whole)
    noticed = 0
    for part in parts_of(whole):
        shutil.rmtree(tmp_path / "2")
        shutil.copytree(whole, tmp_path / "2")
        path = tmp_path / "2" / part.relative_to(whole)
        path.write_bytes(DAMAGE[name](path.read_bytes()))
        with warnings.catch_warnings(record=True, action="always") as caught:
            state, step, extras = restored(tmp_path)
        assert extras == {"at": [step, 2**80]}
        assert differing(bits(state), bits(make_state(step))) == [], part
        assert (step, len(caught)) in [(2, 0), (1, 1)], part
        noticed += step == 1
    assert noticed >= 5


def test_a_warning_says_which_is_damaged_and_why(tmp_path):
    saved(tmp_path, 1, 2, 3)
    (tmp_path / "3/manifest.json").unlink()
    path = tmp_path / "2/manifest.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 5'))
    with rt.Checkpoints(tmp_path) as checkpoints:
        with pytest.warns(RATrainWarning) as caught:
            assert checkpoints.restore(make_state()).step == 1
        (warning,) = caught
        text = str(warning.message)
        assert f"{tmp_path}/3 is damaged: its manifest cannot be read" in text
        assert f"{tmp_path}/2 is damaged: the manifest was altered" in text
        assert text.endswith("Went back to step 1.")
        assert warning.filename == __file__
        # They are written anew as the run comes by, and count for nothing meanwhile.
        checkpoints.save(2, make_state(2))
        checkpoints.save(3, make_state(3))
        checkpoints.wait()
        assert checkpoints.steps == (1, 2, 3)
        assert checkpoints.restore(make_state()).step == 3


def test_damaged_checkpoints_do_not_push_whole_ones_out(tmp_path):
    saved(tmp_path, 1, 2, 9)
    (tmp_path / "9/manifest.json").unlink()
    with rt.Checkpoints(tmp_path, keep=2) as checkpoints:
        with pytest.warns(RATrainWarning):
            checkpoints.restore(make_state())
        checkpoints.save(3, make_state(3))
        checkpoints.wait()
        assert checkpoints.steps == (2, 3)
        checkpoints.save(10, make_state(10))
        checkpoints.wait()
        assert checkpoints.steps == (3, 10)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["10", "3", "9", "lock"]


def test_an_altered_file_is_named(tmp_path):
    saved(tmp_path, 1)
    path = max(parts_of(tmp_path / "1/state/ocdbt.process_0/d"), key=lambda p: p.stat().st_size)
    name = path.relative_to(tmp_path / "1").as_posix()
    data = path.read_bytes()
    for changed, text in [
        (flip(0.5)(data), f"{name} was altered"),
        (cut(data), f"{name} has {len(data) // 2} bytes instead of {len(data)}"),
    ]:
        path.write_bytes(changed)
        for step in (None, 1):
            wanted = f"{tmp_path}/1 is damaged: {text}(.|\n)*another step, or remove the folder"
            with pytest.raises(CheckpointError, match=wanted):
                restored(tmp_path, step=step)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        restored(tmp_path)
    with rt.Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError, match="not after"):
        checkpoints.save(1, make_state())


def test_a_step_asked_for_is_that_step_or_an_error(tmp_path):
    saved(tmp_path, 1, 2, 3)
    (tmp_path / "2/manifest.json").unlink()
    with pytest.raises(CheckpointError, match="2 is damaged"):
        restored(tmp_path, step=2)
    with pytest.raises(
        CheckpointError, match=r"no whole checkpoint of step 7; whole are: steps 1, 2, 3"
    ):
        restored(tmp_path, step=7)
    assert restored(tmp_path, step=1).step == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": "ratrain-plan"}',
        '{"format": "ratrain-checkpoint", "version": 2}',
        "\ud800",
    ],
)
def test_a_manifest_that_is_none(tmp_path, text):
    saved(tmp_path, 1)
    (tmp_path / "1/manifest.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(CheckpointError, match="1 is damaged: "):
        restored(tmp_path)


def test_the_manifest_is_plain_json(tmp_path):
    saved(tmp_path, 1)
    table = json.loads((tmp_path / "1/manifest.json").read_text())
    assert (table["format"], table["version"], table["step"]) == ("ratrain-checkpoint", 1, 1)
    (leaf,) = (leaf for leaf in table["leaves"] if leaf["path"] == ["params", "w"])
    assert (leaf["shape"], leaf["dtype"]) == ([4, 6], "float32")
    sizes = {file["path"]: file["bytes"] for file in table["files"]}
    parts = parts_of(tmp_path / "1/state")
    assert sizes == {p.relative_to(tmp_path / "1").as_posix(): p.stat().st_size for p in parts}


def test_what_orbax_cannot_read_is_damaged_too(tmp_path):
    saved(tmp_path, 1, state=lambda _: jnp.arange(3))
    path = tmp_path / "1/manifest.json"
    manifest = dataclasses.replace(Manifest.load(path), files=()).signed()
    path.write_text(json.dumps(manifest.table()))
    (tmp_path / "1/state/_METADATA").write_text("{")
    with pytest.raises(CheckpointError, match="1 is damaged: its arrays cannot be read"):
        restored(tmp_path, jnp.arange(3))


def test_a_copy_under_another_step_is_none(tmp_path):
    saved(tmp_path, 1)
    shutil.copytree(tmp_path / "1", tmp_path / "2")
    with pytest.warns(RATrainWarning, match="2 is damaged: its manifest is that of step 1"):
        assert restored(tmp_path).step == 1


def test_too_little_memory_is_no_damage(tmp_path, monkeypatch):
    saved(tmp_path, 1, 2)

    def restore(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(ocp.Checkpointer, "restore", restore)
    with pytest.raises(MemoryError):
        restored(tmp_path)


# Checkpoints of others.


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
