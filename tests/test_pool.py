"""The machine: what follows from what. The world runs `pool.validate()` after every event."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jupyter_gpupool.core.model import (
    ANY,
    DAY,
    HOUR,
    MINUTE,
    WHOLE,
    AddSlice,
    ConfigChanged,
    Cordoned,
    CreateInstance,
    DestroyInstance,
    DrainMode,
    DrainSlice,
    EndLease,
    InstanceCreated,
    LeaseExtended,
    LeaseFailed,
    LeaseFreed,
    LeaseRekeyed,
    LeaseStarted,
    NodeJoined,
    NodeLost,
    NodeSilent,
    Notice,
    Notify,
    Project,
    Reason,
    RefuseRequest,
    RequestWithdrawn,
    SliceDrained,
    SliceFailed,
    SliceFreed,
    SliceStarted,
    SliceState,
    StartLease,
    StopSlice,
    Tick,
    Uncordoned,
    Verdict,
)
from jupyter_gpupool.core.pool import Pool
from tests.placing import node as mig_node
from tests.pool_helpers import World, ask, kinds, node, states
from tests.pool_helpers import world as pool_of


@pytest.fixture
def world():
    """Two nodes of four GPUs."""
    return World(node("node-1"), node("node-2"))


def reasons(out):
    return [each.reason for order in out if isinstance(order, RefuseRequest) for each in order.refusals]


class TestLife:
    def test_a_request_that_fits_starts_at_once_on_one_node(self, world):
        out = world.ask("a", count=3)
        assert kinds(out) == ["StartLease"]
        assert {each.node for each in out[0].slices} == {"node-1"}
        assert world.state("a") == "active"

    def test_a_lease_is_active_only_when_its_scheduler_and_all_its_first_slices_run(self, world):
        world.ignore = {StartLease}
        world.ask("a", count=2)
        seen = []
        for kind, what in (
            (LeaseStarted, {"lease": "a"}),
            (SliceStarted, {"slice": "a/0"}),
            (SliceStarted, {"slice": "a/1"}),
        ):
            seen.append(world.state("a"))
            world.send(kind, **what)
        assert [*seen, world.state("a")] == ["starting", "starting", "starting", "active"]

    def test_a_gang_is_granted_whole_or_not_at_all(self, world):
        world.ask("a", count=5)
        world.ask("b", count=4)
        assert (world.state("b"), world.devices("b")) == ("pending", [])

    def test_a_slice_is_free_only_when_its_processes_are_seen_gone(self, world):
        world.ask("a", count=8)
        world.ask("b")
        world.ignore = {StopSlice}
        assert kinds(world.release("a")) == ["EndLease"] + 8 * ["StopSlice"]
        assert (world.state("a"), world.state("b")) == ("draining", "pending")
        world.send(SliceFreed, slice="a/0")
        assert world.state("b") == "active"

    def test_a_withdrawn_request_is_over_and_leaves_nothing(self, world):
        world.ask("a", count=8)
        world.ask("b")
        assert kinds(world.send(RequestWithdrawn, lease="b")) == []
        world.release("a")
        assert world.state("b") == "ended"

    def test_an_owner_is_warned_before_the_time_limit_ends_a_lease(self, world):
        world.ask("a", time_limit=3 * HOUR)
        world.wait(3 * HOUR - 15 * MINUTE)
        assert world.told[-1].notice is Notice.EXPIRING
        assert world.state("a") == "active"
        world.wait(15 * MINUTE)
        assert world.state("a") == "ended"
        assert world.pool.leases["a"].why == "its time limit was reached"

    def test_an_extended_lease_ends_later(self, world):
        world.ask("a", time_limit=HOUR)
        world.send(LeaseExtended, lease="a", by=HOUR)
        world.wait(90 * MINUTE)
        assert world.state("a") == "active"
        world.wait(30 * MINUTE)
        assert world.state("a") == "ended"

    def test_a_scheduler_that_does_not_start_ends_the_lease_and_leaves_nothing(self, world):
        world.ignore = {StartLease}
        world.ask("a", count=2)
        out = world.send(LeaseFailed, lease="a", why="no such Python")
        assert kinds(out) == ["StopSlice", "StopSlice"]
        assert world.pool.leases["a"].why == "failed: no such Python"
        assert world.state("a") == "ended"

    def test_a_lost_scheduler_is_started_anew_with_its_workers(self, world):
        world.ask("a", count=2)
        devices = world.devices("a")
        out = world.send(LeaseFailed, lease="a", why="killed")
        assert [each.device for each in out[0].slices] == devices
        assert world.state("a") == "active"

    def test_a_worker_that_fails_is_replaced_elsewhere_and_three_in_a_row_end_the_lease(self, world):
        world.ask("a")
        first = world.devices("a")
        world.send(SliceFailed, slice="a/0", why="out of memory")
        assert world.devices("a") != first
        world.ignore = {AddSlice}
        for number in (1, 2, 3):
            world.send(SliceFailed, slice=f"a/{number}", why="out of memory")
        assert world.state("a") == "ended"


class TestNewKeys:
    """Whoever has a lease's keys is shut out by new ones: all that knows the old ones ends first."""

    def test_a_lease_on_new_keys_keeps_its_place_although_others_wait(self, world):
        world.ask("a", count=8)
        world.ask("b")
        out = world.send(LeaseRekeyed, lease="a", why="a test")
        assert kinds(out) == ["EndLease"] + 8 * ["StopSlice"]
        assert (world.state("a"), world.state("b")) == ("active", "pending")
        assert len(world.devices("a")) == 8
        assert set(world.pool.leases["a"].slices) == {f"a/{n}" for n in range(8, 16)}
        told = [each.notice for each in world.told if isinstance(each, Notify) and each.lease == "a"]
        assert told == [Notice.GRANTED, Notice.STARTED, Notice.RESTARTED, Notice.STARTED]

    def test_nothing_starts_on_new_keys_before_the_old_scheduler_is_seen_gone(self, world):
        world.ask("a", count=2)
        world.ignore = {EndLease}
        world.send(LeaseRekeyed, lease="a")
        assert (world.state("a"), world.pool.leases["a"].address) == ("starting", "")
        world.send(LeaseStarted, lease="a", address="said late by the old one")
        assert world.state("a") == "starting"
        assert kinds(world.pool.orders()).count("EndLease") == 1
        out = world.send(LeaseFreed, lease="a")
        assert kinds(out) == ["StartLease"]
        assert (world.state("a"), len(world.devices("a"))) == ("active", 2)

    def test_new_keys_twice_in_a_row_are_one_restart(self, world):
        world.ask("a")
        world.ignore = {EndLease}
        world.send(LeaseRekeyed, lease="a")
        assert kinds(world.send(LeaseRekeyed, lease="a")) == []
        world.send(LeaseFreed, lease="a")
        assert (world.state("a"), world.pool.leases["a"].keys) == ("active", 2)

    def test_of_a_lease_that_gives_back_and_has_lost_its_scheduler_nothing_goes_on_with_the_old_ones(self):
        made = pool_of(nodes=1, gpus=2, min_run=MINUTE)
        ask(made, "a1", count=2, time_limit=DAY)
        made.wait(MINUTE)
        made.ignore = {DrainSlice}
        ask(made, "b1", "b", count=1)
        made.send(LeaseFailed, lease="a1", why="killed")
        assert {each.state for each in made.pool.leases["a1"].slices.values()} == {SliceState.DRAINING}
        out = made.send(LeaseRekeyed, lease="a1", why="a test")
        assert kinds(out) == ["StopSlice"] * 2
        assert states(made, "a1", "b1") == ["suspended", "active"]

    def test_a_lease_that_is_released_meanwhile_ends(self, world):
        world.ask("a")
        world.ignore = {EndLease}
        world.send(LeaseRekeyed, lease="a")
        world.release("a")
        world.send(LeaseFreed, lease="a")
        assert world.state("a") == "ended"

    def test_a_lease_that_is_over_gets_none(self, world):
        world.ask("a")
        world.release("a")
        assert reasons(world.send(LeaseRekeyed, lease="a")) == [Reason.LEASE_OVER]


