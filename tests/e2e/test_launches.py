"""However far launching runs ahead, XLA's pool keeps a thread that works.

Each script runs in a process of its own with four devices, hence four threads in the pool.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Two threads launch one collective after another, each on its own two devices. Launched without a bound, they hang within
# the first forty or so: XLA then ends the process after 40 seconds.
COLLECTIVES = """
import threading
import jax, numpy as np
from ratrain_jax.runtime.groups import Group
from ratrain_jax.runtime.launches import launcher, turn_type, with_turn

def work(x):
    x = jax.lax.fori_loop(0, 200, lambda _, a: jax.numpy.tanh(a @ a * 1e-3), x)
    return x + jax.lax.psum(x, "data")

def launch(group):
    types = jax.tree.map(
        lambda t: group.local_type(t.shape, t.dtype),
        (turn_type(group), jax.ShapeDtypeStruct((64, 64), np.float32)),
    )
    call = launcher(group, group.compile(with_turn(work), types, ()), True)
    x = group.put_whole(np.ones((64, 64), np.float32))
    for _ in range(150):
        x = call(x)
    x.block_until_ready()
    print("ended", flush=True)

devices = jax.devices()
threads = [threading.Thread(target=launch, args=(Group(tuple(devices[i : i + 2])),)) for i in (0, 2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""

# No step is waited for: launching outruns the devices.
STEPS = """
import jax, numpy as np, ratrain_jax as rt

@rt.train_step(stages=2, data_parallel=2, microbatches=4, zero=2)
def step(params, batch):
    def loss_fn(params):
        x = batch["x"]
        for name in sorted(params):
            x = jax.lax.fori_loop(0, 300, lambda _, a: jax.numpy.tanh(a @ params[name]), x)
        return (x ** 2).mean()
    loss, grads = rt.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

params = {f"layer_{i}": np.eye(64, dtype=np.float32) for i in range(8)}
batch = {"x": np.ones((64, 64), np.float32)}
for _ in range(6):
    params, loss = step(params, batch)
print("ended", float(loss) > 0)
"""


def run(script):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


def test_two_threads_of_collectives_end():
    assert run(COLLECTIVES) == ["ended", "ended"]


def test_steps_launched_far_ahead_end():
    assert run(STEPS) == ["ended", "True"]
