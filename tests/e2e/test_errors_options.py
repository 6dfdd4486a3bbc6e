"""What a user is told of options out of range, and of stages that neither the layers nor the devices allow."""

import re

import jax
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import LayoutError, OptionError
from tests.refusals import BATCH, STATE, refused, step


def test_more_stages_than_layers():
    words = ("7 stages", "has 3", "first, second, third", "stages=3", "ratrain_jax.layer")
    refused(LayoutError, step, words=words, stages=7)


def test_fewer_devices_than_needed():
    devices = len(jax.devices())
    lowered = rt.train_step(stages=3, data_parallel=8)(step).lower(STATE, BATCH)
    setting = "XLA_FLAGS=--xla_force_host_platform_device_count=24"
    with pytest.raises(LayoutError, match=re.escape(setting)) as caught:
        lowered.compile()
    assert f"needs 24 devices, but there are {devices}" in str(caught.value)


BOUNDARIES = [
    (2, ["seconds"], ("'seconds'", "'second'", "first, second, third")),
    (2, ["second", "third"], ("['second', 'third']", "list of 1 names")),
    (2, "second", ("'second'", "list of 1 names")),
    (3, ["third", "second"], ("'second' does not come after 'third'", "first, second, third")),
]


@pytest.mark.parametrize(("stages", "boundaries", "words"), BOUNDARIES)
def test_boundaries_that_name_no_split(stages, boundaries, words):
    refused(LayoutError, step, words=words, stages=stages, boundaries=boundaries)


OPTIONS = [
    ({"stages": 0}, ("stages", "at least 1", "got 0")),
    ({"data_parallel": 1.5}, ("data_parallel", "whole number", "1.5")),
    ({"microbatches": True}, ("microbatches", "whole number", "True")),
    ({"schedule": "zigzag"}, ("'zigzag'", "'gpipe', '1f1b', 'ratrain'")),
    ({"recovery": "some"}, ("'some'", "'auto', 'none', 'backward', 'forward'")),
    ({"zero": 3}, ("zero=3", "zero=1 or zero=2")),
    ({"zero": 0}, ("zero=0", "1, 2")),
    ({"window": 2}, ("window", "Window", "2")),
    ({"memory_limit": [1000, 1000]}, ("2 entries", "stages=1", "one a stage")),
    ({"memory_limit": 0}, ("memory_limit", "at least 1", "0")),
    ({"memory_limit": 0.5}, ("memory_limit", "whole number", "0.5")),
    ({"batch_argnums": 1}, ("batch_argnums", "1", "(1,)")),
    ({"devices": 3}, ("devices", "3", "jax.devices()")),
]


@pytest.mark.parametrize(("options", "words"), OPTIONS, ids=lambda o: str(o))
def test_an_option_out_of_range(options, words):
    with pytest.raises(OptionError) as caught:
        rt.train_step(**options)
    for word in words:
        assert word in str(caught.value)


def test_a_window_out_of_range():
    for values, words in [
        ({"layers": 0}, ("Window.layers", "at least 1", "0")),
        ({"bytes": -1}, ("Window.bytes", "-1")),
        ({"microbatches": 0}, ("Window.microbatches", "0")),
    ]:
        with pytest.raises(OptionError) as caught:
            rt.Window(**values)
        for word in words:
            assert word in str(caught.value)


@pytest.mark.parametrize("boundaries", [3, [1]])
def test_boundaries_that_are_no_names(boundaries):
    with pytest.raises(OptionError, match="boundaries must be"):
        rt.train_step(stages=2, boundaries=boundaries)