class TestRefusals:
    @pytest.mark.parametrize(
        ("what", "reason"),
        [
            pytest.param({"count": 9}, Reason.TOO_MANY_GPUS, id="more GPUs than the pool has"),
            pytest.param({"count": 0}, Reason.BAD_REQUEST, id="no GPU at all"),
            pytest.param({"model": "A100"}, Reason.UNKNOWN_MODEL, id="an unknown model"),
            pytest.param({"project": "x"}, Reason.UNKNOWN_PROJECT, id="an unknown project"),
            pytest.param({"node": "node-9"}, Reason.UNKNOWN_NODE, id="an unknown node"),
            pytest.param({"min_vram": 10**12}, Reason.TOO_MUCH_MEMORY, id="more memory than any GPU has"),
            pytest.param({"cpus": 65_000}, Reason.TOO_MUCH_HOST, id="more CPUs than any node has"),
            pytest.param({"time_limit": 8 * 24 * HOUR}, Reason.TIME_LIMIT, id="more time than is allowed"),
            pytest.param({"name": "taken"}, Reason.NAME_TAKEN, id="a name in use"),
            pytest.param({"count": 5, "same_node": True}, Reason.TOO_MANY_GPUS, id="more than one node has"),
        ],
    )
    def test_what_can_never_be_granted_is_refused_at_once(self, world, what, reason):
        world.ask("taken")
        out = world.ask("a", **what)
        assert reasons(out) == [reason]
        assert "a" not in world.pool.leases

    def test_a_project_is_for_its_members(self, world):
        world.send(ConfigChanged, projects=(Project(name="lab", members=("ben",)),))
        assert reasons(world.ask("a", project="lab")) == [Reason.NOT_A_MEMBER]
        assert kinds(world.ask("b", "ben", project="")) == ["StartLease"]

    def test_a_request_above_a_hard_limit_is_refused_and_one_that_must_wait_for_it_waits(self, world):
        world.send(ConfigChanged, projects=(Project(name="default", limit=(("*", 3 * WHOLE),)),))
        assert reasons(world.ask("a", count=4)) == [Reason.OVER_LIMIT]
        world.ask("b", count=2)
        world.ask("c", count=2)
        assert world.pool.explain("c", world.now).reasons[0].reason is Reason.AT_LIMIT

    def test_who_is_at_their_limit_does_not_hold_up_those_behind(self, world):
        projects = (Project(name="small", limit=(("*", WHOLE),)), Project(name="default"))
        world.send(ConfigChanged, projects=projects)
        world.ask("a", project="small")
        world.ask("b", project="small")
        world.ask("c")
        assert [world.state(each) for each in "abc"] == ["active", "pending", "active"]

    def test_limits_count_host_cpus_too(self, world):
        world.send(ConfigChanged, projects=(Project(name="default", limit=(("cpus", 20_000),)),))
        world.ask("a", cpus=12_000)
        world.ask("b", cpus=12_000)
        assert [world.state(each) for each in "ab"] == ["active", "pending"]

    @pytest.mark.parametrize(
        "projects",
        [
            pytest.param((Project(name="a", quota=(("*", 9 * WHOLE),)),), id="above the pool"),
            pytest.param(
                (
                    Project(name="a", quota=(("*", 2 * WHOLE),)),
                    Project(name="b", parent="a", quota=(("*", 3 * WHOLE),)),
                ),
                id="above the parent",
            ),
        ],
    )
    def test_quotas_that_sum_too_high_are_refused_with_the_numbers_and_nothing_changes(self, world, projects):
        before = world.pool.projects
        out = world.send(ConfigChanged, projects=projects)
        assert reasons(out) == [Reason.QUOTA_SUM]
        assert world.pool.projects == before

    def test_wishes_about_unknown_or_ended_leases_are_refused(self, world):
        assert reasons(world.release("nothing")) == [Reason.UNKNOWN_LEASE]
        world.ask("a")
        world.release("a")
        assert reasons(world.release("a")) == [Reason.LEASE_OVER]


