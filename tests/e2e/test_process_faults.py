"""What goes wrong in steps over several processes ends them all, with an error that says what it was."""

import re

import pytest

from tests.blocks import read_blocks
from tests.processes import BOUND, ROOT, end_all, start, start_run

HEAD = """
import sys
import ratrain_jax as rt
rt.initialize(heartbeat=4)
import jax, jax.numpy as jnp, numpy as np
me = jax.process_index()

def make(**options):
    @rt.train_step(**options)
    def step(w, x):
        def loss(w):
            y = x
            for n in range(4):
                y = jnp.tanh(y @ rt_layer(w, n))
            return (y ** 2).mean()
        def rt_layer(w, n):
            return w[f"l{n}"]
        value, grads = rt.value_and_grad(loss)(w)
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, grads), {"loss": value}
    return step

def weights():
    return {f"l{n}": np.eye(8, dtype=np.float32) for n in range(4)}

x = np.ones((8, 8), np.float32)
"""

FOR_EVER = """
step, w = make(stages=2, microbatches=2), weights()
for n in range(10**6):
    w, metrics = step(w, x)
    READ
    if n == 2:
        print("at work", flush=True)
"""


@pytest.fixture
def run(tmp_path):
    """Starts two processes with a script; waits until both have said a word."""
    started = []

    def begin(script, word=None, **variables):
        path = tmp_path / "script.py"
        path.write_text(HEAD + script)
        started.extend(start_run(2, path, **variables))
        for one in started if word else ():
            one.read_until(word)
        return started

    yield begin
    end_all(started)


@pytest.mark.parametrize("read", ["float(metrics['loss'])", "pass"])
def test_a_process_killed_in_a_step_is_named(read, run):
    processes = run(FOR_EVER.replace("READ", read), "at work")
    processes[1].kill()
    said = processes[0].wait(BOUND)
    assert f"DistributedError: process 1 (pid {processes[1].process.pid} on " in said, said
    assert "Restart all processes; training goes on from the last checkpoint" in said
    assert processes[0].code == 1


@pytest.mark.parametrize(
    ("script", "what"),
    [
        ("make(stages=2, microbatches=2 + 2 * me)(weights(), x)", "the code of the step"),
        (
            "make(stages=2, schedule=('1f1b', 'gpipe')[me], microbatches=2)(weights(), x)",
            "the program",
        ),
        (
            "make(stages=2, donate_state=bool(me))(weights(), x)",
            "the devices or the options",
        ),
    ],
)
def test_processes_that_mean_different_steps_are_told(script, what, run):
    processes = run(script)
    said = [one.wait(BOUND) for one in processes]
    # As with the pool, one of them may be ended by JAX before it can say so.
    told = f"DistributedError: {what} is not the same in process 1 as in process 0"
    assert any(told in text for text in said), said
    assert all(one.code for one in processes)


def test_a_pool_that_would_run_dry_is_refused(run):
    script = "make(stages=2, data_parallel=2)(weights(), x)"
    flags = "--xla_force_host_platform_device_count=2"
    processes = run(script, XLA_FLAGS=flags, NPROC=2)
    said = [one.wait(BOUND) for one in processes]
    # The one that leaves first may take the coordinator with it, and then JAX ends the other.
    told = "DistributedError: XLA's pool has 2 threads for 2 CPU devices"
    assert any(told in text and "NPROC=5" in text for text in said), said
    assert all(one.code for one in processes)


GLOBAL_BATCH = """
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), "d")
step, w = make(data_parallel=2), weights()
rows = np.arange(64, dtype=np.float32).reshape(8, 8)
w, whole = step(w, rows)
spread = NamedSharding(mesh, P("d"))
mine = jax.make_array_from_process_local_data(spread, rows[4 * me : 4 * me + 4])
_, cut = step(weights(), mine)
assert float(whole["loss"]) == float(cut["loss"])
columns = jax.make_array_from_callback((8, 8), NamedSharding(mesh, P(None, "d")), lambda i: rows[i])
try:
    step(w, columns)
except rt.errors.BatchError as error:
    print("told:", error, flush=True)
w, again = step(w, rows)  # nothing of the state was used up
float(again["loss"])
"""


def test_a_global_batch_is_taken_where_each_process_has_its_rows(run):
    for number, one in enumerate(run(GLOBAL_BATCH)):
        said = one.wait()
        assert one.code == 0, said
        first = 4 * number
        assert f"told: batch: rows {first} to {first + 3} are read on" in said, said


MEASURED = """
step, w = make(stages=2, microbatches=2), weights()
compiled = step.lower(w, x).compile()
(w, _), run = compiled.trace(w, x)
kinds = sorted({type(each.op).__name__ for each in run.ops})
stages = sorted({time.stage for each in run.ops for time in each.devices})
print("traced", len(run.ops), kinds, stages, f"{run.seconds:.6f}", flush=True)
(w, _), census = compiled.census(w, x)
print("census", me, census.stages[me].largest_difference < 0.02, flush=True)
profile = rt.profile(compiled, w, x, repetitions=1, progress=False)
print("profile", profile.missing(compiled.lowered), len(profile.measured), flush=True)
alone = {m.share for m in profile.measured if m.kind != "Send"}
print("alone", alone, [m.share for m in (*profile.measured, *profile.lines) if m.kind == "Send"])
print("predicted", rt.simulate(compiled.lowered, "cpu", profile=profile).step_seconds, flush=True)
"""


