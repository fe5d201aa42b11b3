"""Where a request goes: whole devices, gangs, shares, constraints, host parts, tries and refusals."""

from __future__ import annotations

import dataclasses

import pytest

from jupyter_gpupool.core.cluster import Cluster
from jupyter_gpupool.core.model import GB, GIB, WHOLE, Reason
from jupyter_gpupool.core.parts import Part
from jupyter_gpupool.core.placement import NoPlacement, Placement, feasible_ever, place
from jupyter_gpupool.core.whynot import in_sum, nearest, why_not
from tests.placing import cluster_of, node, parts_of, request, short, take

# --------------------------------------------------------------------------------------- whole and gangs


def test_a_request_gets_all_slices_or_none():
    cluster = cluster_of(node("a", 2), node("b", 2))
    assert short(parts_of(cluster, count=4)) == ["a:0", "a:1", "b:0", "b:1"]
    assert isinstance(place(request(count=5), cluster), NoPlacement)


def test_nothing_is_taken_by_placing():
    cluster = cluster_of(node("a", 2))
    before = cluster.grids.copy(), cluster.lines.copy()
    parts_of(cluster, count=2)
    parts_of(cluster, count=2, milli=500)
    assert (before[0] == cluster.grids).all()
    assert (before[1] == cluster.lines).all()


def test_a_gang_goes_to_one_node_though_another_is_fuller():
    cluster = cluster_of(node("a", 4), node("b", 4))
    take(cluster, "x", node="a")
    assert short(parts_of(cluster, count=4)) == ["b:0", "b:1", "b:2", "b:3"]


def test_a_single_device_goes_to_the_fuller_node():
    cluster = cluster_of(node("a", 4), node("b", 4))
    take(cluster, "x", node="b", count=2)
    assert parts_of(cluster)[0].node == "b"


def test_a_pair_fits_exactly_rather_than_break_a_whole_node():
    cluster = cluster_of(node("a", 4), node("b", 4))
    take(cluster, "x", node="b", count=2)
    assert {part.node for part in parts_of(cluster, count=2)} == {"b"}


def test_a_gang_that_no_node_holds_takes_the_fewest():
    cluster = cluster_of(node("a", 2), node("b", 4), node("c", 4), node("d", 2))
    assert {part.node for part in parts_of(cluster, count=8)} == {"b", "c"}


def test_equal_nodes_are_taken_in_the_order_of_their_names_whenever_they_joined():
    assert parts_of(cluster_of(node("b"), node("a")))[0].node == "a"
    assert parts_of(cluster_of(node("a"), node("b")))[0].node == "a"


def test_spread_takes_one_device_of_each_node_emptiest_first():
    cluster = cluster_of(node("a", 4), node("b", 4), node("c", 4))
    take(cluster, "x", node="a")
    assert {part.node for part in parts_of(cluster, count=2, spread=True)} == {"b", "c"}


def test_new_slices_go_where_the_lease_is_already():
    cluster = cluster_of(node("a", 4), node("b", 4))
    have = take(cluster, "x", node="b")[0].slice("x", "x")
    take(cluster, "y", node="a", count=3)
    found = place(request(), cluster, have=[have])
    assert isinstance(found, Placement)
    assert found.parts[0].node == "b"


# ------------------------------------------------------------------------------------------- constraints


@pytest.mark.parametrize(
    ("what", "nodes"),
    [
        pytest.param({"model": "T4-16GB"}, {"t"}, id="of a model"),
        pytest.param({"model": "T4-16GB|L40S-48GB", "count": 4}, {"l", "t"}, id="of one of two models"),
        pytest.param({"min_vram": 40 * GB}, {"h", "l"}, id="with so much memory"),
        pytest.param({"node": "l"}, {"l"}, id="on a node"),
        pytest.param({"exclude": ("t", "GPU-l-0", "GPU-l-1")}, {"h"}, id="not on a node, not on devices"),
        pytest.param({"vram": 60 * GB}, {"h"}, id="a share with more memory than others have"),
        pytest.param({"count": 3, "same_node": True}, {"h"}, id="three on one node"),
        pytest.param({"cpus": 20_000}, {"h"}, id="with more CPUs than others have"),
        pytest.param({"memory": 300 * GB}, {"h"}, id="with more host memory than others have"),
    ],
)
def test_constraints_hold(what, nodes):
    cluster = cluster_of(node("t", 2, "T4-16GB"), node("l", 2, "L40S-48GB"), node("h", 4))
    assert {part.node for part in parts_of(cluster, **what)} <= nodes
    assert parts_of(cluster, **what)