class TestMigration:
    def test_a_lost_device_is_left_at_once_for_a_free_one(self, world):
        world.ask("a", count=2)
        gone = world.devices("a")[0]
        out = world.verdict(gone, Verdict.GONE)
        assert kinds(out) == ["AddSlice", "DrainSlice"]
        assert out[-1].mode is DrainMode.NOW if isinstance(out[-1], DrainSlice) else True
        assert gone not in world.devices("a")
        assert len(world.devices("a")) == 2

    @pytest.mark.parametrize(
        ("verdict", "mode"), [(Verdict.RETIRE_SOON, DrainMode.FINISH), (Verdict.EVACUATE, DrainMode.NOW)]
    )
    def test_moving_is_grant_elsewhere_then_drain_then_release(self, world, verdict, mode):
        world.ask("a")
        old = world.devices("a")[0]
        world.ignore = {AddSlice, DrainSlice, StopSlice}
        steps = [kinds(world.verdict(old, verdict))]
        out = world.send(SliceStarted, slice="a/1")
        steps.append(kinds(out))
        assert next(each for each in out if isinstance(each, DrainSlice)).mode is mode
        world.ignore = {StopSlice}
        world.obey(next(each for each in out if isinstance(each, DrainSlice)))
        steps.append(kinds([world.told[-1]]))
        assert steps == [["AddSlice"], ["DrainSlice"], ["StopSlice"]]

    def test_a_replacement_goes_before_everything_that_waits(self, world):
        world.ask("a", count=4)
        world.ask("b", count=4)
        world.ask("c")
        gone = world.devices("a")[0]
        assert kinds(world.verdict(gone, Verdict.GONE)) == ["DrainSlice"]
        world.release("b")
        assert len(world.devices("a")) == 4
        assert world.state("c") == "active"

    def test_a_replacement_is_charged_in_the_place_of_what_it_replaces(self, world):
        world.send(ConfigChanged, projects=(Project(name="default", limit=(("*", 2 * WHOLE),)),))
        world.ask("a", count=2)
        world.ignore = {DrainSlice}
        world.verdict(world.devices("a")[0], Verdict.GONE)
        assert len(world.devices("a")) == 3
        world.ask("b")
        assert world.state("b") == "pending"

    def test_a_device_that_is_out_takes_no_work_until_its_verdict_is_fine(self, world):
        world.verdict("GPU-node-1-0", Verdict.GONE)
        world.ask("a", count=7)
        world.ask("b")
        assert (world.state("a"), world.state("b")) == ("active", "pending")
        world.verdict("GPU-node-1-0", Verdict.FINE)
        assert world.devices("b") == ["GPU-node-1-0"]

    def test_work_without_a_replacement_stays_on_a_device_that_still_works_until_the_deadline(self, world):
        world.ask("a", count=8, min_count=1, time_limit=5 * HOUR)
        assert kinds(world.verdict("GPU-node-1-0", Verdict.RETIRE_SOON)) == []
        world.wait(9 * MINUTE)
        assert len(world.devices("a")) == 8
        world.wait(MINUTE)
        assert len(world.devices("a")) == 7
        assert world.told[-2].notice is Notice.SHRUNK or any(
            getattr(each, "notice", "") is Notice.SHRUNK for each in world.told
        )

    def test_a_worse_verdict_makes_a_drain_more_urgent(self, world):
        world.ask("a")
        world.ignore = {DrainSlice}
        world.verdict(world.devices("a")[0], Verdict.RETIRE_SOON)
        out = world.verdict("GPU-node-1-0", Verdict.GONE)
        assert [each.mode for each in out if isinstance(each, DrainSlice)] == [DrainMode.NOW]

    def test_a_replacement_that_fails_is_replaced_too_and_the_charge_stays_one(self, world):
        world.ask("a")
        world.ignore = {AddSlice}
        world.verdict("GPU-node-1-0", Verdict.RETIRE_SOON)
        world.send(SliceFailed, slice="a/1", why="did not start")
        assert len(world.pool.leases["a"].charges) == 1
        world.send(SliceStarted, slice="a/2")
        assert world.devices("a") == [world.pool.leases["a"].slices["a/2"].device]

    def test_a_slice_whose_second_replacement_is_there_before_it_is_gone_is_wanted_no_more_then(self):
        world = World(node("node-1", 1), node("node-2", 1))
        world.ask("a", milli=250)
        world.ignore = {AddSlice, StopSlice}
        world.send(SliceFailed, slice="a/0", why="died")
        lease, tree = world.pool.leases["a"], world.pool._state.tree
        world.send(NodeLost, node=lease.slices["a/1"].node)
        assert set(lease.charges) == {"a/2"}
        world.send(SliceFreed, slice="a/0")
        assert set(lease.charges) == {"a/2"}
        assert tree.root.demand[ANY] == 250

    def test_what_is_still_there_is_charged_when_its_replacement_and_that_one_s_are_lost_at_once(self):
        world = World(node("node-1", 1), node("node-2", 2))
        world.ask("a")
        world.ignore = {AddSlice}
        world.send(Cordoned, target="GPU-node-1-0", why="a new fan", drain=True)
        world.send(Cordoned, target="GPU-node-2-0", why="a new fan", drain=True)
        lease = world.pool.leases["a"]
        assert [each.replaces for each in lease.slices.values()] == ["", "a/0", "a/1"]
        world.send(NodeLost, node="node-2")
        assert ([*lease.slices], [*lease.charges], [*lease.needs]) == (["a/0"], ["a/0"], ["a/0"])

    @pytest.mark.parametrize("freed", [True, False], ids=["its first is gone", "its first is still there"])
    @pytest.mark.parametrize("found", [True, False], ids=["its second is there", "its second is wanted"])
    def test_a_slice_is_replaced_once_however_many_replacements_failed(self, freed, found):
        world = World(node("n", 4))
        world.send(Cordoned, target="GPU-n-3", why="kept for later")
        world.ask("a", count=2, min_count=1, time_limit=DAY)
        world.ignore = {AddSlice, DrainSlice, StopSlice}
        world.verdict("GPU-n-1", Verdict.RETIRE_SOON)
        world.verdict("GPU-n-2", Verdict.GONE)
        world.wait(2 * MINUTE)
        assert world.pool.leases["a"].slices["a/2"].state is SliceState.STOPPING
        if freed:
            world.send(SliceFreed, slice="a/2")
        if found:
            world.send(Uncordoned, target="GPU-n-3")
        left = tuple(each for each in node("n", 4).devices if each.index != 1)
        world.send(NodeJoined, node=dataclasses.replace(node("n", 4), devices=left), obey=False)
        lease = world.pool.leases["a"]
        assert len([*lease.seats()]) == len(lease.charges) == 2
        assert world.pool._state.tree.root.demand[ANY] == 2 * WHOLE

    def test_a_poisoned_worker_is_restarted_where_it_is(self, world):
        world.ask("a")
        assert kinds(world.verdict("GPU-node-1-0", Verdict.RESTART_WORKER)) == ["RestartWorker"]

    def test_a_cordoned_node_keeps_its_work_and_a_drained_one_loses_it(self, world):
        world.ask("a", count=2)
        world.send(Cordoned, target="node-1", why="new driver")
        world.ask("b", count=2)
        assert {world.pool.leases["a"].slices[each].node for each in world.pool.leases["a"].slices} == {
            "node-1"
        }
        assert {each.node for each in world.pool.leases["b"].slices.values()} == {"node-2"}
        world.send(Cordoned, target="node-1", why="new driver", drain=True)
        assert {each.node for each in world.pool.leases["a"].slices.values()} == {"node-2"}
        world.send(Uncordoned, target="node-1")
        world.ask("c", count=4)
        assert world.state("c") == "active"

    @pytest.mark.parametrize("many", [1, 10, 12])
    def test_what_the_deadline_cut_off_is_counted_and_named_to_the_owner(self, world, many):
        world.ignore = {DrainSlice}
        world.ask("a", count=1)
        world.send(Cordoned, target="node-1", why="new driver", drain=True)
        keys = tuple(f"key-{n}" for n in range(many))
        out = world.send(SliceDrained, slice="a/0", forced=keys, lost=("table",))
        [told] = [each for each in out if isinstance(each, Notify)]
        assert f"{many} running tasks were cut off" in told.sentence
        assert "key-0" in told.sentence
        assert told.sentence.endswith("; lost for good: table.")
        assert ("and 2 more" in told.sentence) == (many == 12)
        assert json.loads(told.data) == {"forced": list(keys), "lost": ["table"]}


