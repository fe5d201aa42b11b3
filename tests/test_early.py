"""A worker starts beside its lease's scheduler: it is there before the scheduler is, and waits for it."""

from __future__ import annotations

import os
import signal
import time

import pytest

from jupyter_gpupool.node import guard
from tests.leasing import LONGEST, Lease, credentials


class Waiting(Lease):
    """A lease that has a worker on its first device, and no scheduler yet."""

    def __init__(self, node, name, **options):
        self.node, self.id, self.user, self.options = node, name, "me", options
        self.keys, self.secret, self.address, self.parts = credentials(), "", "", []
        self.add(wait=False)

    def worker(self):
        """The PID of the worker, whose parent is the forkserver and which is not the host."""
        mark = self.node.leases._table.mark(self.parts[0].id)
        deadline = time.monotonic() + LONGEST
        while time.monotonic() < deadline:
            host = self.node.leases._table.entries[self.parts[0].id].pid
            for pid, _ in guard.find([mark], (), guard.look()):
                if host and pid != host and guard.look_at(pid).parent == guard.look_at(host).parent:
                    return pid
            time.sleep(0.01)
        raise AssertionError("there is no worker")

    def begin(self):
        """Start the scheduler, and tell the worker."""
        self.begin_alone()
        self.start(self.parts[0])

    def begin_alone(self):
        """Start the scheduler."""
        orders = {"user": "me", "credentials": self.keys, "secret": "", "options": {}}
        self.node.obey("start_scheduler", lease=self.id, **orders)
        self.address = self.node.wait("scheduler_started", lease=self.id)["address"]


@pytest.fixture
def lease(node, request):
    lease = Waiting(node, request.node.name[-20:], **getattr(request, "param", {}))
    yield lease
    lease.end()
    assert not lease.processes()


def test_the_worker_that_waited_is_the_one_that_registers(node, lease):
    there = lease.worker()
    lease.begin()
    node.wait("slice_started", slice=lease.parts[0].id)
    with lease.client() as client:
        assert list(client.run(os.getpid).values()) == [there]
        assert client.submit(sum, [20, 22]).result(timeout=30) == 42


def test_a_worker_is_started_anew_on_the_scheduler_that_the_first_one_waited_for(node, lease):
    lease.begin()
    node.wait("slice_started", slice=lease.parts[0].id)
    with lease.client() as client:
        [before] = client.run(os.getpid).values()
        os.kill(before, signal.SIGKILL)
        client.wait_for_workers(1, timeout=LONGEST)
        deadline = time.monotonic() + LONGEST
        while (now := list(client.run(os.getpid, on_error="ignore").values())) in ([], [before]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert len(now) == 1


def test_one_that_is_killed_while_it_waits_is_followed_by_another(node, lease):
    os.kill(lease.worker(), signal.SIGKILL)
    lease.begin()
    node.wait("slice_started", slice=lease.parts[0].id)
    with lease.client() as client:
        assert client.submit(sum, [20, 22]).result(timeout=30) == 42


def test_one_hears_from_the_next_agent_what_the_former_one_had_no_time_to_say(node, lease):
    lease.worker()
    lease.begin_alone()
    table = node.leases._table
    table.entries[lease.parts[0].id].scheduler = lease.address  # as the former one wrote down, and then died
    table.save()
    node.stop(keep=True)
    node.start()
    node.wait("slice_started", slice=lease.parts[0].id)


def test_a_slice_that_is_stopped_while_its_worker_waits_leaves_nothing(node, lease):
    lease.worker()
    node.obey("stop_slice", lease=lease.id, slice=lease.parts[0].id)
    node.wait("slice_freed", slice=lease.parts[0].id)
    assert not lease.processes()


@pytest.mark.parametrize("lease", [{"pre_import": "no_such_module"}], indirect=True)
def test_what_keeps_a_worker_from_starting_is_told_in_its_own_words(node, lease):
    lease.begin()
    failed = node.wait_failed("slice_failed", slice=lease.parts[0].id)
    assert "no_such_module" in failed["why"]
    late = lease.add(wait=False)  # its replacement, say: for that one the scheduler is there already
    failed = node.wait_failed("slice_failed", slice=late.id)
    assert "no_such_module" in failed["why"]
