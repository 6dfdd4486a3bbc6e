"""Machine descriptions: built-in ones, rooflines, and errors that name key, unit and range."""

import dataclasses
import importlib.resources

import pytest

from ratrain_jax.errors import MachineError
from ratrain_jax.kernels import (
    Link,
    Machine,
    Memory,
    Overlap,
    builtin_machines,
    load_machine,
    parse_machine,
)


def _source(name: str) -> str:
    files = importlib.resources.files("ratrain_jax.kernels")
    return files.joinpath("data", f"{name}.toml").read_text()


@pytest.mark.parametrize("name", builtin_machines())
def test_builtin_machines_load_and_are_hashable(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name
    assert hash(machine) == hash(load_machine(name))


@pytest.mark.parametrize("name", ["mt3000", "ft-m7032"])
@pytest.mark.parametrize("dtype, size", [("float16", 2), ("float32", 4), ("float64", 8)])
def test_peaks_follow_from_cores_lanes_and_clock(name: str, dtype: str, size: int) -> None:
    machine = load_machine(name)
    assert machine.accelerator is not None
    assert machine.peak(dtype) == pytest.approx(machine.accelerator.peak_flops(size))


def test_mt3000_has_the_peak_its_authors_count_with() -> None:
    assert load_machine("mt3000").peak("float16") == pytest.approx(8.1e12, rel=2e-3)


def test_roofline_is_the_larger_of_compute_and_memory_time() -> None:
    machine = load_machine("generic")
    assert machine.roofline_seconds(10e12, 1.0) == pytest.approx(1.0)
    assert machine.roofline_seconds(1.0, 500e9) == pytest.approx(1.0)
    assert machine.roofline_seconds(40e12, 0.0, "bfloat16") == pytest.approx(1.0)
    assert machine.roofline_seconds(0, 0, launch=True) == machine.launch_seconds


def test_unlisted_dtypes_use_a_listed_rate() -> None:
    machine = load_machine("mt3000")
    assert machine.peak("int32") == machine.peak("float32")
    assert machine.peak("bfloat16") == machine.peak("float16")


def test_links_are_found_by_reach() -> None:
    near, far = Link("near", 100e9, 1e-6, devices=8), Link("far", 10e9, 1e-5)
    machine = dataclasses.replace(load_machine("generic"), links=(near, far))
    assert machine.link(8) is near
    assert machine.link(9) is far
    assert machine.link_bandwidth == 10e9 and machine.link_latency == 1e-5


def test_overlap_is_read_in_either_order() -> None:
    slow = Overlap(("compute", "link"), (1.1, 1.5))
    machine = dataclasses.replace(load_machine("generic"), overlaps=(slow,))
    assert machine.overlap("compute", "link") == (1.1, 1.5)
    assert machine.overlap("link", "compute") == (1.5, 1.1)
    assert machine.overlap("compute", "host") is None


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("cores = 24", "cores = 0", ["accelerator.cores", "cores", "1 to"]),
        ("clock = 0.88e9", 'clock = "fast"', ["accelerator.clock", "'fast'", "Hz"]),
        ("fma_units = 3", "fma_units = 2.5", ["accelerator.fma_units", "whole number", "2.5"]),
        ("bandwidth = 26e9", "bandwidth = -1.0", ["memories.GSM.bandwidth", "bytes/s"]),
        ("latency = 1e-5", "latency = nan", ["links.interconnect.latency", "seconds"]),
        ("fma = 6\n", "", ["accelerator.latencies.fma", "missing", "cycles"]),
        ("cores = 24", "coers = 24", ["accelerator.coers", "'cores'"]),
        ('sharing = "device"', 'sharing = "all"', ["sharing", "'all'", "'core'"]),
        ('accumulator = "promote"', 'accumulator = "int8"', ["accumulator", "'fp16'"]),
        ("float16 = 8.11008e12", "float16 = true", ["peak_flops.float16", "FLOP/s"]),
        ("usable_bytes = 20_", "usable_bytes = 99_", ["usable_bytes", "DDR"]),
        ('"compute", "link"', '"compute", "gpu"', ["overlaps.lanes", "gpu"]),
        ('"overlaps",', '"overlapz",', ["assumed", "overlapz"]),
        ('name = "AM"', 'name = "SM"', ["share a name"]),
        ("[peak_flops]", "[peak_flops", ["not valid TOML"]),
    ],
)
def test_bad_files_name_the_key_the_unit_and_the_range(
    old: str, new: str, words: list[str]
) -> None:
    source = _source("mt3000")
    assert old in source
    with pytest.raises(MachineError) as error:
        parse_machine(source.replace(old, new), "mine.toml")
    for word in ["mine.toml", *words]:
        assert word in str(error.value)


def test_a_users_own_file_is_loaded(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(_source("generic").replace('"generic"', '"mine"'))
    assert load_machine(path).name == "mine"


def test_unknown_names_and_files_are_refused() -> None:
    with pytest.raises(MachineError, match="mt3000"):
        load_machine("mt9000")
    with pytest.raises(MachineError, match="cannot read"):
        load_machine("no/such.toml")
    with pytest.raises(MachineError, match="GSM"):
        load_machine("mt3000").memory("L2")


def test_machines_made_in_code_are_checked_too() -> None:
    with pytest.raises(MachineError, match=r"memories\.X\.bytes"):
        Memory("X", 0)
    with pytest.raises(MachineError, match="float32"):
        Machine("m", (Memory("D", 10),), (("float16", 1e12),), (Link("l", 1e9, 0.0),), 10)
