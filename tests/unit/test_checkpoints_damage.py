"""A damaged checkpoint is noticed, told, and never gives another state than the one that was saved."""

import dataclasses
import json
import shutil
import warnings
from pathlib import Path

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ratrain_jax as rt
from ratrain_jax.checkpoints.manifest import Manifest
from ratrain_jax.errors import CheckpointError, RATrainWarning
from tests.checkpoints import bits, make_state, restored, saved
from tests.training import differing


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
