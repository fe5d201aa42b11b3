"""Fair share in the machine: who is next, who gives back, who may pass.

The known bugs of the peers are in `test_peers_bugs`.
"""

from __future__ import annotations

import copy
import math

import pytest

from jupyter_gpupool.core import explain, submit
from jupyter_gpupool.core.ledger import KEEP_HOURS
from jupyter_gpupool.core.model import (
    ANY,
    GB,
    HOUR,
    MINUTE,
    SECOND,
    WHOLE,
    AddSlice,
    ConfigChanged,
    Cordoned,
    Defaults,
    DrainMode,
    DrainSlice,
    LeaseBusy,
    LeaseExtended,
    LeaseHolds,
    LeaseIdle,
    LeaseKept,
    LeaseScaled,
    NodeJoined,
    NodeLost,
    Notice,
    Notify,
    Project,
    Reason,
    RequestWithdrawn,
    SliceDrained,
    SliceFreed,
    StartLease,
    StopSlice,
    Tick,
    UserShare,
)
from jupyter_gpupool.core.pool import Pool
from jupyter_gpupool.core.reserve import Book
from tests.pool_helpers import World, ask, kinds, node, project, refused, request, states, world

MIN_RUN, GRACE = Defaults().min_run, Defaults().grace


class TestOrder:
    def test_who_is_below_their_share_comes_first_whoever_waits_longer(self):
        made = world(nodes=1)
        ask(made, "a1", count=4)
        ask(made, "a2")
        ask(made, "b1", "b")
        assert [each.id for each in explain.order(made.pool._state)] == ["b1", "a2"]

    def test_who_waits_is_told_the_numbers_of_whoever_is_ahead(self):
        made = world(nodes=1)
        ask(made, "a1", count=3)
        ask(made, "b1", "b")
        ask(made, "a2")
        ask(made, "b2", "b")
        first = made.pool.explain("a2", made.now).sentences[0]
        assert first == (
            "1 request is ahead of it: project b is below its share (1 of 2 GPUs),"
            " project a is not (3 GPUs, 1 GPU more)."
        )

    def test_what_is_served_is_said_in_hundredths_of_a_gpu(self):
        made = world(nodes=1)
        ask(made, "a0", milli=702)
        ask(made, "a1", count=2)
        ask(made, "b1", "b", count=2)
        ask(made, "a2", count=2)
        first = made.pool.explain("a2", made.now).sentences[0]
        assert first.endswith("project a is not (2.7 GPUs, 0.7 GPUs more).")

    def test_among_equals_who_has_used_less_by_weight_comes_first(self):
        made = world(project("a", weight=1), project("b", weight=3), nodes=1)
        ask(made, "a1", count=2)
        ask(made, "b1", count=2)
        made.wait(HOUR)
        for ident, who in (("a1", "a"), ("b1", "b")):
            made.state(ident)
            ask(made, f"{who}2", who, count=4)
        assert next(explain.order(made.pool._state)).id == "b2"

    def test_usage_is_forgotten_by_and_by(self):
        made = world(project("a"), project("b"), nodes=1, half_life=HOUR)
        ask(made, "a1", count=4, time_limit=2 * HOUR)
        made.wait(2 * HOUR)
        ask(made, "b1", "b", count=1, time_limit=HOUR)
        made.wait(HOUR)
        tree = made.pool._state.tree
        before = tree.worth(tree.user("a", "ua"), made.now)
        made.wait(10 * HOUR)
        assert tree.worth(tree.user("a", "ua"), made.now) < before // 1000

    def test_a_burst_at_one_moment_is_charged_from_its_first_grant_on(self):
        made = world(project("a"), project("b"), nodes=1, gpus=8)
        made.ignore = {StartLease}
        for number in range(6):
            ask(made, f"a{number}")
        ask(made, "b0", "b")
        ask(made, "big", "b", count=8)
        tree = made.pool._state.tree
        weight = tree.decay.at(made.now + Defaults().charged_ahead)
        assert tree.user("a", "ua").used(weight) > tree.user("b", "ub").used(weight) > 0

    def test_priority_orders_only_ones_own_requests(self):
        made = world(nodes=1)
        ask(made, "full", count=4, time_limit=HOUR)
        made.now += MINUTE
        ask(made, "a1", priority=0)
        made.now += MINUTE
        ask(made, "a2", priority=5)
        ask(made, "b1", "b")
        assert [each.id for each in explain.order(made.pool._state)] == ["b1", "a2", "a1"]

    def test_a_step_of_priority_is_worth_an_hour_of_waiting_and_ten_at_most(self):
        made = world(nodes=1)
        ask(made, "full", count=4, time_limit=24 * HOUR)
        ask(made, "old")
        made.now += 9 * HOUR
        ask(made, "new", priority=10)
        made.now += 2 * HOUR
        ask(made, "newer", priority=99)
        assert [each.id for each in explain.order(made.pool._state)] == ["new", "old", "newer"]

    def test_a_change_of_the_tree_takes_effect_at_once(self):
        made = world(project("a", 1), project("b", 3), nodes=1)
        ask(made, "a1", count=4, time_limit=24 * HOUR)
        made.wait(MIN_RUN)
        ask(made, "b1", "b", count=4)
        assert states(made, "a1", "b1") == ["active", "pending"]
        made.send(ConfigChanged, projects=(project("a"), project("b", 4)))
        assert states(made, "a1", "b1") == ["suspended", "active"]


