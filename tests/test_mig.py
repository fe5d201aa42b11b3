"""MIG: what a device can be cut into, which instance a request gets, and what others lose by it."""

from __future__ import annotations

import dataclasses

import pytest

from jupyter_gpupool.core import mig
from jupyter_gpupool.core.model import GB, GIB, HOUR, MIB, MINUTE, WHOLE, Instance, MigProfile, Reason
from jupyter_gpupool.core.placement import feasible_ever
from jupyter_gpupool.core.whynot import nearest, why_not
from tests.placing import cluster_of, node, parts_of, request, take
from tests.pool_helpers import World

#: Model, bytes, and the names of its profiles from the smallest.
MODELS = [
    ("A100-40GB", 40 * GIB, "1g.5gb 1g.5gb+me 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb"),
    ("A100-80GB", 80 * GIB, "1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb"),
    ("H100-80GB", 81559 * MIB, "1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb"),
    ("H100-NVL-94GB", 95830 * MIB, "1g.12gb 1g.12gb+me 1g.24gb 2g.24gb 3g.47gb 4g.47gb 7g.94gb"),
    ("H200-141GB", 143771 * MIB, "1g.18gb 1g.18gb+me 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb"),
    ("B200-180GB", 183359 * MIB, "1g.23gb 1g.23gb+me 1g.45gb 2g.45gb 3g.90gb 4g.90gb 7g.180gb"),
    ("A30-24GB", 24 * GIB, "1g.6gb 1g.6gb+me 2g.12gb 2g.12gb+me 4g.24gb"),
]


def geometry(model="A100-40GB", memory=40 * GIB, *, leave_out=()):
    found = mig.built_in(model, memory)
    assert found is not None
    return mig.Geometry(tuple(each for each in found.profiles if not each.name.endswith(leave_out)))


def profile(name):
    found = geometry().profile(name)
    assert found is not None
    return found


def cut(*where):
    """The bits of instances given as (profile, start)."""
    return sum(mig.span(start, profile(name).size) for name, start in where)


# ---------------------------------------------------------------------------------------------- geometry


@pytest.mark.parametrize(("model", "memory", "names"), MODELS, ids=[each[0] for each in MODELS])
def test_each_model_has_the_published_profiles(model, memory, names):
    assert [each.name for each in geometry(model, memory).profiles] == names.split()
    assert max(each.memory for each in geometry(model, memory).profiles) < memory


def test_other_models_have_no_geometry():
    assert mig.built_in("T4-16GB", 16 * GIB) is None
    assert mig.built_in("L40S-48GB", 48 * GIB) is None


def test_what_the_driver_says_counts():
    told = (MigProfile(name="2g.24gb", size=2, starts=(0, 2), compute=2, memory=24 * GB),)
    device = dataclasses.replace(node("a", 1, mig=True).devices[0], profiles=told)
    assert mig.geometry_of(device) == mig.Geometry(told)


@pytest.mark.parametrize(
    ("leave_out", "count"),
    [(("+me",), 723), (("+me", "1g.10gb"), 298)],
    ids=["723 with the double-memory profile", "298 without it"],
)
def test_a_seven_slice_device_has_exactly_the_known_number_of_layouts(leave_out, count):
    assert len(mig.layouts(geometry(leave_out=leave_out))) == count


def test_an_a30_has_26_layouts():
    assert len(mig.layouts(geometry("A30-24GB", 24 * GIB, leave_out=("+me",)))) == 26


def test_every_legal_layout_can_be_taken_and_no_illegal_one():
    kinds = geometry(leave_out=("+me",))
    legal = set(mig.layouts(kinds))
    everything = [(each.name, start) for each in kinds.profiles for start in range(8)]
    for layout in legal:
        mask, cluster = 0, cluster_of(node("a", 1, "A100-40GB", mig=True))
        part = parts_of(cluster, mig="1g.5gb")[0]
        for number, (name, start) in enumerate(layout):
            cluster.take(str(number), "x", made(part, name, start))
            mask |= cut((name, start))
        for name, start in everything:
            grown = tuple(sorted((*layout, (name, start))))
            fits = not mask & mig.span(start, profile(name).size) and start in profile(name).starts
            assert (grown in legal) == fits
            if not fits:
                with pytest.raises(ValueError, match=r"free|cannot"):
                    cluster.take("one more", "x", made(part, name, start))


def made(part, name, start):
    """The same part with another instance."""
    kind = profile(name)
    instance = Instance(profile=name, start=start, size=kind.size, memory=kind.memory, made=True)
    return dataclasses.replace(part, instance=instance, milli=geometry().milli(kind), cpus=0, memory=0)


