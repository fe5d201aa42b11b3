"""What happens to a lease's work when a worker has to go: real dask-cuda workers on simulated GPUs."""

from __future__ import annotations

import collections
import os
import re
import signal
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path

import dask
import numpy as np
import pytest
from distributed import KilledWorker, wait

from tests.leasing import LONGEST, Lease

pytestmark = pytest.mark.slow


@pytest.fixture
def lease(node, request):
    """A lease of two workers on healthy devices, ended after the test."""
    for device in node.devices:
        node.machine.restore(device)
        node.obey("verdict", device=device, verdict="fine", sentence="")
    lease = Lease(node, request.node.name.replace("_", "-")[-40:], workers=2)
    yield lease
    lease.end()


@pytest.fixture
def client(lease):
    with lease.client() as client:
        yield client


def square(x, seconds=0.02, file=None):
    """Take some time, and leave a trace of each run."""
    if file is not None:
        with Path(file).open("a") as trace:
            trace.write(f"{x}\n")
    time.sleep(seconds)
    return x * x


def suspicions(dask_scheduler):
    return {key: task.suspicious for key, task in dask_scheduler.tasks.items() if task.suspicious}


# -------------------------------------------------------------------------------------- the device is gone


def test_tasks_and_results_of_a_lost_gpu_are_computed_again_and_nobody_sees_an_error(lease, client):
    done = client.map(square, range(20), pure=False)
    wait(done, timeout=LONGEST)
    todo = client.map(square, range(100), pure=False)
    time.sleep(0.2)
    lease.node.machine.lose(lease.parts[0].device)
    lease.add(2)
    assert sum(client.gather(todo)) == sum(x * x for x in range(100))
    assert client.gather(done) == [x * x for x in range(20)]
    assert client.run_on_scheduler(suspicions) == {}
    assert lease.drain(0, "now")["lost"] == []


def test_work_waits_for_the_replacement_where_the_lost_worker_was_the_last_one(lease, client):
    lease.drain(1, "now")
    todo = client.map(square, range(30), pure=False)
    time.sleep(0.1)
    lease.node.machine.lose(lease.parts[0].device)
    lease.drain(0, "now")
    time.sleep(0.3)
    assert not any(future.status == "error" for future in todo)
    lease.add(2)
    assert client.gather(todo) == [x * x for x in range(30)]


def test_a_worker_that_aborts_with_its_gpu_is_held_against_no_task(lease, client):
    lease.drain(1, "now")
    future = client.submit(square, 7, 1.0)
    for device in (2, 3):
        # A second and a third GPU are lost under the same task; Dask would have given it up after the fourth.
        time.sleep(0.3)
        lease.node.machine.lose(lease.parts[-1 if device == 3 else 0].device, abort=True)
        lease.add(device)
    assert future.result(timeout=LONGEST) == 49
    assert client.run_on_scheduler(suspicions) == {}


def test_results_that_cannot_be_read_off_a_lost_gpu_are_computed_again(lease, client):
    first = client.submit(square, 5, workers=[lease.parts[0].id], allow_other_workers=True)
    wait(first, timeout=LONGEST)
    lease.node.machine.lose(lease.parts[0].device)
    # Nobody has told the lease yet: a peer, then the client, find it out when they ask for the result.
    assert client.submit(lambda x: x + 1, first, workers=[lease.parts[1].id]).result(timeout=LONGEST) == 26
    assert first.result(timeout=LONGEST) == 25


def test_scattered_data_and_actors_that_only_the_lost_gpu_had_are_named(lease, client):
    [data] = client.scatter([np.arange(3)], workers=[lease.parts[0].id])
    actor = client.submit(dict, actor=True, workers=[lease.parts[0].id])
    wait([data, actor], timeout=LONGEST)
    lease.node.machine.lose(lease.parts[0].device)
    report = lease.drain(0, "now")
    assert set(report["lost"]) == {data.key, actor.key}


def test_tasks_that_were_bound_to_the_lost_worker_run_elsewhere(lease, client):
    todo = client.map(square, range(10), workers=[lease.parts[0].id], pure=False)
    wait(todo, timeout=LONGEST, return_when="FIRST_COMPLETED")
    lease.node.machine.lose(lease.parts[0].device)
    lease.drain(0, "now")
    assert client.gather(todo) == [x * x for x in range(10)]


