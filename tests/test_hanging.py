"""A worker that does nothing any more is started anew, one that is busy is left alone: real processes."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jupyter_gpupool.lease.host import _Host
from jupyter_gpupool.lease.pulse import Hanging
from tests.leasing import LONGEST, Lease

pytestmark = pytest.mark.slow

#: Seconds after which a worker of these tests hangs.
HUNG = 2.0


#: The options of this module's node (`conftest.node`).
NODE = {"hung_s": HUNG}


@pytest.fixture
def lease(node, request):
    lease = Lease(node, request.node.name.replace("_", "-")[-40:])
    yield lease
    lease.end()


@pytest.fixture
def client(lease):
    with lease.client() as client:
        yield client


def first_run(file) -> bool:
    """Leave a trace, and say whether it is the first."""
    first = not Path(file).exists()
    with Path(file).open("a") as trace:
        trace.write("run\n")
    return first


def wait_in_c(file, seconds):
    """Keep the GIL in a C call that uses no CPU time, in the first run."""
    if first_run(file):
        ctypes.PyDLL(None).sleep(seconds)
    return os.getpid()


def compute_in_c(file, seconds):
    """Keep the GIL in a C call that computes all the time."""
    first_run(file)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(4 * 10**7))  # about a second in which no other thread runs
    return os.getpid()


def runs(file) -> int:
    return Path(file).read_text().count("run")


def test_a_worker_that_hangs_in_c_code_is_started_anew_and_its_task_runs_again(client, tmp_path):
    before = client.submit(os.getpid).result(timeout=LONGEST)
    after = client.submit(wait_in_c, tmp_path / "runs", 600).result(timeout=LONGEST)
    assert after != before
    assert runs(tmp_path / "runs") == 2


def test_a_worker_that_computes_in_c_code_is_busy_and_left_alone(client, tmp_path):
    before = client.submit(os.getpid).result(timeout=LONGEST)
    assert client.submit(compute_in_c, tmp_path / "runs", 1.6 * HUNG).result(timeout=LONGEST) == before
    assert runs(tmp_path / "runs") == 1


def test_a_worker_that_waits_for_a_gpu_at_work_is_busy_and_left_alone(lease, client, tmp_path):
    lease.node.busy.add(lease.parts[0].device)
    before = client.submit(os.getpid).result(timeout=LONGEST)
    waiting = client.submit(wait_in_c, tmp_path / "runs", int(2 * HUNG))
    assert waiting.result(timeout=LONGEST) == before
    assert runs(tmp_path / "runs") == 1
    assert lease.node.heard("suspect"), "it was looked at"


def test_a_host_or_scheduler_that_somebody_has_stopped_is_ended_for_another_to_be_started(node):
    hosted, scheduled = Lease(node, "stopped-host"), Lease(node, "stopped-scheduler")
    part = hosted.parts[0].id
    for key in (part, scheduled.id):
        os.kill(node.leases._table.entries[key].pid, signal.SIGSTOP)
    assert "its process ended" in node.wait_failed("slice_failed", slice=part)["why"]
    assert "its process ended" in node.wait_failed("scheduler_failed", lease=scheduled.id)["why"]
    for lease in (hosted, scheduled):
        lease.end()
        assert not lease.processes()


def test_a_worker_that_has_begun_while_the_node_was_asked_is_not_ended_in_the_other_s_place(tmp_path):
    """The node may take seconds to answer; meanwhile the Nanny may have replaced the worker that hung."""
    nanny = SimpleNamespace(pid=2**22 + 1)  # as the one that hung, and is gone

    async def replace_and_answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nanny.pid = fresh.pid
        writer.write(b"{}\n")
        writer.close()

    async def end_hanging() -> bool:
        path = str(tmp_path / "node")
        async with await asyncio.start_unix_server(replace_and_answer, path):
            host = _Host({"slice": "a/0", "socket": path, "scheduler": ""})
            host._nanny = nanny
            return await host._end_hanging("it hangs")

    with subprocess.Popen(["sleep", "60"]) as fresh:
        try:
            assert asyncio.run(end_hanging()), "the watch begins anew"
            assert fresh.poll() is None
        finally:
            fresh.kill()


def test_a_nanny_that_cannot_start_its_worker_s_process_is_not_waited_for():
    """Dask's own start would wait for ever where the forkserver is gone: the lease would start for ever."""

    async def cannot() -> None:
        raise ConnectionRefusedError("there is no forkserver")

    async def start() -> None:
        nanny = SimpleNamespace(rpc=SimpleNamespace(), worker_kwargs={}, instantiate=cannot)
        host = _Host({"slice": "a/0", "socket": "", "scheduler": ""})
        await asyncio.wait_for(host._started(Starting(nanny)), LONGEST)

    with pytest.raises(ConnectionRefusedError, match="there is no forkserver"):
        asyncio.run(start())


class Starting:
    """A cluster as far as a host starts it: its Nanny connects to the scheduler, which is not there yet."""

    def __init__(self, nanny: SimpleNamespace) -> None:
        self.nannies = [nanny]

    def __await__(self):
        return self.nannies[0].rpc.connect("nowhere").__await__()


@pytest.mark.parametrize(
    ("looks", "hangs"),
    [
        pytest.param([(1, 0.0, False), (5, 0.0, False), (9, 0.0, False)], True, id="it does nothing"),
        pytest.param([(1, 0.0, False), (9, 0.05, False)], True, id="a thread that wakes up is no work"),
        pytest.param([(1, 0.0, False), (5, 0.2, False), (9, 0.4, False)], False, id="it computes"),
        pytest.param([(1, 0.0, False), (5, 0.0, True), (9, 0.0, False)], False, id="it answers"),
        pytest.param([(1, 9.0, False), (5, 0.0, False)], False, id="it has just begun"),
    ],
)
def test_what_hangs_has_neither_answered_nor_done_anything(looks, hangs):
    seen = Hanging(6.0)
    said = [seen.look(7, now, used, answers=answers) for now, used, answers in looks]
    assert said[-1] is hangs
    assert not any(said[:-1])
