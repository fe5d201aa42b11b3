"""The real driver, where there is one: what the simulated one stands for."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from jupyter_gpupool.driver import nvml
from jupyter_gpupool.driver.nvml import Driver
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