def test_a_drained_slice_lets_no_worker_in_again(lease, client):
    lease.drain(0, "now")
    again = lease.drain(0, "now")
    assert again["forced"] == []
    assert [info["name"] for info in client.scheduler_info()["workers"].values()] == [lease.parts[1].id]


# --------------------------------------------------------------------------------- the program is at fault


def illegal_access():
    from jupyter_gpupool.driver import simulated

    simulated.fault("illegal_address")


def test_a_program_s_own_cuda_error_reaches_its_owner_and_its_process_takes_no_other_task(lease, client):
    lease.drain(1, "now")
    before = client.submit(lambda: __import__("os").getpid()).result(timeout=LONGEST)
    future = client.submit(illegal_access)
    queued = client.map(square, range(5), pure=False)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        future.result(timeout=LONGEST)
    assert client.gather(queued) == [x * x for x in range(5)]
    assert client.submit(lambda: __import__("os").getpid(), pure=False).result(timeout=LONGEST) != before
    assert client.run_on_scheduler(suspicions) == {}


def test_a_result_that_a_spoilt_process_cannot_give_any_more_is_computed_again(lease, client):
    """No task has failed: the peer that asks for the result meets the error, and the process is replaced."""
    first = client.submit(square, 5, workers=[lease.parts[0].id], allow_other_workers=True)
    wait(first, timeout=LONGEST)
    [address] = client.who_has(first)[first.key]
    before = client.run(os.getpid)[address]
    lease.node.machine.poison(before)
    assert client.submit(lambda x: x + 1, first, workers=[lease.parts[1].id]).result(timeout=LONGEST) == 26
    assert first.result(timeout=LONGEST) == 25
    assert lease.node.wait("suspect", slice=lease.parts[0].id), "the node was asked whose fault it is"
    there = client.submit(os.getpid, workers=[lease.parts[0].id], pure=False)
    assert there.result(timeout=LONGEST) != before


class Faulty:
    """An actor whose call spoils its process."""

    def break_it(self):
        illegal_access()


def test_an_actor_s_cuda_error_reaches_its_caller_and_its_process_is_started_anew(lease, client):
    actor = client.submit(Faulty, actor=True, workers=[lease.parts[0].id]).result(timeout=LONGEST)
    before = client.submit(os.getpid, workers=[lease.parts[0].id]).result(timeout=LONGEST)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        actor.break_it().result(timeout=LONGEST)
    assert lease.node.wait("suspect", slice=lease.parts[0].id)["error"].startswith("cudaErrorIllegalAddress")
    deadline = time.monotonic() + LONGEST
    while client.submit(os.getpid, workers=[lease.parts[0].id], pure=False).result(timeout=LONGEST) == before:
        assert time.monotonic() < deadline


def test_an_error_that_is_not_cuda_s_is_not_held_back(lease, client):
    future = client.submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        future.result(timeout=LONGEST)
    assert not [each for each in lease.node.heard("suspect") if each["lease"] == lease.id]


def test_a_task_that_kills_its_workers_fails_after_the_allowed_number(lease, client):
    lease.drain(1, "now")
    with pytest.raises(KilledWorker):
        client.submit(lambda: __import__("os")._exit(3)).result(timeout=LONGEST)
    assert client.submit(square, 3).result(timeout=LONGEST) == 9


def test_a_stopped_worker_is_replaced_and_its_task_runs_again(lease, client):
    lease.drain(1, "now")
    [pid] = client.run(os.getpid).values()
    future = client.submit(square, 6, 1.0)
    time.sleep(0.3)
    os.kill(pid, signal.SIGSTOP)
    assert future.result(timeout=LONGEST) == 36
    assert client.submit(os.getpid, pure=False).result(timeout=LONGEST) != pid
    assert client.run_on_scheduler(suspicions) == {}


# --------------------------------------------------------------------------------- a worker that is to finish


def test_a_worker_that_leaves_in_good_order_runs_each_task_once_and_loses_no_result(lease, client, tmp_path):
    trace = tmp_path / "trace"
    done = client.map(square, range(50), seconds=0, pure=False)
    data = client.scatter(list(range(1000, 1010)))
    wait(done, timeout=LONGEST)
    running = client.map(square, range(40), seconds=0.1, file=str(trace), pure=False)
    time.sleep(0.15)
    report = lease.drain(0, "finish", 30_000)
    assert (report["forced"], report["lost"]) == ([], [])
    assert client.gather(running) == [x * x for x in range(40)]
    assert client.gather(done) == [x * x for x in range(50)]
    assert client.gather(data) == list(range(1000, 1010))
    assert sorted(map(int, trace.read_text().split())) == list(range(40))