def test_all_of_a_gang_keeps_to_the_node_of_the_slices_that_the_lease_has():
    cluster = cluster_of(node("a", 2), node("b", 4))
    have = take(cluster, "x", node="a")[0].slice("x", "x")
    again = request(same_node=True)
    assert isinstance(place(again, cluster, have=[have]), Placement)
    take(cluster, "y", node="a")
    assert isinstance(place(again, cluster, have=[have]), NoPlacement)


# -------------------------------------------------------------------------------------------- host parts


def test_a_slice_gets_its_part_of_the_host_unless_asked_otherwise():
    cluster = cluster_of(node("a", 4))
    assert [(part.cpus, part.memory) for part in parts_of(cluster)] == [(8000, 100 * GB)]
    assert [(part.cpus, part.memory) for part in parts_of(cluster, milli=250)] == [(2000, 25 * GB)]
    assert parts_of(cluster, cpus=500, memory=GB)[0].cpus == 500


def test_host_parts_are_charged_and_given_back():
    cluster = cluster_of(node("a", 4))
    take(cluster, "x", cpus=30_000)
    assert not parts_of(cluster)
    assert parts_of(cluster, cpus=2000)
    cluster.release("x")
    assert len(parts_of(cluster, count=4)) == 4


def test_a_request_without_devices_takes_host_cpus_only():
    cluster = cluster_of(node("a", 1))
    found = parts_of(cluster, milli=0, cpus=8000)
    assert [(part.device, part.cpus) for part in found] == [("", 8000)]
    take(cluster, "x", milli=0, cpus=8000)
    assert not parts_of(cluster)


# ------------------------------------------------------------------------------------------------ shares


def test_what_is_charged_is_the_larger_share():
    cluster = cluster_of(node("a", 1))
    assert parts_of(cluster, milli=200, vram=40 * GIB)[0].milli == 500
    assert parts_of(cluster, milli=700, vram=40 * GIB)[0].milli == 700
    assert parts_of(cluster, vram=20 * GIB)[0].milli == 250


def test_a_share_of_memory_is_charged_rounded_up_and_has_exactly_what_was_asked_for():
    part = parts_of(cluster_of(node("a", 1)), vram=20 * GIB + 1)[0]
    assert (part.milli, part.vram) == (251, 20 * GIB + 1)


def test_a_share_of_a_gpu_has_its_part_of_the_memory():
    assert parts_of(cluster_of(node("a", 1)), milli=250)[0].vram == 20 * GIB


def test_shares_of_several_owners_fill_one_device_before_another_is_opened():
    cluster = cluster_of(node("a", 4))
    devices = {take(cluster, str(number), milli=250)[0].device for number in range(4)}
    assert len(devices) == 1


def test_whole_and_shared_never_meet():
    cluster = cluster_of(node("a", 1))
    take(cluster, "x", milli=250)
    assert not parts_of(cluster)
    cluster.release("x")
    take(cluster, "y")
    assert not parts_of(cluster, milli=1)


def test_two_shares_of_a_lease_go_to_two_devices_unless_asked_otherwise():
    cluster = cluster_of(node("a", 2))
    assert len({part.device for part in parts_of(cluster, count=2, milli=500)}) == 2
    assert not parts_of(cluster, count=3, milli=250)
    assert len({part.device for part in parts_of(cluster, count=4, milli=250, same_device=True)}) == 1


def test_a_replacement_of_a_share_keeps_off_the_other_devices_of_its_lease():
    cluster = cluster_of(node("a", 2))
    have = take(cluster, "x", milli=250)[0].slice("x", "x")
    found = place(request(milli=250), cluster, have=[have])
    assert isinstance(found, Placement)
    assert found.parts[0].device != have.device


# ------------------------------------------------------------------------------------------- holds, bars


def test_what_is_held_is_seen_only_by_whom_it_is_held_for():
    cluster = cluster_of(node("a", 1))
    cluster.hold("h", "ben", parts_of(cluster)[0])
    assert isinstance(place(request(), cluster), NoPlacement)
    assert isinstance(place(request(), cluster, allow=["ben"]), Placement)
    assert [taken.key for taken in cluster.held_for("ben")] == ["h"]


