"""Steps over several processes give what they give in one, to the last bit."""

import json

import numpy as np
import pytest

from tests.processes import end_all, start, start_run

THREADS = 9
"""Of XLA's pool, in every process: the pool's size decides how it cuts sums."""


def results(tmp_path, processes, devices, case):
    """Runs a case; gives the leaves that it writes."""
    name = f"{processes}-{abs(hash(json.dumps(case)))}"
    out = tmp_path / f"{name}.npz"
    variables = {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "NPROC": THREADS,
    }
    arguments = ("-m", "tests.process_run", json.dumps(case), out)
    alone = processes == 1
    started = (
        [start(*arguments, **variables)] if alone else start_run(processes, *arguments, **variables)
    )
    try:
        said = [one.wait() for one in started]
    finally:
        end_all(started)
    assert [one.code for one in started] == [0] * processes, "\n".join(said)
    losses = {text[text.index("losses") :].splitlines()[0] for text in said}
    assert len(losses) == 1, losses  # every process can read the metrics
    with np.load(out) as found:
        return dict(found)


def assert_same(tmp_path, processes, devices, case):
    one = results(tmp_path, 1, processes * devices, case)
    many = results(tmp_path, processes, devices, case)
    assert one.keys() == many.keys()
    differing = [name for name, leaf in one.items() if leaf.tobytes() != many[name].tobytes()]
    assert not differing


@pytest.mark.parametrize(
    ("processes", "devices", "case"),
    [
        pytest.param(2, 1, {"stages": 2, "microbatches": 2}, id="stages"),
        pytest.param(3, 1, {"stages": 3, "microbatches": 4, "zero": 2}, id="three-stages"),
        pytest.param(2, 1, {"data_parallel": 2, "microbatches": 2}, id="ranks"),
        pytest.param(4, 1, {"data_parallel": 4, "zero": 2}, id="four-ranks"),
        pytest.param(2, 2, {"data_parallel": 4, "microbatches": 2}, id="ranks-by-twos"),
        pytest.param(4, 1, {"stages": 2, "data_parallel": 2, "microbatches": 2}, id="both"),
        pytest.param(
            2,
            2,
            {
                "stages": 2,
                "data_parallel": 2,
                "microbatches": 2,
                "order": [0, 2, 1, 3],
                "swap": True,
            },
            id="every-rank-in-one-process",
        ),
        pytest.param(
            2,
            2,
            {"stages": 4, "microbatches": 4, "schedule": "1f1b", "recovery": "backward"},
            id="two-stages-each",
        ),
        pytest.param(2, 1, {"stages": 2, "scanned": True, "microbatches": 2}, id="stacked"),
        pytest.param(
            2, 2, {"stages": 2, "data_parallel": 2, "averaged": True}, id="a-moving-average-is-read"
        ),
        pytest.param(
            2,
            2,
            {
                "stages": 2,
                "data_parallel": 2,
                "scanned": True,
                "state_layout": "layers",
                "swap": True,
            },
            id="stacked-in-layers",
        ),
        pytest.param(
            2,
            1,
            {"data_parallel": 2, "validation": "deferred", "microbatches": 2},
            id="deferred-validation",
        ),
        pytest.param(
            3, 1, {"stages": 2, "microbatches": 2, "swap": True}, id="one-without-a-stage"
        ),
    ],
)
def test_processes_give_what_one_gives(tmp_path, processes, devices, case):
    assert_same(tmp_path, processes, devices, case)
