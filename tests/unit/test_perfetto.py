"""Traces, held to the rules of the Trace Event Format and to what Perfetto's importer makes of them."""

import collections
import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest

import ratrain_jax as rt
from ratrain_jax.lowering.program import Borrow, Forward, Free, Lane, PrefetchView, Send
from ratrain_jax.runtime.measured import MeasuredOp, MeasuredRun
from ratrain_jax.views.perfetto import write_trace
from tests.programs import make_program

# What each phase must have beside `ph`, `name`, `pid` and `tid`.
REQUIRED = {
    "X": {"cat", "ts", "dur", "args"},
    "M": {"args"},
    "C": {"ts", "args"},
    "s": {"cat", "ts", "id"},
    "t": {"cat", "ts", "id"},
    "f": {"cat", "ts", "id", "bp"},
}
TYPES = {
    "name": str,
    "cat": str,
    "pid": int,
    "tid": int,
    "ts": float,
    "dur": float,
    "args": dict,
    "id": int,
    "bp": str,
}
METADATA = {
    "process_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def faults(trace):
    """What of a trace breaks the format's rules."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["no JSON object with traceEvents"]
    found = ["displayTimeUnit"] if "displayTimeUnit" in trace else []
    events = trace["traceEvents"]
    for event in events:
        if {"ph", "name", "pid", "tid"} | REQUIRED.get(event.get("ph"), {"ph?"}) != set(event):
            found.append(f"keys of {event}")
        elif not all(isinstance(event[key], TYPES[key]) for key in event.keys() - {"ph"}):
            found.append(f"types of {event}")
        elif min(event.get("ts", 0), event.get("dur", 0)) < 0:
            found.append(f"negative time in {event}")
        elif event["ph"] == "C" and not all(isinstance(n, int) for n in event["args"].values()):
            found.append(f"counter without a number: {event}")
        elif event["ph"] == "M":
            key, kind = METADATA[event["name"]]
            if not isinstance(event["args"].get(key), kind):
                found.append(f"metadata {event}")
    return found or [*_thread_faults(events), *_flow_faults(events), *_name_faults(events)]


def _thread_faults(events):
    for thread, slices in _slices(events).items():
        for before, after in itertools.pairwise(slices):
            if after[0] < before[1] - 1e-6:
                yield f"slices of {thread} overlap: {before}, {after}"


def _flow_faults(events):
    slices = _slices(events)
    flows = collections.defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
            around = slices.get((event["pid"], event["tid"]), [])
            if not any(start <= event["ts"] <= end for start, end, _ in around):
                yield f"flow outside of slices: {event}"
    for number, flow in flows.items():
        phases = "".join(event["ph"] for event in flow)
        if phases[0] + phases[-1] != "sf" or set(phases[1:-1]) - {"t"}:
            yield f"flow {number} is {phases}"
        if any(b["ts"] < a["ts"] for a, b in itertools.pairwise(flow)):
            yield f"flow {number} runs back in time"
        if len({(event["name"], event["cat"]) for event in flow}) > 1:
            yield f"flow {number} changes its name"
        if flow[-1].get("bp") != "e":
            yield f"flow {number} binds to the next slice"


def _name_faults(events):
    """Processes and threads must be told apart, and every one must have a name."""
    names = collections.Counter(e["args"]["name"] for e in events if e["name"] == "process_name")
    yield from (f"two processes are {name}" for name, count in names.items() if count > 1)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    used = {(e["pid"], e["tid"]) for e in events}
    yield from (f"thread {thread} has no name" for thread in used - named)
    yield from (f"{thread} is too large" for thread in used if max(thread) >= 2**32)
    yield from (f"{thread} may be a main thread" for thread in used if thread[0] == thread[1])
    tids = collections.Counter(tid for _, tid in named)
    yield from (f"two threads are {tid}" for tid, count in tids.items() if count > 1)


def _slices(events):
    """Start, end and event of each slice, by process and thread, in order."""
    found = collections.defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            end = event["ts"] + event["dur"]
            found[event["pid"], event["tid"]].append((event["ts"], end, event))
    for slices in found.values():
        slices.sort(key=lambda item: item[:2])
    return found


def _written(path, *charts):
    write_trace(path, charts)
    text = path.read_text("utf-8")
    assert "\\u" not in text  # Perfetto's tokenizer knows no such escapes
    return json.loads(text)


def _processes(trace):
    """Numbers of the processes by name, in the order in which they are shown."""
    events = trace["traceEvents"]
    place = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    named = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    return dict(sorted(named.items(), key=lambda item: place[item[1]]))


def _threads(trace):
    return {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name"
    }


@pytest.fixture(scope="module", params=["gpipe", "1f1b", "ratrain"])
def timeline(request):
    program = make_program(stages=3, microbatches=4, schedule=request.param, clip=True)
    seconds = {Lane.COMPUTE: 1e-3, Lane.LINK: 0.7e-3}
    return rt.simulate(program, "generic", seconds=lambda op: seconds[op.lane])


@pytest.fixture(scope="module")
def trace(timeline, tmp_path_factory):
    return _written(tmp_path_factory.mktemp("trace") / "step.json", timeline.chart)


def test_the_trace_is_of_the_format(trace):
    assert faults(trace) == []


def test_processes_are_stages_and_threads_are_lanes(timeline, trace):
    processes, threads = _processes(trace), _threads(trace)
    assert list(processes) == [f"simulated stage {n}" for n in range(3)]
    wanted = collections.Counter()
    for bar in timeline.chart.bars:
        receives = isinstance(bar.op, Send | Borrow) and bar.stage == bar.op.target
        lane = (
            "compute" if bar.lane == Lane.COMPUTE else "link receive" if receives else "link send"
        )
        wanted[bar.stage, lane, bar.kind] += 1
    stages = {pid: n for n, pid in enumerate(processes.values())}
    found = collections.Counter(
        (stages[e["pid"]], threads[e["pid"], e["tid"]].rstrip(" 23"), e["cat"])
        for e in trace["traceEvents"]
        if e["ph"] == "X"
    )
    assert found == wanted


def test_slices_tell_times_layers_microbatches_and_bytes(timeline, trace):
    program = timeline.program
    slices = collections.defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            slices[event["name"]].append(event)
    for bar in timeline.chart.bars:
        if isinstance(bar.op, Forward) and not bar.next_step:
            names = ", ".join(program.layers[n].name for n in range(*bar.op.layers))
            (found,) = (e for e in slices[bar.label] if e["args"]["layers"] == names)
            assert found["ts"] == pytest.approx(bar.start * 1e6)
            assert found["dur"] == pytest.approx((bar.end - bar.start) * 1e6)
            assert found["args"] == {"layers": names, "microbatch": bar.op.microbatch}
        if isinstance(bar.op, PrefetchView):
            (found,) = slices[bar.label]
            assert found["args"] == {
                "layers": program.layers[bar.op.layer].name,
                "bytes": program.values[bar.op.writes[0]].bytes,
                "exposed_us": pytest.approx(bar.exposed * 1e6, abs=1e-3),
            }
    assert sum("next step" in name for name in slices) > 0


def test_flows_lead_from_sends_to_what_reads_them_and_from_gathers_to_forwards(timeline, trace):
    slices = {(pid, tid): of for (pid, tid), of in _slices(trace["traceEvents"]).items()}
    flows = collections.defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] in "stf":
            of = slices[event["pid"], event["tid"]]
            inside = [e for start, end, e in of if start <= event["ts"] < end]
            flows[event["id"]].append((event["name"], event["pid"], inside[0]["name"]))
    led = collections.Counter(tuple(flow) for flow in flows.values())
    chart, pids = timeline.chart, list(_processes(trace).values())
    wanted = collections.Counter()
    for op in {bar.op for bar in chart.bars}:
        if isinstance(op, Send):
            label = next(bar.label for bar in chart.bars if bar.op == op)
            reads = [b for b in chart.bars if b.op.stage == b.stage and op.writes[0] in b.op.reads]
            ends = [(op.stage, label), (op.target, label), (op.target, reads[0].label)]
            wanted[tuple(("transfer", pids[stage], name) for stage, name in ends)] += 1
    for source, target in chart.arrows:
        gather, forward = chart.bars[source], chart.bars[target]
        late = " of the next step" if forward.next_step else ""
        ends = [(gather.stage, gather.label), (forward.stage, forward.label + late)]
        wanted[tuple(("gather", pids[stage], name) for stage, name in ends)] += 1
    found = {flow: n for flow, n in led.items() if not flow[0][2].startswith("BO")}
    assert found == wanted
    assert len(chart.arrows) > 0


def test_counters_are_the_bytes_over_time(timeline, trace):
    for curve, pid in zip(timeline.chart.memory, _processes(trace).values(), strict=True):
        for kind, sizes in (*curve.by_kind.items(), ("all", curve.total)):
            counted = [
                (e["ts"], e["args"]["bytes"])
                for e in trace["traceEvents"]
                if e["ph"] == "C" and e["pid"] == pid and e["name"] == f"memory: {kind}"
            ]
            times, found = zip(*counted, strict=True)
            at = np.searchsorted(np.array(times), curve.times * 1e6 + 1e-3) - 1
            # Of moments that a trace's nanoseconds do not tell apart, the last counts.
            last = np.append(np.diff(curve.times) * 1e6 > 2e-3, True)
            assert np.array(found)[at][last].tolist() == sizes[last].tolist()


def test_the_checker_finds_what_breaks_the_rules(trace):
    for spoil in (
        lambda events: events[-1].pop("args"),
        lambda events: next(e for e in events if e["ph"] == "X").update(ts=-1.0),
        lambda events: next(e for e in events if e["ph"] == "X").update(dur=1e9),
        lambda events: events.remove(next(e for e in events if e["ph"] == "f")),
        lambda events: next(e for e in events if e["ph"] == "s").update(ts=1e9),
        lambda events: events.remove(next(e for e in events if e["name"] == "thread_name")),
    ):
        spoiled = json.loads(json.dumps(trace))
        spoil(spoiled["traceEvents"])
        assert faults(spoiled)


def _shifted(timeline, by):
    """A run of the simulated program in which each op takes longer than predicted."""
    ops = tuple(MeasuredOp(e.op, e.start, e.end + by) for e in timeline.events)
    return MeasuredRun(timeline.program, ops, max(op.end for op in ops))


def test_ops_that_overlap_in_a_lane_stand_in_threads_of_their_own(timeline, tmp_path):
    late = _written(tmp_path / "late.json", _shifted(timeline, 1.5e-3).chart)
    assert faults(late) == []
    assert "compute 2" in _threads(late).values()


def test_a_flow_that_would_lead_back_in_time_ends_before(timeline, tmp_path):
    """The thread that watches a transfer may be later than the one that watches what reads it."""
    sends = [event for event in timeline.events if isinstance(event.op, Send)]
    late = {event.op: 1.0 for event in sends[:2]}
    ops = tuple(MeasuredOp(e.op, e.start, e.end + late.get(e.op, 0)) for e in timeline.events)
    trace = _written(tmp_path / "late.json", MeasuredRun(timeline.program, ops, 2.0).chart)
    assert faults(trace) == []
    flows = collections.Counter(
        e["id"] for e in trace["traceEvents"] if e["ph"] in "stf" and e["name"] == "transfer"
    )
    assert sum(count == 2 for count in flows.values()) >= 2


def test_prediction_and_measurement_stand_side_by_side(timeline, tmp_path):
    path = tmp_path / "both.json"
    timeline.to_perfetto(path, _shifted(timeline, 2e-4), timeline)
    both = json.loads(path.read_text("utf-8"))
    assert faults(both) == []
    assert list(_processes(both))[:3] == [
        "simulated 1 stage 0",
        "measured stage 0",
        "simulated 2 stage 0",
    ]
    measured = _processes(both)["measured stage 1"]
    for event in both["traceEvents"]:
        if event["ph"] == "X" and event["pid"] == measured:
            assert event["args"]["difference_us"] == pytest.approx(200, abs=1e-3)
            took = event["args"]["predicted_us"] + event["args"]["difference_us"]
            assert event["dur"] == pytest.approx(took, abs=2e-3)
    simulated, ran, _ = both["otherData"]["steps"]
    rows = {row.kind: row for row in timeline.compare(_shifted(timeline, 2e-4)).rows}
    assert ran["kinds"].keys() == rows.keys() == simulated["kinds"].keys()
    for kind, row in rows.items():
        told = ran["kinds"][kind]
        assert told["ops"] == row.count
        assert told["difference"] == pytest.approx(row.difference)
        assert "difference" not in simulated["kinds"][kind]


def test_a_run_of_another_program_has_no_prediction(timeline, tmp_path):
    other = dataclasses.replace(timeline.program, fingerprint="other")
    run = dataclasses.replace(_shifted(timeline, 1e-4), program=other)
    both = _written(tmp_path / "other.json", timeline.chart, run.chart)
    assert "predicted_us" not in json.dumps(both)


@pytest.fixture(scope="module")
def run():
    """A step that really ran, on two stages of two devices."""
    width = 8

    @rt.train_step(stages=2, data_parallel=2, microbatches=2, boundaries=("b",))
    def step(state, x):
        def loss_fn(params):
            return ((jax.numpy.tanh(x @ params["a"]) @ params["b"]) ** 2).mean()

        loss, grads = rt.value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    state = {name: jax.numpy.eye(width) for name in "ab"}
    batch = np.ones((8, width), np.float32)
    return step.lower(state, batch).compile().trace(state, batch)[1]


def test_a_run_tells_when_each_op_ran_on_each_device(run):
    ids = [device.id for device in jax.devices()]
    assert len(run.ops) == sum(not isinstance(op, Free) for op in run.program.ops())
    for measured in run.ops:
        places = [(t.stage, t.rank, t.device) for t in measured.devices]
        assert places == [(s, r, ids[2 * s + r]) for s in measured.op.stages for r in range(2)]
        assert all(0 <= t.start <= t.end <= measured.end for t in measured.devices)
        assert measured.end == max(t.end for t in measured.devices)
        if isinstance(measured.op, Send):
            by_stage = [
                [(t.start, t.end) for t in measured.devices if t.stage == s] for s in (0, 1)
            ]
            assert by_stage[0] == by_stage[1]


def test_ops_of_a_lane_follow_each_other_on_each_device(run):
    for stage, rank in itertools.product(range(2), range(2)):
        spans = [
            (t.start, t.end)
            for measured in run.of(Forward)
            for t in measured.devices
            if (t.stage, t.rank) == (stage, rank)
        ]
        assert len(spans) == 2
        assert spans[0][1] <= spans[1][0]


def test_a_run_is_traced_device_by_device(run, tmp_path):
    path = tmp_path / "run.json"
    run.to_perfetto(path)
    trace = json.loads(path.read_text("utf-8"))
    assert faults(trace) == []
    ids = [device.id for device in jax.devices()[:4]]
    names = [f"measured stage {n // 2}, device {device}" for n, device in enumerate(ids)]
    assert list(_processes(trace)) == names
    for (name, pid), place in zip(_processes(trace).items(), range(4), strict=True):
        found = sorted(
            (e["ts"], e["ts"] + e["dur"])
            for e in trace["traceEvents"]
            if e["ph"] == "X" and e["pid"] == pid
        )
        wanted = sorted(
            (t.start * 1e6, t.end * 1e6)
            for measured in run.ops
            for t in measured.devices
            if (t.stage, t.rank) == divmod(place, 2)
        )
        assert np.array(found) == pytest.approx(np.array(wanted), abs=2e-3), name
