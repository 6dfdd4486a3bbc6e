"""What communication costs: pure functions of bytes and a machine.

**Places.** Devices are numbered; those that a link joins are neighbours (devices 0 to 7 are the
first node of eight). A *group* of `size` devices with `stride` s is 0, s, 2s, …; the s groups that
start at 0 to s − 1 together hold `size` · s neighbouring devices, and all work at once. A
tensor-parallel group has stride 1; a data-parallel one, the tensor-parallel size.

**One transfer** (*hop*). Bytes that go as far as link l leave over every link of shorter reach
first, so the slowest of them sets the pace, and the latency is that of l:

    latency_l + bytes / min over k ≤ l of (bandwidth_k · efficiency_k / active_k)

active_k is how many of the `shared_by` devices that share one link k send over it at once. Links
are full duplex and switches do not block.

**A ring** (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
Operations in MPICH", 2005): each of size − 1 steps sends 1/size of the array from every device to
the next; a step lasts as long as its slowest hop. A ring along a group leaves a node of r devices
min(s, r) times at once, one for each of the interleaved groups: those share what the node shares.

**Hierarchical** (NCCL, Horovod, Megatron-LM): a reduce-scatter inside each node, then, for each
local rank, one over the nodes with 1/local of the bytes, and so on for each further link; an
all-gather goes back the same way. Nodes are cut so that all parts have equal size: `local` is the
greatest common divisor of the group's size and of the devices of it that fit a node.

**Halving** takes log2 steps instead of size − 1, for as many bytes: in each step every device hands
what half of those left will own to the device that far ahead, so that a group of any size takes
⌈log2 size⌉ latencies (J. L. Träff, "Optimal, Non-pipelined Reduce-scatter and Allreduce
Algorithms", arXiv 2410.14234; for powers of two it is R. Rabenseifner's recursive halving, 2004;
backwards it is the all-gather of J. Bruck et al., 1997):

    skips ⌈size/2⌉, ⌈size/4⌉, …, 1:  Σ hop((skip before − skip) / size of the array, skip · stride)

The first steps go far and carry most. Where neighbours share a link, all of them then send over it
at once, which rings avoid; and a library has to offer it. So only machines whose `collectives` say
"ring or halving" use it, wherever it is faster; on all others, latency grows with the group.

Arithmetic of reductions is left out: it is far quicker than the links.
"""

import math
from collections.abc import Callable
from typing import Final

from ratrain_jax.errors import OptionError
from ratrain_jax.kernels.machine import Machine

ALGORITHMS: Final = ("ring", "halving", "hierarchical", "best")


def transfer_seconds(
    machine: Machine, count: float, *, distance: int = 1, sharing: int = 1
) -> float:
    """Returns how long one device takes to send to another.

    Args:
      machine: The machine.
      count: Bytes that it sends.
      distance: How far the other device is: the hop is from device 0 to device `distance`.
      sharing: How many neighbouring devices send as far at once; of each link, those that share it
        count.

    Returns:
      Seconds.

    Raises:
      OptionError: If an argument is out of range.

    Example:
      >>> from ratrain_jax.kernels import load_machine
      >>> generic = load_machine("generic")  # 25 GB/s, 5 µs
      >>> transfer_seconds(generic, 25e9)
      1.000005
    """
    _check("bytes", count, 0)
    _check("distance", distance, 1)
    _check("sharing", sharing, 1)
    level = _level(machine, distance + 1)
    return _hop(machine, level, count, lambda k: min(sharing, machine.links[k].shared_by))


def reduce_scatter_seconds(
    machine: Machine, count: float, size: int, *, stride: int = 1, algorithm: str = "best"
) -> float:
    """Returns how long a reduce-scatter over a group takes.

    As a ring it takes (size − 1) · hop(count / size) seconds.

    Args:
      machine: The machine.
      count: Bytes of the whole array that each device holds before.
      size: Devices of the group.
      stride: Distance between neighbours of the group.
      algorithm: "ring", "halving", "hierarchical", or the "best" that the machine offers.

    Returns:
      Seconds; none for a group of one.

    Raises:
      OptionError: If an argument is out of range.

    Example:
      >>> from ratrain_jax.kernels import load_machine
      >>> generic = load_machine("generic")
      >>> reduce_scatter_seconds(generic, 100e9, 4) == 3 * transfer_seconds(generic, 25e9)
      True
    """
    _check("bytes", count, 0)
    _check("size", size, 1)
    _check("stride", stride, 1)
    if algorithm not in ALGORITHMS:
        words = ", ".join(repr(word) for word in ALGORITHMS)
        raise OptionError(f"algorithm is {algorithm!r}; use one of {words}.")
    flat = {"ring": _ring, "halving": _halving}.get(algorithm)
    if flat is not None:
        return flat(machine, count, size, stride, size * stride)
    found = [_hierarchical(machine, count, size, stride)]
    if algorithm == "best":
        found.append(_flat(machine, count, size, stride, size * stride))
    return min(found)


