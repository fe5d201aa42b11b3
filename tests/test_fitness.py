"""The judges in their places: at a node's agent, at the controller, and what the pool makes of a restart."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from jupyter_gpupool.controller.fitness import FILE, ThresholdsError, read_thresholds
from jupyter_gpupool.core.model import (
    GB,
    InstanceCreated,
    Node,
    NvmlEvent,
    Reading,
    RestartWorker,
    Verdict,
)
from jupyter_gpupool.node import fitness as module
from jupyter_gpupool.node.fitness import Fitness, now_ms
from jupyter_gpupool.node.lease_table import Entry
from jupyter_gpupool.node.lease_verdicts import Verdicts

from .controller_kit import running
from .judging import Bench, gpus
from .pool_helpers import World, kinds, node

# ------------------------------------------------------------------------------------------ at a node's agent


class Agent:
    """A fitness as an agent has it, on two devices; `answers` are given to its next polls, in their order."""

    def __init__(self, folder, users=("ann",), **options):
        self.reports, self.answers = [], []
        self.fitness = Fitness(
            folder / "health.json", "node-1", self.reports.append, self.poll, lambda *_: users, **options
        )
        self.devices = gpus(2)
        self.fitness.on_devices(tuple(self.devices))

    async def poll(self):
        if self.answers:
            self.answers.pop(0)()

    def xid(self, code, gpu=0):
        uuid = self.devices[gpu].uuid
        self.fitness.on_event(NvmlEvent(device=uuid, now=now_ms(), kind="xid", xid=code))

    def read(self, gpu=0, **signals):
        self.fitness.on_readings([Reading(device=self.devices[gpu].uuid, now=now_ms(), **signals)])

    def told(self, kind="verdict"):
        return [each for each in self.reports if each["report"] == kind]


@pytest.mark.asyncio
async def test_what_an_agent_remembers_outlives_it_with_the_pool_s_thresholds(tmp_path):
    agent = Agent(tmp_path)
    agent.fitness.set_limits({"xids": {"109": "reset"}})
    agent.xid(95, 0)
    again = Agent(tmp_path)
    again.xid(109, 1)
    told = {each["device"]: each["verdict"] for each in again.fitness.opinions()}
    assert told == {again.devices[0].uuid: "evacuate", again.devices[1].uuid: "evacuate"}


@pytest.mark.asyncio
async def test_wrong_thresholds_change_nothing(tmp_path):
    agent = Agent(tmp_path)
    with pytest.raises(ValueError, match="There is no health threshold"):
        agent.fitness.set_limits({"nonsense": 1})
    agent.xid(109)
    assert [each["verdict"] for each in agent.told()] == ["watch"]


@pytest.mark.asyncio
async def test_two_people_s_programs_on_one_gpu_take_it_out_and_one_person_s_do_not(tmp_path, monkeypatch):
    """A person who tries again has another lease each time, and stays the same person."""
    clock = [now_ms()]
    monkeypatch.setattr(module, "now_ms", lambda: clock[0])
    users = ["ann"]
    agent = Agent(tmp_path, users)
    for _ in range(3):
        clock[0] += 60_000
        agent.fitness.on_event(NvmlEvent(device=agent.devices[0].uuid, now=clock[0], kind="xid", xid=31))
    assert [each["verdict"] for each in agent.told()] == ["restart_worker"] * 3
    users[:] = ["ben"]
    agent.fitness.on_event(NvmlEvent(device=agent.devices[0].uuid, now=clock[0] + 60_000, kind="xid", xid=31))
    assert agent.told()[-1]["verdict"] == "retire_soon"


@pytest.mark.asyncio
async def test_a_program_that_fails_elsewhere_lets_a_gpu_off(tmp_path):
    agent = Agent(tmp_path)
    for minute in range(5):
        event = NvmlEvent(device=agent.devices[0].uuid, now=now_ms() + 60_000 * minute, kind="xid", xid=31)
        agent.fitness.on_event(event)
    assert agent.told()[-1]["verdict"] == "retire_soon"
    agent.fitness.blame("ann")
    assert agent.told()[-1]["verdict"] not in ("retire_soon", "evacuate", "gone")


@pytest.mark.asyncio
async def test_a_suspicion_waits_for_the_event_that_comes_after_the_reading(tmp_path):
    """The task's error, the reading and the XID come within milliseconds, in any order."""
    agent = Agent(tmp_path)
    loop = asyncio.get_running_loop()
    agent.answers = [lambda: agent.read(remap_pending=True), lambda: None]
    loop.call_later(0.1, agent.xid, 48)
    answer = await agent.fitness.suspect(agent.devices[0].uuid)
    assert (answer["verdict"], answer["final"]) == ("evacuate", True)


@pytest.mark.asyncio
@pytest.mark.parametrize("percent", [None, 0, 70])
async def test_a_suspicion_is_also_told_whether_the_gpu_is_at_work(tmp_path, percent):
    """A worker that gives no answer while its GPU works does not hang; not supported is not at work."""
    agent = Agent(tmp_path)
    agent.answers = [lambda: agent.read(utilisation=percent)]
    assert (await agent.fitness.suspect(agent.devices[0].uuid))["busy"] is bool(percent)


