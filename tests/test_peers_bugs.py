"""What other schedulers of GPUs have got wrong, each as the rule that it broke.

The cases are our own; the lessons are those of the peers' bug trackers (KAI-Scheduler, Kueue, Volcano, Ray,
Slurm's and dask-gateway's users). In most, eight GPUs belong half to project `a`, half to project `b`.
"""

from __future__ import annotations

import pytest

from jupyter_gpupool.core import placement
from jupyter_gpupool.core.model import (
    ANY,
    HOUR,
    MINUTE,
    SECOND,
    WHOLE,
    ConfigChanged,
    Defaults,
    NodeJoined,
    NodeLost,
    Project,
    Reason,
    RequestSubmitted,
    SliceFreed,
    StopSlice,
)
from tests.pool_helpers import World, ask, node, project, request, states, world

MIN_RUN = Defaults().min_run


# ------------------------------------------------------------------------------ endless mutual preemption


@pytest.mark.parametrize(
    ("projects", "who"),
    [
        pytest.param((project("a"), project("b"), project("c")), "abc", id="of equals"),
        pytest.param((project("a", 3), project("b", 2), project("c", weight=7)), "abc", id="of unequals"),
        pytest.param(
            (project("up", 4), project("a", parent="up"), project("b", parent="up"), project("c", 4)),
            "abc",
            id="across the levels of a tree",
        ),
        pytest.param((project("a", tier=1), project("b"), project("c")), "abc", id="of tiers"),
    ],
)
def test_taking_from_each_other_comes_to_an_end(projects, who):
    made = world(*projects)
    for number in range(6):
        for each in who:
            ask(made, f"{each}{number}", each, count=1 + number % 4, time_limit=24 * HOUR)
    made.wait(10 * MIN_RUN)
    before = made.pool.ledger.count
    assert before < 18, "that is more than there are leases"
    made.wait(5 * HOUR)
    assert made.pool.ledger.count == before


# ------------------------------------------------------------------ reclaim that stops at quota, not share


def test_what_is_deserved_above_the_quota_is_taken_back_too():
    made = world(project("a"), project("b"))
    for number in range(8):
        ask(made, f"a{number}")
    made.wait(MIN_RUN)
    ask(made, "b1", "b", count=4)
    assert made.state("b1") == "active"


def test_what_is_deserved_by_weight_beside_a_quota_is_taken_back_too():
    made = world(project("a", 2), project("b", 2, weight=3))
    for number in range(8):
        ask(made, f"a{number}")
    made.wait(MIN_RUN)
    ask(made, "b1", "b", count=5)
    assert made.state("b1") == "active", "two by quota and three of the four that nobody is guaranteed"


# ------------------------------------------------------------------------------------------ over-eviction


def test_no_more_is_taken_than_is_needed():
    made = world()
    ask(made, "big", count=4)
    made.wait(5 * MINUTE)
    for number in range(4):
        ask(made, f"a{number}")
    made.wait(MIN_RUN)
    ask(made, "b1", "b", count=2)
    assert states(made, "big", "b1") == ["active", "active"]
    assert states(made, *(f"a{number}" for number in range(4))).count("suspended") == 2


def test_nobody_is_suspended_while_surplus_would_do_and_no_more_of_that_goes_than_is_needed():
    made = world()
    ask(made, "a1", count=3, time_limit=5 * HOUR)
    ask(made, "a2", count=1, max_count=5, time_limit=5 * HOUR)
    made.wait(MIN_RUN)
    assert len(made.devices("a2")) == 5
    ask(made, "b1", "b", count=2)
    assert states(made, "a1", "a2", "b1") == ["active", "active", "active"]
    assert len(made.devices("a2")) == 3


def test_what_is_being_given_back_for_one_request_is_not_asked_for_again():
    """At every event while the first victims finish their tasks, a peer picked some more."""
    made = world()
    for number in range(8):
        ask(made, f"a{number}")
    made.wait(MIN_RUN)
    made.ignore = {StopSlice}
    ask(made, "b1", "b", count=2)
    for _ in range(5):
        made.wait(5 * SECOND)
        ask(made, f"late{made.now}")
    assert states(made, *(f"a{number}" for number in range(8))).count("active") == 6


# ------------------------------------------------------------ an evicted lease that takes its part again


def test_who_was_taken_from_does_not_take_the_freed_part_back():
    """The victim's next attempt was the first to see what it had just given back."""
    made = world()
    ask(made, "a1", count=4)
    ask(made, "a2", count=4)
    made.wait(MIN_RUN)
    made.ignore = {StopSlice}
    ask(made, "b1", "b", count=4)
    victim = next(each for each in ("a1", "a2") if made.state(each) == "draining")
    idents = list(made.pool.leases[victim].slices)
    for ident in idents[:2]:
        made.send(SliceFreed, slice=ident)
    ask(made, "a3")
    assert states(made, victim, "b1", "a3") == ["draining", "pending", "pending"]
    assert made.pool.explain("b1", made.now).reasons[0].reason is Reason.RECLAIMING
    for ident in idents[2:]:
        made.send(SliceFreed, slice=ident)
    assert states(made, victim, "b1", "a3") == ["suspended", "active", "pending"]


