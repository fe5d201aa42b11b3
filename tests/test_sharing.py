"""Fair share on a real pool: elastic leases grow and shrink, batch leases make room, idle ones end."""

from __future__ import annotations

import collections
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from distributed import wait

from jupyter_gpupool.client import GPUPoolCluster, Pool
from tests.conftest import wait_until
from tests.pool_processes import PoolProcesses

pytestmark = pytest.mark.slow

#: Seconds that anything may take before a test fails.
LONGEST = 90
#: What makes a lease small enough for several of them on any machine.
SMALL = {"cpus": 0.1, "memory": "500MB"}
CONFIG = {
    "projects": [{"name": "a", "quota": 1}, {"name": "b", "quota": 1}],
    "defaults": {"min_run": 0, "grace": "60s", "idle_warning_gap": 1, "idle_timeout": "1h"},
}


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """A pool of two GPUs that are read twice a second."""
    with PoolProcesses(tmp_path_factory.mktemp("sharing"), {"node-1": 2}) as processes:
        processes.start_controller()
        processes.start_agent("node-1", "--interval", "0.5")
        processes.wait_for_nodes({"node-1"})
        yield processes


@pytest.fixture(scope="module")
def pool(processes):
    """The same for its administrator, with a GPU for each of two projects."""
    token = json.loads((processes.folder / "controller" / "admin.json").read_text())["token"]
    with Pool(processes.said["url"], token, processes.said["ca"]) as pool:
        pool.set_projects(**CONFIG)
        yield pool


@pytest.fixture(autouse=True)
def all_given_back(pool):
    """No lease of one test is in the way of the next."""
    yield
    for lease in pool.leases():
        lease.release(wait=30)


def ask(pool, name, project, **what):
    return pool.request(name=name, project=project, timeout=LONGEST, **SMALL, **what)


def square(x, seconds, file):
    """Take some time, and leave a trace of each run."""
    with Path(file).open("a") as trace:
        trace.write(f"{x}\n")
    time.sleep(seconds)
    return x * x


def workers(lease):
    return lease.refresh().data["progress"]["workers"]


def test_an_elastic_lease_grows_into_what_nobody_needs_and_hands_its_data_over_when_somebody_does(
    pool, tmp_path
):
    grown = ask(pool, "grown", "a", gpus=1, max_gpus=8)
    client = grown.client()
    wait_until(lambda: workers(grown) == 2, LONGEST)
    trace = tmp_path / "trace"
    done = client.map(square, range(6), seconds=0.1, file=str(trace))
    wait(done, timeout=LONGEST)
    [data] = client.scatter([np.arange(1000)])
    mine = ask(pool, "mine", "b", gpus=1)
    assert (len(mine.slices), len(grown.refresh().slices), grown.state) == (1, 1, "active")
    assert client.gather(done) == [x * x for x in range(6)]
    assert data.result().sum() == 499_500, "scattered data is handed over too"
    assert set(collections.Counter(trace.read_text().split()).values()) == {1}, "each task ran once"
    assert any("gives back 1 GPU of surplus" in each and "project b is below" in each for each in grown.notes)
    record = pool.reclaims()[0]
    assert (record["lease_name"], record["cost"], record["victims"][0]["whole"]) == ("mine", 0, False)
    mine.release(wait=30)
    wait_until(lambda: workers(grown) == 2, LONGEST)
    grown.scale(1)
    wait_until(lambda: len(grown.refresh().slices) == 1, LONGEST)
    assert client.gather(done) == [x * x for x in range(6)]


def test_a_batch_lease_makes_room_with_its_running_tasks_ended_and_goes_on_later(pool, processes, tmp_path):
    trace = tmp_path / "trace"
    batch = ask(pool, "batch", "a", gpus=2)
    client = batch.client()
    todo = client.map(square, range(10), seconds=0.5, file=str(trace))
    wait(todo, timeout=LONGEST, return_when="FIRST_COMPLETED")
    assert pool.trial(gpus=1, project="b").reasons[0]["reason"] == "reclaiming"
    began = time.monotonic()
    mine = ask(pool, "mine", "b", gpus=1)
    assert time.monotonic() - began < 45, "who holds nothing for good is not waited for until the deadline"
    wait_until(lambda: batch.refresh().state == "suspended", LONGEST)
    ran = len(trace.read_text().split())
    assert (batch.name, batch.place, batch.slices) == ("batch", 1, ())
    assert pool.explain("batch").reasons
    record = pool.reclaims()[0]
    assert (record["gpus"], record["deserved"], record["victims"][0]["whole"]) == (1, 1, True)
    assert record["cost"] >= 0.5, "the result that was there is to be computed again"
    assert [each["lost"] > 0 for each in pool.ledger() if each["project"] == "a"] == [True]
    processes.kill("controller")
    processes.start_controller()
    again = pool.reclaims()[0]
    assert {**again, "time": 0} == {**record, "time": 0}, "all of it outlives the controller"
    assert batch.refresh().state == "suspended"
    mine.release(wait=30)
    assert client.gather(todo) == [x * x for x in range(10)], "the same client, the same futures"
    again = collections.Counter(trace.read_text().split())
    assert max(again.values()) == 2, "what had begun was not cut off"
    assert sum(again.values()) == ran + 10
    assert batch.refresh().state == "active"


