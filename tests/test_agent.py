"""The agent of a node: joining, surviving, adopting, and what it keeps from others."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed.diagnostics.plugin import SchedulerPlugin

from jupyter_gpupool import wire
from jupyter_gpupool.core.model import Device, Instance, NvmlEvent, Reading, Verdict, encode
from jupyter_gpupool.driver import simulated
from jupyter_gpupool.line import Line, read_line, write_line
from jupyter_gpupool.node import guard, host, locks
from jupyter_gpupool.node.agent import Agent, Settings, listed_in
from jupyter_gpupool.node.connection import Connection
from jupyter_gpupool.node.fitness import Fitness, now_ms
from jupyter_gpupool.node.instances import Instances
from jupyter_gpupool.node.locks import DeviceLocks
from jupyter_gpupool.node.membership import FILE, JoinError, Membership, join, load
from jupyter_gpupool.node.outside import OutsideWatch
from jupyter_gpupool.node.reader import Finding
from tests.pki import TestAuthority
from tests.pool_processes import WAIT, PoolProcesses, wait_for

SECRET = "GPUPOOL_TEST_SECRET"


def a_device(index: int = 0) -> Device:
    return Device(uuid=f"GPU-test-{index}-{os.getpid()}", node="node-1", index=index, model="H100", memory=1)


# ------------------------------------------------------------------------------------- locks of the machine


def _hold(folder: str, uuid: str, ready: Any, over: Any) -> None:
    device = Device(uuid=uuid, node="n", index=0, model="H100", memory=1)
    DeviceLocks("https://first:1", "ben", Path(folder)).take([device])
    ready.set()
    over.wait(WAIT)
    os._exit(0)


def test_a_second_pool_is_refused_a_gpu_with_the_first_ones_address_and_owner(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, over, device = context.Event(), context.Event(), a_device()
    process = context.Process(target=_hold, args=(str(tmp_path), device.uuid, ready, over))
    process.start()
    try:
        assert ready.wait(WAIT)
        second = DeviceLocks("https://second:2", "ann", tmp_path)
        mine, refused = second.take([device, a_device(1)])
        assert mine == (a_device(1),)
        assert "https://first:1" in refused[device.uuid]
        assert "ben" in refused[device.uuid]
        process.kill()
        process.join(WAIT)
        assert second.take([device, a_device(1)]) == ((device, a_device(1)), {}), (
            "it is free with its process"
        )
    finally:
        process.kill()
        process.join(WAIT)


@pytest.mark.parametrize(
    "prepare",
    [
        lambda path: path.symlink_to("/etc/passwd"),
        os.mkfifo,
        lambda path: path.mkdir(),
    ],
    ids=["a link", "a pipe", "a folder"],
)
def test_what_is_no_plain_file_is_no_lock(tmp_path, prepare):
    prepare(tmp_path / f"gpupool-{a_device().uuid}.lock")
    mine, refused = DeviceLocks("https://x:1", "ann", tmp_path).take([a_device()])
    assert mine == ()
    assert "remove that file" in refused[a_device().uuid]
    assert "root:" in Path("/etc/passwd").read_text(), "nothing was written through the link"


def test_a_lock_is_anybodys_to_take_whatever_its_file_says(tmp_path):
    path = tmp_path / f"gpupool-{a_device().uuid}.lock"
    path.write_text('{"address": "\\u001b[31m", "owner": "x"}')
    held = locks._open(path)
    locks.fcntl.flock(held, locks.fcntl.LOCK_EX)
    _, refused = DeviceLocks("https://x:1", "ann", tmp_path).take([a_device()])
    assert "another pool on this machine" in refused[a_device().uuid], "what is not printable is not shown"
    os.close(held)
    mine = DeviceLocks("https://x:1", "ann", tmp_path)
    assert mine.take([a_device()])[0]
    assert path.stat().st_mode & 0o777 in (0o644, 0o666)
    mine.release()


# ---------------------------------------------------------------------------------------------- the machine


def test_the_host_is_what_this_process_may_use(tmp_path):
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text("1000000\n")
    assert host.cpus(tmp_path) == min(1500, len(os.sched_getaffinity(0)) * 1000)
    assert host.memory(tmp_path) == 1_000_000
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert host.cpus(tmp_path) == len(os.sched_getaffinity(0)) * 1000
    assert host.memory(tmp_path) == psutil.virtual_memory().total


def test_a_process_from_outside_counts_when_it_is_seen_twice():
    watch, mine = OutsideWatch(lambda pid: "L1/0" if pid == 1 else ""), os.getpid()
    there = [Reading(device="g", now=0, processes=((1, 5), (mine, 5)))]
    assert list(watch.changes(there)) == []
    [(device, who)] = watch.changes(there)
    assert device == "g"
    assert f"PID {mine}, user " in who
    assert list(watch.changes(there)) == [], "it is told once"
    assert list(watch.changes([Reading(device="g", now=0)])) == [("g", "")]


def test_a_pid_that_is_not_here_is_another_machines_view():
    watch = OutsideWatch(lambda pid: "")
    there = [Reading(device="g", now=0, processes=((2**22 + 1, 5),))]
    assert list(watch.changes(there)) == list(watch.changes(there)) == []


# --------------------------------------------------------------------------------------------- MIG instances


@pytest.mark.asyncio
async def test_a_mig_instance_is_made_once_remembered_and_destroyed(tmp_path):
    machines = tmp_path / "machines"
    simulated.create(machines, {"node-1": 1})
    machine = simulated.Machine(machines)
    [device] = machine.devices("node-1")
    machine.mig(device)
    environ = {**os.environ, **simulated.environment(machines, "node-1")}
    made = Instances(tmp_path / "instances.json", environ)
    wanted = encode(Instance(profile="1g.10gb", start=0, size=1))
    there, why = await made.create(device, wanted)
    assert there.uuid.startswith("MIG-"), why
    assert there.gpu_instance >= 0, "by which NVML events name it"
    assert (await made.create(device, wanted)) == (there, ""), "an order may come twice"
    _, why = await made.create(device, encode(Instance(profile="7g.80gb", start=0, size=8)))
    assert why, "there is no room for it, and the driver says so"
    whole = dataclasses.replace(a_device(), instances=(there, dataclasses.replace(there, uuid="MIG-older")))
    again = Instances(tmp_path / "instances.json", environ)
    assert [each.uuid for each in again.offered(whole).instances] == ["MIG-older"]
    assert await again.destroy(device, encode(there)) == ""
    assert await again.destroy(device, encode(there)) == "", "nor does it hurt to destroy it twice"
    assert again.offered(whole) == whole


@pytest.mark.asyncio
async def test_an_order_that_this_machine_has_no_means_for_is_answered_all_the_same(tmp_path):
    """Else nobody would hear of it, and the lease would wait for its instance for ever."""
    machines = tmp_path / "machines"
    simulated.create(machines, {"node-1": 1})
    machine = simulated.Machine(machines)
    [device] = machine.devices("node-1")
    machine.mig(device)
    wanted = encode(Instance(profile="1g.10gb", start=0, size=1))
    environ = {**os.environ, **simulated.environment(machines, "node-1")}
    crowded = Instances(tmp_path / "instances.json", {**environ, "LARGE": "x" * 2**20})
    there, why = await crowded.create_once("a/0", device, wanted)
    assert (there, why) == (None, "no process could be started to call the driver (Argument list too long)")
    no_disk = Instances(tmp_path / "gone" / "instances.json", environ)
    there, why = await no_disk.create_once("a/0", device, wanted)
    assert (there.profile, why) == ("1g.10gb", "")


@pytest.mark.asyncio
async def test_what_an_agent_finds_at_its_start_that_belongs_to_nothing_goes_at_the_second_look(tmp_path):
    machines = tmp_path / "machines"
    simulated.create(machines, {"node-1": 1})
    machine = simulated.Machine(machines)
    [device] = machine.devices("node-1")
    machine.mig(device)
    environ = {**os.environ, **simulated.environment(machines, "node-1")}
    older = Instances(tmp_path / "others.json", environ)
    await older.create(device, encode(Instance(profile="1g.10gb", start=6, size=1)))
    before = Instances(tmp_path / "instances.json", environ)
    mine, _ = await before.create(device, encode(Instance(profile="1g.10gb", start=0, size=1)))
    used = mine.uuid
    await before.create(device, encode(Instance(profile="1g.10gb", start=1, size=1)))
    machine.fail_next(device, "nvmlGpuInstanceCreateComputeInstance")
    machine.fail_next(device, "nvmlGpuInstanceDestroy")
    await before.create(device, encode(Instance(profile="2g.20gb", start=2, size=2)))
    assert len(machine.describe(device)["instances"]) == 4
    assert [await before.sweep(device, {used}) for _ in range(2)] == [0, 1], "what is new is left alone"
    after = Instances(tmp_path / "instances.json", environ)
    assert after.suspects({used}), "there is one of the pool's making that nobody uses"
    assert [await after.sweep(device, {used}) for _ in range(3)] == [0, 1, 0]
    assert sorted(each["start"] for each in machine.describe(device)["instances"]) == [0, 6]
    for _ in range(3):
        after.suspects({used})
    assert not after.suspects({used})


# -------------------------------------------------------------------------------------------------- fitness


def _fitness(path: Path, reports: list[dict]) -> Fitness:
    async def poll() -> None:
        """A driver that answers with nothing new."""

    return Fitness(path, "node-1", reports.append, poll, lambda *_: ["ann"])


@pytest.mark.asyncio
async def test_a_verdict_is_remembered_over_a_restart_and_said_again(tmp_path):
    reports: list[dict] = []
    fitness = _fitness(tmp_path / "health.json", reports)
    fitness.on_devices((a_device(),))
    assert fitness.opinions() == [], "nothing to say of a device that nobody has heard of"
    fitness.on_event(NvmlEvent(device=a_device().uuid, now=now_ms(), kind="xid", xid=79))
    assert [each["verdict"] for each in reports if each["report"] == "verdict"] == ["gone"]
    again = _fitness(tmp_path / "health.json", [])
    assert [each["verdict"] for each in again.opinions()] == ["gone"]
    order = await again.suspect(a_device().uuid)
    assert (order["order"], order["verdict"]) == ("verdict", "gone")
    again.forgive(a_device().uuid)
    [opinion] = _fitness(tmp_path / "health.json", []).opinions()
    assert opinion["verdict"] in (Verdict.FINE.value, Verdict.WATCH.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 99}'], ids=["empty", "cut", "a list", "newer"])
def test_a_damaged_memory_begins_anew(tmp_path, text):
    (tmp_path / "health.json").write_text(text)
    assert _fitness(tmp_path / "health.json", []).opinions() == []


# ------------------------------------------------------------------------------------------------- joining


def test_an_agent_that_never_joined_says_so(tmp_path):
    done = run_agent(tmp_path)
    assert "has not joined a pool yet" in done.stderr
    assert done.returncode == 1
    (tmp_path / FILE).write_text("{")
    with pytest.raises(JoinError, match="join anew"):
        load(tmp_path)


def run_agent(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jupyter_gpupool.node", "--dir", str(folder), "--name", "node-9", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    os.environ[SECRET] = "hunter2"
    with PoolProcesses(tmp_path_factory.mktemp("pool"), {"node-1": 2, "node-2": 2}) as pool:
        yield pool.start()
    del os.environ[SECRET]


def _line(pool: PoolProcesses, kind: str = "agent") -> str:
    return str(pool.call("POST", "/v1/tokens", {"kind": kind})["line"])


def test_a_line_joins_one_agent_once(pool, tmp_path):
    line = _line(pool)
    member = join(tmp_path, line, "node-7")
    assert load(tmp_path) == member
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    assert "PRIVATE KEY" not in repr(member)
    with pytest.raises(JoinError, match="not good any more"):
        join(tmp_path / "second", line, "node-8")


def _other(line: Line, **changes: str) -> str:
    return write_line(line._replace(**changes))


def test_a_line_that_is_not_good_joins_nothing_and_says_what_to_do(pool, tmp_path):
    good = read_line(_line(pool))
    with socket.create_server(("127.0.0.1", 0)) as mute:
        closed = mute.getsockname()[1]
    cases = {
        "copy the whole line": "gpupool:" + base64.urlsafe_b64encode(b"{}").decode(),
        "login": _other(good, kind="login"),
        "another fingerprint": _other(good, ca_sha256="0" * 64),
        "cannot be reached": _other(good, url=f"https://127.0.0.1:{closed}"),
        "new": _other(good, token="gpupool_0_0"),
    }
    for words, line in cases.items():
        with pytest.raises(JoinError, match=words):
            join(tmp_path, line, "node-9")
        assert not (tmp_path / FILE).exists()
    for name in ("", "a|b", "x" * 51, "../up", "two words"):
        with pytest.raises(JoinError, match="--name"):
            join(tmp_path, write_line(good), name)
    assert "login" in run_agent(tmp_path, "--join", cases["login"]).stderr


@pytest.mark.asyncio
async def test_orders_are_taken_from_the_controllers_certificate_only(tmp_path):
    """Another agent's certificate is of the same authority; it must not give orders."""
    from distributed import Scheduler

    authority = TestAuthority()
    obeyed: list[Any] = []
    for name in ("gpupool agent node-2", wire.CONTROLLER):
        pair = authority.pair(name)
        security = wire.security(pair.ca, pair.cert, pair.key)
        async with Scheduler(
            host="127.0.0.1", port=0, protocol="tls", security=security, dashboard_address="127.0.0.1:0"
        ) as scheduler:
            scheduler.stream_handlers[wire.OP] = lambda **_: None
            ordering = Ordering(name)
            scheduler.add_plugin(ordering)
            mine = authority.pair("gpupool agent node-1")
            member = Membership(name="node-1", url="", comm=scheduler.address, **vars(mine))
            connection = Connection(
                member, tmp_path, "boot", joined=dict, connected=lambda: None, obey=obeyed.extend
            )
            task = asyncio.create_task(connection.run())
            try:
                await asyncio.wait_for(ordering.came.wait(), WAIT)
                await asyncio.sleep(0.3)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
    assert obeyed == [{"order": wire.CONTROLLER}]


