"""A worker's process is started anew on the same GPU and no task pays for it: real workers, simulated GPU."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from jupyter_gpupool.driver import simulated
from jupyter_gpupool.lease.worker import FRESH
from tests.leasing import LONGEST, Lease, Node

pytestmark = pytest.mark.slow


#: The options of this module's node (`conftest.node`).
NODE = {"judges": False}


@pytest.fixture
def lease(node, request):
    """A lease of one worker that is no longer fresh."""
    node.machine.restore(node.devices[0])
    lease = Lease(node, request.node.name.replace("_", "-")[-40:])
    time.sleep(FRESH)
    yield lease
    lease.end()


@pytest.fixture
def client(lease):
    with lease.client() as client:
        yield client


def trace(file, seconds=0.0, fault=""):
    """Leave a trace of each run, take time in the first one, and say in which process it was."""
    first = not Path(file).exists()
    with Path(file).open("a") as traces:
        traces.write("run\n")
    if first:
        time.sleep(seconds)
    if fault:
        simulated.fault(fault)
    return os.getpid()


def runs(file) -> int:
    return Path(file).read_text().count("run") if Path(file).exists() else 0


def started(file) -> None:
    """Wait until a task has begun."""
    end = time.monotonic() + LONGEST
    while not runs(file):
        assert time.monotonic() < end
        time.sleep(0.02)


def restart(lease):
    lease.node.obey("restart_worker", lease=lease.id, slice=lease.parts[0].id, why="XID 31")


def test_a_restart_waits_for_the_error_that_is_held_and_the_task_runs_once(lease, client, tmp_path):
    """The node's order and the task's own error come together, for both follow from the same XID."""
    file = tmp_path / "runs"
    before = client.submit(os.getpid).result(timeout=LONGEST)
    failing = client.submit(trace, file, fault="illegal_address")
    suspect = lease.node.wait("suspect", slice=lease.parts[0].id)
    restart(lease)
    time.sleep(0.3)
    fine = {"device": suspect["device"], "verdict": "restart_worker", "sentence": "XID 31", "final": True}
    lease.node.obey("verdict", **fine)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        failing.result(timeout=LONGEST)
    after = client.submit(os.getpid, pure=False).result(timeout=LONGEST)
    assert after != before
    assert runs(file) == 1
    restart(lease)  # the same order once more, late
    time.sleep(0.5)
    assert client.submit(os.getpid, pure=False).result(timeout=LONGEST) == after


def test_a_process_that_failed_silently_takes_no_other_task(lease, client, tmp_path):
    """The kernel that failed belongs to a task that has ended: its error would hit the next one."""
    file = tmp_path / "runs"
    before = client.submit(os.getpid).result(timeout=LONGEST)
    running = client.submit(trace, file, seconds=1.5)
    started(file)
    restart(lease)
    time.sleep(0.2)
    queued = client.map(lambda _: os.getpid(), range(4), pure=False)
    assert running.result(timeout=LONGEST) == before
    assert runs(file) == 1
    assert set(client.gather(queued)).isdisjoint({before})


def test_a_task_that_does_not_end_does_not_keep_a_spoilt_process_alive(lease, client, tmp_path):
    file = tmp_path / "runs"
    before = client.submit(os.getpid).result(timeout=LONGEST)
    stuck = client.submit(trace, file, seconds=60.0)
    started(file)
    restart(lease)
    assert stuck.result(timeout=LONGEST) != before
    assert runs(file) == 2


def test_a_contained_memory_error_costs_a_process_and_no_task(lease, client, tmp_path):
    """The hardware failed and the GPU stays: the task runs again on it, in a new process."""
    file = tmp_path / "runs"
    before = client.submit(os.getpid).result(timeout=LONGEST)
    lease.node.machine.fail(lease.parts[0].device, 94)
    hit = client.submit(trace, file)
    suspect = lease.node.wait("suspect", slice=lease.parts[0].id)
    assert suspect["error"].startswith("cudaErrorContained")
    answer = {"verdict": "restart_worker", "sentence": "XID 94", "hardware": True, "final": True}
    lease.node.obey("verdict", device=suspect["device"], **answer)
    assert hit.result(timeout=LONGEST) != before
    assert client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.tasks[hit.key].suspicious) == 0


def test_a_worker_that_cannot_be_started_again_ends_its_host_and_holds_no_gpu(tmp_path):
    node = Node(tmp_path)
    node.start()
    try:
        lease = Lease(node, "orphan")
        for pid in node.leases._processes._launchers.forkservers():
            os.kill(pid, signal.SIGKILL)  # and with it the worker's tie to its host
        assert "its process ended" in node.wait_failed("slice_failed", slice=lease.parts[0].id)["why"]
        lease.end()
    finally:
        node.stop()