@pytest.mark.parametrize(
    ("taken", "name", "starts"),
    [
        pytest.param([("4g.20gb", 0)], "3g.20gb", {4}, id="4g at 0 and 3g at 4 go together"),
        pytest.param([("3g.20gb", 0)], "3g.20gb", {4}, id="3g and 3g go together"),
        pytest.param([("4g.20gb", 0)], "4g.20gb", set(), id="two 4g do not"),
        pytest.param([], "2g.10gb", {0, 2, 4}, id="2g is never at 6"),
        pytest.param([], "1g.5gb", {0, 1, 2, 3, 4, 5, 6}, id="1g is never at 7"),
        pytest.param(
            [("1g.5gb", each) for each in range(6)], "1g.10gb", {6}, id="six 1g and a double-memory one at 6"
        ),
        pytest.param([("1g.5gb", 0)], "4g.20gb", set(), id="a 1g at 0 forbids the 4g"),
        pytest.param([("1g.5gb", 3)], "4g.20gb", set(), id="a 1g at 3 forbids the 4g"),
        pytest.param(
            [("1g.5gb", each) for each in (6, 5, 4)], "4g.20gb", {0}, id="1g at 6, 5, 4 keep the 4g"
        ),
        pytest.param([("1g.5gb", 6)], "7g.40gb", set(), id="any 1g forbids the 7g"),
    ],
)
def test_where_an_instance_may_start_beside_others(taken, name, starts):
    mask = cut(*taken)
    free = {start for start in profile(name).starts if not mask & mig.span(start, profile(name).size)}
    assert free == starts
    assert (mig.room(geometry(), profile(name))[mask] > 0) == bool(starts)


@pytest.mark.parametrize(
    ("memory", "names"),
    [
        (9 * GB, "1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb"),
        (5 * GB, "1g.5gb 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb"),
        (21 * GB, "7g.40gb"),
        (43 * GB, ""),
    ],
)
def test_by_need_the_smallest_profile_that_has_it_comes_first(memory, names):
    assert [each.name for each in mig.suiting(geometry(), "", memory, 0)] == names.split()


def test_what_instances_are_charged_never_sums_above_the_device():
    kinds = geometry()
    for layout in mig.layouts(kinds):
        assert sum(kinds.milli(profile(name)) for name, _ in layout) <= WHOLE


# --------------------------------------------------------------------------------------------- placement


def test_small_instances_go_where_the_4g_stays_possible():
    cluster = cluster_of(node("a", 1, "A100-40GB", mig=True))
    starts = [take(cluster, str(each), mig="1g.5gb")[0].instance.start for each in range(3)]
    assert starts == [6, 5, 4]
    assert parts_of(cluster, mig="4g.20gb")


def test_an_instance_goes_where_one_is_already_rather_than_break_a_whole_device():
    cluster = cluster_of(node("a", 2, "A100-40GB", mig=True))
    first = take(cluster, "x", mig="1g.5gb")[0].device
    assert take(cluster, "y", mig="2g.10gb")[0].device == first
    assert parts_of(cluster, mig="7g.40gb")


def test_several_instances_of_a_lease_may_sit_on_one_device():
    cluster = cluster_of(node("a", 1, "A100-40GB", mig=True))
    assert len(parts_of(cluster, mig="1g.5gb", count=7)) == 7
    assert len(parts_of(cluster, mig="2g.10gb", count=3)) == 3
    assert not parts_of(cluster, mig="2g.10gb", count=4)


def test_a_profile_that_can_be_there_once_is_there_once():
    cluster = cluster_of(node("a", 1, "A100-40GB", mig=True))
    take(cluster, "x", mig="1g.5gb+me")
    assert not parts_of(cluster, mig="1g.5gb+me")
    assert parts_of(cluster, mig="1g.5gb")


def test_an_instance_to_be_made_has_no_uuid_and_its_memory_is_the_slices():
    part = parts_of(cluster_of(node("a", 1, "A100-40GB", mig=True)), isolated=True, vram=9 * GB)[0]
    assert part.instance == Instance(profile="1g.10gb", start=6, size=2, memory=9856 * MIB, made=True)
    assert (part.milli, part.vram) == (250, 9856 * MIB)


def test_by_need_a_larger_profile_serves_where_the_smallest_has_no_room():
    cluster = cluster_of(node("a", 1, "A100-40GB", mig=True))
    for start in (0, 2, 4):
        take(cluster, f"x{start}", mig="2g.10gb")
    take(cluster, "y", mig="1g.5gb")
    assert not parts_of(cluster, isolated=True, vram=9 * GB)
    cluster = cluster_of(node("a", 1, "A100-40GB", mig=True), node("b", 1, "A30-24GB", mig=True))
    assert parts_of(cluster, isolated=True, vram=6 * GB)[0].instance.profile in {"1g.6gb", "1g.10gb"}