class TestNodes:
    def test_a_cordoned_device_that_its_node_did_not_list_for_a_while_is_still_cordoned(self, world):
        """Its agent was started anew while the GPU had fallen off the bus."""
        world.send(Cordoned, target="GPU-node-1-3", why="dust")
        for cordoned in ("dust", ""):
            world.send(NodeJoined, node=node("node-1", 3))
            assert "GPU-node-1-3" not in world.pool.devices
            world.pool = Pool.restore(json.loads(json.dumps(world.pool.snapshot())))
            world.send(NodeJoined, node=node("node-1"))
            assert world.pool.devices["GPU-node-1-3"].cordoned == cordoned
            world.send(Uncordoned, target="GPU-node-1-3")

    def test_a_silent_node_keeps_its_leases_and_gets_nothing_new(self, world):
        world.ask("a", count=2)
        world.send(NodeSilent, node="node-1")
        world.ask("b", count=2)
        assert world.state("a") == "active"
        assert {each.node for each in world.pool.leases["b"].slices.values()} == {"node-2"}

    def test_a_node_that_stays_silent_is_lost_and_its_work_moves(self, world):
        world.ask("a", count=2)
        world.send(NodeSilent, node="node-1")
        world.wait(MINUTE)
        assert {each.node for each in world.pool.leases["a"].slices.values()} == {"node-2"}

    def test_a_node_that_is_back_in_time_goes_on_as_if_nothing_had_been(self, world):
        world.ask("a", count=2)
        world.send(NodeSilent, node="node-1")
        out = world.send(NodeJoined, node=node("node-1"), adopted=("a/0", "a/1"))
        assert kinds(out) == []
        world.wait(2 * MINUTE)
        assert world.state("a") == "active"

    def test_workers_that_died_with_their_node_start_anew_in_their_place(self, world):
        world.ask("a", count=2)
        devices = world.devices("a")
        world.send(NodeSilent, node="node-1")
        assert kinds(world.send(NodeJoined, node=node("node-1"), adopted=("a/0",))) == ["AddSlice"]
        assert world.devices("a") == devices

    def test_a_lost_node_that_returns_ends_its_old_processes_before_it_offers_its_devices(self, world):
        world.ask("a", count=4)
        world.send(NodeLost, node="node-1")
        world.ignore = {StopSlice}
        out = world.send(NodeJoined, node=node("node-1"), adopted=("a/0", "a/1"))
        assert kinds(out) == ["StopSlice", "StopSlice"]
        world.ask("b", count=3)
        assert world.state("b") == "pending"
        world.send(SliceFreed, slice="a/0")
        assert world.state("b") == "active"
        assert "GPU-node-1-1" not in world.devices("b")

    def test_nothing_goes_to_a_node_that_runs_something_unknown(self, world):
        world.ignore = {StopSlice}
        out = world.send(NodeJoined, node=node("node-3"), adopted=("old/0",))
        assert kinds(out) == ["StopSlice"]
        world.ask("a", count=9)
        assert world.state("a") == "pending"
        world.send(SliceFreed, slice="old/0")
        assert world.state("a") == "active"

    def test_a_gang_whose_node_came_back_gets_its_missing_slices(self):
        """A gang is not stuck below its size after a node was repaired."""
        world = World(node("node-1"), node("node-2"))
        world.ask("a", count=8)
        world.send(NodeLost, node="node-2")
        assert len(world.devices("a")) == 4
        world.send(NodeJoined, node=node("node-2"))
        assert len(world.devices("a")) == 8

    def test_a_node_that_returns_without_a_gpu_loses_what_was_on_it(self, world):
        world.ask("a", count=4)
        out = world.send(NodeJoined, node=node("node-1", gpus=3), adopted=("a/0", "a/1", "a/2", "a/3"))
        assert "AddSlice" in kinds(out)
        assert len(world.devices("a")) == 4