@pytest.mark.asyncio
async def test_a_suspicion_of_a_lost_gpu_is_answered_at_once(tmp_path):
    agent = Agent(tmp_path)
    agent.answers = [lambda: agent.read(error="GPU_IS_LOST")]
    began = time.monotonic()
    answer = await agent.fitness.suspect(agent.devices[0].uuid)
    assert answer["verdict"] == "gone"
    assert time.monotonic() - began < module.LATER


@pytest.mark.asyncio
async def test_a_mild_verdict_in_between_answers_no_worker():
    """The worker waits for the answer to its own question, or for a verdict that leaves no doubt."""
    reports = []
    verdicts = Verdicts(reports.append)
    entry = Entry("L1/0", "L1", "ann", {"id": "L1/0", "lease": "L1", "device": "GPU-0"})
    asked = asyncio.create_task(verdicts.ask(entry, "CUDA error"))
    await asyncio.sleep(0)
    verdicts.say({"device": "GPU-0", "verdict": "watch", "sentence": "a row is to be remapped"})
    await asyncio.sleep(0)
    assert not asked.done()
    verdicts.say({"device": "GPU-0", "verdict": "evacuate", "sentence": "XID 48"})
    assert (await asked)["verdict"] == "evacuate"
    assert [each["report"] for each in reports] == ["suspect"]


# ------------------------------------------------------------------------------------------ at the controller


def _report(change):
    return {
        "report": "verdict",
        "device": change.device,
        "verdict": change.verdict.value,
        "sentence": change.sentence,
        "evidence": change.evidence,
        "probation": change.probation,
    }


def _hear(kit, name, changes):
    for change in changes:
        kit.controller.hearing._take(name, _report(change))


def _verdicts(kit):
    return [str(each.verdict) for each in kit.controller.pool.devices.values()]


async def _notices(kit, who):
    answer = await kit.call(who, "GET", "/v1/notices?after=0")
    return [each["sentence"] for each in answer.data["notices"]]


@pytest.mark.asyncio
async def test_the_circuit_breaker_holds_until_an_administrator_says_what_is_bad(tmp_path):
    """Five of eight at once: four are taken out, one waits; draining it carries its verdict out."""
    async with running(tmp_path) as kit:
        for name in ("node-1", "node-2"):
            bench = Bench(node=name)
            for gpu in range(3):
                _hear(kit, name, bench.xid(79, gpu).changes)
        assert _verdicts(kit) == ["gone"] * 3 + ["fine"] + ["gone", "watch", "watch", "fine"]
        assert any("more likely one cause" in each for each in await _notices(kit, "adm"))
        await kit.call("adm", "POST", "/v1/health/node-2/gpu1", {"action": "drain"})
        await kit.call("adm", "POST", "/v1/health/node-2/gpu2", {"action": "uncordon"})
        assert _verdicts(kit)[4:] == ["gone", "gone", "watch", "fine"]
        _hear(kit, "node-2", bench.xid(79, 3).changes)
        assert _verdicts(kit)[7] == "gone", "the breaker is closed again"


@pytest.mark.asyncio
async def test_what_the_controller_knows_of_fitness_outlives_it(tmp_path):
    async with running(tmp_path) as kit:
        for name in ("node-1", "node-2"):
            bench = Bench(node=name)
            for gpu in range(3):
                _hear(kit, name, bench.xid(79, gpu).changes)
    async with running(tmp_path) as kit:
        assert list(kit.controller.fitness._judge.held) == ["GPU-node-2-1", "GPU-node-2-2"]


@pytest.mark.asyncio
async def test_anybody_can_read_what_a_verdict_rests_on(tmp_path):
    """Also of one that the circuit breaker holds back: what it was judged to be is in its sentence."""
    async with running(tmp_path) as kit:
        for name in ("node-1", "node-2"):
            bench = Bench(node=name)
            for gpu in range(3):
                _hear(kit, name, bench.xid(79, gpu).changes)
        out = (await kit.call("eve", "GET", "/v1/health/node-1/gpu2")).data
        assert (out["verdict"], out["evidence"]["rule"]) == ("gone", "xid gone")
        assert out["evidence"]["incidents"][0]["labels"] == ["XID 79"]
        assert len(out["evidence"]["strikes"]) == 1
        held = (await kit.call("eve", "GET", "/v1/health/node-2/gpu2")).data
        assert held["verdict"] == "watch"
        assert "gone" in held["sentence"]


@pytest.mark.asyncio
async def test_whose_program_fails_on_several_nodes_is_told_and_loses_no_gpu(tmp_path):
    async with running(tmp_path) as kit:
        _hear(kit, "node-2", Bench(node="node-2").xid(31, by=["ann"]).changes)
        bench = Bench()
        for _ in range(5):
            _hear(kit, "node-1", bench.xid(31, by=["ann"]).changes)
            bench.wait(60_000)
        assert set(_verdicts(kit)) == {"fine", "restart_worker"}
        assert any("under ann's program" in each for each in await _notices(kit, "ann"))
        assert not any("under ann's program" in each for each in await _notices(kit, "ben"))