def test_tasks_that_wait_at_a_worker_that_leaves_are_taken_back(lease, client, tmp_path):
    """Too few for Dask's queue, they are given to workers at once, where they would be stuck."""
    trace = tmp_path / "trace"
    names = "abcdefghij"
    todo = [client.submit(square, x, 0.3, str(trace), key=f"{name}-{x}") for x, name in enumerate(names)]
    wait(todo, timeout=LONGEST, return_when="FIRST_COMPLETED")
    assert lease.drain(0, "finish", 30_000)["forced"] == []
    assert client.gather(todo) == [x * x for x in range(len(names))]
    assert sorted(map(int, trace.read_text().split())) == list(range(len(names)))


def test_data_of_the_last_worker_waits_for_the_next_one(lease, client):
    lease.drain(1, "finish", 10_000)
    [data] = client.scatter([np.arange(5)])
    lease.node.obey(
        "drain", lease=lease.id, slice=lease.parts[0].id, mode="finish", deadline_in=30_000, why="maintenance"
    )
    time.sleep(0.5)
    assert not [each for each in lease.node.heard("slice_drained") if each["slice"] == lease.parts[0].id]
    lease.add(2)
    assert lease.node.wait("slice_drained", slice=lease.parts[0].id)["lost"] == []
    assert data.result(timeout=LONGEST).sum() == 10


def test_what_the_deadline_cuts_off_is_named_and_runs_again(lease, client):
    lease.drain(1, "now")
    long = client.submit(square, 9, 3.0)
    time.sleep(0.3)
    lease.add(2)
    assert lease.drain(0, "finish", 500)["forced"] == [long.key]
    assert long.result(timeout=LONGEST) == 81


def test_an_actor_is_waited_for_until_the_deadline_and_then_named(lease, client):
    actor = client.submit(dict, actor=True, workers=[lease.parts[0].id])
    data = client.submit(square, 3, workers=[lease.parts[0].id], allow_other_workers=True)
    wait([actor, data], timeout=LONGEST)
    report = lease.drain(0, "finish", 700)
    assert (report["lost"], report["forced"]) == ([actor.key], [])
    assert data.result(timeout=LONGEST) == 9


def partition(x, file=None):
    import pandas as pd

    if file is not None:
        with Path(file).open("a") as trace:
            trace.write(f"{x}\n")
    time.sleep(0.05)
    return pd.DataFrame({"key": np.arange(x, x + 200) % 17, "value": np.arange(200.0)})


def shuffled(client, file):
    import dask.dataframe as dd

    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        frame = dd.from_map(partition, range(40), file=str(file), meta=partition(0))
        return client.persist(frame.shuffle("key", npartitions=8))


def shuffles_under_way(dask_scheduler):
    return bool(dask_scheduler.extensions["shuffle"].active_shuffles)


@pytest.mark.parametrize("mode", ["finish", "now"])
def test_a_shuffle_survives_a_worker_that_leaves(lease, client, tmp_path, mode):
    """In good order its input tasks run once; where the device is gone, as often as it takes."""
    trace = tmp_path / "trace"
    frame = shuffled(client, trace)
    deadline = time.monotonic() + LONGEST
    while not client.run_on_scheduler(shuffles_under_way):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if mode == "now":
        lease.node.machine.lose(lease.parts[0].device)
    lease.add(2, wait=False)
    report = lease.drain(0, mode, 30_000)
    total = frame.groupby("key").value.sum().compute(scheduler=client)
    whole = sum(partition(x).groupby("key").value.sum() for x in range(40))
    assert total.sort_index().equals(whole.sort_index())
    assert report["lost"] == []
    if mode == "finish":
        assert report["forced"] == []
        assert sorted(map(int, trace.read_text().split())) == list(range(40))


