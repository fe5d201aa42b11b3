"""Actors when their worker has to go: moved with their state where their class says how; else waited for."""

from __future__ import annotations

import threading
import time

import pytest
from distributed import wait

from tests.leasing import LONGEST, Lease

pytestmark = pytest.mark.slow

#: Milliseconds that a worker gets to leave, and where it is to be in vain.
ENOUGH, SHORT = 30_000, 1_200


@pytest.fixture
def lease(node, request):
    """A lease of two workers."""
    lease = Lease(node, request.node.name.replace("_", "-")[-40:], workers=2)
    yield lease
    lease.end()


@pytest.fixture
def client(lease):
    with lease.client() as client:
        yield client


class Counter:
    """An actor that says how it is moved."""

    n = 0

    def __init__(self, friend=None):
        self.friend = friend

    def add(self, seconds=0.0):
        time.sleep(seconds)
        self.n += 1
        return self.n

    def ask_friend(self):
        return self.friend.add().result()

    def where(self):
        from distributed import get_worker

        return get_worker().name

    def checkpoint(self):
        return self.n, self.friend

    def restore(self, state):
        self.n, self.friend = state


class Anew(Counter):
    """One whose class makes it anew."""

    @classmethod
    def restore(cls, state):
        actor = cls(state[1])
        actor.n = state[0] + 1000
        return actor


class Stubborn(Counter):
    """One whose checkpoint fails."""

    def checkpoint(self):
        raise ValueError("a file is open")


class Fixed:
    """One that says nothing."""

    def add(self):
        return 1


def actor_on(client, part, kind, *arguments):
    return client.submit(kind, *arguments, actor=True, workers=[part.id]).result(timeout=LONGEST)


def test_an_actor_moves_with_its_state_and_each_call_runs_once(lease, client):
    """Calls go on all the time: those before the move, during it and after it are all counted."""
    counter = actor_on(client, lease.parts[0], Counter)
    other = actor_on(client, lease.parts[0], Anew)
    assert other.add().result(timeout=LONGEST) == 1
    seen, ending = [], threading.Event()

    def call():
        while not ending.is_set():
            seen.append(counter.add(0.01).result(timeout=LONGEST))

    caller = threading.Thread(target=call)
    caller.start()
    report = lease.drain(0, "finish", ENOUGH)
    ending.set()
    caller.join(LONGEST)
    assert (report["lost"], report["forced"]) == ([], [])
    assert seen == list(range(1, len(seen) + 1))
    assert counter.where().result(timeout=LONGEST) == lease.parts[1].id
    assert counter.n == len(seen)
    assert other.add().result(timeout=LONGEST) == 1002


def test_who_holds_a_moved_actor_keeps_it(lease, client):
    """A task that is given it, an actor elsewhere that has held it, and its future asked again."""
    future = client.submit(Counter, actor=True, workers=[lease.parts[0].id])
    asker = client.submit(Counter, future, actor=True, workers=[lease.parts[1].id]).result(timeout=LONGEST)
    assert asker.ask_friend().result(timeout=LONGEST) == 1
    assert lease.drain(0, "finish", ENOUGH)["lost"] == []
    assert asker.ask_friend().result(timeout=LONGEST) == 2
    assert client.submit(lambda actor: actor.add().result(), future).result(timeout=LONGEST) == 3
    assert future.result(timeout=LONGEST).add().result(timeout=LONGEST) == 4
    lease.add(2)
    assert lease.drain(1, "finish", ENOUGH)["lost"] == []
    assert asker.ask_friend().result(timeout=LONGEST) == 5
    assert asker.where().result(timeout=LONGEST) == lease.parts[2].id


def test_an_actor_waits_for_the_replacement_where_there_is_no_other_worker(lease, client):
    lease.drain(1, "now")
    counter = actor_on(client, lease.parts[0], Counter)
    assert counter.add().result(timeout=LONGEST) == 1
    said = {"lease": lease.id, "slice": lease.parts[0].id, "mode": "finish", "deadline_in": ENOUGH}
    lease.node.obey("drain", **said, why="maintenance")
    assert counter.add().result(timeout=LONGEST) == 2
    lease.add(2)
    assert lease.node.wait("slice_drained", slice=lease.parts[0].id)["lost"] == []
    assert counter.add().result(timeout=LONGEST) == 3


def test_an_actor_that_cannot_move_works_until_the_deadline_and_is_named_at_once_and_then(lease, client):
    """It is called from elsewhere too; that does not make it one of which there are two."""
    fixed = client.submit(Fixed, actor=True, workers=[lease.parts[0].id])
    stubborn = client.submit(Stubborn, actor=True, workers=[lease.parts[0].id])
    wait([fixed, stubborn], timeout=LONGEST)
    called = client.submit(lambda one: one.add().result(), fixed, workers=[lease.parts[1].id])
    assert called.result(timeout=LONGEST) == 1
    said = {"lease": lease.id, "slice": lease.parts[0].id, "mode": "finish", "deadline_in": SHORT}
    lease.node.obey("drain", **said, why="maintenance")
    why = {}
    while len(why) < 2:
        why |= lease.node.wait("actors_stay", slice=lease.parts[0].id)["actors"]
    assert stubborn.result(timeout=LONGEST).add().result(timeout=LONGEST) == 1
    assert why == {
        fixed.key: "its class has no checkpoint() and restore(state)",
        stubborn.key: "ValueError: a file is open",
    }
    report = lease.node.wait("slice_drained", slice=lease.parts[0].id)
    assert sorted(report["lost"]) == sorted([fixed.key, stubborn.key])