def test_what_a_lease_would_lose_for_good_is_named_with_its_size_before_it_is_taken(pool):
    batch = ask(pool, "holder", "a", gpus=2)
    with batch.client() as client:
        [data] = client.scatter([np.zeros(2_000_000)])
        actor = client.submit(dict, actor=True)
        wait(actor, timeout=LONGEST)
        wait_until(lambda: batch.refresh().data["holds"]["count"] == 2, LONGEST)
        assert batch.data["holds"]["size"] > 16_000_000
        mine = pool.request(name="mine", project="b", wait=False, **SMALL)
        wait_until(lambda: any("will be suspended" in each for each in batch.refresh().notes), LONGEST)
        [told] = [each for each in batch.notes if "will be suspended" in each]
        assert f"{data.key} (16 MB)" in told
        assert actor.key in told
        mine.release()


def test_an_interactive_lease_within_its_quota_is_never_taken(pool):
    ask(pool, "notebook", "a", gpus=1, interactive=True)
    ask(pool, "other", "a", gpus=1, interactive=True)
    mine = ask(pool, "mine", "b", gpus=1)
    assert mine.state == "active"
    states = {each.name: each.state for each in pool.leases()}
    assert states["notebook"] == "active", "the older one is within the quota"
    assert states["other"] in ("draining", "suspended")


def test_a_cluster_adapts_between_what_it_has_for_sure_and_what_nobody_needs(pool):
    with GPUPoolCluster(pool, project="a", gpus=1, max_gpus=2, timeout=LONGEST, **SMALL) as cluster:
        cluster.scale(1)  # for now: what it may grow to stays what was asked for
        adaptive = cluster.adapt(interval="200ms", wait_count=2, target_duration="100ms")
        assert (adaptive.minimum, adaptive.maximum) == (1, 2)
        with cluster.get_client() as client:
            slow = client.map(time.sleep, [0.4] * 40, pure=False)
            client.wait_for_workers(2, timeout=LONGEST)
            client.cancel(slow)
            wait_until(lambda: len(client.scheduler_info()["workers"]) == 1, LONGEST)
            adaptive.stop()
            cluster.scale(2)
            client.wait_for_workers(2, timeout=LONGEST)
            assert client.submit(sum, [1, 2]).result(timeout=LONGEST) == 3


def test_an_idle_lease_is_warned_of_twice_then_free_for_others_then_over_and_the_kernel_stays(pool):
    lease = ask(pool, "idler", "a", gpus=1, interactive=True, idle_timeout=2)
    kept = ask(pool, "worker", "b", gpus=1, interactive=True, idle_timeout=2)
    busy = kept.client().submit(time.sleep, LONGEST)
    client = lease.client()
    assert client.submit(os.getpid).result(timeout=LONGEST) != os.getpid()
    wait_until(lambda: any("warning 1 of 2" in each for each in lease.refresh().notes), LONGEST)
    lease.keep()  # the time-out begins anew
    client.close()  # that it was merely connected has kept nothing; once over, it would try to come back
    wait_until(lambda: lease.refresh().state == "ended", LONGEST)
    assert lease.why.startswith("idle for")
    words = [each for each in lease.notes if "has done nothing" in each]
    steps = ["warning 1 of 2", "warning 2 of 2", "others may take it now"]
    assert [part in each for part, each in zip(steps, words[-3:], strict=True)] == [True] * 3
    assert len(words) >= 4, "one before it was kept, and all after that"
    assert (kept.refresh().state, kept.data["idle_since"]) == ("active", None), "a running task is never idle"
    del busy
