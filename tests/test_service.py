"""What the pool's long-running processes do alike."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
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


def test_a_log_is_turned_over_does_not_grow_for_ever_and_is_its_owners_alone(tmp_path):
    code = """
import logging, sys
from jupyter_gpupool import service
service.LOG_SIZE = 2000
service.log_to(sys.argv[1])
for number in range(1000):
    logging.getLogger("jupyter_gpupool").info("line %d", number)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "log")], check=True)
    files = sorted(each.name for each in tmp_path.iterdir())
    assert files == ["log", "log.1", "log.2"]
    assert all(each.stat().st_size <= 2000 for each in tmp_path.iterdir())
    assert {each.stat().st_mode & 0o777 for each in tmp_path.iterdir()} == {0o600}
    assert "line 999" in (tmp_path / "log").read_text()