class TestReclaim:
    def test_who_is_below_their_share_gets_it_from_who_is_above(self):
        made = world()
        for number in range(4):
            ask(made, f"a{number}", count=2)
            made.now += SECOND
        made.wait(MIN_RUN)
        out = ask(made, "b1", "b", count=2)
        assert states(made, "a0", "a1", "a2", "a3", "b1") == ["active"] * 3 + ["suspended", "active"]
        drains = [each for each in out if isinstance(each, DrainSlice)]
        assert {(each.mode, each.deadline) for each in drains} == {(DrainMode.SUSPEND, made.now + GRACE)}
        record = made.pool.ledger.reclaims[-1]
        [victim] = record.victims
        assert (record.user, victim.lease, record.served, record.share) == ("ub", "a3", 2000, 2000)
        assert (victim.of, victim.served, victim.share) == ("project a", 8000, 6000)
        assert record.after < record.before

    def test_nothing_is_taken_before_it_has_run_a_while_and_then_at_once(self):
        made = world()
        ask(made, "a1", count=8)
        made.wait(MINUTE)
        ask(made, "b1", "b", count=4)
        made.wait(MIN_RUN - MINUTE - 1)
        assert states(made, "a1", "b1") == ["active", "pending"]
        made.wait(1)
        assert states(made, "a1", "b1") == ["suspended", "active"]

    def test_nobody_takes_beyond_their_share(self):
        made = world()
        for number in range(8):
            ask(made, f"a{number}")
        made.wait(MIN_RUN)
        ask(made, "b1", "b", count=5)
        made.wait(HOUR // 2)
        assert made.state("b1") == "pending"
        ask(made, "b2", "b", count=4)
        assert made.state("b2") == "active"

    def test_who_was_picked_and_is_not_needed_is_put_back(self):
        made = world(project("a", 2), project("b", 6))
        ask(made, "small", count=1)
        made.now += SECOND
        ask(made, "large", count=6, time_limit=24 * HOUR)
        made.wait(MIN_RUN)
        ask(made, "b1", "b", count=6)
        assert states(made, "small", "large", "b1") == ["active", "suspended", "active"]

    def test_the_least_that_was_computed_is_taken_and_of_equals_the_youngest(self):
        made = world()
        for number in range(8):
            ask(made, f"a{number}")
            made.now += MINUTE
        made.wait(MIN_RUN)
        ask(made, "b1", "b")
        assert [number for number in range(8) if made.state(f"a{number}") == "suspended"] == [7]

    def test_within_a_project_users_share_alike_and_other_projects_are_left_alone(self):
        made = world(project("a", 4), project("b", 4))
        made.ask("x", "ann", project="a", count=4, time_limit=5 * HOUR)
        ask(made, "b1", "b", count=4, time_limit=5 * HOUR)
        made.wait(MIN_RUN)
        made.ask("y", "ben", project="a", count=2)
        assert states(made, "x", "b1", "y") == ["suspended", "active", "active"]

    def test_a_project_above_its_share_takes_nothing_from_others_for_a_user_below_theirs(self):
        made = world(project("a", 4), project("b", 4))
        ask(made, "b1", "b", count=3, interactive=True, time_limit=5 * HOUR)
        made.ask("x", "ann", project="a", count=5, interactive=True, time_limit=5 * HOUR)
        made.wait(MIN_RUN)
        made.ask("y", "ben", project="a", count=2)
        assert states(made, "x", "b1", "y")[1] == "active"

    def test_a_freed_part_that_the_claimant_no_longer_wants_is_free_for_all(self):
        made = world()
        for number in range(4):
            ask(made, f"a{number}", count=2)
        made.wait(MIN_RUN)
        made.ignore = {StopSlice}
        ask(made, "b1", "b", count=4)
        made.send(RequestWithdrawn, lease="b1")
        made.ignore = set()
        for order in [each for each in made.told if isinstance(each, StopSlice)]:
            made.obey(order)
        assert states(made, "a0", "a1", "a2", "a3", "b1") == ["active"] * 4 + ["ended"]

    def test_a_claim_that_does_not_come_true_in_time_is_given_up(self):
        made = world()
        ask(made, "a1", count=8)
        made.wait(MIN_RUN)
        made.ignore = {DrainSlice, StopSlice}
        ask(made, "b1", "b", count=4)
        assert made.pool.explain("b1", made.now).reasons[0].reason is Reason.RECLAIMING
        made.wait(GRACE + Defaults().hold)
        assert made.pool.leases["b1"].claim is None
        assert made.pool.explain("b1", made.now).reasons[0].reason is not Reason.RECLAIMING

    def test_a_drain_that_is_never_heard_of_again_is_ended_by_force(self):
        made = world()
        ask(made, "a1", count=8)
        made.wait(MIN_RUN)
        made.ignore = {DrainSlice}
        ask(made, "b1", "b", count=4)
        made.wait(GRACE + 2 * MINUTE)
        assert states(made, "a1", "b1") == ["suspended", "active"]

    def test_the_owner_is_told_at_once_what_happens_when_and_why(self):
        made = world()
        ask(made, "a1", count=8)
        made.wait(MIN_RUN)
        out = ask(made, "b1", "b", count=4)
        told = next(each for each in out if isinstance(each, Notify) and each.notice is Notice.RECLAIM)
        assert told.user == "ua"
        assert "suspended in 2 min" in told.sentence
        assert "scattered data and actors are lost" in told.sentence

    def test_of_several_models_only_the_one_that_is_asked_for_is_taken(self):
        made = World(node("node-1", 4, model="H100"), node("node-2", 4, model="A100"))
        made.send(ConfigChanged, projects=(project("a"), project("b")))
        ask(made, "a1", count=4, model="H100", time_limit=5 * HOUR)
        ask(made, "a2", count=4, model="A100", time_limit=5 * HOUR)
        made.wait(MIN_RUN)
        ask(made, "b1", "b", count=2, model="A100")
        assert states(made, "a1", "a2", "b1") == ["active", "suspended", "active"]

    def test_who_needs_a_model_gets_their_part_of_it_though_others_have_their_share_in_sum(self):
        made = World(node("node-1", 4, model="H100"), node("node-2", 4, model="A100"))
        made.send(ConfigChanged, projects=(project("a"), project("b")))
        for number in range(4):
            ask(made, f"a{number}", model="H100", time_limit=5 * HOUR)
        made.wait(MIN_RUN)
        ask(made, "b1", "b", count=2, model="H100")
        assert made.state("b1") == "active"
        ask(made, "b2", "b", count=2, model="H100")
        assert made.state("b2") == "pending"


class TestNonPreemptible:
    def test_an_interactive_lease_within_its_quota_is_never_taken(self):
        made = world()
        ask(made, "a1", count=4, interactive=True, time_limit=5 * HOUR)
        ask(made, "a2", count=4, time_limit=5 * HOUR)
        made.wait(MIN_RUN)
        ask(made, "b1", "b", count=4)
        assert states(made, "a1", "a2", "b1") == ["active", "suspended", "active"]
        ask(made, "b2", "b", count=1)
        made.wait(HOUR // 2)
        assert states(made, "a1", "b2") == ["active", "pending"]

    def test_beyond_the_quota_oldest_first_it_can_be_taken(self):
        made = world()
        for number in range(4):
            ask(made, f"a{number}", count=2, interactive=True, time_limit=5 * HOUR)
            made.now += SECOND
        made.wait(MIN_RUN)
        ask(made, "b1", "b", count=4)
        assert states(made, "a0", "a1", "a2", "a3") == ["active", "active", "suspended", "suspended"]

    def test_idle_after_all_warnings_it_can_be_taken(self):
        made = world(idle_timeout=20 * MINUTE)
        ask(made, "a1", count=4, interactive=True, time_limit=9 * HOUR)
        ask(made, "b1", "b", count=2, interactive=True, time_limit=9 * HOUR)
        made.send(ConfigChanged, projects=(project("a", 2), project("b", 6)), defaults=made.pool.defaults)
        made.send(ConfigChanged, projects=(project("a", 4), project("b", 4)), defaults=made.pool.defaults)
        made.send(LeaseIdle, lease="a1", since=made.now)
        ask(made, "b2", "b", count=4)
        made.wait(20 * MINUTE + 15 * MINUTE)
        assert [each.notice for each in made.told if isinstance(each, Notify)].count(Notice.IDLE) == 2
        assert made.state("a1") == "active"


class TestElastic:
    def test_an_elastic_lease_grows_into_what_nobody_needs(self):
        made = world()
        ask(made, "a1", max_count=6)
        assert len(made.devices("a1")) == 6

    def test_growth_never_passes_who_waits(self):
        made = world()
        ask(made, "b1", "b", count=6, time_limit=HOUR)
        ask(made, "b2", "b", count=7)
        ask(made, "a1", max_count=4, time_limit=5 * HOUR)
        assert (made.state("b2"), len(made.devices("a1"))) == ("pending", 1)
        made.wait(HOUR)
        assert (made.state("b2"), len(made.devices("a1"))) == ("active", 1)

    def test_surplus_goes_first_and_the_lease_goes_on(self):
        made = world()
        ask(made, "a1", max_count=8, time_limit=5 * HOUR)
        made.wait(MIN_RUN)
        ask(made, "b1", "b", count=4)
        assert states(made, "a1", "b1") == ["active", "active"]
        assert len(made.devices("a1")) == 4

    def test_surplus_gives_way_to_ones_own_requests_too(self):
        made = world()
        ask(made, "a1", max_count=8, time_limit=5 * HOUR)
        made.wait(MIN_RUN)
        ask(made, "a2", count=4)
        assert (made.state("a2"), len(made.devices("a1"))) == ("active", 4)

    def test_an_owner_can_ask_for_fewer_and_for_more(self):
        made = world()
        ask(made, "a1", count=2)
        made.send(LeaseScaled, lease="a1", count=4)
        assert len(made.devices("a1")) == 4
        made.send(LeaseScaled, lease="a1", count=1)
        assert len(made.devices("a1")) == 1
        made.send(LeaseScaled, lease="a1", count=0)
        assert (made.state("a1"), made.devices("a1")) == ("active", [])

    def test_growth_stops_at_a_hard_limit(self):
        made = world(project("a", limit=((ANY, 3 * WHOLE),)))
        ask(made, "a1", max_count=8)
        assert len(made.devices("a1")) == 3

    def test_a_lost_slice_of_an_elastic_lease_is_filled_with_its_surplus(self):
        made = world()
        ask(made, "a1", count=2, max_count=8)
        made.send(NodeLost, node="node-1")
        lease = made.pool.leases["a1"]
        assert (len(lease.slices), len(lease.needs), len(lease.extra)) == (4, 0, 2)


class TestSuspension:
    def suspended(self, **what):
        made = world()
        ask(made, "a1", count=8, time_limit=4 * HOUR, **what)
        made.wait(HOUR)
        ask(made, "b1", "b", count=4, time_limit=HOUR)
        assert made.state("a1") == "suspended"
        return made

    def test_a_suspended_lease_goes_on_in_its_old_place_with_the_time_that_was_left(self):
        made = self.suspended()
        made.now += MINUTE
        ask(made, "a2", count=8)
        assert [each.id for each in explain.order(made.pool._state)] == ["a1", "a2"]
        out = made.release("b1")
        resumed = [each for each in made.told if isinstance(each, AddSlice) and each.lease == "a1"]
        assert (made.state("a1"), len(resumed)) == ("active", 8)
        assert made.pool.leases["a1"].ends_at == made.now + 3 * HOUR
        assert "StartLease" not in kinds(out)

    def test_its_scheduler_is_kept_and_its_name_too(self):
        made = self.suspended(name="training")
        assert made.pool.leases["a1"].scheduler == "up"
        assert refused(ask(made, "a9", name="training")) == [Reason.NAME_TAKEN]

    def test_a_suspended_lease_can_be_released(self):
        made = self.suspended()
        assert "EndLease" in kinds(made.release("a1"))
        assert made.state("a1") == "ended"

    def test_what_was_lost_for_good_is_named(self):
        made = world()
        ask(made, "a1", count=8)
        made.wait(MIN_RUN)
        made.ignore = {DrainSlice}
        ask(made, "b1", "b", count=4)
        made.send(SliceDrained, slice="a1/0", forced=("task-1",), lost=("model (2 GB)",))
        told = next(
            each.sentence for each in made.told if isinstance(each, Notify) and "2 GB" in each.sentence
        )
        assert "1 running tasks were cut off" in told


class TestBackfill:
    def blocked(self):
        """8 GPUs: 6 taken for an hour; a gang of 8 waits; 2 are free."""
        made = world(project("a"))
        ask(made, "long", count=6, time_limit=HOUR)
        ask(made, "gang", count=8, time_limit=HOUR)
        return made

    def test_a_blocked_head_is_not_passed_by_who_would_delay_it(self):
        made = self.blocked()
        ask(made, "late", count=1, time_limit=2 * HOUR)
        assert made.state("late") == "pending"
        told = made.pool.explain("late", made.now)
        assert [each.reason for each in told.reasons] == [Reason.BEHIND, Reason.RESERVED]
        made.wait(HOUR)
        assert made.state("gang") == "active"

    def test_with_the_time_limit_that_is_named_a_request_does_start_now(self):
        made = self.blocked()
        made.wait(MINUTE // 2)
        ask(made, "late", count=1, time_limit=2 * HOUR)
        advice = made.pool.explain("late", made.now).reasons[-1].advice
        assert advice == "A time limit of at most 59 min could start now."
        made.release("late")
        ask(made, "short", count=1, time_limit=59 * MINUTE)
        assert made.state("short") == "active"

    def test_what_is_left_over_at_the_heads_start_can_be_used_by_anybody(self):
        made = world(project("a"))
        ask(made, "long", count=6, time_limit=HOUR)
        ask(made, "gang", count=7, time_limit=HOUR)
        ask(made, "late", count=1, time_limit=9 * HOUR)
        ask(made, "later", count=1, time_limit=9 * HOUR)
        assert states(made, "late", "later") == ["active", "pending"]

    def test_a_large_gang_does_not_starve_under_an_endless_stream_of_small_requests(self):
        made = world(project("a"), project("b"))
        for number in range(8):
            ask(made, f"s{number}", "b", time_limit=HOUR)
        ask(made, "gang", count=8, time_limit=HOUR)
        for number in range(8, 400):
            made.wait(10 * MINUTE)
            ask(made, f"s{number}", "b", time_limit=HOUR)
            if made.state("gang") != "pending":
                break
        assert made.state("gang") == "active"
        assert number < 40

    @pytest.mark.parametrize(
        "gang",
        [
            pytest.param({"count": 12}, id="beside whole devices"),
            pytest.param({"count": 4, "same_node": True}, id="beside devices that are kept by name"),
        ],
    )
    def test_who_may_pass_at_a_quick_look_is_who_has_so_much_left_over_for_so_long(self, gang):
        made = world(project("a", 16), nodes=4, gpus=4)
        for hours in range(8, 14):
            ask(made, f"r{hours}", count=2, time_limit=hours * HOUR)
        ask(made, "r4", time_limit=4 * HOUR)
        ask(made, "gang", **gang)
        state, book = made.pool._state, Book(made.pool._state)
        waiting = [
            state.waiting.shape(submit.make(state, request("x", count=count, time_limit=hours * HOUR)))
            for count in (1, 2, 3)
            for hours in (1, 3, 5, 9, 20)
        ]
        head = state.leases["gang"]
        book.block(head, state.waiting.shape(head))
        left = {each for each in waiting if book.spare(each.base, each.limit) >= each.base.count}
        assert {*book.passing(waiting)} == left
        assert 0 < len(left) < len(waiting)

    def test_an_early_end_is_used_at_once(self):
        made = self.blocked()
        made.release("long")
        assert made.state("gang") == "active"

    def test_gangs_for_one_node_have_their_node_kept(self):
        made = world(project("a"))
        ask(made, "one", count=3, time_limit=2 * HOUR)
        ask(made, "two", count=3, time_limit=HOUR)
        ask(made, "gang", count=4, same_node=True, time_limit=HOUR)
        ask(made, "late", count=2, time_limit=9 * HOUR)
        ask(made, "small", count=1, time_limit=9 * HOUR)
        assert states(made, "late", "small") == ["pending", "active"]
        assert made.pool.leases["small"].slices["small/0"].node == "node-1"
        made.wait(HOUR)
        assert made.state("gang") == "active"

    def test_an_extension_that_would_delay_a_reservation_is_refused_with_the_time_that_can_be_had(self):
        made = world(project("a"))
        ask(made, "short", count=4, time_limit=HOUR)
        ask(made, "long", count=4, time_limit=2 * HOUR)
        ask(made, "gang", count=8, time_limit=HOUR)
        assert refused(made.send(LeaseExtended, lease="short", by=2 * HOUR)) == [Reason.DELAYS_RESERVATION]
        assert "60 more minutes" in made.told[-1].refusals[0].advice
        assert refused(made.send(LeaseExtended, lease="short", by=HOUR)) == []
        assert refused(made.send(LeaseExtended, lease="long", by=HOUR)) == [Reason.DELAYS_RESERVATION]
        assert made.told[-1].refusals[0].sentence.startswith("1 more hour would delay gang")

    def test_with_a_strict_queue_nobody_passes(self):
        made = world(project("a"), passing=False)
        ask(made, "long", count=6, time_limit=HOUR)
        ask(made, "gang", count=8, time_limit=HOUR)
        ask(made, "short", count=2, time_limit=HOUR // 2)
        assert made.state("short") == "pending"


class TestIdle:
    def test_two_warnings_then_others_may_take_it_then_it_ends(self):
        made = world(idle_timeout=20 * MINUTE, idle_warning_gap=10 * MINUTE)
        ask(made, "a1", count=4, interactive=True, time_limit=9 * HOUR)
        made.send(LeaseIdle, lease="a1", since=made.now)
        seen = []
        for minutes in (20, 10, 10, 10):
            made.wait(minutes * MINUTE)
            seen.append((made.pool.leases["a1"].idle_steps, made.state("a1")))
        assert seen == [(1, "active"), (2, "active"), (3, "active"), (4, "ended")]

    @pytest.mark.parametrize("kind", [LeaseKept, LeaseBusy])
    def test_keeping_it_or_working_begins_anew(self, kind):
        made = world(idle_timeout=20 * MINUTE, idle_warning_gap=10 * MINUTE)
        ask(made, "a1", time_limit=9 * HOUR)
        made.send(LeaseIdle, lease="a1", since=made.now)
        made.wait(35 * MINUTE)
        made.send(kind, lease="a1")
        made.wait(15 * MINUTE)
        assert made.pool.leases["a1"].idle_steps == 0

    def test_idle_time_is_in_the_ledger(self):
        made = world()
        ask(made, "a1", count=2, time_limit=9 * HOUR)
        made.wait(HOUR)
        made.send(LeaseIdle, lease="a1", since=made.now)
        made.wait(HOUR // 2)
        made.send(LeaseBusy, lease="a1")
        made.wait(HOUR // 2)
        made.release("a1")
        account = next(iter(made.pool.ledger.accounts.values()))
        assert (account.used, account.idle) == (2 * WHOLE * 2 * HOUR, 2 * WHOLE * HOUR // 2)

    def test_a_lease_can_be_without_an_idle_timeout(self):
        made = world(idle_timeout=20 * MINUTE)
        ask(made, "a1", idle_timeout=-1, time_limit=9 * HOUR)
        made.send(LeaseIdle, lease="a1", since=made.now)
        made.wait(8 * HOUR)
        assert made.pool.leases["a1"].idle_steps == 0


class TestExplain:
    def test_whoever_waits_is_told_the_reason_the_place_and_the_start(self):
        made = world(project("a"))
        for name in ("one", "two", "three"):
            ask(made, name, count=8, time_limit=HOUR)
            made.now += 1
        made.now -= 3
        told = made.pool.explain("three", made.now)
        assert (told.place, told.expected_start) == (2, made.now + 2 * HOUR)
        assert [each.reason for each in told.reasons] == [Reason.BEHIND, Reason.NO_ROOM]
        assert "your own two" in told.sentences[0]

    def test_who_is_at_a_limit_is_told_when_enough_of_their_own_ends(self):
        made = world(project("a", limit=((ANY, 4 * WHOLE),)))
        ask(made, "one", count=3, time_limit=HOUR)
        ask(made, "two", count=1, time_limit=2 * HOUR)
        ask(made, "three", count=3)
        told = made.pool.explain("three", made.now)
        assert (told.reasons[0].reason, told.expected_start) == (Reason.AT_LIMIT, made.now + HOUR)

    def test_the_order_is_explained_by_the_siblings_that_differ(self):
        made = world(nodes=1)
        ask(made, "a1", count=4)
        ask(made, "b1", "b", count=4)
        ask(made, "a2")
        assert "project b is below its share" in made.pool.explain("a2", made.now).sentences[0]

    def test_a_dry_run_says_that_it_would_start_now_and_where(self):
        made = world()
        told = made.pool.would(request("x", "ua", project="a", count=2), made.now)
        assert told.starts_now
        assert "node-1/gpu0" in told.sentences[0]

    def test_a_dry_run_says_when_else_and_why_and_who_would_give_back(self):
        made = world()
        ask(made, "a1", count=8, time_limit=4 * HOUR)
        told = made.pool.would(request("x", "ua", project="a", count=2), made.now)
        assert (told.starts_now, told.expected_start) == (False, made.now + 4 * HOUR)
        made.wait(MIN_RUN)
        told = made.pool.would(request("y", "ub", project="b", count=2), made.now)
        assert (told.reasons[0].reason, told.expected_start) == (Reason.RECLAIMING, made.now + GRACE)
        assert "a1" in told.sentences[0]

    def test_a_dry_run_changes_nothing(self):
        made = world()
        ask(made, "a1", count=8)
        made.wait(MIN_RUN)
        before, version = made.pool.snapshot(), made.pool.version
        for count in (1, 4, 8, 99):
            made.pool.would(request("y", "ub", project="b", count=count), made.now)
        assert (made.pool.snapshot(), made.pool.version) == (before, version)
        made.pool.validate()

    def test_the_whole_queue_can_be_had_at_once(self):
        made = world(project("a"))
        for name in ("one", "two", "three"):
            ask(made, name, count=8, time_limit=HOUR)
            made.now += 1
        made.now -= 3
        assert made.pool.queue(made.now) == [("two", made.now + HOUR), ("three", made.now + 2 * HOUR)]


class TestLedger:
    def test_usage_adds_up_over_a_restart_and_is_kept_by_user_project_model_and_kind(self):
        made = world(nodes=1)
        ask(made, "a1", count=2, time_limit=9 * HOUR)
        ask(made, "a2", milli=500, time_limit=9 * HOUR)
        made.wait(HOUR)
        made.pool = type(made.pool).restore(made.pool.snapshot())
        made.wait(HOUR)
        for ident in ("a1", "a2"):
            made.release(ident)
        found = {(each.user, each.model, each.kind): each.used for each in made.pool.ledger.accounts.values()}
        assert found == {
            ("ua", "H100-80GB", "whole"): 2 * WHOLE * 2 * HOUR,
            ("ua", "H100-80GB", "share"): 500 * 2 * HOUR,
        }

    def test_what_a_person_used_is_kept_by_the_hour_over_restarts_and_changes_of_form(self):
        made = world(nodes=1)
        made.now += HOUR - made.now % HOUR + HOUR // 2
        first = made.now // HOUR
        ask(made, "a1", count=2, time_limit=9 * HOUR)
        made.wait(HOUR)
        made.send(LeaseIdle, lease="a1", since=made.now)
        made.wait(HOUR)
        running = made.pool.history("ua", made.now)
        made.pool = type(made.pool).restore(made.pool.snapshot())
        assert made.pool.history("ua", made.now) == running
        made.release("a1")
        two = 2 * WHOLE * HOUR
        assert made.pool.history("ua", made.now) == [
            [first, two // 2, 0],
            [first + 1, two, two // 2],
            [first + 2, two // 2, two // 2],
        ]
        assert made.pool.history("ub", made.now) == []
        old = made.pool.snapshot()
        del old["hours"]
        assert type(made.pool).restore({**old, "form": 1}).history("ua", made.now) == []

    def test_hours_that_are_too_old_are_in_the_sums_only(self):
        day = 24 * HOUR
        made = world(nodes=1, max_time=200 * day)
        ask(made, "a1", time_limit=100 * day)
        made.wait(50 * day)
        made.release("a1")
        made.pool.validate()
        assert sum(each.used for each in made.pool.ledger.accounts.values()) == WHOLE * 50 * day
        hours = made.pool.history("ua", made.now)
        assert len(hours) == KEEP_HOURS
        made.wait(20 * day)
        assert made.pool.history("ua", made.now) == []
        ask(made, "b1", "b")
        assert made.pool.snapshot()["hours"] == {}

    def test_usage_of_what_runs_is_in_the_figures(self):
        made = world()
        ask(made, "a1", count=2)
        made.wait(HOUR // 2)
        figures = made.pool.usage(made.now)
        mine = next(each for each in figures["users"] if each["user"] == "ua")
        assert mine["used"] == 2 * WHOLE * HOUR // 2
        assert mine["served"][ANY] == 2 * WHOLE

    def test_a_reclaim_says_what_it_cost(self):
        made = world()
        ask(made, "a1", count=8, time_limit=4 * HOUR)
        made.wait(MIN_RUN)
        ask(made, "b1", "b", count=4)
        assert made.pool.ledger.reclaims[0].victims[0].ran == MIN_RUN

    def test_a_model_weighs_by_its_memory_unless_told_otherwise(self):
        made = World(
            node("node-1", 1, model="H100", memory=80 * GB), node("node-2", 1, model="T4", memory=16 * GB)
        )
        made.send(ConfigChanged, projects=(project("a"),))
        made.ask("x", "ann", project="a", model="H100")
        made.ask("y", "ben", project="a", model="T4")
        tree = made.pool._state.tree
        assert (tree.user("a", "ann").rate, tree.user("a", "ben").rate) == (80 * WHOLE, 16 * WHOLE)

    def test_whoever_takes_most_cpus_of_a_node_pays_for_them(self):
        made = world(nodes=1)
        ask(made, "a1", cpus=48_000)
        assert made.pool._state.tree.user("a", "ua").rate == 3 * 80 * WHOLE


def test_a_replacement_may_use_what_is_held_for_others_only_within_its_quota():
    for quota, kept in ((4, 4), (2, 3)):
        made = world(project("a", quota), project("b", 4), project("c"))
        ask(made, "c1", "c", count=4, time_limit=9 * HOUR)
        made.wait(MIN_RUN)
        ask(made, "a1", count=4, time_limit=9 * HOUR)
        made.ignore = {StopSlice}
        ask(made, "b1", "b", count=4)
        for ident in ("c1/0", "c1/1", "c1/2"):
            made.send(SliceFreed, slice=ident)
        made.ignore = set()
        made.send(NodeJoined, node=node("node-2", 3), adopted=("a1/0", "a1/1", "a1/2", "a1/3"))
        assert len(made.devices("a1")) == kept, quota


def test_users_of_a_project_stand_by_their_own_numbers():
    users = (UserShare(name="ann", quota=((ANY, 6 * WHOLE),)),)
    made = world(Project(name="a", users=users))
    made.ask("y", "ben", project="a", count=8, time_limit=5 * HOUR)
    made.wait(MIN_RUN)
    made.ask("x", "ann", project="a", count=7)
    assert states(made, "y", "x") == ["suspended", "active"]


def test_a_user_is_guaranteed_a_quota_in_a_project_that_states_none():
    ann = UserShare(name="ua", quota=((ANY, 3 * WHOLE),))
    made = world(project("a", users=(ann,)), project("b", weight=9), nodes=1)
    ask(made, "b1", "b", count=4)
    ask(made, "a1", count=3)
    tree = made.pool._state.tree
    tree.refresh()
    assert [tree.project(name).share[ANY] for name in ("a", "b")] == [3 * WHOLE, WHOLE]
    assert tree.user("a", "ua").share[ANY] == 3 * WHOLE


def test_what_was_used_counts_after_another_configuration_although_nothing_runs():
    made = world(nodes=1)
    ask(made, "a1", count=2)
    made.wait(HOUR)
    made.release("a1")
    before = made.pool.usage(made.now)["users"]
    made.send(ConfigChanged, projects=(project("a"), project("b")), defaults=Defaults(grace=MINUTE))
    after = made.pool.usage(made.now)["users"]
    assert before[0]["decayed"] > 0
    assert [each["decayed"] for each in after] == pytest.approx(
        [each["decayed"] for each in before], rel=1e-6
    )


def test_other_numbers_may_change_while_a_lost_node_makes_the_quotas_too_many():
    made = world()
    made.send(NodeLost, node="node-2")
    assert not refused(made.send(ConfigChanged, projects=made.pool.projects, defaults=Defaults(grace=MINUTE)))
    out = made.send(ConfigChanged, projects=made.pool.projects[:1] * 1, defaults=Defaults())
    assert not refused(out)
    out = made.send(ConfigChanged, projects=(project("a", 5),), defaults=Defaults())
    assert refused(out) == [Reason.QUOTA_SUM]


def test_what_a_lease_holds_that_cannot_be_computed_again_is_named_and_counts_as_work_lost():
    made = world(nodes=1)
    for ident in ("a1", "a2"):
        ask(made, ident, count=2)
        made.now += SECOND
    made.wait(MIN_RUN)
    # By age and work alone, the younger a2 would go.
    parts = (("table", 3 * GB), ("model", GB // 2))
    made.send(LeaseHolds, lease="a2", parts=parts, count=4, size=4 * GB)
    out = ask(made, "b1", "b", count=2)
    assert states(made, "a1", "a2") == ["suspended", "active"]
    [told] = [each for each in out if isinstance(each, Notify) and each.notice is Notice.RECLAIM]
    assert "actors are lost; it has none now" in told.sentence
    made.release("b1")
    made.send(LeaseHolds, lease="a1", parts=parts, count=4, size=4 * GB)
    made.wait(MIN_RUN)
    out = ask(made, "b2", "b", count=2)
    [told] = [each for each in out if isinstance(each, Notify) and each.notice is Notice.RECLAIM]
    assert "4 GB in all: table (3 GB), model (0.5 GB) and 2 more." in told.sentence
    assert '"lost": [["table", 3000000000], ["model", 500000000]]' in told.data


def test_what_a_reclaim_undid_is_in_its_record_and_in_the_ledger():
    made = world(nodes=1)
    for ident in ("a1", "a2"):
        ask(made, ident, count=2)
        made.now += SECOND
    made.wait(MIN_RUN)
    made.ignore = {DrainSlice}
    ask(made, "b1", "b", count=2)
    parts = made.pool.leases["a2"].slices
    for ident in list(parts):
        made.send(SliceDrained, slice=ident, work=30 * SECOND)
    [record] = made.pool.ledger.reclaims
    assert (record.lease, record.number, record.cost) == ("b1", 1, 2 * WHOLE * 30 * SECOND)
    lost = {each["user"]: each["lost"] for each in made.pool.usage(made.now)["accounts"]}
    assert lost == {"ua": 2 * WHOLE * 30 * SECOND, "ub": 0}
    assert Pool.restore(made.pool.snapshot()) == made.pool


def test_who_waits_for_others_to_give_back_is_first_and_a_suspended_one_says_why_it_was():
    made = world(nodes=1)
    ask(made, "a1", count=4)
    made.wait(MIN_RUN)
    made.ignore = {DrainSlice}
    ask(made, "b1", "b", count=2)
    ask(made, "b2", "b", count=2)
    assert made.pool.order(9) == ["b1", "b2"]
    assert [made.pool.explain(each, made.now).place for each in made.pool.order(9)] == [1, 2]
    for ident in list(made.pool.leases["a1"].slices):
        made.send(SliceDrained, slice=ident)
    assert made.state("a1") == "suspended"
    said = made.pool.explain("a1", made.now).sentences
    assert said[0] == (
        "a1 was suspended: project b is below its share (2 GPUs) and project a above its (2 GPUs)."
    )
    assert len(said) > 1


def test_an_account_tells_used_and_decayed_and_both_outlive_a_restart_and_another_half_life():
    made = world(nodes=1, half_life=HOUR)
    ask(made, "a1", count=2, time_limit=8 * HOUR)
    made.wait(2 * HOUR)
    made.release("a1")
    made.wait(HOUR)

    def account():
        [found] = Pool.restore(made.pool.snapshot()).usage(made.now)["accounts"]
        return found["used"], found["decayed"]

    used, decayed = account()
    assert used == 2 * WHOLE * 2 * HOUR
    # The integral of 2 ** -age from 3 h ago to 1 h ago, in hours.
    assert decayed == pytest.approx(2 * WHOLE * HOUR * (2**-1 - 2**-3) / math.log(2), rel=1e-4)
    made.send(ConfigChanged, projects=made.pool.projects, defaults=Defaults(half_life=2 * HOUR))
    assert account() == (used, pytest.approx(decayed, rel=1e-4))
    made.wait(2 * HOUR)
    assert account() == (used, pytest.approx(decayed / 2, rel=1e-4))


def test_an_idle_lease_has_all_its_warnings_although_nobody_looked_for_hours():
    made = world(nodes=1)
    ask(made, "a1", time_limit=23 * HOUR)
    made.send(LeaseIdle, lease="a1", since=made.now)
    made.now += 3 * Defaults().idle_timeout
    gap = Defaults().idle_warning_gap
    told = [len([each for each in made.send(Tick) if isinstance(each, Notify)]) for _ in range(3)]
    assert (told, made.state("a1")) == ([1, 0, 0], "active")
    for expected in ("warning 2 of 2", "others may take it"):
        made.now += gap
        [said] = [each.sentence for each in made.send(Tick) if isinstance(each, Notify)]
        assert expected in said
    made.now += gap
    made.send(Tick)
    assert made.state("a1") == "ended"
    assert made.pool.leases["a1"].why == "idle for 405 min"


class TestFoundByTheMachine:
    """What `test_machine` has found, one small case for each kind."""

    def test_with_one_model_left_nobody_is_above_a_share_of_it(self):
        made = World(node("node-1", 4, model="H100"), node("node-2", 4, model="A100"))
        made.send(ConfigChanged, projects=(project("a"), project("b")))
        ask(made, "a1")
        other = {"node-1", "node-2"} - {each.node for each in made.pool.leases["a1"].slices.values()}
        made.send(NodeLost, node=other.pop())

    def test_who_was_held_up_by_a_head_starts_as_soon_as_others_give_back_for_that_head(self):
        made = World(node("node-1", 4, model="H100"), node("node-2", 4, model="A100"))
        made.send(ConfigChanged, projects=(project("a"), Project(name="b", quota=(("H100", 4 * WHOLE),))))
        ask(made, "a1", count=4, model="H100", time_limit=5 * HOUR)
        ask(made, "b1", "b", count=4, model="H100", time_limit=5 * HOUR)
        ask(made, "a2", milli=500, time_limit=9 * HOUR)
        made.ignore = {DrainSlice}
        made.wait(MIN_RUN)
        assert made.pool.leases["b1"].claim
        assert made.state("a2") == "active"

    @pytest.mark.parametrize("restarted", [False, True])
    def test_a_quota_of_a_model_that_the_pool_has_no_more_of_is_refused_after_a_restart_too(self, restarted):
        made = World(node("node-1", 4, model="H100"), node("node-2", 4, model="A100"))
        made.send(NodeLost, node="node-2")
        if restarted:
            made.pool = type(made.pool).restore(made.pool.snapshot())
        projects = (Project(name="a", quota=(("A100", 2 * WHOLE),)),)
        assert refused(made.send(ConfigChanged, projects=projects)) == [Reason.QUOTA_SUM]

    def test_a_lease_that_is_being_suspended_is_not_scaled_to_nothing_as_it_will_wait(self):
        made = world()
        ask(made, "a1", count=8, time_limit=5 * HOUR)
        made.wait(MIN_RUN)
        made.ignore = {DrainSlice}
        ask(made, "b1", "b", count=4)
        assert made.state("a1") == "draining"
        assert refused(made.send(LeaseScaled, lease="a1", count=0)) == [Reason.BAD_REQUEST]
        assert refused(made.send(LeaseScaled, lease="a1", count=2)) == []

    def test_a_lease_of_nothing_but_surplus_gives_that_back_and_is_not_suspended(self):
        made = world()
        ask(made, "a1", count=8, time_limit=5 * HOUR)
        made.send(LeaseScaled, lease="a1", count=0)
        made.send(LeaseScaled, lease="a1", count=8)
        made.wait(MIN_RUN)
        ask(made, "b1", "b", count=4)
        assert (made.state("a1"), len(made.devices("a1"))) == ("active", 4)

    def test_a_claim_outlives_a_device_that_was_held_for_it(self):
        made = world(nodes=3, gpus=3)
        for number in range(3):
            ask(made, f"a{number}", count=2, time_limit=5 * HOUR)
        ask(made, "b0", "b", count=1, time_limit=5 * HOUR)
        made.wait(MIN_RUN)
        made.ignore = {StopSlice}
        ask(made, "b1", "b", count=3)
        [*held] = made.pool.leases["b1"].claim.held.values()
        assert {part.device for part in held} == {"GPU-node-2-2"}
        running = [each for lease in made.pool.leases.values() for each in lease.slices.values()]
        there = tuple(each.id for each in running if each.node == "node-2")
        before = made.pool.snapshot()["leases"]["b1"]["claim"]["held"]
        made.send(NodeJoined, node=node("node-2", 2), adopted=there)
        assert made.pool.leases["b1"].claim.held == {}
        now = made.pool.snapshot()
        assert type(made.pool).restore(now).snapshot() == now
        former = copy.deepcopy(now)  # of a pool that took no notice
        former["leases"]["b1"]["claim"]["held"] = before
        assert type(made.pool).restore({**former, "form": 3}).snapshot() == now
        made.ignore = set()
        for order in [each for each in made.told if isinstance(each, StopSlice)]:
            made.obey(order)
        assert made.pool.leases["b1"].claim is None


class TestLimits:
    """A hard limit holds wherever a request is placed, also for what the request leaves open."""

    def test_a_limit_of_a_model_holds_for_requests_that_name_none(self):
        made = World(node("node-1", 4, model="H100"), node("node-2", 4, model="A100"))
        made.send(ConfigChanged, projects=(Project(name="a", limit=(("A100", WHOLE),)),))
        assert refused(ask(made, "gang", count=8)) == [Reason.TOO_MANY_GPUS]
        for ident, count in (("four", 4), ("one", 1), ("two", 1)):
            ask(made, ident, count=count)
        assert states(made, "four", "one", "two") == ["active", "active", "pending"]
        assert made.pool.leases["one"].charges["one/0"].model == "A100"
        told = made.pool.explain("two", made.now).reasons
        assert [each.reason for each in told] == [Reason.AT_LIMIT, Reason.NO_ROOM]
        assert "has 1 of at most 1 A100" in told[0].sentence

    def test_who_may_have_no_model_any_more_is_told_so_and_holds_up_nobody(self):
        made = World(node("node-1", 4, model="H100"), node("node-2", 4, model="A100"))
        limits = (("A100", WHOLE), ("H100", WHOLE))
        made.send(ConfigChanged, projects=(Project(name="a", limit=limits), project("b")))
        ask(made, "one")
        ask(made, "two")
        ask(made, "three")
        ask(made, "b1", "b", count=6, time_limit=9 * HOUR)
        assert states(made, "one", "two", "three", "b1") == ["active", "active", "pending", "active"]
        told = made.pool.explain("three", made.now)
        assert (told.reasons[0].reason, told.expected_start) == (Reason.AT_LIMIT, made.now + HOUR)

    def test_a_limit_of_cpus_counts_a_slices_own_part_of_its_node(self):
        made = world(Project(name="a", limit=(("cpus", 40_000),)), nodes=1)
        for ident in ("one", "two", "three"):
            ask(made, ident)
        assert states(made, "one", "two", "three") == ["active", "active", "pending"], "16 cores each"
        assert made.pool.explain("three", made.now).reasons[0].reason is Reason.AT_LIMIT

    def test_growth_keeps_to_the_limit_of_a_model(self):
        made = World(node("node-1", 4, model="H100"), node("node-2", 4, model="A100"))
        made.send(ConfigChanged, projects=(Project(name="a", limit=(("A100", WHOLE),)),))
        ask(made, "one", max_count=8)
        assert len(made.devices("one")) == 5

    def test_a_replacement_may_be_of_the_model_that_it_is_charged_for_already(self):
        made = World(node("node-1", 1, model="H100"), node("node-2", 2, model="A100"))
        made.send(ConfigChanged, projects=(Project(name="a", limit=(("A100", WHOLE),)), project("b")))
        ask(made, "b1", "b", model="H100")
        ask(made, "one")
        made.send(Cordoned, target=made.devices("one")[0], why="maintenance", drain=True)
        assert [made.pool.devices[each].device.model for each in made.devices("one")] == ["A100"]
        assert made.pool.leases["one"].number == 2
