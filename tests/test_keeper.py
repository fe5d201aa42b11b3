"""The pool and its journal, the keys of leases, and which leases do nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_gpupool.controller.backup import requests_of
from jupyter_gpupool.controller.clock import Clock
from jupyter_gpupool.controller.idleness import Idleness
from jupyter_gpupool.controller.keeper import Keeper
from jupyter_gpupool.controller.keys import Keys
from jupyter_gpupool.controller.records import StoreError
from jupyter_gpupool.controller.store import Store
from jupyter_gpupool.core.model import (
    HOUR,
    LeaseBusy,
    LeaseFreed,
    LeaseIdle,
    LeaseReleased,
    LeaseStarted,
    LeaseState,
    NodeJoined,
    Reading,
    RequestSubmitted,
    SliceFreed,
    SliceState,
    Tick,
)
from tests.pool_helpers import node, request

NOW = 1_000_000


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "journal.sqlite")
    yield store
    store.close()


def test_what_cannot_be_journaled_has_not_happened(store, monkeypatch):
    followed: list[Any] = []
    keeper = Keeper(store, Clock(store), lambda event, instructions: followed.append(event))

    def fail(*_arguments: Any) -> None:
        raise StoreError("The disk is full.")

    monkeypatch.setattr(store, "append", fail)
    with pytest.raises(StoreError):
        keeper.submit(NodeJoined(now=NOW, node=node()))
    assert not keeper.pool.nodes
    assert followed == []


def test_an_event_is_journaled_before_what_follows_is_done(store):
    seen: list[int] = []
    keeper = Keeper(store, Clock(store), lambda event, instructions: seen.append(store.last_seq))
    keeper.submit(NodeJoined(now=NOW, node=node()))
    assert seen == [1]


def test_a_replay_gives_an_equal_pool(store):
    keeper = Keeper(store, Clock(store), lambda event, instructions: None)
    keeper.submit(NodeJoined(now=NOW, node=node()))
    keeper.submit(RequestSubmitted(now=NOW, request=request("L1")))
    keeper.submit(LeaseReleased(now=NOW, lease="L1"))
    assert Keeper(store, Clock(store), lambda event, instructions: None).pool == keeper.pool


def test_what_has_run_is_remembered_once_with_how_long_it_ran(store):
    """Two GPUs for 90 s; what was withdrawn before it ran is not told of. A replay says it again."""
    clock = Clock(store)
    keeper, begin = Keeper(store, clock, lambda event, instructions: None), clock.now()
    keeper.submit(NodeJoined(now=begin, node=node("n1", 2)))
    keeper.submit(RequestSubmitted(now=begin, request=request("r1", count=2)))
    keeper.submit(RequestSubmitted(now=begin, request=request("r2")))
    keeper.submit(LeaseReleased(now=begin, lease="r2"))
    keeper.submit(LeaseStarted(now=begin, lease="r1", address="tls://x"))
    end = begin + 90_000
    keeper.submit(LeaseReleased(now=end, lease="r1"))
    for event in (SliceFreed(now=end, slice="r1/0"), SliceFreed(now=end, slice="r1/1")):
        keeper.submit(event)
    keeper.submit(LeaseFreed(now=end, lease="r1"))
    Keeper(store, clock, lambda event, instructions: None)
    found = requests_of(store.path, since=3600)
    said = [(each["seconds"], each["milli"], each["project"], each["user"]) for each in found]
    assert said == [(90.0, 2000, "default", "ann")]
    assert abs(found[0]["time"] - clock.wall(begin)) < 1
    assert requests_of(store.path, since=-3600) == []


def test_a_tick_from_which_nothing_follows_is_not_journaled_and_one_that_ends_a_lease_is(store):
    keeper = Keeper(store, SimpleNamespace(now=lambda: clock[0]), lambda event, instructions: None)
    clock = [NOW]
    keeper.submit(NodeJoined(now=NOW, node=node()))
    keeper.submit(RequestSubmitted(now=NOW, request=request("L1")))
    keeper.tick()
    assert store.last_seq == 2
    clock[0] = NOW + 2 * HOUR
    keeper.tick()
    assert store.last_seq == 3
    assert [type(event) for _, event in store.replay()][-1] is Tick


def test_a_tick_that_cannot_be_journaled_leaves_the_pool_as_the_journal_says(store, monkeypatch):
    clock = [NOW]
    keeper = Keeper(store, SimpleNamespace(now=lambda: clock[0]), lambda event, instructions: None)
    keeper.submit(NodeJoined(now=NOW, node=node()))
    keeper.submit(RequestSubmitted(now=NOW, request=request("L1")))
    before = keeper.pool.snapshot()

    def fail(*_arguments: Any) -> None:
        raise StoreError("The disk is full.")

    monkeypatch.setattr(store, "append", fail)
    clock[0] = NOW + 2 * HOUR
    keeper.tick()
    assert keeper.pool.snapshot() == before
    monkeypatch.undo()
    keeper.tick()
    assert keeper.pool.leases["L1"].state is LeaseState.DRAINING


def test_a_fault_in_the_rules_stops_neither_the_controller_nor_its_next_start(store, monkeypatch):
    keeper = Keeper(store, Clock(store), lambda event, instructions: None)

    def stumble(*_arguments: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(type(keeper.pool), "handle", stumble)
    assert keeper.submit(NodeJoined(now=NOW, node=node())) == []
    assert not Keeper(store, Clock(store), lambda event, instructions: None).pool.nodes


def _lease_on(device: str, idle_since: int = 0, granted_at: int = 1) -> dict[str, Any]:
    slices = {"L1/0": SimpleNamespace(device=device, state=SliceState.RUNNING)}
    active = SimpleNamespace(
        id="L1", state=LeaseState.ACTIVE, slices=slices, idle_since=idle_since, granted_at=granted_at
    )
    return {"L1": active}


def test_a_lease_is_idle_from_when_neither_its_scheduler_nor_its_gpu_worked():
    idleness = Idleness()
    busy, calm = (Reading(device="g", now=0, utilisation=percent) for percent in (90, 0))
    assert list(idleness.changes(_lease_on("g"), {"g": calm}, 50)) == [], "nobody claims it"
    idleness.claim("L1", 10)
    idleness.seen(busy, 20)
    assert list(idleness.changes(_lease_on("g"), {"g": busy}, 30)) == [], "its GPU works"
    idleness.seen(calm, 40)
    expected = LeaseIdle(now=50, cause="readings", lease="L1", since=20)
    assert list(idleness.changes(_lease_on("g"), {"g": calm}, 50)) == [expected]
    assert list(idleness.changes(_lease_on("g", idle_since=20), {"g": calm}, 60)) == []
    back = LeaseBusy(now=70, cause="readings", lease="L1")
    assert list(idleness.changes(_lease_on("g", idle_since=20), {"g": busy}, 70)) == [back]
    idleness.withdraw("L1")
    assert list(idleness.changes(_lease_on("g", idle_since=20), {"g": calm}, 70)) == [back]


@pytest.mark.parametrize("claims", [(10, 30), (30, 10)], ids=["said again", "the first came late"])
def test_of_two_claims_of_idleness_the_earlier_counts(claims):
    idleness = Idleness()
    for since in claims:
        idleness.claim("L1", since)
    [event] = idleness.changes(_lease_on("g"), {}, 50)
    assert event.since == 10


def test_a_lease_that_goes_on_after_a_suspension_has_been_idle_since_then_at_the_earliest():
    idleness = Idleness()
    idleness.claim("L1", 10)
    [event] = idleness.changes(_lease_on("g", granted_at=40), {}, 50)
    assert event.since == 40


def test_what_was_idle_before_a_restart_of_the_controller_still_is():
    idleness = Idleness()
    lease = _lease_on("g", idle_since=20)
    idleness.remember(lease.values())
    assert list(idleness.changes(lease, {}, 60)) == []
    idleness.withdraw("L1")
    assert list(idleness.changes(lease, {}, 60)) == [LeaseBusy(now=60, cause="readings", lease="L1")]


def test_the_keys_of_a_lease_outlive_the_controller(store):
    keys = Keys(store)
    keys.note_head("node-1")
    made = keys.ensure("L1", 0, "ann")
    keys.note_dashboard("L1", "https://d:1")
    again = Keys(store)
    assert again.head == "node-1"
    assert again.of("L1") == {**made, "dashboard": "https://d:1"}
    again.forget_all_but([])
    assert Keys(store).of("L1") is None