@pytest.mark.asyncio
@pytest.mark.parametrize("disk", ["its own", "that of temporary files"])
async def test_a_disk_that_is_full_for_a_while_costs_an_agent_its_connection_for_that_while_only(
    tmp_path, monkeypatch, disk
):
    """Dask writes files for a connection; what stands in for a full disk here refuses them as well."""
    from distributed import Scheduler

    authority = TestAuthority()
    pair, mine = authority.pair(wire.CONTROLLER), authority.pair("gpupool agent node-1")
    full, connected = tmp_path / "full", asyncio.Event()
    full.write_text("")
    async with Scheduler(
        host="127.0.0.1",
        port=0,
        protocol="tls",
        security=wire.security(pair.ca, pair.cert, pair.key),
        dashboard_address="127.0.0.1:0",
    ) as scheduler:
        scheduler.stream_handlers[wire.OP] = lambda **_: None
        member = Membership(name="node-1", url="", comm=scheduler.address, **vars(mine))
        folder = full if disk == "its own" else tmp_path
        connection = Connection(member, folder, "boot", joined=dict, connected=connected.set, obey=list)
        if folder is tmp_path:
            monkeypatch.setattr(tempfile, "tempdir", str(full))
        task = asyncio.create_task(connection.run())
        try:
            await asyncio.sleep(0.5)
            assert not connected.is_set()
            full.unlink()
            full.mkdir()
            await asyncio.wait_for(connected.wait(), WAIT)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("readings", "listed"),
    [
        pytest.param([Reading(device="g", now=1, processes=((7, 1),))], {7}, id="it lists what it lists"),
        pytest.param([], None, id="one that hangs does not say"),
        pytest.param([Reading(device="h", now=1)], None, id="another device's reading says nothing"),
        pytest.param([Reading(device="g", now=1, error="IRQ_ISSUE")], None, id="an error says nothing"),
        pytest.param([Reading(device="g", now=1, error="GPU_IS_LOST")], set(), id="a lost GPU runs nothing"),
    ],
)
def test_what_the_driver_says_of_a_device_s_processes(readings, listed):
    assert listed_in(readings, "g") == listed


