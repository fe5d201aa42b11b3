"""What an agent does for its leases: orders may come twice, failures are reported, nothing stays behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jupyter_gpupool.core.model import encode
from jupyter_gpupool.node import guard
from tests.leasing import LONGEST, Lease, Node, running


def test_an_order_that_comes_twice_is_carried_out_once_and_answered_twice(node):
    with running(node, "twice") as lease:
        before = lease.processes()
        part = lease.parts[0]
        node.obey("start_scheduler", lease="twice", user="me", credentials=lease.keys, secret="", options={})
        assert node.wait("scheduler_started", lease="twice")["address"] == lease.address
        order = {"slice": encode(part), "user": "me", "address": lease.address, "credentials": lease.keys}
        node.obey("start_worker", lease="twice", options={}, **order)
        node.wait("slice_started", slice=part.id)
        assert lease.processes() == before
        for _ in range(2):
            node.obey("stop_slice", lease="twice", slice=part.id)
        node.wait("slice_freed", slice=part.id)
        node.obey("stop_slice", lease="twice", slice=part.id)
        node.wait("slice_freed", slice=part.id)


def test_an_unknown_order_is_refused_and_names_those_there_are(node):
    with pytest.raises(ValueError, match="'format_disk' is no order; there are start_scheduler"):
        node.obey("format_disk")


def test_a_worker_sees_its_slice_and_nothing_else(node):
    with running(node, "sees") as lease, lease.client() as client:
        [facts] = client.run(see).values()
        [info] = client.scheduler_info()["workers"].values()
    assert facts["visible"] == lease.parts[0].device
    assert facts["slice"] == lease.parts[0].id
    assert facts["device_limit"] == lease.parts[0].vram * 8 // 10
    assert facts["nvml"] is False
    assert facts["listens"] <= {"127.0.0.1"}
    assert (info["name"], info["nthreads"]) == (lease.parts[0].id, 1)
    assert info["memory_limit"] == lease.parts[0].memory


def see(dask_worker):
    import dask
    import psutil

    return {
        "visible": os.environ["CUDA_VISIBLE_DEVICES"],
        "slice": os.environ["GPUPOOL_SLICE"],
        "device_limit": dask_worker.data.device_buffer.n,
        "nvml": dask.config.get("distributed.diagnostics.nvml"),
        "listens": {each.laddr.ip for each in psutil.Process().net_connections() if each.status == "LISTEN"},
    }


def test_a_lease_admits_only_its_own_credentials(node):
    from distributed import Client

    from jupyter_gpupool.lease.settings import security
    from tests.leasing import credentials

    with (
        running(node, "admits", workers=0) as lease,
        pytest.raises(OSError, match=r"Timed out|certificate|connect"),
    ):
        Client(lease.address, security=security(credentials()), timeout=2)


def leave_children():
    """Start programs, one with a mark of its own, and a daemon that ignore SIGTERM, as careless code does."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    posing = subprocess.Popen(
        [sys.executable, "-c", code], env={guard.MARK: "0a1b2c3d:x/0"}, start_new_session=True
    )
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(writer, f"{os.getpid()}\n".encode())
            time.sleep(600)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pids:
        return child.pid, posing.pid, int(pids.readline())


def test_children_that_ignore_sigterm_end_with_the_lease_and_before_its_slice_is_free(node):
    with running(node, "children") as lease:
        with lease.client() as client:
            left = client.submit(leave_children).result(timeout=LONGEST)
        assert set(left) <= lease.processes()
        assert {node.leases.owner(each) for each in left} == {lease.parts[0].id}
        node.obey("stop_slice", lease="children", slice=lease.parts[0].id)
        node.wait("slice_freed", slice=lease.parts[0].id)
        assert not [each for each in left if guard.started_at(each)]


def test_a_slice_is_not_free_while_the_driver_lists_its_worker(node):
    with running(node, "listed") as lease, lease.client() as client:
        [pid] = client.run(os.getpid).values()
        listed = node.run(node._device_pids(lease.parts[0].device))
        assert pid in listed
        real, node.leases._processes._device_pids = node.leases._processes._device_pids, lambda _: {pid}
        try:
            node.obey("stop_slice", lease="listed", slice=lease.parts[0].id)
            time.sleep(1.5)
            assert not [each for each in node.heard("slice_freed") if each["slice"] == lease.parts[0].id]
        finally:
            node.leases._processes._device_pids = real
        node.wait("slice_freed", slice=lease.parts[0].id)


def test_a_killed_worker_is_there_again_on_the_same_gpu(node):
    with running(node, "killed") as lease, lease.client() as client:
        [pid] = client.run(os.getpid).values()
        os.kill(pid, signal.SIGKILL)
        again = client.submit(os.getpid, pure=False).result(timeout=LONGEST)
        assert again != pid
        visible = client.submit(lambda: os.environ["CUDA_VISIBLE_DEVICES"]).result(timeout=LONGEST)
        assert visible == lease.parts[0].device


def test_a_start_that_fails_says_why_in_its_report_and_in_the_logs(node):
    with running(node, "fails", workers=0) as lease:
        lease.options["rmm_pool_size"] = "1GB"  # there is no rmm here
        part = lease.add(wait=False)
        failed = node.wait_failed("slice_failed", slice=part.id)
        assert "rmm" in failed["why"]
        [text] = [each["text"] for each in node.leases.logs("fails") if each["name"] == "worker-0"]
        assert "RMM pool requested but module 'rmm' is not available" in text
    assert any("RMM pool requested" in each["text"] for each in node.leases.logs("fails")), (
        "kept after the end"
    )