def all_gather_seconds(
    machine: Machine, count: float, size: int, *, stride: int = 1, algorithm: str = "best"
) -> float:
    """Returns how long an all-gather over a group takes: a reduce-scatter run backwards.

    Args:
      machine: The machine.
      count: Bytes of the whole array that each device holds afterwards.
      size: Devices of the group.
      stride: Distance between neighbours of the group.
      algorithm: "ring", "halving", "hierarchical", or the "best" that the machine offers.

    Returns:
      Seconds; none for a group of one.

    Raises:
      OptionError: If an argument is out of range.
    """
    return reduce_scatter_seconds(machine, count, size, stride=stride, algorithm=algorithm)


def all_reduce_seconds(
    machine: Machine, count: float, size: int, *, stride: int = 1, algorithm: str = "best"
) -> float:
    """Returns how long an all-reduce over a group takes: a reduce-scatter, then an all-gather.

    As a ring it moves 2 · (size − 1) / size · count bytes over each hop.

    Args:
      machine: The machine.
      count: Bytes of the whole array, which each device holds before and afterwards.
      size: Devices of the group.
      stride: Distance between neighbours of the group.
      algorithm: "ring", "halving", "hierarchical", or the "best" that the machine offers.

    Returns:
      Seconds; none for a group of one.

    Raises:
      OptionError: If an argument is out of range.

    Example:
      Eight data-parallel groups of four nodes share each node's network; one group of 32 devices
      does the same work when it goes through the nodes first.

      >>> from ratrain_jax.kernels import load_machine
      >>> a100 = load_machine("a100")
      >>> round(all_reduce_seconds(a100, 1e9, 4, stride=8), 4)
      0.1251
      >>> round(all_reduce_seconds(a100, 1e9, 32, algorithm="hierarchical"), 4)
      0.0232
    """
    return 2 * reduce_scatter_seconds(machine, count, size, stride=stride, algorithm=algorithm)


def _hierarchical(machine: Machine, count: float, size: int, stride: int) -> float:
    """Seconds of collectives inside the shortest link's reach, then of their shares over the next."""
    span, seconds = size * stride, 0.0
    for link in machine.links:
        local = size
        if link.devices:
            local = math.gcd(size, link.devices // stride) if link.devices % stride == 0 else 1
        seconds += _flat(machine, count, local, stride, span)
        count, size, stride = count / local, size // local, stride * local
    return seconds + _flat(machine, count, size, stride, span)


def _flat(machine: Machine, count: float, size: int, stride: int, span: int) -> float:
    """Seconds of the best collective that takes all members of a group for equals."""
    ring = _ring(machine, count, size, stride, span)
    if machine.collectives == "ring":
        return ring
    return min(ring, _halving(machine, count, size, stride, span))


def _halving(machine: Machine, count: float, size: int, stride: int, span: int) -> float:
    """Seconds of ⌈log2 size⌉ steps, each over as far as half the devices that the one before went over."""
    seconds, left = 0.0, size
    while left > 1:
        skip = (left + 1) // 2
        seconds += _step(machine, count * (left - skip) / size, skip * stride, size * stride, span)
        left = skip
    return seconds


def _ring(machine: Machine, count: float, size: int, stride: int, span: int) -> float:
    """Seconds of a ring's steps over a part of `span` neighbouring devices that all do the same."""
    if size == 1:
        return 0.0
    return (size - 1) * _step(machine, count / size, stride, size * stride, span)


def _step(machine: Machine, count: float, stride: int, reach: int, span: int) -> float:
    """Seconds in which every device sends to the one `stride` ahead, round a group that reaches so far."""
    # Some hops are as short as the stride, and some go as far as the devices of the groups lie.
    levels = range(_level(machine, stride + 1), _level(machine, reach) + 1)

    def active(k: int) -> int:
        return _active(machine, k, stride, span)

    return max(_hop(machine, level, count, active) for level in levels)


def _active(machine: Machine, k: int, stride: int, span: int) -> int:
    """How many devices of one link k send over it in a step of that stride in all groups."""
    sharing = min(machine.links[k].shared_by, span)
    inside = machine.links[k - 1].devices if k else 1  # devices that need no link k among them
    return min(sharing, math.ceil(sharing / inside) * min(stride, inside))


def _hop(machine: Machine, level: int, count: float, active: Callable[[int], int]) -> float:
    """Seconds of bytes that go as far as a link, of which `active` devices send at once."""
    links = machine.links[: level + 1]
    rate = min(link.bandwidth * link.efficiency / active(k) for k, link in enumerate(links))
    return links[-1].latency + count / rate


def _level(machine: Machine, devices: int) -> int:
    """Which link is the shortest that joins so many neighbouring devices."""
    return machine.links.index(machine.link(devices))


def _check(what: str, value: float, least: int) -> None:
    if not value >= least:
        raise OptionError(f"{what} is {value}; give {least} or more.")