@pytest.fixture
def agent(tmp_path):
    """An agent that is not run: what it would say is in its outbox."""
    member = Membership(name="node-1", url="", comm="", ca="", cert="", key="")
    agent = Agent(tmp_path, member, Settings(simulated={"GPUPOOL_SIMULATED": str(tmp_path)}))
    yield agent
    agent._leases._table.remove_run()
    agent._leases._table.close()


def test_how_long_a_lease_has_been_idle_is_not_kept_for_a_controller_that_is_away(agent):
    agent._on_report({"report": "lease_idle", "lease": "L", "since": 0})
    assert len(agent._connection.outbox) == 0
    agent._on_report({"report": "lease_busy", "lease": "L"})
    assert len(agent._connection.outbox) == 1


@pytest.mark.parametrize(
    ("finding", "sentence"),
    [
        pytest.param(
            Finding(device="GPU-1", seconds=40.0, sentence="readings of this device stopped 40 s ago"),
            "node-1/gpu3: readings of this device stopped 40 s ago. That condemns no device.",
            id="silence condemns nothing",
        ),
        pytest.param(
            Finding(device="GPU-1", seconds=0.0, sentence="readings are back"),
            "node-1/gpu3: readings are back.",
            id="good news needs no comfort",
        ),
        pytest.param(
            Finding(device="", seconds=0.0, sentence="the reader's process ended", name="READER_ENDED"),
            "node-1: the reader's process ended. That condemns no device.",
            id="what is the whole node's",
        ),
    ],
)
def test_what_is_the_matter_with_readings_is_said_in_people_s_names(agent, finding, sentence):
    agent._reader.devices = (Device(uuid="GPU-1", node="node-1", index=3, model="H100", memory=1),)
    agent._on_silence(finding)
    [report] = agent._connection.outbox._kept.values()
    assert report["sentence"] == sentence


