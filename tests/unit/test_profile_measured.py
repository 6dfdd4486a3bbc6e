"""What is made of the samples that a profile takes."""

import math
import time

import pytest

from ratrain_jax.profiling.calm import Others
from ratrain_jax.profiling.keys import Key
from ratrain_jax.profiling.links import fit
from ratrain_jax.profiling.measure import measured
from ratrain_jax.profiling.slowdown import slowdowns
from ratrain_jax.runtime.serial import Taken, time_call
from tests.profiles import SMALL


def test_a_line_goes_through_its_points_and_never_has_a_negative_part():
    points = [(count, 3e-5 + count / 2e9) for count in (4096, 65536, 1_000_000)]
    line = fit("Send", 2, points)
    assert line.latency == pytest.approx(3e-5, rel=1e-4)
    assert line.bandwidth == pytest.approx(2e9, rel=1e-4)
    assert line.points == tuple(points)
    falling = fit("Send", 1, [(1000, 3e-6), (2000, 2e-6)])
    assert falling.seconds(10**9) == pytest.approx(2.5e-6, rel=0.7)
    steep = fit("Send", 1, [(1000, 1e-6), (2000, 9e-6)])
    assert steep.latency == 0


def test_medians_and_quartiles():
    key = Key("Metrics", "8", 2)
    entry = measured(key, [Taken(0.5, total) for total in (5.5, 1.5, 2.5, 3.5, 4.5)], 0.25)
    assert (entry.seconds, entry.count, entry.spread, entry.launch) == (2.75, 5, 2.0, 0.5)
    inline = measured(key, [Taken(2.0, 2.5)], 0.25)
    assert (inline.seconds, inline.launch) == (2.25, 0.0)
    # A step has slow launches as well as usual ones.
    launches = [Taken(launch, 10.0) for launch in (0.5, 0.5, 2.0)]
    assert measured(key, launches, 0.25).launch == 1.0
    assert measured(key, [Taken(0.1, 0.1)], 0.25).seconds == 0
    assert slowdowns([{1: 1.0, 2: 1.5}, {1: 1.0, 2: 1.7}, {1: 1.0, 2: 4.0}]) == ((1, 1.0), (2, 1.7))


def test_time_in_which_an_op_waits_for_other_processes_is_idle():
    assert Taken(1.0, 5.0, 3.0).share == 0.25
    assert Taken(1.0, 5.0).share == Taken().share == 1.0
    device = object()
    _, waited = time_call(time.sleep, 0.2, waits=[device])
    _, alone = time_call(time.sleep, 0.2)
    assert waited.share < 0.5 < alone.share == 1.0


def test_what_others_do_is_not_what_this_process_does():
    watch = Others()
    assert sum(range(2_000_000)) > 0
    cores = watch.cores()
    assert cores is None or 0 <= cores < math.inf


def test_a_profile_is_a_table():
    text = str(SMALL)
    assert "500.000" in text and "Send on 1: 100 µs + bytes / 1.00 GB/s" in text
    assert repr(SMALL) == "<Profile of 1 kinds of op, 4 cpu devices, 2030-01-01T00:00:00+00:00>"