def test_a_host_that_dies_is_a_slice_that_has_failed_and_leaves_nothing(node):
    with running(node, "dies") as lease:
        mark = node.leases._table.mark(lease.parts[0].id)
        pid = node.leases._table.entries[lease.parts[0].id].pid
        os.kill(pid, signal.SIGKILL)
        failed = node.wait_failed("slice_failed", slice=lease.parts[0].id)
        assert "its process ended with status -9" in failed["why"]
        assert semaphores(mark), "Dask's, which a killed process leaves"
    node.wait("slice_freed", slice=lease.parts[0].id)
    assert not semaphores(mark)


def semaphores(mark):
    """Those of the processes with a mark, as Linux shows them."""
    return list(Path("/dev/shm").glob(f"sem.{guard.semaphores(mark)[1:]}-*"))


def test_a_slice_that_was_seen_gone_is_never_started_again(node):
    """An order that crossed the report on its way would start it on a GPU that is another lease's by then."""
    lease = Lease(node, "over")
    part = lease.parts[0]
    node.obey("stop_slice", lease="over", slice=part.id)
    node.wait("slice_freed", slice=part.id)
    late = {"user": lease.user, "address": lease.address, "credentials": lease.keys, "options": {}}
    node.obey("start_worker", lease="over", slice=encode(part), **late)
    node.wait("slice_freed", slice=part.id)
    assert part.id not in node.leases._table.entries
    lease.end()


def test_a_scheduler_that_dies_is_reported_and_can_be_started_anew(node):
    with running(node, "anew", workers=0) as lease:
        os.kill(node.leases._table.entries["anew"].pid, signal.SIGKILL)
        node.wait_failed("scheduler_failed", lease="anew")
        keys = {"credentials": lease.keys, "secret": "", "options": {}}
        node.obey("start_scheduler", lease="anew", user="me", **keys)
        assert node.wait("scheduler_started", lease="anew")["address"] != lease.address


def test_a_scheduler_that_hangs_holds_no_drain_up(node, monkeypatch):
    monkeypatch.setattr("jupyter_gpupool.node.leases._SILENCE", 0.5)
    with running(node, "hangs") as lease:
        pid = node.leases._table.entries["hangs"].pid
        os.kill(pid, signal.SIGSTOP)
        assert lease.drain(0, "now")["lost"] == []


def test_draining_a_lease_that_is_gone_is_done_at_once(node):
    node.obey("drain", lease="gone", slice="gone/0", mode="finish", deadline_in=60_000, why="a test")
    assert node.wait("slice_drained", slice="gone/0")["forced"] == []


def test_what_a_lease_has_written_is_its_owner_s_alone_and_gone_after_it(node):
    with running(node, "writes") as lease, lease.client() as client:
        [folder] = client.run(lambda dask_worker: dask_worker.local_directory).values()
        mine = node.leases._table.folder("writes")
        assert Path(folder).is_relative_to(mine)
        assert mine.stat().st_mode & 0o777 == 0o700
        assert node.leases._table.socket("writes").stat().st_mode & 0o777 == 0o600
        secrets = [lease.keys["key"], lease.secret]
        for pid in lease.processes():
            for name in ("cmdline", "environ"):
                text = Path(f"/proc/{pid}/{name}").read_text(errors="replace")
                assert not any(secret in text for secret in secrets), (pid, name)
    node.wait("lease_freed", lease="writes")
    node.wait("slice_freed", slice=lease.parts[0].id)
    assert not mine.exists()
    assert not node.leases._table.socket("writes").exists()


def test_nonsense_on_a_lease_s_socket_harms_nobody(node):
    with running(node, "nonsense", workers=0) as lease:
        for line in (
            b"\xff\xfe\n",
            b"[]\n",
            b'{"report": 7}\n',
            b'{"report": "drained", "slice": 3}\n',
            b"x" * 2**21,
        ):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(node.leases._table.socket("nonsense")))
                try:
                    connection.sendall(line)
                except OSError:
                    continue  # it has hung up
        lease.add()


def test_leases_stay_in_their_range_of_ports(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        first = min(probe.getsockname()[1], 65_000)
    node = Node(tmp_path, ports=(first, first + 40))
    node.start()
    try:
        with running(node, "ports") as lease, lease.client() as client:
            [worker] = client.scheduler_info()["workers"].values()
            [address] = client.run(lambda dask_worker: dask_worker.address).values()
            urls = [lease.address, lease.dashboard, worker["nanny"], address]
            assert {first <= int(url.rpartition(":")[2]) <= first + 40 for url in urls} == {True}
    finally:
        node.stop()


def test_a_worker_that_cannot_start_on_a_lost_gpu_says_the_driver_s_own_error(node):
    """dask-cuda hides it behind a ValueError, and that behind a TypeError."""
    with running(node, "lost", workers=0) as lease:
        node.machine.lose(node.devices[3])
        try:
            lease.add(3, wait=False)
            failed = node.wait_failed("slice_failed", slice=lease.parts[0].id)
        finally:
            node.machine.restore(node.devices[3])
    assert failed["why"] == "NVMLError_GpuIsLost: GPU is lost"
