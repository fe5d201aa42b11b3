"""The pool's clock: milliseconds that only go forward, whatever is done to the wall clock.

Strategy: within one boot of the machine it follows `CLOCK_BOOTTIME`, which nobody can set and which goes on
while the controller is down. Across a reboot it goes on from the last time mark in the store, so that a lease
that had two hours left still has them. The first start takes the wall clock's value: it looks familiar.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

#: Milliseconds between two time marks. A reboot or a power cut gives leases as much time as has passed since
#: the last one; each is synced to the disk, and one every second was most of what an idle pool did.
MARK_EVERY = 10_000


class Mark(NamedTuple):
    """What the pool's clock said at one moment of one boot; times in milliseconds."""

    boot: str
    boottime: int
    pool: int


class Marks(Protocol):
    """Where time marks are kept: the store."""

    def last_mark(self) -> Mark | None:
        """Return the last time mark, or None in a new store."""

    def mark(self, mark: Mark) -> None:
        """Keep a time mark in place of the last one."""

    @property
    def last_now(self) -> int:
        """The time of the last pool event of the journal, in milliseconds."""


def boottime() -> int:
    """Return the milliseconds since the boot, time asleep included where the system counts it."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime_ns(clock) // 1_000_000


def boot_id() -> str:
    """Return a name of this boot of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        import psutil

        return str(int(psutil.boot_time()))


class Clock:
    """The pool's clock over a store's time marks; the sources of time can be replaced in tests."""

    def __init__(
        self,
        marks: Marks,
        *,
        boot: str | None = None,
        boottime: Callable[[], int] = boottime,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._marks = marks
        self._boot = boot_id() if boot is None else boot
        self._boottime = boottime
        self._wall = wall
        self._offset = self._start() - boottime()
        self._marked: int | None = None
        self._wall_offset = wall() - self.now() / 1000

    def _start(self) -> int:
        """Return what the clock says now: never less than any pool event has been told."""
        mark, last = self._marks.last_mark(), self._marks.last_now
        if mark is None:
            return max(last, int(self._wall() * 1000))
        gone = self._boottime() - mark.boottime if mark.boot == self._boot else 0
        return max(last, mark.pool + max(0, gone))

    def now(self) -> int:
        """Return the pool's time in milliseconds."""
        return self._boottime() + self._offset

    def renew(self) -> None:
        """Write a time mark if it is time for one; to be called each second.

        Raises:
            StoreError: The mark cannot be written.
        """
        at = self._boottime()
        if self._marked is None or at - self._marked >= MARK_EVERY:
            self._marks.mark(Mark(self._boot, at, at + self._offset))
            self._marked = at

    def wall(self, pool: int) -> float:
        """Return a time of the pool's clock (milliseconds) as seconds since the epoch, for people."""
        offset = self._wall() - self.now() / 1000
        if (
            abs(offset - self._wall_offset) > 1
        ):  # the wall clock was set; less is the jitter between two readings
            self._wall_offset = offset
        return round(pool / 1000 + self._wall_offset, 3)
