"""Random models, optimizers and settings train as plain `jax.jit` does (see `tests.fuzz`)."""

import shlex
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz import TOLERANCE, Trial, check, strategies

ONE_BY_ONE = settings(deadline=None, suppress_health_check=list(HealthCheck))


pytestmark = pytest.mark.usefixtures("double_precision")


@settings(ONE_BY_ONE, max_examples=12)
@given(strategies)
def test_some_steps_train_as_plain_jit_does(trial):
    check(trial)


@pytest.mark.slow
@settings(ONE_BY_ONE, max_examples=500)
@given(strategies)
def test_many_steps_train_as_plain_jit_does(trial):
    check(trial)
    jax.clear_caches()


def test_waits_for_as_many_arrays_in_other_bundles_are_other_executables():
    parts = ("attention", "attention", "tied", "attention", "parallel")
    layout = {"data_parallel": 2, "microbatches": 5, "zero": 2}
    assert check(Trial(parts, **layout, layerwise_state=False, update_prefetch=False, window=1))


def test_the_line_that_runs_a_trial_again_runs():
    root = Path(__file__).parents[2]
    line = shlex.split(Trial(parts=("dense",), data_parallel=2).command())
    done = subprocess.run(
        [sys.executable, *line[1:]], cwd=root, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "agrees\n", done.stderr


def test_a_failure_says_how_to_run_it_again(monkeypatch):
    monkeypatch.setitem(TOLERANCE, "float64", -1.0)
    with pytest.raises(AssertionError, match=r"""python -m tests.fuzz '\{"stages": 2\}'"""):
        check(Trial(stages=2))
