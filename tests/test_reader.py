"""The reader tells readings and NVML events, and what hangs or dies in it harms nobody else."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from jupyter_gpupool.driver import simulated
from jupyter_gpupool.driver.nvml import reason_unavailable
from jupyter_gpupool.node import reader as module
from jupyter_gpupool.node.reader import Finding, Reader, ReaderError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

pytestmark = pytest.mark.asyncio


class Heard:
    """What a reader has told, in order."""

    def __init__(self) -> None:
        self.devices: list[Any] = []
        self.readings: list[Any] = []
        self.events: list[Any] = []
        self.findings: list[Finding] = []

    async def until(self, what: Callable[[], Any], limit: float = 15) -> Any:
        end = time.monotonic() + limit
        while not (found := what()):
            assert time.monotonic() < end, (self.events, self.findings, len(self.readings))
            await asyncio.sleep(0.01)
        return found


@pytest.fixture
def machine(tmp_path: Path) -> simulated.Machine:
    simulated.create(tmp_path / "machines", {"node-1": 3, "node-2": ["A100-40GB"]})
    return simulated.Machine(tmp_path / "machines")


@asynccontextmanager
async def reading(machine: simulated.Machine, **options: Any) -> AsyncIterator[tuple[Reader, Heard]]:
    heard = Heard()
    environ = os.environ | simulated.environment(machine.state.path, "node-1")
    reader = Reader(
        environ,
        node="node-1",
        on_devices=heard.devices.append,
        on_readings=heard.readings.extend,
        on_event=heard.events.append,
        on_silence=heard.findings.append,
        **options,
    )
    try:
        await reader.start()
        yield reader, heard
    finally:
        await reader.close()


async def test_it_tells_the_nodes_own_devices_readings_and_events(machine: simulated.Machine) -> None:
    async with reading(machine) as (reader, heard):
        assert [each.uuid for each in reader.devices] == machine.devices("node-1")
        assert {each.node for each in reader.devices} == {"node-1"}
        machine.set("gpu1", "temperature", 77)
        readings = await asyncio.wait_for(reader.poll(), 5)
        assert {each.device: each.temperature for each in readings}[machine.find("gpu1")] == 77
        machine.xid("gpu2", 31)
        machine.announce("gpu0", "recovery_action")
        await heard.until(lambda: len(heard.events) == 2)
        found = [(each.device, each.kind, each.xid) for each in heard.events]
        assert found == [(machine.find("gpu2"), "xid", 31), (machine.find("gpu0"), "recovery_action", 0)]
        assert heard.findings == []


async def test_who_asks_about_one_device_gets_that_one_and_a_hanging_neighbour_does_not_delay_it(
    machine: simulated.Machine,
) -> None:
    one, other = machine.find("gpu0"), machine.find("gpu1")
    async with reading(machine, interval_s=60) as (reader, heard):
        assert len(await asyncio.wait_for(reader.poll(), 5)) == 3
        machine.hang("gpu1", 30)
        seen = {each.device for each in await asyncio.wait_for(reader.poll(), 5)}
        assert other not in seen, "its call hangs"
        assert {each.device for each in await asyncio.wait_for(reader.poll([one]), 5)} == {one}
        asked = reader.poll([one]), reader.poll([one]), reader.poll()
        for each in await asyncio.wait_for(asyncio.gather(*asked), 5):
            assert one in {reading.device for reading in each}, "each question is answered"
        assert await asyncio.wait_for(reader.poll(["GPU-of-nobody"]), 5) == []
        machine.restore("gpu1")
        await heard.until(lambda: {each.device for each in heard.readings[-3:]} >= {other})


async def test_it_polls_by_itself_and_at_once_after_an_event(machine: simulated.Machine) -> None:
    async with reading(machine, interval_s=0.3) as (_, heard):
        await heard.until(lambda: len(heard.readings) >= 9)
    async with reading(machine, interval_s=60) as (reader, heard):
        await asyncio.wait_for(reader.poll(), 5)
        machine.lose("gpu0")
        lost = await heard.until(lambda: [each for each in heard.readings if each.error])
        assert {(each.device, each.error) for each in lost} == {(machine.find("gpu0"), "GPU_IS_LOST")}


async def test_a_device_that_is_not_listed_any_more_is_told_without_any_event(
    machine: simulated.Machine,
) -> None:
    async with reading(machine) as (reader, heard):
        machine.lose("gpu1", xid=0, vanish=True)
        readings = {each.device: each.error for each in await asyncio.wait_for(reader.poll(), 5)}
        assert readings[machine.find("gpu1")] in ("GPU_NOT_FOUND", "GPU_IS_LOST")
        assert readings[machine.find("gpu2")] == ""
        machine.restore("gpu1")
        readings = {each.device: each.error for each in await asyncio.wait_for(reader.poll(), 5)}
        assert readings[machine.find("gpu1")] == ""
        assert heard.events == []


async def test_processes_of_anybody_are_in_the_readings(machine: simulated.Machine, tmp_path: Path) -> None:
    environ = os.environ | simulated.environment(machine.state.path, "node-1")
    environ["CUDA_VISIBLE_DEVICES"] = machine.find("gpu1")
    code = "from jupyter_gpupool.driver import simulated; simulated.malloc(10**9); input()"
    process = await asyncio.create_subprocess_exec(
        module.sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE, env=environ
    )
    try:
        async with reading(machine, interval_s=0.2) as (_, heard):
            found = await heard.until(lambda: [each for each in heard.readings if each.processes])
            ((pid, size),) = found[0].processes
            assert (found[0].device, pid) == (machine.find("gpu1"), process.pid)
            assert size > 10**9
    finally:
        process.stdin.close()
        await process.wait()


async def test_a_hanging_device_is_a_finding_and_the_others_are_read_on(machine: simulated.Machine) -> None:
    async with reading(machine, interval_s=0.2, silence_s=2.5) as (reader, heard):
        await heard.until(lambda: len(heard.readings) >= 3)
        machine.hang("gpu1", 60)
        finding = await heard.until(lambda: heard.findings)
        assert finding[0].device == machine.find("gpu1")
        assert finding[0].sentence.startswith("readings of this device stopped")
        assert not any(each.error for each in heard.readings)
        assert reader.age(machine.find("gpu0")) < 2.5
        machine.heal()
        back = await heard.until(
            lambda: [each for each in heard.findings if each.sentence == "readings are back"]
        )
        assert back[0].device == machine.find("gpu1")


async def test_a_hanging_driver_is_a_finding_and_the_reader_is_replaced_without_a_kill(
    machine: simulated.Machine,
) -> None:
    async with reading(machine, interval_s=0.2, silence_s=2.5) as (reader, heard):
        first = reader._process
        assert len(await asyncio.wait_for(reader.poll(), 5)) == 3
        machine.hang("node-1", 60)
        finding = await heard.until(lambda: heard.findings)
        assert (finding[0].device, finding[0].name) == ("", "")
        await heard.until(lambda: reader._process is not first)
        machine.heal()
        await heard.until(lambda: [each for each in heard.findings if each.sentence == "readings are back"])
        await heard.until(lambda: first.returncode is not None)
        assert first.returncode in (0, -signal.SIGTERM)


async def test_a_reader_that_hangs_for_good_is_not_replaced_for_ever(
    machine: simulated.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GENTLE", 60.0)
    async with reading(machine, interval_s=0.1, silence_s=0.4) as (reader, heard):
        machine.hang("node-1", 600)
        await heard.until(lambda: len(reader._left) == module.MOST_LEFT)
        await heard.until(lambda: len(heard.findings) > module.MOST_LEFT + 2)
        assert len(reader._left) == module.MOST_LEFT
        machine.heal()


async def test_a_reader_that_dies_is_started_anew_and_that_is_told(machine: simulated.Machine) -> None:
    async with reading(machine, interval_s=0.2) as (reader, heard):
        await heard.until(lambda: heard.readings)
        os.kill(reader._process.pid, signal.SIGSEGV)
        finding = await heard.until(lambda: heard.findings)
        assert finding[0].name == "READER_ENDED"
        assert "SIGSEGV" in finding[0].sentence
        before = len(heard.readings)
        await heard.until(lambda: len(heard.readings) > before)
        machine.xid("gpu0", 13)
        await heard.until(lambda: heard.events)


async def test_a_new_reader_still_tells_of_a_device_that_was_lost_before(machine: simulated.Machine) -> None:
    async with reading(machine, interval_s=0.2) as (reader, heard):
        machine.lose("gpu1")
        await heard.until(lambda: [each for each in heard.readings if each.error])
        os.kill(reader._process.pid, signal.SIGKILL)
        await heard.until(lambda: heard.findings)
        before = len(heard.readings)
        new = await heard.until(lambda: [each for each in heard.readings[before:] if each.error])
        assert (new[0].device, new[0].error) == (machine.find("gpu1"), "GPU_IS_LOST")
        known = reader.devices
        assert {each.uuid for each in known} == set(machine.devices("node-1"))
    async with reading(machine, interval_s=0.2, known=known) as (reader, heard):
        assert reader.devices == known
        await heard.until(lambda: [each for each in heard.readings if each.error == "GPU_IS_LOST"])


async def test_an_error_of_the_monitor_is_a_finding_and_condemns_no_device(
    machine: simulated.Machine,
) -> None:
    async with reading(machine, interval_s=0.2) as (_, heard):
        await heard.until(lambda: len(heard.readings) >= 3)
        machine.fail_next("gpu2", code="UNKNOWN", times=5)
        finding = await heard.until(lambda: heard.findings)
        assert (finding[0].name, finding[0].device) == ("UNKNOWN", machine.find("gpu2"))
        assert "container" in finding[0].sentence
        assert not any(each.error for each in heard.readings)


async def test_a_node_without_a_driver_says_what_to_do() -> None:
    if not reason_unavailable():
        pytest.skip("there is an NVIDIA driver on this machine")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GPUPOOL")}
    with pytest.raises(ReaderError, match="no NVIDIA driver on this machine: install it"):
        await Reader(environ).start()


async def test_nothing_is_left_behind(machine: simulated.Machine) -> None:
    me = psutil.Process()
    async with reading(machine):
        pass
    before = (me.num_fds(), len(me.children()), len(asyncio.all_tasks()))
    for _ in range(3):
        async with reading(machine) as (reader, _heard):
            await asyncio.wait_for(reader.poll(), 5)
    await asyncio.sleep(0.05)
    assert (me.num_fds(), len(me.children()), len(asyncio.all_tasks())) == before


async def test_it_ends_when_its_agent_is_killed(machine: simulated.Machine, tmp_path: Path) -> None:
    code = (
        "import asyncio, os\nfrom jupyter_gpupool.node.reader import Reader\n"
        "async def main():\n    reader = Reader(os.environ)\n    await reader.start()\n"
        "    print(reader._process.pid, flush=True)\n    await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    environ = os.environ | simulated.environment(machine.state.path, "node-1")
    agent = await asyncio.create_subprocess_exec(
        module.sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, env=environ
    )
    pid = int(await asyncio.wait_for(agent.stdout.readline(), 20))
    agent.kill()
    await agent.wait()
    end = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "the reader has outlived its agent"
        await asyncio.sleep(0.05)
