"""A lease whose processes are killed or stopped: what its owner sees, with a plain Dask client."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import psutil
import pytest
from distributed.client import FutureCancelledError

from jupyter_gpupool import PoolError
from tests.conftest import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def processes_of(key: str) -> list[int]:
    """The PIDs whose mark is that of a slice, or of a lease's scheduler."""
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            mark = each.environ().get("GPUPOOL_MARK", "").partition(":")[2].rstrip(".")
            if mark == key and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each.pid)
    return found


def slow(seconds):
    time.sleep(seconds)
    return os.getpid()


def test_a_killed_scheduler_loses_named_futures_and_the_lease_goes_on_with_a_new_one(pool):
    lease = pool.request(gpus=1, idle_timeout="1h")
    before = lease.client()
    future = before.submit(slow, 60, key="a-long-task")
    for pid in processes_of(lease.id):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(FutureCancelledError, match="a-long-task"):
        future.result(timeout=60)
    wait_until(lambda: "was lost" in " ".join(lease.refresh().notes), 60)
    client = lease.client()
    assert client is not before
    assert client.submit(sum, [20, 22]).result(timeout=60) == 42
    assert lease.refresh().state == "active"
    assert "submit them again" in " ".join(lease.notes)
    assert len(lease.slices) == 1
    before.close()


def test_when_a_lease_ends_its_clients_are_told_why_and_wait_for_nothing(pool, caplog):
    lease = pool.request(gpus=1)
    client = lease.client()
    future = client.submit(slow, 600, key="a-long-task")
    pool.call("DELETE", f"/v1/leases/{lease.id}")  # somebody gives it back elsewhere
    with pytest.raises(FutureCancelledError, match=r"(?s)a-long-task .*The lease has ended: released"):
        future.result(timeout=60)
    wait_until(lambda: client.status == "closed", 60)
    assert f"Lease {lease.name} has ended: " in caplog.text
    with pytest.raises(PoolError, match=f"{lease.name}|{lease.id}"):
        lease.client()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_worker_that_is_killed_or_stopped_costs_its_lease_no_result(pool, number):
    lease = pool.request(gpus=2)
    client = lease.client()
    workers = set(client.run(os.getpid).values())
    futures = client.map(slow, [0.2] * 20, pure=False)
    time.sleep(0.5)
    os.kill(min(workers), number)
    found = client.gather(futures)
    assert len(found) == 20
    assert len(lease.refresh().slices) == 2
