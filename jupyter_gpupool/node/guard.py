"""All processes of a slice or a lease, found and ended: nothing is free before they are seen gone.

With them go the semaphores that they have made: those of a process that was killed would stay for ever.

A process is a lease's when it is one that the agent has started, or its mark says so (forked processes
inherit it with the memory, programs with the environment, so daemons that left parent and session carry it),
or it descends from such a process, or shares a session that such a process leads. A mark that no lease here
has is one that a program has given itself, and frees nobody. Linux only: it reads /proc.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

logger = logging.getLogger(__name__)

#: The variable that carries the mark, and the width to which every mark is filled up (`lease.process` writes
#: it).
MARK = "GPUPOOL_MARK"
WIDTH = 200
#: The mark of a process that waits to become a lease's (`lease.process` writes it as well).
SPARE = "spare"
#: Seconds that processes have to end by themselves before they are killed. Killing a process that talks to
#: the driver can freeze the GPU, so SIGKILL is never the first thing.
GRACE = 5.0
#: Seconds that a slice is kept for a process that only the driver knows.
STALE = 30.0
#: Seconds after which a process that a forkserver has forked has its mark, on the slowest machine.
UNMARKED = 60.0
#: Where Linux keeps named semaphores, as files.
_SEMAPHORES = Path("/dev/shm")  # noqa: S108 - no temporary file: sem_overview(7)
#: Seconds between two looks: the first, and the longest.
_SOON, _LATE = 0.02, 1.0

#: A process: its PID and the time it started (clock ticks since boot), which nobody else will have.
Identity = tuple[int, int]
#: Answers, at once or as a coroutine, with the PIDs that the driver lists on a device; None: it does not say.
DevicePids = Callable[[], "set[int] | Awaitable[set[int] | None] | None"]


@dataclass(frozen=True, slots=True)
class Process:
    """What /proc says of a process."""

    pid: int
    parent: int
    session: int
    started: int
    zombie: bool
    mark: str

    @property
    def identity(self) -> Identity:
        """PID and start time."""
        return self.pid, self.started


def boot_id() -> str:
    """Name this boot of the machine; PIDs and start times mean nothing beyond it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def look_at(pid: int) -> Process | None:
    """Read one process; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name in parentheses may hold spaces and parentheses itself.
    fields = stat.rpartition(b")")[2].split()
    return Process(
        pid, int(fields[1]), int(fields[3]), int(fields[19]), fields[0] in (b"Z", b"X"), _read_mark(pid)
    )


def look() -> dict[int, Process]:
    """Read all processes of the machine."""
    found: dict[int, Process] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (process := look_at(int(entry.name))) is not None:
            found[process.pid] = process
    return found


def mark_of(pid: int, prefix: str) -> str:
    """Answer with the mark of a process, or of the nearest that it descends from; "" where none has one.

    What a task starts with an environment of its own has no mark, or any, and is a lease's all the same.

    Args:
        pid: Its PID.
        prefix: How the marks begin that count.
    """
    seen: set[int] = set()
    while pid > 1 and pid not in seen and (process := look_at(pid)) is not None:
        seen.add(pid)
        leader = None if process.mark.startswith(prefix) else look_at(process.session)
        for each in (process, leader):
            if each is not None and each.mark.startswith(prefix):
                return each.mark
        pid = process.parent
    return ""


def started_at(pid: int) -> int:
    """Answer with the start time of a process, or 0 if there is none."""
    process = look_at(pid)
    return 0 if process is None or process.zombie else process.started


def user_of(pid: int) -> int:
    """Answer with the UID that a process runs as, or -1 if there is none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return -1
    return next((int(line.split()[1]) for line in lines if line.startswith("Uid:")), -1)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal (SIGSTOP); one that a debugger has stopped is not meant."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


def find(
    marks: Iterable[str],
    roots: Iterable[Identity],
    processes: dict[int, Process],
    others: Iterable[str] = (),
) -> set[Identity]:
    """Find the processes that belong to a slice or a lease, zombies left out.

    Args:
        marks: Their marks, in full.
        roots: Processes that are known to belong to it.
        processes: All processes, as `look` answers.
        others: Marks of what else there is here: with one of these a process is another slice's, whoever
            started it. Any other mark says nothing, as a program can give itself one.
    """
    wanted, known = set(marks), set(roots)
    foreign = set(others) - wanted
    members = {pid for pid, each in processes.items() if each.mark in wanted or each.identity in known}
    # Below a PID: its children, and those of the session that it leads. A session that it is only in has
    # others too.
    below: dict[int, list[int]] = {}
    for pid, each in processes.items():
        below.setdefault(each.parent, []).append(pid)
        below.setdefault(each.session, []).append(pid)
    new = list(members)
    while new:
        for pid in below.get(new.pop(), ()):
            if pid not in members and processes[pid].mark not in foreign:
                members.add(pid)
                new.append(pid)
    return {processes[pid].identity for pid in members if not processes[pid].zombie}


def marked(prefix: str, processes: dict[int, Process]) -> dict[str, set[Identity]]:
    """Answer with the living processes whose mark begins with a prefix, by mark."""
    found: dict[str, set[Identity]] = {}
    for each in processes.values():
        if each.mark.startswith(prefix) and not each.zombie:
            found.setdefault(each.mark, set()).add(each.identity)
    return found


