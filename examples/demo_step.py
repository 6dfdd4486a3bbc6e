"""The demo's step with its state and batch, as the command line takes them.

    ratrain inspect examples/demo_step.py:train_step --machine a100
    ratrain bench examples/demo_step.py:train_step --stages 4 --data-parallel 1

The command looks for `make_state` and `make_batch` beside the step, and only takes their types where nothing is to run.
"""

import numpy as np
from flax.training.train_state import TrainState
from text_data import batches, read_sources
from train_gpt import GPT
from train_gpt import make_state as state_of
from train_gpt import train_step as plain_step

import ratrain_jax as rt

BATCH_SIZE, LENGTH = 32, 64

train_step = rt.train_step(stages=2, data_parallel=2, microbatches=4)(plain_step)


def make_state() -> TrainState:
    """The state before the first step."""
    return state_of(GPT(), LENGTH)


def make_batch() -> dict[str, np.ndarray]:
    """A batch of Python's own sources."""
    return next(batches(read_sources(), batch_size=BATCH_SIZE, length=LENGTH))
