"""What the pool's long-running processes do alike."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from jupyter_gpupool import service


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A claimed folder that is looked at often."""
    monkeypatch.setattr(service, "LOOK", 0.01)
    path = tmp_path / "controller"
    handle = service.claim(path, "controller")
    yield path, handle
    os.close(handle)


def _waits(path, handle, seconds):
    async def wait():
        await asyncio.wait_for(service.until_deleted(path, "controller", handle), seconds)

    asyncio.run(wait())


def test_a_process_learns_that_its_folder_was_deleted(folder):
    path, handle = folder
    shutil.rmtree(path)
    _waits(path, handle, 10)


def test_a_folder_made_anew_is_not_the_one_that_was_claimed(folder):
    path, handle = folder
    shutil.rmtree(path)
    other = service.claim(path, "controller")
    try:
        _waits(path, handle, 10)
    finally:
        os.close(other)


def test_a_folder_that_is_there_is_never_called_deleted(folder):
    with pytest.raises(TimeoutError):
        _waits(*folder, 0.3)


def test_a_folder_has_one_process_of_a_kind(folder):
    path, _ = folder
    with pytest.raises(BlockingIOError, match=f"in use by another controller, process {os.getpid()}"):
        service.claim(path, "controller")


def test_a_port_that_is_kept_is_none_that_outgoing_connections_get():
    """While a controller is down its agents try to reach it, and would take its port by their very tries."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = {service.free_port() for _ in range(200)}
    assert not [port for port in ports if first <= port <= last]
    assert min(ports) >= 1024