def orphans(
    forkservers: Iterable[int], processes: dict[int, Process], now: int, marks: Iterable[str] = ()
) -> set[Identity]:
    """Find what dead workers left without a lease's mark: a program with an environment of its own.

    A forkserver takes in the orphans below it (`node.lease_warm`), and what it forks itself soon has a mark.

    Args:
        forkservers: Their PIDs.
        processes: All processes, as `look` answers.
        now: Clock ticks since boot.
        marks: Those of all leases here.
    """
    parents, before = set(forkservers), now - int(UNMARKED * os.sysconf("SC_CLK_TCK"))
    theirs = {SPARE, *marks}
    return {
        each.identity
        for each in processes.values()
        if each.parent in parents and each.mark not in theirs and not each.zombie and each.started < before
    }


def ticks() -> int:
    """Answer with the clock ticks since boot, by which start times are counted."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def semaphores(mark: str) -> str:
    """Answer with how the names begin of the semaphores that the processes with a mark make.

    Args:
        mark: In full.

    >>> semaphores("0a1b2c3d:a1b2/0")
    '/gpupool-bfb458537196fd81'
    """
    return f"/gpupool-{sha256(mark.encode()).hexdigest()[:16]}"


def remove_semaphores(marks: Iterable[str]) -> None:
    """Remove the semaphores of processes that are gone.

    Args:
        marks: Theirs, in full.
    """
    for mark in marks:
        for file in _SEMAPHORES.glob(f"sem.{semaphores(mark)[1:]}-*"):
            with contextlib.suppress(OSError):  # it is gone, or somebody else's who has taken the name
                file.unlink()


def send(process: Identity, number: signal.Signals) -> None:
    """Send a signal to exactly this process, never to one that has got its PID since."""
    pid, started = process
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return  # it is gone
    try:
        if started_at(pid) == started:
            signal.pidfd_send_signal(handle, number)
    except OSError as error:
        logger.warning("process %d could not be sent %s: %s", pid, number.name, error)
    finally:
        os.close(handle)


async def end(
    marks: Iterable[str],
    roots: Iterable[Identity],
    *,
    grace_s: float = GRACE,
    device_pids: DevicePids = set,
    others: Callable[[], set[str]] = set,
) -> set[Identity]:
    """End all processes of a slice or a lease and answer, when all are seen gone, with those there were.

    It does not give up: what cannot be ended (a process stuck in the driver) keeps its slice. A driver that
    does not say what it lists keeps it for `STALE` seconds.

    Args:
        marks: Their marks.
        roots: Processes that are known to belong to it.
        grace_s: Seconds from SIGTERM to SIGKILL.
        device_pids: Answers with the PIDs that the driver lists on the slice's device, None where it does
            not say; none of these may be.
        others: Answers with the marks of what else there is here (`find`).
    """
    wanted, known = tuple(marks), set(roots)
    asked: set[Identity] = set()
    gone_at = time.monotonic()
    deadline, pause = gone_at + grace_s, _SOON
    while True:
        alive = find(wanted, known, await asyncio.to_thread(look), others())
        # What was a member once stays one, even when its parent has gone and taken the trace along.
        known |= alive
        number = signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL
        for process in alive if number is signal.SIGKILL else alive - asked:
            send(process, number)
        asked |= alive
        if alive:
            gone_at = time.monotonic()
        elif not await _listed(known, device_pids, patient=time.monotonic() < gone_at + STALE):
            await asyncio.to_thread(remove_semaphores, wanted)
            return known
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, _LATE)


async def end_one(pid: int, grace_s: float = GRACE) -> None:
    """Ask one process to end, kill it where it does not, and return when it is gone.

    Args:
        pid: Its PID.
        grace_s: Seconds from SIGTERM to SIGKILL.
    """
    process = pid, started_at(pid)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not process[1]:
            return
        # A stopped process does not hear SIGTERM before it goes on.
        send(process, number)
        send(process, signal.SIGCONT)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(wait_gone(process), grace_s)
            return


async def wait_gone(process: Identity) -> None:
    """Wait until a process has ended, whoever started it."""
    pid, started = process
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    try:
        if started_at(pid) == started:
            loop.add_reader(handle, gone.set)
            await gone.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


async def _listed(known: set[Identity], device_pids: DevicePids, *, patient: bool) -> bool:
    """Whether the driver lists one of these processes still, or, for a patient one, any that does not exist.

    That may be a worker that has ended before anybody looked. It may also be a process of another PID
    namespace. For a patient one a driver that does not say lists them all.
    """
    answer = device_pids()
    listed = await answer if inspect.isawaitable(answer) else answer
    if listed is None:
        return patient
    if listed & {pid for pid, _ in known}:
        return True
    return patient and any(not started_at(pid) for pid in listed)


def _read_mark(pid: int) -> str:
    """Read a process's mark, without what it is filled up with."""
    environ = b""
    with contextlib.suppress(OSError):
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    name = MARK.encode() + b"="
    at = 0 if environ.startswith(name) else environ.find(b"\0" + name) + 1
    if not environ.startswith(name, at):
        return ""
    return environ[at + len(name) :].split(b"\0", 1)[0].decode(errors="replace").rstrip(".")