def test_steps_of_several_processes_are_traced_and_profiled_as_one(run):
    said = []
    for one in run(MEASURED):
        said.append(one.wait())
        assert one.code == 0, said[-1]

    def lines(text, word):
        return [line for line in text.splitlines() if line.startswith(word)]

    for word in ("traced", "profile", "alone", "predicted"):
        assert lines(said[0], word) == lines(said[1], word) != [], word
    assert (
        "SendActivation" in lines(said[0], "traced")[0] and "[0, 1]" in lines(said[0], "traced")[0]
    )
    assert "profile ()" in said[0]
    shares = re.search(r"^alone \{1\.0\} \[(.*)\]$", said[0], re.MULTILINE)
    assert shares and all(0 <= float(share) < 1 for share in shares[1].split(","))
    for number, text in enumerate(said):
        assert f"census {number} True" in text


WITHIN = """
step, w = make(stages=2, data_parallel=2, microbatches=2), weights()
profile = rt.profile(step.lower(w, x), w, x, repetitions=1, progress=False)
whole = {line.kind for line in profile.lines if line.share == 1}
print("whole", sorted(whole), sorted({line.kind for line in profile.lines} - whole), flush=True)
"""


def test_only_what_goes_between_processes_leaves_cores_to_others(run):
    for one in run(WITHIN, XLA_FLAGS="--xla_force_host_platform_device_count=2"):
        said = one.wait()
        assert one.code == 0, said
        assert "whole ['GradSync', 'PrefetchView'] ['Send']" in said


def test_the_script_of_the_page_says_what_the_page_shows(tmp_path):
    page = (ROOT / "docs" / "howto" / "several-processes.md").read_text()
    hello = next(block for block in read_blocks(page) if block.title == "hello.py")
    shown = next(block for block in read_blocks(page) if "hello.py" in block.code and block.output)
    (tmp_path / "hello.py").write_text(hello.code)
    words = shown.code.split()[1:-1]
    launched = start("-m", "ratrain_jax.cli", *words, tmp_path / "hello.py")
    said = launched.wait()
    assert launched.code == 0, said
    assert set(shown.output.splitlines()) <= set(said.splitlines())


AHEAD = """
import pathlib, time
step, w = make(stages=2, microbatches=4), weights()
w, metrics = step(w, x)
first = float(metrics["loss"])
told = pathlib.Path(sys.argv[1])
while me == 1 and not told.exists():  # it does not even begin before the other has launched its whole step
    time.sleep(0.01)
w, metrics = step(w, x)
if me == 0:
    told.touch()
assert float(metrics["loss"]) < first
"""


def test_a_stage_launches_its_step_without_waiting_for_the_others(run, tmp_path):
    for one in run(AHEAD.replace("sys.argv[1]", repr(str(tmp_path / "told")))):
        said = one.wait()
        assert one.code == 0, said


# The last layer's view cannot be gathered before the second process hears that the first one's next step has begun.
OWN_VIEW = """
import os, pathlib, time
from ratrain_jax.lowering.program import Forward, PrefetchView

told = pathlib.Path(sys.argv[1])

@rt.train_step(stages=1, data_parallel=2, microbatches=1)
def step(params, batch):
    def loss_fn(params):
        x = batch["x"]
        for name in sorted(params):
            x = jax.numpy.tanh(x @ params[name]["kernel"] * params[name]["scale"])
        return (x ** 2).mean()
    loss, grads = rt.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}

params = {
    f"layer_{n}": {"kernel": np.eye(64, dtype=np.float32), "scale": np.float32(1.1)}
    for n in range(6)
}
batch = {"x": np.ones((8, 64), np.float32)}
compiled = step.lower(params, batch).compile(progress=False)
(last,) = [
    i for i in compiled._plan.threads[1] if isinstance(i.op, PrefetchView) and i.op.layer == 5
]
gather, launch = last.execute, compiled._threads.launch

def late(bundles):
    while me == 1 and not told.exists():
        time.sleep(0.01)
    return gather(bundles)

def watch(instruction, made):
    if isinstance(instruction.op, Forward) and instruction.op.layers[0] == 0:
        end = time.monotonic() + 60
        while not all(array.is_ready() for array in made[0]):
            if time.monotonic() > end:
                print("the first Forward waits for the last view", flush=True)
                os._exit(1)
            time.sleep(0.01)
        told.touch()

last.execute = late
params, _ = compiled(params, batch)
if me == 0:
    compiled._threads.launch = lambda tables, _: launch(tables, watch)
params, metrics = compiled(params, batch)
assert float(metrics["loss"]) > 0
"""


def test_a_forward_waits_for_its_own_view_alone(run, tmp_path):
    for one in run(OWN_VIEW.replace("sys.argv[1]", repr(str(tmp_path / "told")))):
        said = one.wait()
        assert one.code == 0, said
