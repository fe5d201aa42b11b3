"""Consolidation: whole GPUs come free, nobody loses anything, and all move in one stroke or none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_gpupool.core.model import (
    AddSlice,
    ConfigChanged,
    ConsolidationAsked,
    Defaults,
    DrainSlice,
    LeaseBusy,
    LeaseHolds,
    LeaseIdle,
    NodeJoined,
    Notify,
    Project,
    Reason,
    RefuseRequest,
    SliceFailed,
    SliceStarted,
    StartLease,
    UserShare,
)
from tests.controller_kit import running
from tests.placing import node as mig_node
from tests.pool_helpers import World, kinds, node


def apart(world, *names, milli=300):
    """Shares on devices of their own, as they are after what was beside them has ended."""
    for name in names:
        world.ask(name, milli=milli)
        world.ask(f"beside {name}", milli=1000 - milli)
    for name in names:
        world.release(f"beside {name}")


def idle(world, *names):
    for name in names:
        world.send(LeaseIdle, lease=name, since=world.now)


@pytest.fixture
def world():
    """One node of four GPUs with a share of 0.3 on each of the first three."""
    world = World(node("node-1"))
    apart(world, "a", "b", "c")
    return world


def devices(world, *names):
    return [world.devices(name) for name in names]


def test_idle_shares_move_together_and_leave_whole_gpus_free(world):
    idle(world, "a", "b", "c")
    out = world.send(ConsolidationAsked)
    assert sorted(kinds(out)) == ["AddSlice", "AddSlice"]
    assert len({device for [device] in devices(world, "a", "b", "c")}) == 1
    assert [world.state(name) for name in "abc"] == ["active"] * 3
    told = [each for each in world.told if isinstance(each, Notify) and "Consolidation" in each.sentence]
    assert told[-1].sentence == "Consolidation: 2 slices move, which frees node-1/gpu0, node-1/gpu2."


def test_a_move_is_grant_elsewhere_drain_release(world):
    idle(world, "a", "b", "c")
    world.ignore = {AddSlice}
    out = world.send(ConsolidationAsked)
    assert not [each for each in out if isinstance(each, DrainSlice)], (
        "the old worker works until the new one does"
    )
    assert len(world.devices("a")) == 2
    fresh = next(each.slice for each in out if isinstance(each, AddSlice) and each.lease == "a")
    [drain] = [each for each in world.send(SliceStarted, slice=fresh.id) if isinstance(each, DrainSlice)]
    assert (drain.slice, drain.deadline) == ("a/0", world.pool.leases["a"].ends_at), "nothing is cut off"
    assert world.devices("a") == [fresh.device]


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda world: world.send(LeaseBusy, lease="a"), id="that works"),
        pytest.param(
            lambda world: world.send(LeaseHolds, lease="a", parts=(("actor", 5),), count=1, size=5),
            id="that would lose an actor",
        ),
    ],
)
def test_a_lease_stays_where_it_is(world, spoil):
    idle(world, "a", "b", "c")
    spoil(world)
    before = world.devices("a")
    world.send(ConsolidationAsked)
    assert world.devices("a") == before
    assert devices(world, "b", "c") == [before, before], "the others may join it"


def test_a_device_is_cleared_whole_or_not_at_all():
    world = World(node("node-1", 3))
    apart(world, "a", "b", milli=600)
    world.ask("small", milli=300)  # beside a or b
    world.ask("third", milli=500)
    idle(world, "a", "b", "small", "third")
    before = devices(world, "a", "b", "small", "third")
    [no] = world.send(ConsolidationAsked)
    assert isinstance(no, RefuseRequest)
    assert no.refusals[0].reason is Reason.NO_ROOM
    assert "elastic and idle leases" in no.refusals[0].advice
    assert devices(world, "a", "b", "small", "third") == before


def test_an_empty_gpu_stays_empty_and_another_model_is_no_place():
    world = World(node("node-1"), node("node-2", model="T4-16GB", memory=80 * 10**9))
    apart(world, "a", "b", milli=600)
    world.ask("other", milli=300, node="node-2")
    idle(world, "a", "b", "other")
    assert world.pool.consolidation().moves == []


@pytest.mark.parametrize(("limit", "moves"), [((), True), ((("cpus", 1_000),), False)])
def test_nobody_is_moved_beyond_a_hard_limit(limit, moves):
    """A share of a GPU goes with 600 thousandths of a CPU on the one node, with 4,800 on the other."""
    world = World(node("node-1", cpus=8_000))
    ann = UserShare(name="ann", limit=limit)
    world.send(ConfigChanged, projects=(Project(name="default", users=(ann,)),), defaults=Defaults())
    world.ask("a", milli=300)
    world.send(NodeJoined, node=node("node-2", cpus=64_000))
    world.ask("b", "ben", milli=300, node="node-2")
    idle(world, "a")
    world.send(ConsolidationAsked)
    assert (devices(world, "a") == devices(world, "b")) is moves


def test_shares_of_one_lease_keep_apart():
    world = World(node("node-1"))
    apart(world, "a", "b", "c", milli=200)
    world.ask("two", milli=200, count=2)
    idle(world, "a", "b", "c", "two")
    world.send(ConsolidationAsked)
    assert len(set(world.devices("two"))) == 2
    assert whole(world) == 2


def test_mig_instances_move_as_well():
    world = World(mig_node("node-1", 2, "A100-40GB", mig=True))
    for name, profile in (("a", "2g.10gb"), ("beside", "4g.20gb"), ("b", "2g.10gb")):
        world.ask(name, mig=profile, milli=0)
        world.create(world.pool.leases[name].slices[f"{name}/0"])
    world.release("beside")
    idle(world, "a", "b")
    assert sorted(kinds(world.send(ConsolidationAsked))) == ["CreateInstance"]


def test_a_look_changes_nothing(world):
    idle(world, "a", "b", "c")
    before = world.pool.snapshot()
    assert len(world.pool.consolidation().moves) == 2
    assert world.pool.snapshot() == before


#: Shares in the order in which they are asked for: thousandths, whether it rests, whether it has an actor.
SHARES = st.tuples(
    st.sampled_from([100, 250, 300, 500, 700]),
    st.sampled_from([True, True, True, False]),
    st.sampled_from([False, False, False, False, True]),
)


@given(st.lists(SHARES, min_size=4, max_size=16), st.integers(2, 4))
@settings(max_examples=60, deadline=None)
def test_nothing_is_lost_and_whole_gpus_never_get_fewer(asked, every):
    """Whatever shares there are: every lease keeps what it has, and only those that lose nothing move."""
    world = World(node("node-1"), node("node-2"))
    for number, (milli, _, _) in enumerate(asked):
        world.ask(f"l{number}", milli=milli)
    for number in range(0, len(asked), every):
        world.release(f"l{number}")
    live = [each for each in world.pool.leases.values() if each.slices]
    for lease in live:
        _, rests, actors = asked[int(lease.id[1:])]
        if actors:
            world.send(LeaseHolds, lease=lease.id, parts=(("actor", 1),), count=1, size=1)
        if rests:
            world.send(LeaseIdle, lease=lease.id, since=world.now)
    before = {
        each.id: (world.devices(each.id), sum(one.milli for one in each.slices.values())) for each in live
    }
    empty = whole(world)
    planned = world.pool.consolidation()
    world.send(ConsolidationAsked)
    assert whole(world) == empty + len(planned.freed)
    for lease in live:
        devices_, milli = before[lease.id]
        _, rests, actors = asked[int(lease.id[1:])]
        assert sum(one.milli for one in lease.slices.values()) == milli
        assert str(lease.state) == "active"
        assert (rests and not actors) or world.devices(lease.id) == devices_


def whole(world):
    return sum(not world.pool._state.cluster.taken_of(uuid) for uuid in world.pool.devices)


def test_a_replacement_that_cannot_start_leaves_the_old_worker_at_work(world):
    idle(world, "a", "b", "c")
    world.ignore = {AddSlice, StartLease}
    out = world.send(ConsolidationAsked)
    fresh = next(each.slice for each in out if isinstance(each, AddSlice) and each.lease == "a")
    world.send(SliceFailed, slice=fresh.id, why="no")
    assert world.pool.leases["a"].slices["a/0"].state == "running"
    assert world.state("a") == "active"


# ------------------------------------------------------------------------------------------------------ faces


@pytest.mark.asyncio
async def test_administrators_only_may_ask_and_a_dry_run_says_what_would_move(tmp_path):
    async with running(tmp_path) as kit:
        names = [await kit.ask(vram="30GB", name=name) for name in ("a", "b", "c")]
        assert len({each["slices"][0]["device"] for each in names}) < 3
        no = await kit.call("ann", "POST", "/v1/consolidate", {})
        assert no.status_code == 403
        dry = (await kit.call("adm", "POST", "/v1/consolidate", {"dry_run": True})).data
        assert dry == {"moves": [], "freed": [], "dry_run": True}
        no = await kit.call("adm", "POST", "/v1/consolidate", {})
        assert (no.status_code, no.data["reason"]) == (400, "no_room")
        for each in names:
            event = LeaseIdle(now=kit.controller.clock.now(), lease=each["id"], since=1)
            kit.controller.submit(event)
        await kit.call("ann", "DELETE", f"/v1/leases/{names[0]['id']}")
        dry = (await kit.call("adm", "POST", "/v1/consolidate", {"dry_run": True})).data
        done = (await kit.call("adm", "POST", "/v1/consolidate", {})).data
        assert done == {**dry, "dry_run": False}
        assert [each["lease_name"] for each in done["moves"]] in (["b"], ["c"])
