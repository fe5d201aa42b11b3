"""What an agent that is gone for good has left running is found by its list, and ended; nothing else is."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_gpupool.core.model import Slice, encode
from jupyter_gpupool.node import guard, leftovers
from jupyter_gpupool.node.leases import Leases

#: A process that ignores SIGTERM has been told so before it says that it is there.
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(99)"
)


@pytest.fixture
def started():
    """Start processes with a mark; they are gone after the test."""
    children = []

    def start(mark, code="print(1, flush=True); import time; time.sleep(99)"):
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, guard.MARK: mark}
        )
        children.append(child)
        child.stdout.readline()
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


def semaphore(mark):
    """Make what a process with this mark made, and was killed."""
    path = Path(f"/dev/shm/sem.{guard.semaphores(mark)[1:]}-abcdefgh")
    path.touch()
    return path


@pytest.mark.parametrize("lives", [True, False], ids=["some live", "all were killed"])
def test_their_semaphores_go_with_them(tmp_path, started, lives):
    mine, theirs = semaphore("0a1b2c3d:x/0"), semaphore("ffffffff:x/0")
    if lives:
        started("0a1b2c3d:x")
    write(tmp_path, entries=[{"key": "x/0"}])
    assert asyncio.run(leftovers.end(tmp_path)) == lives
    assert theirs.exists()
    theirs.unlink()
    assert not mine.exists()


def write(folder, **more):
    """Write an agent's list as the agent does."""
    (folder / "leases").mkdir(exist_ok=True)
    said = {"boot": guard.boot_id(), "agent": "0a1b2c3d", "run": str(folder / "run"), "entries": [], **more}
    (folder / "leases" / "leases.json").write_text(json.dumps(said))


def test_its_processes_are_ended_and_no_others(tmp_path, started, monkeypatch):
    monkeypatch.setattr(guard.end, "__kwdefaults__", {**guard.end.__kwdefaults__, "grace_s": 0.5})
    (tmp_path / "run").mkdir()
    host, daemon, other = started("0a1b2c3d:x/0"), started("0a1b2c3d:x", STUBBORN), started("ffffffff:x/0")
    unmarked = started("")
    write(tmp_path, entries=[{"pid": unmarked.pid, "started": guard.started_at(unmarked.pid)}])
    assert asyncio.run(leftovers.end(tmp_path)) >= 3
    assert None not in [each.wait(10) for each in (host, daemon, unmarked)]
    assert other.poll() is None
    assert not (tmp_path / "run").exists()
    assert asyncio.run(leftovers.end(tmp_path)) == 0


@pytest.mark.parametrize("of", ["another boot", "another process", "no list", "a broken list"])
def test_a_list_that_means_nothing_any_more_ends_nothing(tmp_path, started, of):
    child = started("0a1b2c3d:x" if of == "another boot" else "")
    write(tmp_path, **({"boot": "another"} if of == "another boot" else {}))
    path = tmp_path / "leases" / "leases.json"
    if of == "another process":
        write(tmp_path, entries=[{"pid": child.pid, "started": guard.started_at(child.pid) - 1}])
    elif of == "no list":
        path.unlink()
    elif of == "a broken list":
        path.write_text("{")
    assert asyncio.run(leftovers.end(tmp_path)) == 0
    assert child.poll() is None


@pytest.mark.parametrize("trouble", ["its folder was deleted", "the disk is full"])
def test_an_agent_that_cannot_write_its_list_still_ends_what_it_is_told_to(tmp_path, trouble, monkeypatch):
    async def go():
        reports = []
        leases = Leases(tmp_path / "agent", reports.append, scratch=str(tmp_path))
        if trouble == "its folder was deleted":
            shutil.rmtree(tmp_path / "agent")
        else:
            monkeypatch.setattr(leases._table, "save", full)
        await leases.obey({"order": "stop_slice", "lease": "x", "slice": "x/0"})
        async with asyncio.timeout(20):
            while not reports:  # noqa: ASYNC110 - a thread's work is awaited
                await asyncio.sleep(0.02)
        monkeypatch.undo()
        await leases.close(keep=False)
        assert (tmp_path / "agent").exists() is (trouble == "the disk is full"), "what is gone stays gone"
        return reports

    assert [each["report"] for each in asyncio.run(go())] == ["slice_freed"]


async def reported(reports):
    """The next report."""
    async with asyncio.timeout(20):
        while not reports:  # noqa: ASYNC110 - a thread's work is awaited
            await asyncio.sleep(0.02)
    return reports.pop(0)


@pytest.mark.asyncio
async def test_a_worker_whose_start_cannot_be_written_down_has_failed_and_says_so(tmp_path, monkeypatch):
    """It would be in the list for ever, without a process: the pool would wait, and so would an end."""
    reports = []
    leases = Leases(tmp_path / "agent", reports.append, scratch=str(tmp_path))
    monkeypatch.setattr(leases._table, "save", full)
    part = encode(Slice(id="x/0", lease="x", node="n", device="GPU-1", milli=1000, vram=1))
    await leases.obey({"order": "start_worker", "lease": "x", "slice": part, "user": "me", "address": ""})
    failed = await reported(reports)
    assert failed["report"] == "slice_failed"
    assert "No space left on device" in failed["why"]
    await leases.obey({"order": "stop_slice", "lease": "x", "slice": "x/0"})
    assert (await reported(reports))["report"] == "slice_freed"
    monkeypatch.undo()
    await leases.close(keep=False)


@pytest.mark.asyncio
async def test_an_agent_that_ends_everything_starts_nothing_more(tmp_path):
    """The pool orders replacements for what is ended, and the agent would end for ever."""
    leases = Leases(tmp_path / "agent", lambda _: None, scratch=str(tmp_path))
    await leases.close(keep=False)
    part = encode(Slice(id="x/1", lease="x", node="n", device="GPU-1", milli=1000, vram=1))
    await leases.obey({"order": "start_worker", "lease": "x", "slice": part, "user": "me", "address": ""})
    await asyncio.gather(*leases._tasks)
    assert leases.present() == ((), ())


def full():
    raise OSError(28, "No space left on device")
