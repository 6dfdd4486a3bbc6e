"""What a host of several CPU devices should be told.

Each op of a program allocates its results anew. glibc serves large blocks with fresh pages from the kernel and gives them
back when freed, so that every step pays a page fault for every page again: 240,000 of them, 600 ms of system time a
step in an 8-layer, width-256 model. `keep_freed_memory` makes it reuse freed blocks instead. Blocks of more than 64 MB,
such as the scratch of a large microbatch, it reuses only in its main heap, while each of XLA's threads has a heap of its own
unless `use_one_heap` was called before: on one core 8 layers of 12 rows then took 600 ms, not 780, and 1.5 GB, not 3.4. But
XLA compiles on several threads, which then wait for each other: on two cores half as fast.

With as many devices as cores, a matrix product that one device spreads over all cores only gets in the way of the other
devices; `compiler_options` then gives each device one core.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_LARGEST_BLOCK = 1 << 30
_MOST_KEPT = (1 << 31) - 1
_HEAP = 64 << 20  # what glibc maps at a time for a thread other than the first


@functools.cache
def keep_freed_memory() -> bool:
    """Tells the C library, once a process, to reuse large freed blocks.

    Set `RATRAIN_KEEP_FREED_MEMORY=0` in the environment to leave it as it is.

    Returns:
        Whether it was told; other C libraries than glibc are left alone.
    """
    set_option = _allocator_option()
    if set_option is None:
        return False
    told = set_option(_M_MMAP_THRESHOLD, _LARGEST_BLOCK)
    told = told and set_option(_M_TRIM_THRESHOLD, _MOST_KEPT)
    # An empty heap of another thread is unmapped unless what stays free in its others is less than the padding.
    return bool(told and set_option(_M_TOP_PAD, 3 * _HEAP))


def use_one_heap() -> bool:
    """Tells the C library to serve threads that do not run yet from its main heap, which alone keeps the largest blocks.

    Set `RATRAIN_KEEP_FREED_MEMORY=0` in the environment to leave it as it is.

    Returns:
        Whether it was told.
    """
    set_option = _allocator_option()
    return set_option is not None and bool(set_option(_M_ARENA_MAX, 1))


def _allocator_option() -> Callable[[int, int], int] | None:
    if os.environ.get("RATRAIN_KEEP_FREED_MEMORY") == "0":
        return None
    try:
        return ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return None


def compiler_options(devices: Sequence[Any]) -> Mapping[str, Any]:
    """Options to compile with for a program on these devices.

    Args:
        devices: all devices of the program, of every stage.
    """
    if len(devices) > 1 and devices[0].platform == "cpu" and len(devices) >= cores():
        return {"xla_cpu_multi_thread_eigen": False}
    return {}


def pool_threads() -> int:
    """Threads of the pool in which XLA's CPU client runs what is launched, as far as the environment says."""
    given = os.environ.get("NPROC", "")
    return int(given) if given.isdigit() and int(given) > 0 else cores()


def threads_needed(devices: int) -> int:
    """Threads of that pool without which a run of several processes can hang.

    A collective holds a thread of each of its devices here until the other processes have come, and what they wait for must
    run meanwhile (tried with 2 devices, of two stages: 3 threads are enough, and 2 hang).

    Args:
        devices: of this process.
    """
    return 2 * devices + 1


def cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
