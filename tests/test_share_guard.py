"""Shares hold: who takes more is warned, paused and ended, and a neighbour never pays."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from jupyter_gpupool.core.model import GB, MIB, WHOLE, Instance, Reading, Slice
from jupyter_gpupool.driver import simulated
from jupyter_gpupool.driver.simulated import cuda
from jupyter_gpupool.node import guard
from jupyter_gpupool.node.reader import Reader
from jupyter_gpupool.node.share_guard import ShareGuard
from jupyter_gpupool.node.share_watch import SLACK, ShareWatch, Step, Stray
from tests.conftest import wait_until
from tests.leasing import Node, running

# ------------------------------------------------------------------------------------------------- judging

SHARE = 20 * GB


def part(ident="L1/0", device="g0", **more):
    what = {"milli": 250, "vram": SHARE, "node": "node-1", **more}
    return Slice(id=ident, lease=ident.rpartition("/")[0], device=device, **what)


#: Whose the processes of these tests are.
OWNERS = {1: "L1/0", 2: "L1/0", 3: "L2/0", 9: ""}


def looks(*sizes, slices=(), gap=1000):
    """What follows from looks a second apart, each with what processes 1 and 2 have."""
    watch = ShareWatch(OWNERS.get, gap_ms=1000)
    told = []
    for number, size in enumerate(sizes, start=1):
        processes = ((1, size - GB), (2, GB), (3, GB), (9, 70 * GB))
        reading = Reading(device="g0", now=number * gap, processes=processes)
        here = slices or (part(), part("L2/0"))
        told.append([(each.step, each.used, each.pid) for each in watch.look([reading], here)])
    return told


def test_a_slice_above_its_share_is_warned_then_paused_then_ended_with_all_its_processes_counted():
    assert looks(30 * GB, 30 * GB, 30 * GB, 30 * GB) == [
        [(Step.WARNED, 30 * GB, 1)],
        [(Step.PAUSED, 30 * GB, 1)],
        [(Step.ENDED, 30 * GB, 1)],
        [(Step.WARNED, 30 * GB, 1)],
    ]


@pytest.mark.parametrize(
    ("sizes", "steps"),
    [
        pytest.param((SHARE, SHARE + SLACK), [[], []], id="a little above is nobody's fault"),
        pytest.param((30 * GB, SHARE, 30 * GB), [["warned"], [], ["warned"]], id="who is back begins anew"),
        pytest.param(
            (30 * GB, 30 * GB, SHARE), [["warned"], ["paused"], ["within"]], id="who was paused goes on"
        ),
    ],
)
def test_a_slice_back_within_its_share_begins_anew(sizes, steps):
    found = looks(*sizes)
    assert [[step.name.lower() for step, _, _ in each] for each in found] == steps


def test_looks_in_quick_succession_are_one_look():
    assert looks(30 * GB, 30 * GB, 30 * GB, gap=100) == [[(Step.WARNED, 30 * GB, 1)], [], []]


@pytest.mark.parametrize(
    "slice_",
    [
        part(milli=WHOLE),
        part(instance=Instance(profile="1g.10gb", start=0, size=1, uuid="MIG-1", memory=10 * GB)),
    ],
    ids=["a whole GPU", "a MIG instance"],
)
def test_what_has_no_neighbour_is_not_judged(slice_):
    assert looks(70 * GB, 70 * GB, slices=(slice_, part("L2/0"))) == [[], []]


def test_a_process_on_a_device_of_which_its_lease_has_nothing_is_astray_at_the_second_look():
    watch = ShareWatch(OWNERS.get, gap_ms=1000)
    slices = [part(), part("L1/1", device="g1"), part("L2/0", device="g1")]
    there = Reading(device="g0", now=1, processes=((1, GB), (3, GB)))
    assert list(watch.look([there], slices)) == []
    assert list(watch.look([there], slices)) == [Stray(3, "L2", "g0")]
    both = Reading(device="g1", now=2, processes=((1, GB),))
    assert list(watch.look([both, both], slices)) == [], "another device of the same lease is its own"


def test_only_a_slice_whose_process_is_seen_is_guarded():
    watch = ShareWatch(OWNERS.get, gap_ms=1000)
    list(watch.look([Reading(device="g0", now=1, processes=((3, GB),))], [part(), part("L2/0")]))
    assert watch.seen == {"L2/0"}


# ------------------------------------------------------------------------------------------- real processes


class Guarded(Node):
    """A node with its reader and its guard."""

    async def _start(self):
        adopted = await super()._start()
        environ = {**os.environ, **simulated.environment(self.folder / "machines", self.name)}
        self.reader = Reader(environ, node=self.name, interval_s=60, on_readings=self.judge)
        self.guard = ShareGuard(self.leases, self.reader.poll, self._report, look_s=0.4)
        devices = {each.uuid: each for each in await self.reader.start()}
        self.leases.shares._device_of = devices.get
        self.keeping = asyncio.create_task(self.guard.keep())
        return adopted

    def judge(self, readings):
        self.guard.on_readings(readings)

    def stop(self, *, keep=False):
        self.run(self._end_guard())
        super().stop(keep=keep)

    async def _end_guard(self):
        self.keeping.cancel()
        await self.reader.close()


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    node = Guarded(tmp_path_factory.mktemp("n"))
    node.start()
    yield node
    node.stop()


def share(lease, gb):
    return lease.add(0, milli=gb * WHOLE // 80, vram=gb * GB)


def allocate(gb):
    """Allocate on the device past every limit of a library's."""
    cuda.malloc(gb * GB)
    return os.getpid()