class Ordering(SchedulerPlugin):
    """Gives an order to whoever registers, before there is time to leave."""

    def __init__(self, order: str) -> None:
        self.order, self.came = order, asyncio.Event()

    def add_worker(self, scheduler: Any, worker: str) -> None:
        scheduler.worker_send(worker, {"op": wire.OP, "orders": [{"order": self.order}]})
        self.came.set()


# ------------------------------------------------------------------------------------------- real processes


def _processes_of(pool: PoolProcesses, lease: str) -> dict[int, psutil.Process]:
    """All processes of a lease, by the marks that its agents put on them and on all that these start."""
    marks = [f"{agent}:{entry['key']}" for agent, entry in pool.tables() if entry["lease"] == lease]
    there = guard.marked("", guard.look())
    found = (pid for mark in marks for pid, _ in there.get(mark, ()))
    return {pid: psutil.Process(pid) for pid in found}


def test_what_an_agent_starts_has_an_environment_from_an_allow_list(pool):
    lease = pool.request(name="environment")
    pool.wait_for_lease(lease, "active")
    agent = psutil.Process(pool.pid("node-1"))
    assert agent.environ()[SECRET] == "hunter2"
    below = {**{each.pid: each for each in agent.children(recursive=True)}, **_processes_of(pool, lease)}
    assert len(below) >= 6, "reader, launcher, forkserver, scheduler, host, worker"
    for process in below.values():
        try:
            assert SECRET not in process.environ(), process.cmdline()
        except psutil.Error:
            continue
    pool.call("DELETE", f"/v1/leases/{lease}")
    pool.wait_for_lease(lease, "ended")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "asked to end"])
