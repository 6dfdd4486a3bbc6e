"""Communication: hand-computed costs, a step-by-step simulation of rings, and what must never fall."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain_jax.errors import OptionError
from ratrain_jax.kernels import Link, Machine, load_machine
from ratrain_jax.kernels.collectives import (
    ALGORITHMS,
    all_gather_seconds,
    all_reduce_seconds,
    reduce_scatter_seconds,
    transfer_seconds,
)
from ratrain_jax.lowering.durations import Durations

GENERIC = load_machine("generic")


def machine(*links: Link) -> Machine:
    return dataclasses.replace(GENERIC, links=links)


# Nodes of four: 100 B/s and 1 s inside; 40 B/s of each node and 3 s between.
NEAR = Link("near", bandwidth=100e3, latency=1.0, devices=4)
FAR = Link("far", bandwidth=40e3, latency=3.0, shared_by=4)
NODES = machine(NEAR, FAR)


# --- by hand ------------------------------------------------------------------------------------


def test_a_transfer_takes_the_shortest_link_that_reaches():
    assert transfer_seconds(NODES, 200e3) == 1 + 2
    assert transfer_seconds(NODES, 200e3, distance=3) == 1 + 2
    assert transfer_seconds(NODES, 200e3, distance=4) == 3 + 5
    assert transfer_seconds(NODES, 0, distance=4) == 3


def test_transfers_that_share_a_link_divide_it():
    assert transfer_seconds(NODES, 200e3, distance=4, sharing=2) == 3 + 10
    assert transfer_seconds(NODES, 200e3, distance=4, sharing=4) == 3 + 20
    # Not more than four devices share one; the others have links of their own.
    assert transfer_seconds(NODES, 200e3, distance=4, sharing=64) == 3 + 20
    assert transfer_seconds(NODES, 200e3, distance=3, sharing=3) == 1 + 2


def test_a_slow_inner_link_holds_up_what_goes_further():
    thin = machine(dataclasses.replace(NEAR, bandwidth=10e3), FAR)
    assert transfer_seconds(thin, 200e3, distance=4) == 3 + 20
    assert transfer_seconds(thin, 200e3, distance=4, sharing=4) == 3 + 20


def test_only_a_share_of_the_bandwidth_is_reached():
    half = machine(dataclasses.replace(NEAR, efficiency=0.5), FAR)
    assert transfer_seconds(half, 200e3) == 1 + 4
    assert all_gather_seconds(half, 400e3, 4) == 3 * (1 + 2)


def test_a_ring_inside_a_node():
    assert reduce_scatter_seconds(NODES, 400e3, 4) == 3 * (1 + 1)
    assert all_gather_seconds(NODES, 400e3, 4) == 3 * (1 + 1)
    assert all_reduce_seconds(NODES, 400e3, 4) == 6 * (1 + 1)
    assert all_reduce_seconds(NODES, 400e3, 2, stride=2) == 2 * (1 + 2)


def test_one_ring_over_nodes_has_the_network_of_a_node_to_itself():
    # Seven steps of 1/8 of the bytes, at the pace of the hop that leaves a node.
    assert reduce_scatter_seconds(NODES, 320e3, 8, algorithm="ring") == 7 * (3 + 1)


def test_one_ring_over_nodes_goes_at_the_pace_of_the_slowest_hop():
    slow = machine(dataclasses.replace(NEAR, latency=9.0), FAR)
    assert reduce_scatter_seconds(slow, 320e3, 8, algorithm="ring") == 7 * (9 + 40 / 100)


def test_rings_of_every_local_rank_share_the_network_of_a_node():
    # Two members, each in its own node: four rings leave a node at once, and each has 10 B/s.
    assert reduce_scatter_seconds(NODES, 320e3, 2, stride=4) == 3 + 16
    # Stride 2: two rings of two devices a node.
    assert reduce_scatter_seconds(NODES, 320e3, 4, stride=2, algorithm="ring") == 3 * (3 + 4)
    # Stride 8: still no more than the four devices of a node.
    assert reduce_scatter_seconds(NODES, 320e3, 2, stride=8) == 3 + 16


def test_a_hierarchical_collective_is_a_ring_inside_and_shares_outside():
    # Inside: three steps of 80 kB. Between two nodes: four rings of 80 kB, 10 kB/s each, one step.
    inside, outside = 3 * (1 + 80 / 100), 1 * (3 + 40 / 10)
    found = reduce_scatter_seconds(NODES, 320e3, 8, algorithm="hierarchical")
    assert found == pytest.approx(inside + outside)
    assert all_reduce_seconds(NODES, 320e3, 8, algorithm="hierarchical") == 2 * found
    assert all_reduce_seconds(NODES, 320e3, 8) == 2 * min(found, 7 * (3 + 1))


def test_a_hierarchy_cuts_nodes_into_equal_parts():
    # Six devices in nodes of four: pairs, of which three rings of thirds follow.
    inside, outside = 1 * (1 + 300 / 100), 2 * (3 + 100 / 20)
    found = reduce_scatter_seconds(NODES, 600e3, 6, algorithm="hierarchical")
    assert found == pytest.approx(inside + outside)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("stride", [1, 3, 8])
def test_a_group_of_one_costs_nothing(algorithm, stride):
    for seconds in (reduce_scatter_seconds, all_gather_seconds, all_reduce_seconds):
        assert seconds(NODES, 1e9, 1, stride=stride, algorithm=algorithm) == 0


def test_on_one_link_a_hierarchy_is_a_ring():
    mt3000 = load_machine("mt3000")
    for size, algorithm in itertools.product((2, 3, 8), ("ring", "hierarchical", "best")):
        ring = (size - 1) * (1e-5 + 1e6 / size / 3.7e9)
        assert all_gather_seconds(mt3000, 1e6, size, algorithm=algorithm) == ring


@pytest.mark.parametrize("size", [2, 3, 8, 100, 1024, 12_500])
def test_halving_has_logarithmically_many_latencies_and_the_bytes_of_a_ring(size):
    mt3000 = load_machine("mt3000")
    both = dataclasses.replace(mt3000, collectives="ring or halving")
    bytes_seconds = (size - 1) / size * 1e6 / 3.7e9
    halving = math.ceil(math.log2(size)) * 1e-5 + bytes_seconds
    ring = (size - 1) * 1e-5 + bytes_seconds
    for found in (mt3000, both):
        seconds = reduce_scatter_seconds(found, 1e6, size, algorithm="halving")
        assert seconds == pytest.approx(halving)
    assert reduce_scatter_seconds(mt3000, 1e6, size) == pytest.approx(ring)
    assert reduce_scatter_seconds(both, 1e6, size) == pytest.approx(min(ring, halving))
    assert all_reduce_seconds(both, 1e6, size) == pytest.approx(2 * min(ring, halving))


def test_a_hierarchy_may_halve_between_nodes():
    # Two steps over nodes for four of them, rather than three; inside a node the ring is as good.
    both = dataclasses.replace(NODES, collectives="ring or halving")
    inside = reduce_scatter_seconds(both, 320e3, 4)
    between = reduce_scatter_seconds(both, 80e3, 4, stride=4, algorithm="halving")
    # Of a quarter of the bytes half, then a quarter, while four devices share the network of a node.
    assert between == (3 + 4) + (3 + 2)
    assert reduce_scatter_seconds(both, 320e3, 16) == inside + between
    assert reduce_scatter_seconds(NODES, 320e3, 16) > inside + between


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: transfer_seconds(NODES, -1), ["bytes is -1", "0 or more"]),
        (lambda: transfer_seconds(NODES, math.nan), ["bytes is nan"]),
        (lambda: transfer_seconds(NODES, 1, distance=0), ["distance is 0", "1 or more"]),
        (lambda: transfer_seconds(NODES, 1, sharing=0), ["sharing is 0"]),
        (lambda: all_reduce_seconds(NODES, 1, 0), ["size is 0"]),
        (lambda: all_gather_seconds(NODES, 1, 2, stride=0), ["stride is 0"]),
        (lambda: all_gather_seconds(NODES, 1, 2, algorithm="tree"), ["'tree'", "'hierarchical'"]),
    ],
)
def test_arguments_out_of_range_are_refused(call, words):
    with pytest.raises(OptionError) as error:
        call()
    assert all(word in str(error.value) for word in words)


# --- durations of ops ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["generic", "mt3000", "ft-m7032"])
@pytest.mark.parametrize("devices", [1, 2, 5])
def test_durations_on_one_link_are_those_of_the_link(name, devices):
    found = load_machine(name)
    durations = Durations(found, (), devices)
    hop = found.link_latency + 4e6 / found.link_bandwidth
    assert durations.send(4_000_000) == durations.send(4_000_000, -3) == hop
    assert durations.collective(4_000_000 * devices) == (devices - 1) * hop
    assert durations.sweep(4_000_000) == 4e6 / found.ddr_bandwidth


def test_durations_of_stages_depend_on_where_their_groups_lie():
    pair, node = Durations(NODES, (), 2), Durations(NODES, (), 4)
    assert pair.send(200_000) == 1 + 2  # from 0 to 2, in one node
    assert pair.send(200_000, -2) == pair.send(200_000, 2) == 3 + 10  # both leave the node
    assert node.send(200_000) == 3 + 20
    assert node.collective(400_000) == 3 * (1 + 1)


# --- against a simulation -----------------------------------------------------------------------


def hop_seconds(found, count, hops):
    """The slowest of several hops that start together, by counting who uses which link."""
    users: dict[tuple[int, int], int] = {}
    paths = []
    for source, target in hops:
        blocks = [(source // link.reach, target // link.reach) for link in found.links]
        level = next(k for k, (a, b) in enumerate(blocks) if a == b)
        path = [(k, source // found.links[k].shared_by) for k in range(level + 1)]
        paths.append(path)
        for place in path:
            users[place] = users.get(place, 0) + 1
    return max(
        found.links[path[-1][0]].latency
        + count
        / min(found.links[k].bandwidth * found.links[k].efficiency / users[k, b] for k, b in path)
        for path in paths
    )


def simulate_reduce_scatter(found, count, groups):
    """Sends chunks round the rings of all groups step by step until each is whole; the seconds."""
    size = len(groups[0])
    seen = {(d, c): {d} for group in groups for d in group for c in range(size)}
    seconds = 0.0
    for step in range(size - 1):
        hops, arrived = [], {}
        for group in groups:
            for place, device in enumerate(group):
                target, chunk = group[(place + 1) % size], (place - step) % size
                hops.append((device, target))
                arrived[target, chunk] = seen[device, chunk]
        for key, members in arrived.items():
            seen[key] = seen[key] | members
        seconds += hop_seconds(found, count / size, hops)
    for group in groups:
        whole = {c for d in group for c in range(size) if seen[d, c] == set(group)}
        assert whole == set(range(size))
    return seconds


def simulate_halving(found, count, groups):
    """Hands on, in each step, what half of those left own, as J. L. Träff describes; the seconds."""
    size = len(groups[0])
    # For each device, and each place ahead of it in its group, who is in the sum for that place.
    seen = {d: [{d} for _ in group] for group in groups for d in group}
    seconds, before = 0.0, size
    while before > 1:
        skip = math.ceil(before / 2)
        hops = [(d, g[(n + skip) % size]) for g in groups for n, d in enumerate(g)]
        sent = {target: seen[source][skip:before] for source, target in hops}
        for device, sums in sent.items():
            kept = seen[device]
            together = [a | b for a, b in zip(kept, sums, strict=False)]
            seen[device] = together + kept[len(together) : skip]
        seconds += hop_seconds(found, count * (before - skip) / size, hops)
        before = skip
    assert all(seen[d] == [set(group)] for group in groups for d in group)
    return seconds


def simulate_hierarchical(found, count, groups):
    """A reduce-scatter among the members in one node, then among those of equal place in each."""
    seconds = 0.0
    for link in found.links:
        if len(groups[0]) == 1:
            return seconds
        nodes = [[d // link.reach for d in group] for group in groups]
        sizes = {len(list(same)) for group in nodes for _, same in itertools.groupby(group)}
        local = math.gcd(*sizes)
        cut = [group[i : i + local] for group in groups for i in range(0, len(group), local)]
        if local > 1:
            seconds += simulate_reduce_scatter(found, count, cut)
        groups = [group[place::local] for group in groups for place in range(local)]
        count /= local
    assert len(groups[0]) == 1
    return seconds


@st.composite
def machines(draw):
    """One to three links; what shares a link divides a node, or is made of whole nodes."""
    links, inside = [], 1
    for k in range(draw(st.integers(1, 3))):
        shares = [s for s in (1, 2, 4, 8, 16) if s % inside == 0 or inside % s == 0]
        link = Link(
            f"link{k}",
            bandwidth=draw(st.floats(1e4, 1e7)),
            latency=draw(st.floats(0, 5)),
            devices=inside * draw(st.sampled_from([2, 4])),
            shared_by=draw(st.sampled_from(shares)),
            efficiency=draw(st.floats(0.1, 1)),
        )
        links.append(link)
        inside = link.devices
    links[-1] = dataclasses.replace(links[-1], devices=0)
    return machine(*links)


sizes = st.sampled_from([1, 2, 4, 8, 16])
strides = st.sampled_from([1, 2, 4, 8])
counts = st.floats(0, 1e7)


def interleaved(size, stride):
    return [[start + stride * place for place in range(size)] for start in range(stride)]


@given(machines(), counts, sizes, strides)
@settings(deadline=None)
def test_a_ring_takes_what_its_steps_take(found, count, size, stride):
    expected = simulate_reduce_scatter(found, count, interleaved(size, stride))
    seconds = reduce_scatter_seconds(found, count, size, stride=stride, algorithm="ring")
    assert seconds == pytest.approx(expected)


@given(machines(), counts, sizes, strides)
@settings(deadline=None)
def test_halving_takes_what_its_steps_take(found, count, size, stride):
    expected = simulate_halving(found, count, interleaved(size, stride))
    seconds = reduce_scatter_seconds(found, count, size, stride=stride, algorithm="halving")
    assert seconds == pytest.approx(expected)


@given(counts, st.integers(1, 40))
@settings(deadline=None)
def test_halving_goes_with_any_number_of_devices(count, size):
    flat = machine(dataclasses.replace(FAR, shared_by=1))
    expected = simulate_halving(flat, count, interleaved(size, 1))
    assert reduce_scatter_seconds(flat, count, size, algorithm="halving") == pytest.approx(expected)


@given(machines(), counts, sizes, strides)
@settings(deadline=None)
def test_a_hierarchy_takes_what_its_rings_take(found, count, size, stride):
    expected = simulate_hierarchical(found, count, interleaved(size, stride))
    seconds = reduce_scatter_seconds(found, count, size, stride=stride, algorithm="hierarchical")
    assert seconds == pytest.approx(expected)


@given(machines(), counts, st.integers(1, 20), st.integers(1, 9))
@settings(deadline=None)
def test_a_ring_of_any_size_is_never_cheaper_than_its_steps(found, count, size, stride):
    expected = simulate_reduce_scatter(found, count, interleaved(size, stride))
    seconds = reduce_scatter_seconds(found, count, size, stride=stride, algorithm="ring")
    assert seconds >= expected * (1 - 1e-9)


# --- what must never fall -----------------------------------------------------------------------


@st.composite
def slower(draw, found):
    """The machine with one link that is worse in one respect."""
    k = draw(st.integers(0, len(found.links) - 1))
    link, factor = found.links[k], draw(st.floats(0.2, 1))
    worse = draw(
        st.sampled_from(
            [
                {"bandwidth": link.bandwidth * factor},
                {"efficiency": link.efficiency * max(factor, 0.1)},
                {"latency": link.latency + factor},
            ]
        )
    )
    links = list(found.links)
    links[k] = dataclasses.replace(link, **worse)
    return machine(*links)


def costs(found, count, size, stride):
    yield transfer_seconds(found, count, distance=stride, sharing=size)
    for algorithm in ALGORITHMS:
        yield reduce_scatter_seconds(found, count, size, stride=stride, algorithm=algorithm)
        yield all_reduce_seconds(found, count, size, stride=stride, algorithm=algorithm)


@given(st.data(), machines(), counts, counts, st.integers(1, 40), st.integers(1, 17))
@settings(deadline=None)
def test_more_bytes_and_slower_links_never_cost_less(data, found, count, more, size, stride):
    before = list(costs(found, count, size, stride))
    after = list(costs(data.draw(slower(found)), count + more, size, stride))
    assert all(b <= a * (1 + 1e-9) for b, a in zip(before, after, strict=True))


@given(machines(), counts, st.integers(1, 40), st.integers(1, 17))
@settings(deadline=None)
def test_the_best_is_the_cheapest_and_parts_make_the_whole(found, count, size, stride):
    ring, halving, hierarchical, best = (
        reduce_scatter_seconds(found, count, size, stride=stride, algorithm=algorithm)
        for algorithm in ALGORITHMS
    )
    assert best == min(ring, hierarchical)
    both = dataclasses.replace(found, collectives="ring or halving")
    best_of_both = reduce_scatter_seconds(both, count, size, stride=stride)
    assert best_of_both <= min(best, halving)
    gathered = all_gather_seconds(found, count, size, stride=stride)
    assert all_reduce_seconds(found, count, size, stride=stride) == best + gathered