@pytest.mark.asyncio
async def test_a_finding_of_an_agent_s_goes_to_whom_it_concerns(tmp_path):
    async with running(tmp_path) as kit:
        for about, subject, sentence in (
            ("program", "ann", "Ann's program fails on two GPUs."),
            ("monitor", "node-1", "Readings of node-1 stopped 40 s ago."),
        ):
            said = {"report": "finding", "about": about, "subject": subject, "sentence": sentence}
            kit.controller.hearing._take("node-1", said)
        assert "Ann's program fails on two GPUs." in await _notices(kit, "ann")
        assert "Readings of node-1 stopped 40 s ago." in await _notices(kit, "adm")


@pytest.mark.asyncio
async def test_an_owner_is_told_at_once_of_actors_that_keep_a_worker_from_leaving(tmp_path):
    async with running(tmp_path) as kit:
        kit.controller.keys.note_head("node-2")
        lease = await kit.ask("ann", gpus=1, name="sweep", time_limit="1h")
        said = {
            "report": "actors_stay",
            "slice": f"{lease['id']}/0",
            "actors": {"Counter-1": "a file is open"},
        }
        for node in ("node-1", "node-2"):
            kit.controller.hearing._take(node, {**said, "seconds": 540})  # only its home may say so
        told = [each for each in await _notices(kit, "ann") if "cannot move" in each]
        assert len(told) == 1
        assert told[0].startswith(
            "sweep: actors on node-1/gpu0 cannot move (Counter-1); the worker waits 540 s"
        )
        assert not any("cannot move" in each for each in await _notices(kit, "ben"))


@pytest.mark.asyncio
async def test_a_verdict_that_is_only_said_again_is_told_to_nobody_twice(tmp_path):
    async with running(tmp_path) as kit:
        change = Bench().xid(79).changes
        _hear(kit, "node-1", change * 3)
        told = [each for each in await _notices(kit, "adm") if "node-1/gpu0 is gone" in each]
        assert len(told) == 1


def test_a_wrong_file_of_thresholds_is_an_error_that_says_what_is_wrong(tmp_path):
    assert read_thresholds(tmp_path / FILE) == {}
    (tmp_path / FILE).write_text(json.dumps({"strikes": 5}))
    assert read_thresholds(tmp_path / FILE) == {"strikes": 5}
    for wrong in ("{", '{"strikes": "many"}', "[]", '{"strike": 3}'):
        (tmp_path / FILE).write_text(wrong)
        with pytest.raises(ThresholdsError, match="is not a file of health thresholds"):
            read_thresholds(tmp_path / FILE)


# ------------------------------------------------------------------------------------------------ in the pool


def test_a_restart_concerns_the_worker_of_a_whole_gpu():
    world = World(node(gpus=1))
    world.ask("one")
    assert kinds(world.verdict("GPU-node-1-0", Verdict.RESTART_WORKER)) == ["RestartWorker"]


@pytest.mark.parametrize(
    ("code", "instance", "restarted"),
    [
        pytest.param(31, 7, ["two/0"], id="its instance's"),
        pytest.param(94, -1, ["one/0", "two/0"], id="all where it is the whole device's"),
        pytest.param(31, 3, [], id="nobody's where nobody has the instance"),
    ],
)
def test_an_event_on_a_device_in_mig_mode_restarts_the_workers_that_it_concerns(code, instance, restarted):
    """The pool makes two instances; the driver numbers them, and names one in its event, or none."""
    device = gpus(1, mig=True, mig_managed=True)[0]
    world = World(Node(name="node-1", devices=(device,), cpus=64_000, memory=512 * GB))
    for number, (name, user) in enumerate((("one", "ann"), ("two", "ben"))):
        world.ask(name, user=user, mig="1g.10gb")
        world.send(InstanceCreated, slice=f"{name}/0", uuid=f"MIG-{name}", gpu_instance=6 + number)
    bench = Bench(mig=True, count=1)
    [change] = bench.xid(code, instance=instance).changes
    assert change.verdict is Verdict.RESTART_WORKER
    told = world.verdict(device.uuid, change.verdict, evidence=change.evidence)
    assert [each.slice for each in told if isinstance(each, RestartWorker)] == restarted


def test_a_tenant_s_fault_restarts_no_neighbour_s_worker():
    """Two leases share a GPU; NVML does not say whose process has failed, and each knows it by itself."""
    world = World(node(gpus=1))
    world.ask("one", milli=500)
    world.ask("two", user="ben", milli=500)
    assert kinds(world.verdict("GPU-node-1-0", Verdict.RESTART_WORKER)) == []
    world.release("two")
    assert kinds(world.verdict("GPU-node-1-0", Verdict.RESTART_WORKER)) == ["RestartWorker"]