@pytest.mark.parametrize("target", ["a", "GPU-a-0"])
def test_a_bar_stops_new_work_until_it_is_gone(target):
    cluster = cluster_of(node("a", 1))
    cluster.bar(target, Reason.DEVICE_CORDONED, "maintenance")
    cluster.bar(target, Reason.DEVICE_OUT, "XID 79")
    cluster.unbar(target, Reason.DEVICE_CORDONED)
    assert not parts_of(cluster)
    cluster.unbar(target, Reason.DEVICE_OUT)
    assert parts_of(cluster)


def test_a_device_under_watch_is_used_only_where_nothing_else_fits():
    cluster = cluster_of(node("a", 1), node("b", 1))
    cluster.doubt("GPU-a-0")
    assert short(parts_of(cluster)) == ["b:0"]
    assert short(parts_of(cluster, count=2)) == ["a:0", "b:0"]


def test_a_node_that_comes_back_keeps_what_is_taken_and_barred():
    cluster = cluster_of(node("a", 2))
    take(cluster, "x")
    cluster.bar("GPU-a-1", Reason.DEVICE_OUT, "XID 79")
    assert cluster.update_node(dataclasses.replace(node("a", 2), cpus=1000)) == ()
    cluster.validate()
    assert not parts_of(cluster, cpus=1)
    assert cluster.update_node(node("a", 1)) == ()
    assert cluster.update_node(node("a", 0)) == ("x",)


def test_taking_more_than_is_free_raises():
    cluster = cluster_of(node("a", 1))
    part = parts_of(cluster, milli=600)[0]
    cluster.take("x", "x", part)
    with pytest.raises(ValueError, match="not free"):
        cluster.take("y", "y", part)
    with pytest.raises(ValueError, match="already"):
        cluster.take("x", "x", part)
    cluster.validate()


def test_a_try_leaves_no_trace():
    cluster = cluster_of(node("a", 2))
    take(cluster, "x")
    before = cluster.grids.copy(), cluster.lines.copy(), cluster.taken("x")
    with cluster.trying():
        cluster.release("x")
        take(cluster, "y", count=2)
        with cluster.trying():
            cluster.release("y/0")
            cluster.bar("a", Reason.DEVICE_OUT)
            assert not parts_of(cluster)
        assert not parts_of(cluster)
    assert (before[0] == cluster.grids).all()
    assert (before[1] == cluster.lines).all()
    assert cluster.taken("x") == before[2]
    cluster.validate()


# ------------------------------------------------------------------------------------------------- never


@pytest.mark.parametrize(
    ("what", "reason", "advice"),
    [
        pytest.param({"count": 7}, Reason.TOO_MANY_GPUS, "at most 6", id="more than there are"),
        pytest.param({"count": 5, "same_node": True}, Reason.TOO_MANY_GPUS, "at most 4", id="on one node"),
        pytest.param(
            {"count": 2, "nvlink": True}, Reason.TOO_MANY_GPUS, "without|out nvlink", id="no NVLink"
        ),
        pytest.param({"model": "A100"}, Reason.UNKNOWN_MODEL, "H100-80GB, T4-16GB", id="an unknown model"),
        pytest.param({"node": "z"}, Reason.UNKNOWN_NODE, "h, t", id="an unknown node"),
        pytest.param({"vram": 90 * GB}, Reason.TOO_MUCH_MEMORY, "at most 85GB", id="a share too large"),
        pytest.param({"min_vram": 90 * GB}, Reason.TOO_MUCH_MEMORY, "at most 85GB", id="memory too large"),
        pytest.param({"cpus": 99_000}, Reason.TOO_MUCH_HOST, "32 CPUs", id="too many CPUs"),
        pytest.param({"memory": 900 * GB}, Reason.TOO_MUCH_HOST, "400 GB", id="too much host memory"),
        pytest.param({"mig": "1g.10gb"}, Reason.NO_MIG, "share", id="MIG where there is none"),
        pytest.param(
            {"model": "T4-16GB", "min_vram": 20 * GB}, Reason.CONTRADICTION, "Leave out", id="a contradiction"
        ),
        pytest.param(
            {"model": "T4-16GB", "node": "h"}, Reason.CONTRADICTION, "on: t", id="on the wrong node"
        ),
        pytest.param(
            {"count": 2, "milli": 500, "nvlink": True}, Reason.CONTRADICTION, "whole", id="linked shares"
        ),
        pytest.param({"count": 7, "milli": 500}, Reason.TOO_MANY_GPUS, "at most 6", id="shares of one lease"),
    ],
)
def test_what_the_pool_can_never_hold_is_refused_with_the_nearest_thing(what, reason, advice):
    refusals = feasible_ever(request(**what), cluster_of(node("h", 4), node("t", 2, "T4-16GB")))
    assert [refusal.reason for refusal in refusals] == [reason]
    assert any(word in refusals[0].advice for word in advice.split("|"))
    assert refusals[0].field


