"""Steps as a trace that https://ui.perfetto.dev and chrome://tracing open.

The form is the JSON of the Trace Event Format. A stage is a process, one a device where a step was measured; a lane is a thread,
and the link's two directions are two. Slices of one thread may not overlap in part, so what runs beside another
slice of its lane stands in a further thread of that lane. Times are microseconds, to the nanosecond. `displayTimeUnit` is left
out, for older versions of Perfetto read times in that unit.

Terms.
    A **track** is a stage of a chart, or one of its devices.
    A **flow** is an arrow over two or more slices, each at its own moment: from a send over its arrival to the op that
    reads what arrived first, and from a gather to the forward that it unblocks.

References:
    Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ratrain_jax.lowering.program import Borrow, Lane, Op, Program, Send
from ratrain_jax.lowering.text import readable_bytes
from ratrain_jax.views.chart import Bar, Chart
from ratrain_jax.views.memory_curve import MemoryCurve

_Event = dict[str, Any]

_LANES: Final = ("compute", "link send", "link receive")
_THREADS: Final = 1_000_000  # a process; their numbers differ from those of all processes and other processes' threads


def write_trace(path: str | os.PathLike[str], charts: Sequence[Chart]) -> None:
    """Writes steps, simulated or measured, as one trace with one time axis.

    Where a measured step is written beside a simulation of the same program, each of its ops says what was predicted, and
    `otherData` the difference by kind of op.

    Args:
        path: where to; the usual ending is `.json`.
        charts: the steps.
    """
    # Perfetto reads no \u escapes where it looks for an event's time.
    encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    head = {"otherData": {"steps": [_summary(chart, charts) for chart in charts]}}
    with open(path, "w", encoding="utf-8") as file:
        file.write(f'{encode(head)[:-1]},"traceEvents":[')
        before = "\n"
        for event in _events(charts):
            file.write(before + encode(event))
            before = ",\n"
        file.write("\n]}\n")


@dataclasses.dataclass(frozen=True, slots=True)
class _Track:
    """A process of the trace: a stage of a chart, or one of its devices."""

    pid: int
    name: str
    chart: int
    stage: int
    rank: int | None

    def thread(self, number: int) -> int:
        """The number of one of its threads in the whole trace."""
        return self.pid * _THREADS + number


@dataclasses.dataclass(frozen=True, slots=True)
class _Slice:
    """A bar on a track: its thread, its start and its end in nanoseconds."""

    pid: int
    tid: int
    start: int
    end: int


def _events(charts: Sequence[Chart]) -> Iterator[_Event]:
    tracks = _tracks(charts)
    flows = itertools.count(1)
    for number, chart in enumerate(charts):
        predictions = _predictions(chart, charts)
        arguments = [_arguments(bar, chart.program, predictions) for bar in chart.bars]
        slices: dict[tuple[int, int | None], _Slice] = {}
        mine = [track for track in tracks if track.chart == number]
        for track in mine:
            yield from _process(track, chart)
            yield from _slices(track, chart, arguments, slices)
        yield from _flows(chart, slices, flows)
        for track in mine:
            if not track.rank:
                yield from _counters(track, chart.memory[track.stage])


def _tracks(charts: Sequence[Chart]) -> list[_Track]:
    """All processes: stage by stage, so that what was predicted of a stage stands beside what was measured."""
    found: list[tuple[int, int, int | None, str]] = []
    for number, chart in enumerate(charts):
        alike = [n for n, other in enumerate(charts) if other.measured == chart.measured]
        which = f" {alike.index(number) + 1}" if len(alike) > 1 else ""
        what = f"{'measured' if chart.measured else 'simulated'}{which} stage"
        devices = {(bar.stage, t.rank): t.device for bar in chart.bars for t in bar.devices}
        for (stage, rank), device in devices.items():
            found.append((stage, number, rank, f"{what} {stage}, device {device}"))
        for stage in {*range(len(chart.program.order))} - {stage for stage, _ in devices}:
            found.append((stage, number, None, f"{what} {stage}"))
    found.sort(key=lambda track: (track[0], track[1], track[2] or 0))
    return [
        _Track(pid, name, number, stage, rank)
        for pid, (stage, number, rank, name) in enumerate(found, 1)
    ]


def _process(track: _Track, chart: Chart) -> Iterator[_Event]:
    curve = chart.memory[track.stage]
    most = readable_bytes(int(curve.total[curve.peak]))
    limit = f" of {readable_bytes(curve.limit)}" if curve.limit is not None else ""
    for name, args in (
        ("process_name", {"name": track.name}),
        ("process_labels", {"labels": f"{chart.title}; at most {most}{limit} a device"}),
        ("process_sort_index", {"sort_index": track.pid}),
    ):
        yield {"ph": "M", "name": name, "pid": track.pid, "tid": track.thread(0), "args": args}


def _slices(
    track: _Track,
    chart: Chart,
    arguments: Sequence[Mapping[str, Any]],
    slices: dict[tuple[int, int | None], _Slice],
) -> Iterator[_Event]:
    """The bars of a track, and the names of its threads; fills `slices` by place of the bar and rank."""
    ends: dict[tuple[int, int], tuple[int, int]] = {}  # lane and row: thread, and end of its last
    for start, end, place in sorted(_spans(track, chart)):
        bar = chart.bars[place]
        lane = _lane(bar)
        row = next(r for r in itertools.count() if ends.get((lane, r), (0, 0))[1] <= start)
        if (lane, row) not in ends:
            ends[lane, row] = (track.thread(len(ends)), 0)
            yield from _thread(track.pid, ends[lane, row][0], lane, row)
        tid = ends[lane, row][0]
        ends[lane, row] = (tid, end)
        slices[place, track.rank] = _Slice(track.pid, tid, start, end)
        yield {
            "ph": "X",
            "name": f"{bar.label} of the next step" if bar.next_step else bar.label,
            "cat": bar.kind,
            "pid": track.pid,
            "tid": tid,
            "ts": start / 1000,
            "dur": (end - start) / 1000,
            "args": arguments[place],
        }


def _spans(track: _Track, chart: Chart) -> Iterator[tuple[int, int, int]]:
    """Start and end in nanoseconds of each bar of a track, with its place."""
    for place, bar in enumerate(chart.bars):
        if bar.stage == track.stage:
            times = (t for t in bar.devices if t.rank == track.rank)
            seen = next(times, bar) if track.rank is not None else bar
            yield round(seen.start * 1e9), round(seen.end * 1e9), place


def _lane(bar: Bar) -> int:
    """The place in `_LANES`: what a stage sends apart from what it receives; collectives with what it sends."""
    if bar.lane != Lane.LINK:
        return 0
    return 2 if isinstance(bar.op, Send | Borrow) and bar.stage == bar.op.target else 1


def _thread(pid: int, tid: int, lane: int, row: int) -> Iterator[_Event]:
    name = _LANES[lane] + (f" {row + 1}" if row else "")
    for key, args in (
        ("thread_name", {"name": name}),
        ("thread_sort_index", {"sort_index": 1000 * lane + row}),
    ):
        yield {"ph": "M", "name": key, "pid": pid, "tid": tid, "args": args}


def _arguments(bar: Bar, program: Program, predictions: Mapping[Op, float]) -> _Event:
    """What the trace tells of a bar that is chosen with the mouse."""
    found: _Event = {}
    layers = getattr(bar.op, "layers", None)
    layer = getattr(bar.op, "layer", None)
    if layers is not None:
        found["layers"] = ", ".join(program.layers[n].name for n in range(*layers))
    elif layer is not None:
        found["layers"] = program.layers[layer].name
    if (microbatch := getattr(bar.op, "microbatch", None)) is not None:
        found["microbatch"] = microbatch
    if bar.lane == Lane.LINK:
        # Of a collective the whole: what a reduce-scatter reads, what an all-gather writes.
        moved = (program.values[v].bytes for v in (*bar.op.reads, *bar.op.writes))
        found["bytes"] = max(moved, default=0)
        found["exposed_us"] = round(bar.exposed * 1e6, 3)
    if bar.op in predictions:
        predicted = predictions[bar.op]
        found["predicted_us"] = round(predicted * 1e6, 3)
        found["difference_us"] = round((bar.end - bar.start - predicted) * 1e6, 3)
    return found


def _flows(
    chart: Chart, slices: Mapping[tuple[int, int | None], _Slice], numbers: Iterator[int]
) -> Iterator[_Event]:
    ranks = {rank for _, rank in slices}
    for name, places in _chains(chart):
        for rank in ranks:
            chain = [slices[place, rank] for place in places if (place, rank) in slices]
            moments = _moments(chain)
            if len(moments) < 2:
                continue
            number = next(numbers)
            for n, (at, slice_) in enumerate(zip(moments, chain, strict=False)):
                last = n == len(moments) - 1
                event = {"ph": "t" if n else "s", "name": name, "cat": "flow", "id": number}
                event |= {"pid": slice_.pid, "tid": slice_.tid, "ts": at / 1000}
                yield event | {"ph": "f", "bp": "e"} if last else event


def _chains(chart: Chart) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The places of the bars that each flow leads over."""
    at = {(bar.op, bar.stage): n for n, bar in enumerate(chart.bars) if not bar.next_step}
    reader: dict[int, int] = {}
    for place, bar in enumerate(chart.bars):
        if not bar.next_step and bar.stage == bar.op.stage:
            for value in bar.op.reads:
                reader.setdefault(value, place)
    for bar in chart.bars:
        op = bar.op
        if isinstance(op, Send | Borrow) and bar.stage == op.stage and not bar.next_step:
            read = [reader[value] for value in op.writes if value in reader]
            yield "transfer", (at[op, op.stage], at[op, op.target], *read)
    for gather, forward in chart.arrows:
        yield "gather", (gather, forward)


