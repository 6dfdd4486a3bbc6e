"""What transfers between groups and collectives within one take, by bytes: measured at some sizes, and a line through them."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ratrain_jax.lowering.program import GradSync, Op, PrefetchView, Program, Send
from ratrain_jax.lowering.unsharded import AXIS
from ratrain_jax.profiling.keys import moved_bytes
from ratrain_jax.profiling.profile import Line
from ratrain_jax.runtime.crossings import Crossing
from ratrain_jax.runtime.groups import Group
from ratrain_jax.runtime.processes import meet, waiting
from ratrain_jax.runtime.serial import Taken, time_call

SMALLEST = 4096
"""Bytes of the smallest array that is moved."""
STEPS = 5
"""Sizes that are moved of each kind."""
_FASTEST = 1e15  # bytes a second, where more bytes took no more time

Run = Callable[[], Any]


class Moves:
    """Measures a program's transfers and collectives.

    Args:
        program: its largest transfer and collective say up to which size is measured.
        groups: the devices of each stage.
    """

    def __init__(self, program: Program, groups: Sequence[Group]) -> None:
        self._runs: dict[tuple[str, int], Run] = {}
        self._waits = {
            "Send": waiting(device for group in groups[:2] for device in group.devices),
            "GradSync": waiting(groups[0].devices),
            "PrefetchView": waiting(groups[0].devices),
        }
        if len(groups) > 1:
            for count in _sizes(program, Send):
                self._runs["Send", count] = _send(groups[0], groups[1], count)
        if groups[0].size > 1:
            for count in _sizes(program, GradSync):
                self._runs["GradSync", count] = _scatter(groups[0], count)
            for count in _sizes(program, PrefetchView):
                self._runs["PrefetchView", count] = _gather(groups[0], count)

    def sample(self) -> dict[tuple[str, int], Taken]:
        """Moves each size once, after once to warm up; gives what each kind and size took."""
        found = {}
        for what, run in self._runs.items():
            for _ in range(2):
                meet()
                _, found[what] = time_call(run, waits=self._waits[what[0]])
        return found


def lines(
    samples: Sequence[Mapping[tuple[str, int], Taken]], devices: int, wait: float
) -> tuple[Line, ...]:
    """The line of each kind.

    Args:
        samples: what `Moves.sample` gave, each time.
        devices: of a group.
        wait: seconds that each move took to be seen to have ended.
    """
    points: dict[str, list[tuple[int, float]]] = {}
    shares: dict[str, list[float]] = {}
    for kind, count in sorted(samples[0]):
        taken = statistics.median(sample[kind, count].total for sample in samples)
        points.setdefault(kind, []).append((count, max(taken - wait, 0.0)))
        shares.setdefault(kind, []).extend(sample[kind, count].share for sample in samples)
    return tuple(
        fit(kind, devices, found, statistics.median(shares[kind])) for kind, found in points.items()
    )


def fit(kind: str, devices: int, points: Sequence[tuple[int, float]], share: float = 1.0) -> Line:
    """The line through some points whose errors, as shares of the seconds, have the least squares.

    Args:
        kind: of the line.
        devices: of the line.
        points: bytes and seconds of each.
        share: of the line.

    Example:
        >>> fit("Send", 1, [(1000, 3e-6), (3000, 5e-6)]).latency
        2e-06
    """
    counts = np.array([count for count, _ in points], float)
    seconds = np.array([max(taken, 1e-9) for _, taken in points])
    table = np.stack([1 / seconds, counts / seconds], axis=1)
    scale = np.linalg.norm(table, axis=0)
    latency, slope = np.linalg.lstsq(table / scale, np.ones(len(points)), rcond=None)[0] / scale
    if latency < 0:
        latency, slope = 0.0, 1 / np.mean(counts / seconds)
    if slope * _FASTEST < 1:
        latency, slope = float(np.median(seconds)), 1 / _FASTEST
    bandwidth = float(f"{1 / slope:.6g}")
    return Line(kind, devices, float(f"{latency:.6g}"), bandwidth, tuple(points), share)


def _sizes(program: Program, kind: type[Op]) -> list[int]:
    """Bytes to move: from a few up to the most that an op of a kind moves, by equal factors."""
    most = max(
        (moved_bytes(op, program) for op in program.ops() if isinstance(op, kind)), default=0
    )
    if not most:
        return []
    sizes = np.geomspace(SMALLEST, max(most, 4 * SMALLEST), STEPS)
    # Whole elements for each of the ranks of a group.
    unit = 4 * program.settings.data_parallel
    return [int(size) // unit * unit for size in sizes]


def _send(source: Group, target: Group, count: int) -> Run:
    array = np.zeros(count // 4, np.float32)
    given = (source.put_whole(array),) if source.is_here else None
    return functools.partial(Crossing(source, target, [array]), given)


def _scatter(group: Group, count: int) -> Run:
    def scatter(whole: Any) -> Any:
        return jax.lax.psum_scatter(whole, AXIS, scatter_dimension=0, tiled=True)

    return _collective(group, scatter, count // 4)


def _gather(group: Group, count: int) -> Run:
    def gather(shard: Any) -> Any:
        return jax.lax.all_gather(shard, AXIS, axis=0, tiled=True)

    return _collective(group, gather, count // 4 // group.size)


def _collective(group: Group, function: Callable[[Any], Any], elements: int) -> Run:
    if not group.is_here:
        return lambda: None
    array = group.put_whole(np.zeros(elements, np.float32))
    call = group.compile(function, [group.local_type((elements,), np.dtype(np.float32))], ())
    return lambda: call(array)
