"""The real driver, where there is one: what the simulated one stands for."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from jupyter_gpupool.driver import nvml
from jupyter_gpupool.driver.nvml import Driver
from jupyter_gpupool.lease import limits
from jupyter_gpupool.node.reader import Reader

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.gpu


@pytest.fixture
def driver() -> Iterator[Driver]:
    nvml.use_library(None)
    reason = nvml.reason_unavailable()
    if reason:
        pytest.skip(f"needs a real NVIDIA GPU: {reason}")
    found = Driver()
    found.open()
    yield found
    found.close()


def test_real_devices_are_described_and_read(driver: Driver) -> None:
    devices = driver.devices("here")
    assert devices
    assert len(devices) == driver.count()
    for device in devices:
        assert device.uuid.startswith("GPU-")
        assert device.memory > 10**9
        assert device.model.endswith("GB")
        reading = driver.read(device.uuid, 1)
        assert reading.error == ""
        assert reading.memory_used is None or 0 <= reading.memory_used <= device.memory
        assert reading.temperature is None or 0 < reading.temperature < 120
    assert driver.wait_events(0.1) == []


def test_a_uuid_is_found_by_those_who_call_the_bindings_themselves(driver: Driver) -> None:
    code = (
        "import pynvml; from jupyter_gpupool.driver import nvml; assert nvml.prepare() == '';"
        "import sys; print(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByUUID(sys.argv[1].encode())))"
    )
    uuid = driver.devices("here")[0].uuid
    found = subprocess.run([sys.executable, "-c", code, uuid], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == uuid


@pytest.mark.asyncio
async def test_the_reader_reads_real_devices(driver: Driver) -> None:
    readings: list[object] = []
    reader = Reader(os.environ, on_readings=readings.extend)
    devices = await reader.start()
    try:
        found = await asyncio.wait_for(reader.poll(), 10)
        assert {each.device for each in found} == {each.uuid for each in devices}
    finally:
        await reader.close()


# ------------------------------------------------------------------------------------------ shares of one GPU

#: A process with a share of a GPU: told its limit as a lease's worker is, it allocates and says how it went.
SHARER = """
import json, os, sys
from jupyter_gpupool.lease import limits
limits.watch_imports()
import torch
wanted, seconds = int(sys.argv[1]), float(sys.argv[2])
said = {"error": "", "sum": 0.0}
try:
    block = torch.zeros(wanted, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
except torch.OutOfMemoryError as error:
    said["error"] = f"{type(error).__name__}: {error}"
print("there", flush=True)
sys.stdin.readline()
said["sum"] = float(torch.ones(1000, device="cuda").sum()) if not said["error"] else 0.0
print(json.dumps(said), flush=True)
"""


def test_of_two_processes_with_shares_the_one_that_takes_too_much_gets_an_error_and_its_neighbour_finishes(
    driver: Driver,
) -> None:
    pytest.importorskip("torch", reason="needs PyTorch with CUDA")
    device = driver.devices("here")[0]
    share = device.memory // 4
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": device.uuid, limits.LIMIT: str(share)}
    command = [sys.executable, "-c", SHARER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environ}
    both = [
        subprocess.Popen([*command, str(size), "0"], **pipes) for size in (share * 3 // 4, share * 3 // 2)
    ]
    try:
        for each in both:
            assert each.stdout.readline() == "there\n"
        used = dict(driver.processes(device.uuid))
        calm, greedy = (json.loads(each.communicate("\n", timeout=60)[0]) for each in both)
    finally:
        for each in both:
            each.kill()
            each.wait()
    assert calm == {"error": "", "sum": 1000.0}
    assert "OutOfMemoryError" in greedy["error"]
    assert "out of memory" in greedy["error"]
    # In a container the driver's PIDs are another machine's view.
    assert both[1].pid not in used or used[both[1].pid] < share
