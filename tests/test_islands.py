"""Which devices of a node a request gets: NVLink islands, NUMA nodes, and blocks kept whole."""

from __future__ import annotations

import pytest

from jupyter_gpupool.core.islands import choose, topology_of
from jupyter_gpupool.core.placement import NoPlacement, Placement, place
from tests.placing import cluster_of, node, parts_of, request, short, take

#: Pairs joined by a bridge.
PAIRS = {place: [(place ^ 1, 4)] for place in range(8)}
#: All joined by a switch.
SWITCH = {place: [(peer, 18) for peer in range(8) if peer != place] for place in range(8)}
#: Two fully joined groups of four, each device joined to its like in the other; as DGX-1 is.
MESH = {
    place: [
        (peer, 2 if peer == place ^ 1 else 1)
        for peer in range(4 * (place // 4), 4 * (place // 4) + 4)
        if peer != place
    ]
    + [((place + 4) % 8, 1)]
    for place in range(8)
}
NUMA = (0, 0, 0, 0, 1, 1, 1, 1)


def picked(free, count, *, links=None, numa=()):
    """Which of the free devices of an eight-device node are chosen."""
    topology = topology_of(node("a", 8, links=links or {}, numa=numa).devices)
    return choose(topology.blocks, frozenset(free), count)


def test_what_nvlink_connects_is_an_island():
    assert topology_of(node("a", 8, links=PAIRS).devices).islands == (0, 0, 1, 1, 2, 2, 3, 3)
    assert topology_of(node("a", 8, links=SWITCH).devices).islands == (0,) * 8
    assert topology_of(node("a", 8, links=MESH, numa=NUMA).devices).islands == (0,) * 8
    assert not any(topology_of(node("a", 8).devices).linked)


def test_without_nvlink_the_devices_of_a_numa_node_are_an_island():
    assert topology_of(node("a", 8, numa=NUMA).devices).islands == NUMA


@pytest.mark.parametrize(
    ("free", "count", "chosen", "how"),
    [
        pytest.param(range(8), 1, [0], {}, id="the first of all"),
        pytest.param([1, 2, 3, 4, 5, 6, 7], 1, [1], {}, id="one goes to the broken pair"),
        pytest.param([1, 2, 3, 4, 5, 6, 7], 2, [2, 3], {}, id="two leave it and break the broken four"),
        pytest.param([1, 2, 3, 4, 5, 6, 7], 4, [4, 5, 6, 7], {}, id="four take the whole four"),
        pytest.param([0, 2, 4, 5, 6, 7], 2, [0, 2], {}, id="two halves of pairs rather than a whole four"),
        pytest.param([0, 1, 2, 3, 5, 6, 7], 3, [5, 6, 7], {}, id="three take the broken four"),
        pytest.param(
            [0, 1, 2, 4, 5], 4, [0, 1, 2, 4], {}, id="the roomiest first, the rest where little breaks"
        ),
        pytest.param([1, 2, 3, 4, 5, 6, 7], 2, [2, 3], {"links": PAIRS}, id="a pair with a bridge"),
        pytest.param(range(2, 8), 4, [4, 5, 6, 7], {"links": MESH, "numa": NUMA}, id="a fully joined four"),
        pytest.param([0, 5, 6, 7], 3, [5, 6, 7], {"numa": NUMA}, id="on one NUMA node"),
    ],
)
def test_as_few_blocks_as_possible_are_broken(free, count, chosen, how):
    assert picked(free, count, **how) == chosen


def test_every_choice_is_of_free_devices_and_of_the_right_number():
    for links, numa in ((None, ()), (PAIRS, ()), (SWITCH, NUMA), (MESH, NUMA)):
        for bits in range(256):
            free = [column for column in range(8) if bits >> column & 1]
            for count in range(len(free) + 1):
                chosen = picked(free, count, links=links, numa=numa)
                assert len(set(chosen)) == count
                assert set(chosen) <= set(free)


def test_a_gang_goes_into_one_island_if_any_node_has_one_that_holds_it():
    cluster = cluster_of(node("a", 8, links=PAIRS), node("b", 8, links=SWITCH))
    take(cluster, "x", node="b", count=4)
    assert {part.node for part in parts_of(cluster, count=4)} == {"b"}


def test_nvlink_is_a_constraint():
    cluster = cluster_of(node("a", 8, links=PAIRS), node("c", 8))
    assert short(parts_of(cluster, count=2, nvlink=True)) == ["a:0", "a:1"]
    for number in range(4):
        take(cluster, str(number), node="a", exclude=tuple(f"GPU-a-{2 * each}" for each in range(4)))
    assert isinstance(place(request(count=2, nvlink=True), cluster), NoPlacement)
    assert parts_of(cluster, count=2)


def test_a_replacement_is_connected_with_what_the_lease_keeps():
    cluster = cluster_of(node("a", 4, links={0: [(1, 4)], 1: [(0, 4)], 2: [(3, 4)], 3: [(2, 4)]}))
    have = take(cluster, "x", exclude=("GPU-a-0", "GPU-a-1", "GPU-a-3"))[0].slice("x", "x")
    found = place(request(nvlink=True, count=2), cluster, count=1, have=[have])
    assert isinstance(found, Placement)
    assert short(found.parts) == ["a:3"]


def test_a_first_share_opens_the_device_whose_block_is_broken_already():
    cluster = cluster_of(node("a", 4))
    take(cluster, "x", exclude=("GPU-a-0", "GPU-a-1", "GPU-a-3"))
    assert short(parts_of(cluster, milli=300)) == ["a:3"]


@pytest.mark.parametrize(
    ("count", "nodes"),
    [(1, {"b": 1}), (2, {"b": 1, "c": 1}), (3, {"a": 1, "b": 1, "c": 1}), (7, {"a": 1, "b": 3, "c": 3})],
)
def test_spread_takes_as_many_nodes_as_there_are_emptiest_first(count, nodes):
    cluster = cluster_of(node("a", 4), node("b", 4), node("c", 4))
    take(cluster, "x", node="a", count=3)
    found = [part.node for part in parts_of(cluster, count=count, spread=True)]
    assert {name: found.count(name) for name in found} == nodes