def test_a_shuffle_that_the_deadline_cuts_off_is_named_in_full(lease, client, tmp_path):
    """A task that is too long keeps a shuffle from ending: all that this one costs is named."""
    before, during, begun = (tmp_path / name for name in ("before", "during", "begun"))
    names = [each.id for each in lease.parts]
    first = [client.submit(square, x, file=before, workers=names[:1], key=f"first-{x}") for x in range(8)]
    wait(first, timeout=LONGEST)
    frame = shuffled(client, during)
    deadline = time.monotonic() + LONGEST
    while not client.run_on_scheduler(shuffles_under_way):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    long = client.submit(square, 9, 4.0, file=begun, workers=names[:1], key="long", priority=10)
    while not begun.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    forced = lease.drain(0, "finish", 1_500)["forced"]
    assert long.key in forced
    assert client.gather([long, *first]) == [81, *(x * x for x in range(8))]
    assert len(frame) == 40 * 200
    again = [x for x, times in collections.Counter(before.read_text().split()).items() if times > 1]
    assert {f"first-{x}" for x in again} <= set(forced)
    runs = collections.Counter(during.read_text().split())
    named = set(re.findall(r"\('partition-[0-9a-f]+', (\d+)\)", " ".join(forced)))
    assert {x for x, times in runs.items() if times > 1} <= named, forced


# ---------------------------------------------------------------------------------------------- what is said


def fetch(url, secret=None):
    request = urllib.request.Request(url)
    if secret is not None:
        request.add_header("X-GPUPool-Lease-Secret", secret)
    try:
        with urllib.request.urlopen(request, timeout=20, context=ssl._create_unverified_context()) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code


PAGES = ("/status", "/health", "/json/identity.json", "/status/ws", "/statics/css/base.css")


def test_the_dashboard_answers_only_with_the_lease_s_secret(lease):
    for path in PAGES:
        for secret in (None, "", "wrong"):
            assert fetch(lease.dashboard + path, secret) == 403, path
        if path != "/status/ws":  # a plain request is no websocket
            assert fetch(lease.dashboard + path, lease.secret) == 200, path


def test_the_first_task_of_a_worker_is_reported(lease, client):
    client.submit(square, 2, workers=[lease.parts[1].id]).result(timeout=LONGEST)
    assert lease.node.wait("first_task", slice=lease.parts[1].id)["lease"] == lease.id


def suspend(lease, deadline_in):
    """Let all workers go, as a lease that is suspended does."""
    order = {"lease": lease.id, "mode": "suspend", "deadline_in": deadline_in, "why": "others need its GPUs"}
    for part in lease.parts:
        lease.node.obey("drain", slice=part.id, **order)
    return [lease.node.wait("slice_drained", slice=part.id) for part in lease.parts]


def test_a_suspended_lease_ends_what_runs_and_goes_on_with_the_rest_when_it_has_workers_again(
    lease, client, tmp_path
):
    trace = tmp_path / "trace"
    done = client.submit(square, 100, 0.2, str(trace))
    assert done.result(timeout=LONGEST) == 10_000
    todo = client.map(square, range(20), seconds=0.3, file=str(trace))
    wait(todo, timeout=LONGEST, return_when="FIRST_COMPLETED")
    began = time.monotonic()
    reports = suspend(lease, 60_000)
    assert time.monotonic() - began < 30, "nobody waits for the deadline when nothing runs any more"
    assert [(each["forced"], each["lost"]) for each in reports] == [([], [])] * 2
    # What was finished has nowhere to go; its work is to be done again, and counted.
    assert sum(each["work"] for each in reports) >= 200 + 300
    ran = len(trace.read_text().split())
    lease.add(2)
    assert client.gather([*todo, done]) == [*(x * x for x in range(20)), 10_000]
    again = collections.Counter(trace.read_text().split())
    assert max(again.values()) == 2
    assert sum(again.values()) == 21 + ran
    assert client.run_on_scheduler(suspicions) == {}


def test_what_the_deadline_of_a_suspension_cuts_off_is_named_and_what_it_holds_was_told_before(lease, client):
    [data] = client.scatter([np.zeros(1_000_000)])
    actor = client.submit(dict, actor=True, workers=[lease.parts[0].id])
    long = client.submit(square, 3, 4.0, workers=[lease.parts[1].id], allow_other_workers=True)
    done = client.submit(square, 2, 0.1)
    wait([actor, done], timeout=LONGEST)
    told = lease.node.wait("lease_holds", count=2)
    assert [key for key, _ in told["parts"]] == [data.key, actor.key]
    assert told["size"] > 8_000_000
    first, second = suspend(lease, 1_000)
    assert set(first["lost"]) | set(second["lost"]) == {data.key, actor.key}
    assert second["forced"] == [long.key], "a finished result is not cut off"
    assert lease.node.wait("lease_holds", count=0)["size"] == 0
    lease.add(2)
    assert client.gather([long, done]) == [9, 4]
