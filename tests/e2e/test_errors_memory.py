"""What a user is told of a memory limit that cannot be met.

Microbatches are large here, so that activations and not the state decide the peak.
"""

import re

import jax.numpy as jnp
import numpy as np

import ratrain_jax as rt
from ratrain_jax.errors import MemoryLimitError
from tests.refusals import STATE, refused, step, types

LARGE = {"x": types(4000, 4), "y": types(4000, 4)}


def lowered(**options):
    return rt.train_step(stages=2, microbatches=4, **options)(step).lower(STATE, LARGE)


def needs(**options):
    return lowered(**options).memory_analysis().peaks


def test_a_memory_limit_that_recovery_cannot_meet():
    smallest = needs(recovery="forward")
    short = smallest[0] - 100
    message = refused(
        MemoryLimitError,
        step,
        STATE,
        LARGE,
        words=("stage 0", f"{smallest[0]:,}", "100 over", f"{short:,}", "raise the limit"),
        stages=2,
        microbatches=4,
        memory_limit=[short, max(needs(recovery="none"))],
    )
    term, held = re.search(r"largest term is (\w+), ([\d,]+) bytes", message).groups()
    kinds = lowered(recovery="forward").memory_analysis().by_kind[0]
    assert kinds[term] == max(kinds.values()) == int(held.replace(",", ""))
    assert 'recovery="auto"' not in message  # it is on already


def test_a_memory_limit_under_a_fixed_recovery():
    peaks = needs(recovery="none")
    words = ("stage 0", f"{peaks[0]:,}", "1 over", f"{peaks[0] - 1:,}", 'recovery="auto"')
    limit = [peaks[0] - 1, peaks[1]]
    options = {"stages": 2, "microbatches": 4, "memory_limit": limit, "recovery": "none"}
    refused(MemoryLimitError, step, STATE, LARGE, words=words, **options)


def test_the_smallest_shortfall_is_named():
    """Of all that recovery can do: where a checkpoint is no smaller than the residuals, nothing."""
    peaks = [
        min(both) for both in zip(*(needs(recovery=r) for r in ("none", "forward")), strict=True)
    ]
    limit = [peaks[0] - 300, peaks[1] - 7]
    options = {"stages": 2, "microbatches": 4, "memory_limit": limit}
    refused(MemoryLimitError, step, STATE, LARGE, words=("stage 1", "7 over"), **options)


def test_only_a_stage_that_cannot_be_helped_is_blamed():
    """Stage 0 is over its limit by less, but recovery helps it."""
    saved = needs(schedule="gpipe", recovery="none")
    recovered = needs(schedule="gpipe", recovery="forward")
    assert recovered[0] < saved[0] - 1
    limit = [saved[0] - 1, recovered[1] - 1000]
    options = {"stages": 2, "microbatches": 4, "schedule": "gpipe", "memory_limit": limit}
    words = ("stage 1", "1,000 over", "raise the limit")
    refused(MemoryLimitError, step, STATE, LARGE, words=words, **options)


def test_a_memory_limit_may_be_a_numpy_number():
    step = rt.train_step(memory_limit=np.int64(10**9))(
        lambda p, b: rt.grad(lambda p: (b @ p).sum())(p)
    )
    assert step.lower(jnp.ones(3), jnp.ones((2, 3))).program.settings.memory_limit == (10**9,)
