"""Use of devices from outside the pool: compute processes that the driver lists and no lease has.

A process counts when two readings in a row list it and it is alive in this machine's own view: between them a
lease's process may have come or gone, and in a container the driver's PIDs may be another machine's view. The
server of MPS computes for its clients, and is none of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

from jupyter_gpupool.node.mps import SERVER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jupyter_gpupool.core.model import Reading


class OutsideWatch:
    """Remembers who was seen on each device.

    Args:
        owner: Says whose a process is; "": none of the leases'.
    """

    def __init__(self, owner: Callable[[int], str]) -> None:
        self._owner = owner
        self._seen: dict[str, set[int]] = {}
        self._told: dict[str, str] = {}

    def changes(self, readings: list[Reading]) -> Iterator[tuple[str, str]]:
        """Give each device on which that has changed, with who it is now; "": nobody."""
        for reading in readings:
            strangers = {pid for pid, _ in reading.processes if not self._owner(pid) and _counts(pid)}
            lasting = sorted(strangers & self._seen.get(reading.device, set()))
            self._seen[reading.device] = strangers
            who = ", ".join(describe(pid) for pid in lasting)
            if who != self._told.get(reading.device, ""):
                self._told[reading.device] = who
                yield reading.device, who


def _counts(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).name() != SERVER)
    except psutil.Error:
        return psutil.pid_exists(pid)


def describe(pid: int) -> str:
    """Return "PID 4711, user ben"."""
    try:
        return f"PID {pid}, user {psutil.Process(pid).username()}"
    except psutil.Error:
        return f"PID {pid}"
