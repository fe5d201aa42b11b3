"""A worker's process that somebody has stopped: found, and started anew, before Dask would think of it.

Stopped is a state of the process (SIGSTOP), which /proc tells. A process that is merely busy, in a kernel or
in C code that keeps the GIL for minutes, is not stopped, and nobody touches it.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

#: Seconds between two looks, and how many in a row must find the process stopped: a moment of it harms
#: nobody.
LOOK, TIMES = 2.0, 3


async def watch(pid: Callable[[], int | None], act: Callable[[str], Awaitable[None]]) -> None:
    """Look after a process for good.

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


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal; one that a debugger has stopped is not meant."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False