def in_a_child(gb, seconds):
    """Allocate in a process of its own, which has nothing of the environment that marks a lease's."""
    kept = {name: os.environ[name] for name in os.environ if name.startswith(("GPUPOOL_SIM", "CUDA_VIS"))}
    code = f"from jupyter_gpupool.driver.simulated import cuda; cuda.malloc({gb * GB}); import time"
    return subprocess.run([sys.executable, "-c", f"{code}; time.sleep({seconds})"], env=kept, check=False)


def test_the_one_that_takes_too_much_is_ended_and_told_and_its_neighbour_finishes(node):
    with (
        running(node, "greedy", user="ann", workers=0) as greedy,
        running(node, "calm", user="ben", workers=0) as calm,
    ):
        mine, theirs = share(greedy, 20), share(calm, 60)
        with greedy.client() as client, calm.client() as other:
            pid = client.submit(os.getpid).result(20)
            neighbour = other.submit(allocate, 50, pure=False).result(20)
            slow = other.submit(lambda: (time.sleep(2), os.getpid())[1])
            assert client.submit(allocate, 24).result(20) == pid, "nothing stops CUDA's own calls at first"
            steps = [node.wait("over_share", slice=mine.id) for _ in range(3)]
            assert [each["step"] for each in steps] == ["warned", "paused", "ended"]
            assert all(each["used"] > 24 * GB and each["share"] == 20 * GB for each in steps)
            assert steps[-1]["pid"] == pid
            assert client.submit(os.getpid, pure=False).result(30) != pid, "its Nanny has started another one"
            assert slow.result(20) == neighbour
        assert {each["slice"] for each in node.heard("over_share")} == {mine.id}
        layers = {each["slice"]: each["layers"] for each in node.heard("layers")}
        assert layers[mine.id]["guard"] == layers[theirs.id]["guard"] == "on"


def test_a_paused_worker_takes_no_task_and_goes_on_when_it_is_back_within_its_share(node):
    with running(node, "back", workers=0) as lease:
        mine = share(lease, 20)
        with lease.client() as client:
            client.submit(os.getpid).result(20)
            node.run(_held(node, mine.id, hold=True))
            wait_until(lambda: statuses(client) == ["paused"])
            waits = client.submit(os.getpid, pure=False)
            time.sleep(0.5)  # Dask's own memory monitor would have let it go on by now
            assert (statuses(client), waits.status) == (["paused"], "pending")
            node.run(_held(node, mine.id, hold=False))
            assert waits.result(20)


async def _held(node, part_id, *, hold):
    node.leases.hold(part_id, hold=hold)


def statuses(client):
    return [each["status"] for each in client.scheduler_info(n_workers=-1)["workers"].values()]


def test_what_a_task_has_started_counts_and_is_what_is_ended(node):
    with running(node, "parent", workers=0) as lease:
        mine = share(lease, 20)
        with lease.client() as client:
            pid = client.submit(os.getpid).result(20)
            child = client.submit(in_a_child, 24, 60)
            last = [node.wait("over_share", slice=mine.id) for _ in range(3)][-1]
            assert last["pid"] != pid
            assert psutil.pid_exists(pid), "the worker is not to blame"
            assert child.result(20).returncode == -signal.SIGTERM


def test_a_process_on_a_device_that_is_not_its_own_is_ended(node):
    with running(node, "astray", workers=0) as lease:
        lease.add(0)
        with lease.client() as client:
            client.submit(os.getpid).result(20)
            other = node.devices[1]
            away = client.submit(on_another, other)
            node.run(_polled_until_told(node))
            told = node.wait("stray", lease="astray")
            assert told["device"] == other
            assert away.result(20) == -signal.SIGTERM
            assert told["pid"] not in {each.pid for each in psutil.process_iter()}


async def _polled_until_told(node):
    """Have it read sooner than it would; the guard's own looks come in between."""
    async with asyncio.timeout(20):
        while not any(each["report"] == "stray" for each in node.reports):
            await node.reader.poll()
            await asyncio.sleep(0.05)


def on_another(uuid):
    code = "from jupyter_gpupool.driver.simulated import cuda; cuda.malloc(5); import time; time.sleep(60)"
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "CUDA_VISIBLE_DEVICES": uuid}, check=False
    ).returncode


def test_a_share_without_room_for_any_data_says_what_to_ask_for(node):
    with running(node, "tiny", workers=0) as lease:
        lease.add(0, wait=False, milli=5, vram=400 * MIB)
        why = node.wait_failed("slice_failed", lease="tiny")["why"]
    assert "its share of 0.42 GB has no room for data: CUDA and its libraries take" in why
    assert "ask for at least" in why


def test_a_process_that_does_not_end_when_asked_is_killed():
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        asyncio.run(guard.end_one(process.pid, 0.2))
        assert process.wait(10) == -signal.SIGKILL