def _moments(chain: Sequence[_Slice]) -> list[int]:
    """When a flow passes each of its slices: never earlier than the slice before, always inside.

    A measured op may seem to end before what it reads is there, by as much as the watching thread was late; the flow then
    ends before it.
    """
    found: list[int] = []
    for n, slice_ in enumerate(chain):
        inside = max(slice_.start, slice_.end - 1)  # at its very end the next slice may begin
        wanted = inside if 0 < n < len(chain) - 1 else slice_.start
        at = max(wanted, *found[-1:], slice_.start)
        if at > inside:
            break
        found.append(at)
    return found


def _counters(track: _Track, curve: MemoryCurve) -> Iterator[_Event]:
    """Bytes on each device by kind and in total, where they change."""
    moments = [round(at * 1e9) / 1000 for at in curve.times.tolist()]
    for name, sizes in (*curve.by_kind.items(), ("all", curve.total)):
        before = None
        for at, size in zip(moments, sizes.tolist(), strict=True):
            if size != before:
                before = size
                yield {
                    "ph": "C",
                    "name": f"memory: {name}",
                    "pid": track.pid,
                    "tid": track.thread(0),
                    "ts": at,
                    "args": {"bytes": size},
                }


def _predictions(chart: Chart, charts: Sequence[Chart]) -> dict[Op, float]:
    """What a simulation among the charts says of each op of a measured one."""
    if not chart.measured:
        return {}
    for other in charts:
        if not other.measured and other.program == chart.program:
            return {bar.op: bar.end - bar.start for bar in other.bars if not bar.next_step}
    return {}


def _summary(chart: Chart, charts: Sequence[Chart]) -> _Event:
    """A step in numbers: seconds of all ops of a kind together, and what was predicted."""
    predictions = _predictions(chart, charts)
    kinds: dict[str, dict[str, float]] = {}
    for bar in chart.bars:
        if bar.next_step or bar.stage != bar.op.stages[0]:
            continue
        row = kinds.setdefault(bar.kind, {"ops": 0, "seconds": 0.0})
        row["ops"] += 1
        row["seconds"] += bar.end - bar.start
        if bar.op in predictions:
            row["predicted"] = row.get("predicted", 0.0) + predictions[bar.op]
    for row in kinds.values():
        if "predicted" in row:
            row["difference"] = row["seconds"] - row["predicted"]
    title = {"title": chart.title, "measured": chart.measured, "seconds": chart.seconds}
    return title | {"kinds": kinds}
