"""A worker's process that does nothing any more: found, and started anew; a busy one is left alone.

Rule 1: stopped is a state of the process (SIGSTOP), which /proc tells: a few looks, and it is replaced.
Rule 2: a process that gives no answer keeps the GIL in C code, or waits for ever. It is busy while it uses
        CPU time or its GPU works, however long that takes: a kernel or a solver may run for minutes. It hangs
        when for `hung_s` it has neither answered nor done anything.
Rule 3: Dask's own limit (`worker-ttl`) is off: it would take a busy worker for a dead one after 5 minutes.
        That a machine is gone, its agent's silence tells.

Not its business: what becomes of the process and its tasks (`host`), whether the GPU works (the node).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

#: Seconds between two looks, and how many in a row must find the process stopped: a moment of it harms
#: nobody.
LOOK, TIMES = 2.0, 3
#: How often a process is asked within the time after which it hangs, and seconds for each answer at most.
ASKED, ANSWER = 8, 5.0
#: Seconds of CPU time a second below which a process does nothing: its threads wake up now and then.
IDLE = 0.02
#: Fields of /proc/PID/stat after the name: the state, and CPU time of the process itself in ticks.
_STATE, _USER, _SYSTEM = 0, 11, 12


async def watch_stopped(pid: Callable[[], int | None], act: Callable[[str], Awaitable[None]]) -> None:
    """Look for good whether somebody has stopped a process.

    Args:
        pid: Answers with its PID now; None while there is none.
        act: Called with a sentence where it is found stopped; it may replace the process.
    """
    found: list[int] = []
    while True:
        await asyncio.sleep(LOOK)
        now = pid()
        found = [*found, now] if now is not None and is_stopped(now) and set(found) <= {now} else []
        if now is not None and len(found) >= TIMES:
            found = []
            await act(f"its process {now} was stopped for {TIMES * LOOK:.0f} s")


@dataclass
class Hanging:
    """Whether one process gives no answer and does nothing, by looks at it."""

    hung_s: float
    pid: int = 0
    #: When it has last answered or done something, and the CPU time that it had used by then.
    alive: float = 0.0
    used: float = field(default=0.0)

    def look(self, pid: int, now: float, used: float, *, answers: bool) -> bool:
        """Take one look; True where the process hangs.

        Args:
            pid: Which process; another one than before begins anew.
            now: By any clock, in seconds.
            used: CPU time that it has used, in seconds.
            answers: It has just answered.
        """
        works = used - self.used > IDLE * max(0.0, now - self.alive)
        if pid != self.pid or answers or works:
            self.pid, self.alive, self.used = pid, now, used
        return now - self.alive >= self.hung_s

    def excuse(self, now: float) -> None:
        """Its GPU works: begin anew."""
        self.alive = now


async def watch_hanging(
    pid: Callable[[], int | None],
    answers: Callable[[], Awaitable[object]],
    act: Callable[[str], Awaitable[bool]],
    hung_s: float,
) -> None:
    """Look for good whether a process hangs.

    Args:
        pid: Answers with its PID now; None while there is none.
        answers: Asks it; raises OSError where it cannot.
        act: Called with a sentence where it hangs; answers whether it really does: its GPU may be at work.
        hung_s: Seconds without an answer and without any work after which it hangs.
    """
    seen = Hanging(hung_s)
    while True:
        await asyncio.sleep(hung_s / ASKED)
        asked = pid()
        said = asked is not None and await _answers(answers, min(ANSWER, hung_s / ASKED))
        now = time.monotonic()
        if asked is None or asked != pid():
            seen = Hanging(hung_s)
        elif seen.look(asked, now, cpu_time(asked), answers=said or is_held(asked)):
            if await act(f"its process {asked} has neither answered nor done anything for {hung_s:g} s"):
                seen = Hanging(hung_s)
            else:
                seen.excuse(now)


async def _answers(ask: Callable[[], Awaitable[object]], seconds: float) -> bool:
    try:
        await asyncio.wait_for(ask(), seconds)
    except (OSError, TimeoutError):
        return False
    return True


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal; one that a debugger has stopped is not meant."""
    return _stat(pid)[_STATE : _STATE + 1] == [b"T"]


def is_held(pid: int) -> bool:
    """Whether a process is stopped, by a signal or by somebody's debugger: then it does not hang."""
    return _stat(pid)[_STATE : _STATE + 1] in ([b"T"], [b"t"])


def cpu_time(pid: int) -> float:
    """Return the CPU time that a process has used, in seconds; 0 of one that is gone."""
    words = _stat(pid)
    return sum(map(int, words[_USER : _SYSTEM + 1])) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[bytes]:
    """The words of /proc/PID/stat after the name, which may have spaces; none of a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []
