"""Planned maintenance of a node: its work moves to another one, and none of it is lost or run twice."""

from __future__ import annotations

import collections
import time
from pathlib import Path

import pytest
from distributed import wait

from tests.conftest import all_notices, wait_until

pytestmark = pytest.mark.slow

#: Seconds that anything may take.
LONGEST = 60


def square(x, file):
    """Take some time, and leave a trace of each run."""
    with Path(file).open("a") as trace:
        trace.write(f"{x}\n")
    time.sleep(0.05)
    return x * x


def nodes_of(lease):
    return {each.node for each in lease.refresh().slices}


def test_a_node_is_drained_under_load_and_no_work_is_lost(pool, tmp_path):
    """Data that cannot be computed again moves too; the node's GPUs are free then, and come back after it."""
    lease = pool.request(gpus=2, same_node=True, time_limit="1h")
    [old] = nodes_of(lease)
    client = lease.client()
    try:
        done = client.map(square, range(20), file=tmp_path / "done")
        [data] = client.scatter([[1, 2, 3]])
        wait(done, timeout=LONGEST)
        todo = client.map(square, range(100, 200), file=tmp_path / "todo")
        wait(todo, timeout=LONGEST, return_when="FIRST_COMPLETED")
        pool.call("POST", f"/v1/health/{old}", {"action": "drain", "why": "driver upgrade"})
        wait_until(lambda: old not in nodes_of(lease), LONGEST)
        assert client.gather(todo) == [x * x for x in range(100, 200)]
        assert client.gather([*done, data]) == [*(x * x for x in range(20)), [1, 2, 3]]
        runs = collections.Counter((tmp_path / "todo").read_text().split())
        assert set(runs.values()) == {1}
        assert (tmp_path / "done").read_text().count("\n") == 20
        assert pool.status().gpus_free == 2, "those of the other node that the lease has not got"
        told = [each["sentence"] for each in all_notices(lambda after: pool.get("/v1/notices", after=after))]
        assert any("work moves from" in each and "driver upgrade" in each for each in told)
    finally:
        client.close()
        pool.call("POST", f"/v1/health/{old}", {"action": "undrain"})
    assert pool.status().gpus_free == 6
