"""What `docs/howto/faults.md` promises of the state when something fails before a step begins, or between two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ratrain_jax.errors import BatchError, StateError
from ratrain_jax.runtime import flights
from ratrain_jax.runtime.groups import Group
from tests.failing import compiled as compiled
from tests.failing import losses, make_batch, make_state, notes


def test_what_is_refused_leaves_the_state_as_it_was(compiled):
    expected = losses(compiled, make_state())
    state, _ = compiled(make_state(), make_batch())
    first = [expected[0]]
    used = jnp.ones((8, 8))
    used.delete()
    for batch in ({"x": np.ones((8, 9), np.float32)}, {"y": make_batch()["x"]}, {"x": used}):
        with pytest.raises(BatchError):
            compiled(state, batch)
    with pytest.raises(StateError):
        compiled({**state, "other": 1}, make_batch())
    assert first + losses(compiled, state, 2) == expected


def test_a_batch_that_finds_no_memory_leaves_the_state_as_it_was(compiled, monkeypatch):
    expected = losses(compiled, make_state())
    state, _ = compiled(make_state(), make_batch())

    def fail(self, array):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.")

    with monkeypatch.context() as patch:
        patch.setattr(Group, "put_rows", fail)
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            compiled(state, make_batch())
    assert flights.KEPT in notes(caught.value)
    assert losses(compiled, state, 2) == expected[1:]


def test_an_iterator_that_raises_leaves_the_state_of_the_last_step(compiled):
    def batches():
        yield make_batch()
        yield make_batch()
        raise OSError("no more data")

    state = make_state()
    with pytest.raises(OSError, match="no more data"):
        for batch in batches():
            state, _ = compiled(state, batch)
    assert losses(compiled, state, 1) == losses(compiled, make_state())[2:]


def test_metrics_that_the_user_gave_away_do_not_stop_the_next_steps(compiled):
    state = make_state()
    for _ in range(4):
        state, metrics = compiled(state, make_batch())
        metrics["loss"].delete()
    assert losses(compiled, state, 1)[0] > 0
