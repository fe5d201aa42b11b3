"""Schedulers that compute without a pause let everybody else on their node go first.

Rule 1: one that has wanted a core all the time since the last look yields: its nice value is raised. A graph
        of a million tasks costs it minutes, in which other leases and the controller want to answer.
Rule 2: one that has rested for a while has its old priority again, where the system lets this user give it.

Where cores are idle it loses nothing. The nice value of a session counts too, since every lease process leads
one of its own: Linux shares cores out among sessions where there are no control groups (sched(7), autogroup).
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

#: The nice value of one that yields.
NICE = 10
#: The part of the time that it ran, or waited to, from which on it has not paused, and below which it rests.
BUSY, CALM = 0.9, 0.5
#: Looks in a row in which it rests before it is trusted again.
LOOKS = 3


@dataclass(slots=True)
class _Seen:
    at: float
    wanted: float
    #: Whether it yields; an earlier agent may have had it do so.
    yields: bool
    calm: int = 0


class Yielding:
    """Which of a node's schedulers yield."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def look(self, pids: Iterable[int]) -> None:
        """See who has not paused since the last look, and who rests.

        Args:
            pids: Of all schedulers on the node.
        """
        there = list(pids)
        self._seen = {pid: seen for pid, seen in self._seen.items() if pid in there}
        for pid in there:
            with contextlib.suppress(OSError, ValueError, IndexError):  # it is gone, or Linux does not say
                self._look_at(pid, time.monotonic(), _wanted(pid))

    def _look_at(self, pid: int, now: float, wanted: float) -> None:
        if pid not in self._seen:
            self._seen[pid] = _Seen(now, wanted, yields=os.getpriority(os.PRIO_PROCESS, pid) >= NICE)
            return
        seen = self._seen[pid]
        part = (wanted - seen.wanted) / (now - seen.at)
        seen.at, seen.wanted = now, wanted
        seen.calm = seen.calm + 1 if part < CALM else 0
        mine = os.getpriority(os.PRIO_PROCESS, 0)  # what this agent starts has its own
        if part >= BUSY and not seen.yields:
            seen.yields = True
            _renice(pid, max(mine, NICE))
        elif seen.yields and seen.calm >= LOOKS:
            seen.yields = False
            _renice(pid, mine)


def _wanted(pid: int) -> float:
    """Seconds that a process's main thread, its event loop's, has run or waited for a core."""
    ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    return (int(ran) + int(waited)) / 1e9


def _renice(pid: int, nice: int) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, int(thread.name), nice)
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))
