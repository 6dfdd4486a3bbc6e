"""Freed blocks of memory are used again, the largest too, where the C library is told so in time."""

import json
import platform
import statistics
import subprocess
import sys

from ratrain_jax.runtime.host import use_one_heap

PROBE = """
import json, resource
from ratrain_jax.runtime.host import keep_freed_memory, use_one_heap
if {early}:
    assert use_one_heap()
import jax
import jax.numpy as jnp

@jax.jit
def scratch(x):  # 100 MB of it
    square = jax.lax.optimization_barrier(jnp.outer(x, x))
    return square @ x

x = jnp.ones(5000)
assert keep_freed_memory()
faults = [0]
for _ in range(25):
    scratch(x).block_until_ready()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(json.dumps([after - before for before, after in zip(faults[5:], faults[6:])]))
"""


def page_faults(early):
    """Of a call, as a median: now and then one finds its scratch in a new place."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(early=early)],
        capture_output=True,
        text=True,
        check=True,
    )
    return statistics.median(json.loads(done.stdout))


def test_scratch_comes_from_memory_that_was_there_before():
    if platform.libc_ver()[0] != "glibc":  # others are left alone
        assert not use_one_heap()
        return
    # Where small blocks lie decides whether the scratch fits where it was; not in every process alike.
    early, late = (
        statistics.median(page_faults(early) for _ in range(5)) for early in (True, False)
    )
    assert early < late / 10


def test_the_environment_leaves_the_c_library_alone(monkeypatch):
    monkeypatch.setenv("RATRAIN_KEEP_FREED_MEMORY", "0")
    assert not use_one_heap()
