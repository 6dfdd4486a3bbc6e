"""What a user is told of a batch that cannot be divided, and of a state that is none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ratrain_jax as rt
from ratrain_jax.errors import BatchError, OptionError, StepError, UnsupportedError
from tests.refusals import BATCH, ROWS, STATE, descend, loss_of, refused, step, step_of, types


@pytest.mark.parametrize(
    ("rows", "ranks", "microbatches", "nearest"),
    [(8, 1, 3, 9), (24, 2, 7, 28), (10, 4, 1, 8), (3, 2, 4, 8)],
)
def test_a_batch_that_does_not_divide(rows, ranks, microbatches, nearest):
    batch = {"x": types(rows, 4), "y": types(rows, 4)}
    options = {"data_parallel": ranks, "microbatches": microbatches}
    words = (
        f"batch of {rows}",
        f"data_parallel={ranks}",
        f"microbatches={microbatches}",
        f"nearest batch that does is {nearest}",
    )
    refused(BatchError, step, STATE, batch, words=words, **options)


def test_leaves_that_disagree_on_the_batch():
    batch = {"x": types(24, 4), "y": types(12, 4)}
    words = ("argument 1", "12, 24", "batch_argnums")
    refused(BatchError, step, STATE, batch, words=words, microbatches=2)


def test_a_batch_size_written_down():
    loss = step_of(lambda p, _, b: loss_of(p, {"x": b["x"].reshape(ROWS, 4), "y": b["y"]}))
    words = ("one microbatch", "writes the batch size down", "(12, 4)")
    refused(StepError, loss, words=words, microbatches=2)


def test_an_operand_that_grows_along_another_axis():
    def turned(state, batch):
        x = batch["x"].T
        loss = lambda params: loss_of(params, {"x": x.T, "y": batch["y"]})  # noqa: E731
        return descend(state, rt.grad(loss)(state))

    words = ("`transpose`", f"(4, {ROWS})", "(4, 12)", "axis 0")
    refused(UnsupportedError, turned, words=words, microbatches=2)


def test_batch_arguments_that_are_none():
    for argnums in [(0,), (2,)]:
        words = (f"batch_argnums={argnums}", "argument 0 is the state")
        refused(OptionError, step, words=words, batch_argnums=argnums)


def test_a_state_leaf_that_is_no_array():
    words = ("'adam'", "str", "structure")
    refused(UnsupportedError, step, {**STATE, "name": "adam"}, BATCH, words=words)


def test_a_step_without_arguments():
    with pytest.raises(StepError, match="state as its first argument"):
        rt.train_step()(lambda: 0).lower()


def test_a_leaf_of_the_state_whose_dtype_changes():
    def step(params, batch):
        grads = rt.grad(lambda p: (batch @ p["w"]).sum())(params)
        return jax.tree.map(lambda p, g: (p - g).astype(jnp.bfloat16), params, grads)

    with pytest.raises(StepError, match=r"\['w'\] is float32.*bfloat16.*\.astype\('float32'\)"):
        rt.train_step()(step)({"w": jnp.ones(3)}, np.ones((2, 3), np.float32))