class TestReplay:
    def day(self):
        world = World(node("node-1"), node("node-2"))
        world.ask("a", count=3)
        world.ask("b", "ben", count=4)
        world.verdict("GPU-node-1-0", Verdict.EVACUATE)
        world.ask("c", count=2)
        world.send(Cordoned, target="node-2", why="dust")
        world.wait(5 * MINUTE)
        world.send(NodeSilent, node="node-1")
        world.wait(2 * MINUTE)
        world.send(NodeJoined, node=node("node-1"), adopted=("a/0",))
        world.release("b")
        return world

    def test_the_same_events_give_an_equal_pool(self):
        world = self.day()
        again = Pool()
        for event in world.events:
            again.handle(event)
        assert again == world.pool

    def test_a_restored_pool_is_equal_and_goes_on_alike(self):
        world = self.day()
        again = Pool.restore(json.loads(json.dumps(world.pool.snapshot())))
        again.validate()
        assert again == world.pool
        other = World(pool=again)
        other.now = world.now
        for each in (world, other):
            each.told = []
            each.send(Uncordoned, target="node-2")
            each.wait(2 * HOUR)
        assert other.told == world.told
        assert again == world.pool

    def test_a_tick_from_which_nothing_follows_changes_nothing(self, world):
        world.ask("a")
        before, version = world.pool.snapshot(), world.pool.version
        world.now += MINUTE
        assert world.send(Tick) == []
        assert (world.pool.snapshot(), world.pool.version) == (before, version)

    def test_what_is_outstanding_can_be_said_again(self, world):
        world.ignore = {StartLease, EndLease, StopSlice}
        world.ask("a", count=2)
        assert kinds(world.pool.orders()) == ["StartLease", "AddSlice", "AddSlice"]
        world.release("a")
        assert kinds(world.pool.orders()) == ["EndLease", "StopSlice", "StopSlice"]

    def test_reports_of_what_is_unknown_or_over_change_nothing(self, world):
        world.ask("a")
        before = world.pool.snapshot()
        for kind in (SliceStarted, SliceFreed):
            assert world.send(kind, slice="b/0") == []
        assert world.send(LeaseStarted, lease="a", address="elsewhere") == []
        assert world.pool.snapshot() == before