def test_what_an_agent_has_started_outlives_it_and_the_next_one_adopts_it(pool, number):
    lease = pool.request(name=f"adopted-{number}", gpus=4)
    pool.wait_for_lease(lease, "active")
    before = _processes_of(pool, lease)
    slices = pool.lease(lease)["slices"]
    for name in ("node-1", "node-2"):
        pool.kill(name, number)
    assert pool.running["node-2"].returncode == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    pool.wait_for_nodes({"node-1", "node-2"}, "silent")
    for name in ("node-1", "node-2"):
        pool.start_agent(name)
    pool.wait_for_nodes({"node-1", "node-2"})
    assert pool.lease(lease)["slices"] == slices
    assert pool.lease(lease)["state"] == "active"
    assert len(before) >= 9, "a scheduler, and a host and a worker for each slice"
    assert set(_processes_of(pool, lease)) == set(before)
    pool.call("DELETE", f"/v1/leases/{lease}")
    pool.wait_for_lease(lease, "ended")
    assert pool.call("GET", "/v1/pool")["gpus_free"] == 4
    assert not _processes_of(pool, lease)


def test_a_worker_that_died_while_nobody_could_be_told_is_replaced(pool):
    """Its agent keeps the report until the controller is back."""
    lease = pool.request(name="told-later")
    first = pool.wait_for_lease(lease, "active")["slices"][0]["id"]
    pool.kill("controller")
    psutil.Process(next(each["pid"] for _, each in pool.tables() if each["key"] == first)).kill()
    pool.start_controller()

    def replaced() -> bool:
        slices = pool.lease(lease)["slices"]
        return [each["state"] for each in slices] == ["running"] and slices[0]["id"] != first

    wait_for(replaced, "another worker in its place")
    pool.call("DELETE", f"/v1/leases/{lease}")
    pool.wait_for_lease(lease, "ended")


