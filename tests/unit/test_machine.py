"""Machine descriptions: built-in ones, rooflines, and errors that name key, unit and range."""

import dataclasses
import importlib.resources

import pytest

from ratrain_jax import machines
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


def test_products_reach_a_share_that_grows_with_their_size() -> None:
    machine = dataclasses.replace(
        load_machine("generic"), product_efficiency=0.8, product_half_flops=2e9
    )
    peak = machine.peak("float16")
    assert machine.compute_seconds(6e9, "float16") == 6e9 / peak
    one = machine.compute_seconds(6e9, "float16", products=1)
    assert one == pytest.approx(6e9 / (peak * 0.8 * 6e9 / (6e9 + 2e9)))
    half = machine.compute_seconds(2e9, "float16", products=1)
    assert half == pytest.approx(2e9 / (peak * 0.8 / 2))
    # Three products of a third of the operations each are no faster than they are one by one.
    assert machine.compute_seconds(6e9, products=3) == pytest.approx(
        3 * machine.compute_seconds(2e9, products=1)
    )
    assert machine.roofline_seconds(6e9, 1.0, "float16", products=1) == one
    assert machine.roofline_seconds(6e9, 1.0, "float16") == 6e9 / peak


def test_only_a_share_of_main_memory_may_be_reached() -> None:
    machine = dataclasses.replace(load_machine("generic"), memory_efficiency=0.5)
    assert machine.streaming_bandwidth == machine.ddr_bandwidth / 2
    assert machine.roofline_seconds(1.0, 500e9) == machine.roofline_seconds(1, 500e9, products=1)
    assert machine.roofline_seconds(1.0, 500e9) == pytest.approx(2.0)


@pytest.mark.parametrize("name", ["generic", "mt3000", "ft-m7032"])
def test_machines_that_state_no_efficiency_reach_their_peaks(name: str) -> None:
    machine = load_machine(name)
    for flops, moved, dtype in ((12_345, 0, "float16"), (1e12, 3e9, "float32"), (7, 7e9, "int8")):
        seconds = max(flops / machine.peak(dtype), moved / machine.ddr_bandwidth)
        assert machine.roofline_seconds(flops, moved, dtype) == seconds
        assert machine.roofline_seconds(flops, moved, dtype, products=3) == seconds


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
        ("[peak_flops]", "devices = 1.5\n[peak_flops]", ["devices", "whole number", "1e+09"]),
        (
            "[peak_flops]",
            "product_efficiency = 1.2\n[peak_flops]",
            ["product_efficiency is 1.2", "a share from 0.01 to 1"],
        ),
        (
            "[peak_flops]",
            "product_half_flops = -1\n[peak_flops]",
            ["product_half_flops is -1", "FLOPs from 0"],
        ),
        (
            "[peak_flops]",
            "memory_efficiency = 0\n[peak_flops]",
            ["memory_efficiency is 0", "a share from 0.01"],
        ),
        ("latency = 1e-5", "latency = 1e-5\nefficiency = 2", ["links.interconnect.efficiency"]),
        (
            '"overlaps",',
            '"memory_efficiency",',
            ["assumed", "memory_efficiency", "no key of this file"],
        ),
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


def test_new_keys_may_be_assumed() -> None:
    keys = "memory_efficiency = 0.5\ndevices = 4\n[peak_flops]"
    source = _source("mt3000").replace("[peak_flops]", keys)
    source = source.replace("latency = 1e-5", "latency = 1e-5\nefficiency = 0.9")
    names = ("devices", "memory_efficiency", "links.interconnect.efficiency")
    listed = "".join(f'"{name}", ' for name in names)
    machine = parse_machine(source.replace('"overlaps",', f'"overlaps", {listed}'))
    assert set(names) <= set(machine.assumed)
    assert (machine.devices, machine.memory_efficiency) == (4, 0.5)
    assert machine.links[0].efficiency == 0.9


def test_links_stand_in_the_order_of_their_reach_and_join_all_devices() -> None:
    near, far = Link("near", 1e9, 0.0, devices=8), Link("far", 1e9, 0.0, devices=64)
    generic = load_machine("generic")
    for links in ((far, near), (near, near), (Link("all", 1e9, 0.0), far)):
        links = tuple(
            dataclasses.replace(link, name=f"{link.name}{k}") for k, link in enumerate(links)
        )
        with pytest.raises(MachineError, match="order links from the shortest reach"):
            dataclasses.replace(generic, links=links)
    assert dataclasses.replace(generic, links=(near, far), devices=64).devices == 64
    with pytest.raises(MachineError, match=r"devices is 65, but links\.far joins only 64; add"):
        dataclasses.replace(generic, links=(near, far), devices=65)


def test_a100_has_its_data_sheets_rates_and_says_what_is_assumed() -> None:
    a100 = load_machine("a100")
    assert a100.peak("float16") == a100.peak("bfloat16") == 312e12
    assert (a100.peak("float32"), a100.ddr_bandwidth) == (19.5e12, 2.039e12)
    near, far = a100.links
    assert (near.devices, far.devices, far.shared_by, far.bandwidth) == (8, 0, 8, 100e9)
    # A product that is large, and the best one that was measured: 1024 × 10240 × 5120.
    best = 2 * 1024 * 10240 * 5120
    assert best / a100.compute_seconds(best, "bfloat16", products=1) == pytest.approx(
        271.2e12, rel=0.03
    )
    assert set(a100.assumed) == {"launch_seconds", "product_half_flops", "overlaps"}


def test_machines_are_loaded_with_their_number_of_devices(tmp_path) -> None:
    assert set(machines.names()) == set(builtin_machines())
    assert machines.load("mt3000") == load_machine("mt3000")
    assert machines.load("mt3000").devices == 0
    many = machines.load("mt3000", clusters=1024)
    assert many == dataclasses.replace(load_machine("mt3000"), devices=1024)
    path = tmp_path / "mine.toml"
    path.write_text(_source("generic").replace("[peak_flops]", "devices = 4\n[peak_flops]"))
    assert machines.load(path).devices == 4
    assert machines.load(str(path), clusters=2).devices == 2


@pytest.mark.parametrize(
    "clusters, words",
    [
        (0, ["clusters is 0", "a whole number of devices from 1"]),
        (2.5, ["clusters is 2.5"]),
        ("8", ["clusters is '8'"]),
    ],
)
def test_a_bad_number_of_devices_is_refused(clusters, words) -> None:
    with pytest.raises(MachineError) as error:
        machines.load("mt3000", clusters=clusters)
    assert all(word in str(error.value) for word in words)
    with pytest.raises(MachineError, match="no built-in machine 'mt9000'; use one of a100"):
        machines.load("mt9000", clusters=2)


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