def test_instances_that_exist_are_offered_as_they_are_and_before_any_is_made():
    there = (
        Instance(profile="2g.10gb", start=0, size=2, uuid="MIG-1", memory=9856 * MIB),
        Instance(profile="2g.10gb", start=2, size=2, uuid="MIG-2", memory=9856 * MIB),
    )
    fixed = node("b", 1, "A100-40GB", mig=True, managed=False, instances=there)
    cluster = cluster_of(node("a", 1, "A100-40GB", mig=True), fixed)
    assert take(cluster, "x", mig="2g.10gb")[0].instance == there[1]
    assert take(cluster, "y", mig="2g.10gb")[0].instance == there[0]
    assert take(cluster, "z", mig="2g.10gb")[0].node == "a"
    assert not parts_of(cluster, mig="2g.10gb", node="b")
    assert not parts_of(cluster, mig="1g.5gb", node="b")


def test_no_instance_is_made_over_one_that_exists():
    there = (Instance(profile="1g.5gb", start=0, size=1, uuid="MIG-1"),)
    cluster = cluster_of(node("a", 1, "A100-40GB", mig=True, instances=there))
    assert not parts_of(cluster, mig="4g.20gb")
    assert parts_of(cluster, mig="3g.20gb")[0].instance.start == 4


def test_an_instance_of_the_pools_making_is_not_offered_when_its_node_comes_back():
    cluster = cluster_of(node("a", 1, "A100-40GB", mig=True))
    part = take(cluster, "x", mig="1g.5gb")[0]
    there = (dataclasses.replace(part.instance, uuid="MIG-1", made=False),)
    assert cluster.update_node(node("a", 1, "A100-40GB", mig=True, instances=there)) == ()
    cluster.release("x")
    assert parts_of(cluster, mig="7g.40gb")


def test_whole_devices_and_shares_stay_off_mig_devices_and_instances_off_others():
    cluster = cluster_of(node("a", 1, "A100-40GB", mig=True), node("b", 1, "A100-40GB"))
    assert parts_of(cluster)[0].node == "b"
    assert parts_of(cluster, milli=100)[0].node == "b"
    assert parts_of(cluster, mig="1g.5gb")[0].node == "a"


def test_a_device_whose_mig_mode_changed_has_lost_what_was_there():
    cluster = cluster_of(node("a", 1, "A100-40GB"))
    take(cluster, "x", milli=500)
    assert cluster.update_node(node("a", 1, "A100-40GB", mig=True)) == ("x",)
    cluster.validate()
    assert parts_of(cluster, mig="7g.40gb")


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("what", "reason", "advice"),
    [
        ({"mig": "3g.40gb"}, Reason.UNKNOWN_PROFILE, "3g.20gb"),
        ({"mig": "7g.40gb", "count": 3}, Reason.TOO_MANY_GPUS, "at most 2"),
        ({"isolated": True, "vram": 60 * GB}, Reason.TOO_MUCH_MEMORY, "at most 42GB"),
        ({}, Reason.CONTRADICTION, "1g.5gb"),
    ],
    ids=[
        "an unknown profile",
        "too many",
        "more memory than an instance has",
        "whole where all are in MIG mode",
    ],
)
def test_what_can_never_be_is_refused_with_what_there_is(what, reason, advice):
    refusals = feasible_ever(request(**what), cluster_of(node("a", 2, "A100-40GB", mig=True)))
    assert [refusal.reason for refusal in refusals] == [reason]
    assert advice in refusals[0].advice


def test_a_missing_instance_names_the_nearest_smaller_one():
    cluster = cluster_of(node("node-1", 1, "A100-40GB", mig=True), node("node-2", 1, "A100-40GB", mig=True))
    take(cluster, "x", mig="7g.40gb", node="node-1")
    for each in range(4):
        take(cluster, f"y{each}", mig="1g.5gb", node="node-2")
    wanted = request(mig="4g.20gb")
    assert nearest(wanted, cluster) == "A 2g.10gb is free on node-2."
    assert {refusal.reason for refusal in why_not(wanted, cluster)} == {Reason.NO_MIG_ROOM}


def test_a_wait_names_the_nearest_smaller_one_and_how_long_the_right_one_takes():
    world = World(node("node-1", 1, "A100-40GB", mig=True), node("node-2", 1, "A100-40GB", mig=True))
    world.ask("large", mig="7g.40gb", milli=0, node="node-1", time_limit=38 * MINUTE)
    for each in range(4):
        world.ask(f"y{each}", mig="1g.5gb", milli=0, node="node-2", time_limit=5 * HOUR)
    world.ask("mine", mig="4g.20gb", milli=0)
    [first, *_] = world.pool.explain("mine", world.now).reasons
    assert first.reason is Reason.NO_MIG_ROOM
    assert first.advice == "A 2g.10gb is free on node-2, or wait about 40 min."