@pytest.mark.parametrize("ending", [False, True], ids=["", "and its leases are being ended"])
def test_an_agent_whose_folder_was_deleted_ends_when_asked_to_and_leaves_nothing(tmp_path, ending):
    """Nobody could find what it left. That the driver hangs meanwhile keeps it no longer."""
    with PoolProcesses(tmp_path, {"node-1": 1}) as pool:
        pool.start()
        lease = pool.request()
        [part] = pool.wait_for_lease(lease, "active")["slices"]
        if ending:
            simulated.Machine(pool.simulated).hang(part["device"], 60)
            pool.call("DELETE", f"/v1/leases/{lease}")
        shutil.rmtree((tmp_path / "node-1").rename(tmp_path / "deleted"))
        pool.kill("node-1", signal.SIGTERM)
        assert pool.running["node-1"].returncode == 0
        wait_for(lambda: not pool.left(), f"nothing is left; {pool.left()}")


def test_a_second_agent_in_the_same_folder_is_refused(pool):
    done = run_agent(pool.folder / "node-1")
    assert done.returncode == 1
    assert f"process {pool.pid('node-1')}" in done.stderr


def test_two_machines_of_one_name_do_not_take_turns(pool, tmp_path):
    """A copied folder is a second agent with the same certificate; the one that is there stays."""
    shutil.copy(pool.folder / "node-1" / FILE, tmp_path / FILE)
    log = tmp_path / "log"
    with (tmp_path / "err").open("wb") as errors:
        second = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "jupyter_gpupool.node",
                "--dir",
                str(tmp_path),
                "--name",
                "node-1",
                "--log",
                str(log),
            ],
            env={**os.environ, **simulated.environment(pool.simulated, "node-1")},
            stdout=errors,
            stderr=errors,
        )
    try:
        wait_for(lambda: log.exists() and "in the pool already" in log.read_text(), "the second is told")
        assert pool.node_states()["node-1"] == "up"
    finally:
        second.terminate()
        assert second.wait(WAIT) == 0


def test_a_frozen_agent_is_silent_and_heard_again_when_it_thaws(pool):
    os.kill(pool.pid("node-2"), signal.SIGSTOP)
    try:
        pool.wait_for_nodes({"node-2"}, "silent")
    finally:
        os.kill(pool.pid("node-2"), signal.SIGCONT)
    pool.wait_for_nodes({"node-2"})


def test_an_agent_without_a_driver_says_so(pool, tmp_path):
    shutil.copy(pool.folder / "node-2" / FILE, tmp_path / FILE)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GPUPOOL")}
    done = subprocess.run(
        [sys.executable, "-m", "jupyter_gpupool.node", "--dir", str(tmp_path)],
        capture_output=True, text=True, timeout=60, check=False, env=environ,
    )  # fmt: skip
    if done.returncode == 1:
        assert "driver" in done.stderr
        assert "Traceback" not in done.stderr


def test_the_memory_of_an_agent_is_for_its_user_only(pool):
    for name in ("controller", "node-1", "node-2"):
        folder = pool.folder / name
        assert folder.stat().st_mode & 0o777 == 0o700
        secret = [each for each in folder.iterdir() if each.is_file() and each.stat().st_mode & 0o077]
        assert [each.name for each in secret if each.suffix in (".json", ".key", ".sqlite")] == []
    assert json.loads((pool.folder / "node-1" / FILE).read_text())["name"] == "node-1"
