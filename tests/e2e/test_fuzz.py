"""Random models, optimizers and settings train as plain `jax.jit` does (see `tests.fuzz`)."""

import jax
import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz import Trial, check, strategies

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


def test_a_failure_says_how_to_run_it_again(monkeypatch):
    monkeypatch.setattr("tests.fuzz.TOLERANCE", -1.0)
    with pytest.raises(AssertionError, match=r"""python -m tests.fuzz '\{"stages": 2\}'"""):
        check(Trial(stages=2))