# ------------------------------------------------------------------ a gang stuck after a node came back


def test_a_gang_that_lost_a_node_is_whole_again_when_the_node_is_back():
    made = world()
    ask(made, "gang", count=8, time_limit=5 * HOUR)
    made.send(NodeLost, node="node-2")
    assert len(made.devices("gang")) == 4
    made.send(NodeJoined, node=node("node-2"))
    assert (made.state("gang"), len(made.devices("gang"))) == ("active", 8)


def test_a_gang_goes_before_the_queue_when_what_it_lost_is_back():
    made = world()
    ask(made, "gang", count=8, time_limit=5 * HOUR)
    made.send(NodeLost, node="node-2")
    ask(made, "b1", "b", count=1)
    made.send(NodeJoined, node=node("node-2"))
    assert len(made.devices("gang")) == 8
    assert made.state("b1") == "pending"


def test_a_gang_that_waits_for_a_node_starts_when_the_node_is_back():
    made = world()
    made.send(NodeLost, node="node-2")
    ask(made, "gang", count=4, same_node=True)
    ask(made, "other", "b", count=4)
    assert states(made, "gang", "other") == ["active", "pending"]
    made.send(NodeJoined, node=node("node-2"))
    assert made.state("other") == "active"


# --------------------------------------------------------------- floating-point amounts that never fit


@pytest.mark.parametrize(("milli", "count"), [(100, 10), (333, 3), (600, 1), (200, 5), (1, 1000)])
def test_amounts_that_add_up_do_fit_also_after_many_have_come_and_gone(milli, count):
    """Ten tenths as floating-point numbers were more than one; after some turns even less was left."""
    made = world(nodes=1, gpus=1)
    few = min(count, 10)
    for turn in range(2):
        for number in range(few):
            ask(made, f"{turn}-{number}", milli=milli * count // few)
        assert states(made, *(f"{turn}-{number}" for number in range(few))) == ["active"] * few
        for number in range(few):
            made.release(f"{turn}-{number}")
    ask(made, "whole")
    assert made.state("whole") == "active"


# -------------------------------------------------------------------------------- head-of-line blocking


def test_a_blocked_head_is_passed_by_who_does_not_delay_it():
    made = world(project("a"))
    ask(made, "long", count=6, time_limit=HOUR)
    ask(made, "gang", count=8, time_limit=HOUR)
    ask(made, "short", count=2, time_limit=HOUR // 2)
    assert states(made, "gang", "short") == ["pending", "active"]


def test_a_head_that_waits_for_one_model_holds_up_nobody_who_can_do_with_another():
    made = World(node("node-1", 4, model="H100"), node("node-2", 4, model="A100"))
    made.send(ConfigChanged, projects=(project("a"), project("b")))
    ask(made, "full", count=4, model="H100", time_limit=5 * HOUR)
    ask(made, "head", "b", count=3, model="H100", time_limit=5 * HOUR)
    ask(made, "named", model="A100", time_limit=9 * HOUR)
    ask(made, "unnamed", count=2, time_limit=9 * HOUR)
    ask(made, "part", milli=500, time_limit=9 * HOUR)
    assert states(made, "head", "named", "unnamed", "part") == ["pending", "active", "active", "active"]


# ------------------------------------------------------ a queue that drills thousands of hopeless items


def test_a_thousand_equal_hopeless_requests_are_looked_at_once(monkeypatch):
    made = world(project("a"), nodes=1)
    ask(made, "full", count=3)
    for number in range(1000):
        asked = request(f"r{number}", "ua", project="a", cpus=60_000)
        made.pool.handle(RequestSubmitted(now=made.now, request=asked))
    calls = []
    place = placement.place
    monkeypatch.setattr(placement, "place", lambda *args, **more: calls.append(1) or place(*args, **more))
    made.release("full")
    assert len(calls) < 30


# ------------------------------------------------------------- a user at their limit who blocks others


@pytest.mark.parametrize("passing", [True, False], ids=["with backfill", "in a strict queue"])
def test_who_is_at_their_limit_holds_up_nobody_behind(passing):
    limited = Project(name="a", quota=((ANY, 8 * WHOLE),), limit=((ANY, 2 * WHOLE),))
    made = world(limited, project("b"), passing=passing)
    ask(made, "a1", count=2, time_limit=5 * HOUR)
    ask(made, "a2", count=2)
    made.now += MINUTE
    ask(made, "b1", "b", count=6, time_limit=9 * HOUR)
    assert states(made, "a1", "a2", "b1") == ["active", "pending", "active"]
    assert made.pool.explain("a2", made.now).reasons[0].reason is Reason.AT_LIMIT
