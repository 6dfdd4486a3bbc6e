"""A profile as a file: read back equal, or refused by name."""

import contextlib
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ratrain_jax as rt
from ratrain_jax.errors import ProfileError
from ratrain_jax.profiling.profile import FORM, Profile
from tests.profiles import SMALL, profiles
from tests.strategies import json_values, put_somewhere


@given(profiles)
def test_json_is_read_back_to_an_equal_profile(profile):
    assert Profile.from_json(profile.to_json()) == profile


def test_the_form_is_named_and_versioned(tmp_path):
    table = json.loads(SMALL.to_json())
    assert (table["format"], table["version"]) == ("ratrain-profile", 1)
    SMALL.save(tmp_path / "here.json")
    assert Profile.load(tmp_path / "here.json") == SMALL
    assert rt.Profile is Profile


@pytest.mark.parametrize(
    "old, new, message",
    [
        ('"version": 1', '"version": 2', "version: expected 1, found 2; write the profile again"),
        (FORM.name, "other", "the whole: expected an object whose format is 'ratrain-profile'"),
        ('"count": 7', '"count": 0.5', "measured[0].count: expected a whole number, found 0.5"),
        ('"count": 7', '"count": 0', "count: expected a number of at least 1, found 0"),
        ('"seconds": 0.5', '"seconds": -1', "seconds: expected a number of at least 0, found -1"),
        ('"seconds": 0.5', '"seconds": NaN', "NaN is no number of JSON"),
        ('"cores": 2', '"cores": "2"', 'cores: expected a whole number, found "2"'),
        ('"bandwidth": 1000000000.0', '"bandwidth": 0', "bandwidth: expected a number of at least"),
        ("[[1, 1.0], [2, 1.5]]", "[[2, 1.0], [1, 1.5]]", "slowdowns: expected pairs of a number"),
        ("[[1, 1.0], [2, 1.5]]", "[[1, 0]]", "slowdowns: expected pairs of a number"),
        ("[[1, 1.0], [2, 1.5]]", "[1]", "slowdowns[0]: expected a list of 2, found 1"),
        ('"date"', '"data"', "the whole: expected only the fields fingerprint"),
        ('"platform": "cpu",', "", "the whole: expected a field 'platform'"),
        ('"fingerprint"', "fingerprint", "line 3: not valid JSON"),
    ],
)
def test_errors_name_the_file_the_spot_and_what_was_expected(old, new, message, tmp_path):
    text = SMALL.to_json()
    assert old in text
    path = tmp_path / "damaged.json"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ProfileError, match=re.escape(message)) as caught:
        Profile.load(path)
    assert str(caught.value).startswith(str(path))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ProfileError, match=r"absent\.json: expected a profile, found"):
        Profile.load(tmp_path / "absent.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match=r"bytes\.json: expected a profile, found"):
        Profile.load(tmp_path / "bytes.json")


@given(st.text() | st.sampled_from(["[" * 100_000, "1" * 5000, "{}", "[]"]))
def test_any_text_is_a_profile_or_an_error(text):
    with pytest.raises(ProfileError):
        Profile.from_json(text)


@given(profiles, json_values, st.data())
def test_a_damaged_table_is_a_profile_or_an_error(profile, junk, data):
    table = json.loads(profile.to_json())
    put_somewhere(table, junk, data)
    with contextlib.suppress(ProfileError):
        assert isinstance(Profile.from_json(json.dumps(table)), Profile)
