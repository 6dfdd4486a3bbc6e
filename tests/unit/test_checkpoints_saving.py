"""Saving while a run goes on: what is kept, what is refused, second writers, and disks that are full."""

import errno
import os
import resource
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ratrain_jax as rt
from ratrain_jax.checkpoints import store as module
from ratrain_jax.checkpoints.storage import UNFINISHED
from ratrain_jax.errors import CheckpointError, OptionError
from tests.checkpoints import bits, make_state, restored, saved
from tests.training import differing


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