class TestInstances:
    """MIG instances that the agent has made when nobody waits for them any more."""

    def world(self):
        world = World(mig_node("node-1", 1, "A100-40GB", mig=True))
        world.ignore = {StartLease}
        [order] = [
            each for each in world.ask("a", mig="2g.10gb", milli=0) if isinstance(each, CreateInstance)
        ]
        return world, order

    def made(self, order, **more):
        return {
            "slice": order.slice,
            "uuid": "MIG-1",
            "device": order.device,
            "instance": order.instance,
            **more,
        }

    def test_one_whose_slice_is_gone_is_destroyed(self):
        world, order = self.world()
        world.release("a")
        [gone] = world.send(InstanceCreated, **self.made(order))
        assert isinstance(gone, DestroyInstance)
        assert (gone.device, gone.node, gone.instance.uuid) == (order.device, "node-1", "MIG-1")

    def test_one_whose_place_was_granted_anew_is_left_to_whom_has_it(self):
        world, order = self.world()
        world.release("a")
        world.ask("b", mig="2g.10gb", milli=0)
        assert world.send(InstanceCreated, **self.made(order)) == []

    def test_one_on_a_device_that_nobody_knows_changes_nothing(self):
        world, order = self.world()
        world.release("a")
        assert world.send(InstanceCreated, **self.made(order, device="GPU-other")) == []