def test_what_is_only_taken_now_is_not_refused_for_ever():
    cluster = cluster_of(node("h", 4))
    take(cluster, "x", count=4)
    cluster.bar("h", Reason.NODE_SILENT)
    assert feasible_ever(request(count=4), cluster) == ()


def test_a_pool_without_nodes_refuses_nothing_and_waits():
    assert feasible_ever(request(count=99), Cluster()) == ()
    found = place(request(), Cluster())
    assert isinstance(found, NoPlacement)
    assert found.refusals[0].reason is Reason.NO_NODES


# ----------------------------------------------------------------------------------------------- not now


def test_each_candidate_that_was_left_out_has_its_reason():
    cluster = cluster_of(node("a", 4), node("m", 1, "A100-40GB", mig=True), node("t", 1, "T4-16GB"))
    take(cluster, "x", node="a")
    take(cluster, "y", node="a", milli=400)
    cluster.bar("GPU-a-2", Reason.DEVICE_OUT, "XID 79")
    cluster.hold("h", "ben", parts_of(cluster, node="a")[0])
    refusals = why_not(request(model="H100-80GB|A100-40GB"), cluster)
    reasons = {refusal.subject: refusal.reason for refusal in refusals[1:]}
    assert sorted(reasons.values()) == sorted(
        [
            Reason.DEVICE_BUSY,
            Reason.DEVICE_SHARED,
            Reason.DEVICE_OUT,
            Reason.DEVICE_HELD,
            Reason.NO_MIG,
            Reason.WRONG_MODEL,
        ]
    )
    assert refusals[0].reason is Reason.NO_ROOM
    assert "1 in shares, 1 in use" in refusals[0].sentence
    assert in_sum(request(model="H100-80GB|A100-40GB"), cluster) == refusals[0]


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"cpus": 9000}, Reason.NO_CPUS),
        ({"memory": 500 * GB}, Reason.NO_HOST_MEMORY),
        ({"count": 4, "same_node": True, "cpus": 100, "memory": GB}, Reason.NOT_SAME_NODE),
    ],
)
def test_a_node_with_free_devices_that_does_not_do_says_why(what, reason):
    cluster = cluster_of(node("a", 4))
    take(cluster, "x", cpus=24_000, memory=GB)
    assert reason in {refusal.reason for refusal in why_not(request(**what), cluster)}


@pytest.mark.parametrize(
    ("what", "advice"),
    [
        pytest.param({"count": 4}, "2 GPUs are free on 2 nodes.", id="fewer"),
        pytest.param({"count": 2, "same_node": True}, "A GPU is free on a.", id="fewer on one node"),
        pytest.param({"model": "T4-16GB"}, "A GPU of another model is free on a.", id="another model"),
        pytest.param(
            {"milli": 800, "model": "T4-16GB"}, "0.8 of a GPU of another model is free on a.", id="share"
        ),
    ],
)
def test_the_nearest_thing_that_would_start_now_is_named(what, advice):
    cluster = cluster_of(node("a", 2), node("b", 2), node("t", 1, "T4-16GB"))
    for key, where in (("x", "a"), ("y", "b")):
        take(cluster, key, node=where)
    take(cluster, "z", node="t", milli=500)
    assert nearest(request(**what), cluster) == advice


def test_the_largest_free_share_is_named_where_no_device_is_free():
    cluster = cluster_of(node("a", 1))
    take(cluster, "x", milli=300)
    assert nearest(request(), cluster) == "0.7 of a GPU is free on a."


def test_whole_is_a_thousand_thousandths():
    part = parts_of(cluster_of(node("a", 1)))[0]
    assert isinstance(part, Part)
    assert part.milli == WHOLE
