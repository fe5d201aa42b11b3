"""Who uses the simulated GPUs: CUDA contexts, memory by process, and how busy they are.

Rule 1: each process writes one small file of its own, by an atomic rename; nobody else's.
Rule 2: a process that is gone uses nothing, however it went. A PID that was given anew is somebody else.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection

    from jupyter_gpupool.driver.simulated.state import State

#: Below so many percent of a core a process counts as doing nothing: Dask's own loop needs that much.
QUIET = 4
#: Seconds within which a device's utilisation is not measured anew.
WINDOW = 0.1
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Use:
    """What one process has on one device or MIG instance."""

    pid: int
    #: UUID of the device or the MIG instance.
    on: str
    #: bytes, the context included
    memory: int
    #: Percent that the process says itself, or None: its CPU time tells.
    busy: int | None


def stat_of(pid: int) -> tuple[int, int] | None:
    """Start time and CPU time of a process, in clock ticks; None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    if fields[0] in "ZX":
        return None
    return int(fields[19]), int(fields[11]) + int(fields[12])


def identity(pid: int) -> str:
    """A process's name for ever: its PID may be given anew."""
    found = stat_of(pid)
    return f"{pid}:{found[0] if found else 0}"


@dataclass(slots=True)
class Record:
    """This process's own file."""

    file: Path
    #: UUID of a device or MIG instance -> {"memory": bytes, "busy": percent or None}
    uses: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def own(cls, state: State) -> Record:
        """The record of this process, empty until it is written."""
        return cls(state.path / "processes" / f"{os.getpid()}.json")

    def write(self) -> None:
        """Make it seen by all; a record without uses is taken away."""
        if not self.uses:
            self.file.unlink(missing_ok=True)
            return
        found = stat_of(os.getpid())
        data = {"start": found[0] if found else 0, "uses": self.uses}
        draft = self.file.with_suffix(".tmp")
        draft.write_text(json.dumps(data), encoding="ascii")
        draft.chmod(0o644)  # who may enter the folder may read it
        draft.replace(self.file)


def uses(state: State, on: Collection[str] | None = None) -> list[Use]:
    """What living processes have; files of dead ones are taken away.

    Args:
        state: Of which machines.
        on: UUIDs of the devices and MIG instances that matter; all of them unless said. A look at a process
            costs more than one at its file, and most questions are about one device.
    """
    found: list[Use] = []
    for name, (start, has) in _records(state).items():
        wanted = [(uuid, each) for uuid, each in has.items() if on is None or uuid in on]
        pid = int(name.removesuffix(".json"))
        if wanted and _lives(state.path / "processes" / name, pid, start):
            found += [Use(pid, uuid, each["memory"], each["busy"]) for uuid, each in wanted]
    return found


def _records(state: State) -> dict[str, tuple[int, dict[str, dict[str, Any]]]]:
    """All files: when their processes started and what they have; only what has changed is read again."""
    before = state.records
    with os.scandir(state.path / "processes") as entries:
        files = sorted((entry.name, entry) for entry in entries if entry.name.endswith(".json"))
    after = {}
    for name, entry in files:
        with contextlib.suppress(OSError, ValueError):
            found = entry.stat()
            version = (found.st_mtime_ns, found.st_ino)
            known = before.get(name)
            after[name] = known if known and known[0] == version else (version, _read(Path(entry.path)))
    state.records = after
    return {name: record for name, (_, record) in after.items()}


def _read(file: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    data = json.loads(file.read_text(encoding="ascii"))
    return data["start"], data["uses"]


def _lives(file: Path, pid: int, start: int) -> bool:
    alive = stat_of(pid)
    if alive is not None and alive[0] == start:
        return True
    # It may belong to another user, or be taken away by somebody else at the same time.
    with contextlib.suppress(OSError):
        file.unlink(missing_ok=True)
        file.with_suffix(".tmp").unlink(missing_ok=True)
    return False


class Meter:
    """How busy processes are, from their CPU time between two looks."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, int, int]] = {}

    def busy(self, use: Use) -> int:
        """Percent of one core that a process has used since the last look (0 at the first)."""
        if use.busy is not None:
            return use.busy
        found = stat_of(use.pid)
        if found is None:
            self._before.pop(use.pid, None)
            return 0
        now, ticks = time.monotonic(), found[1]
        at, before, percent = self._before.get(use.pid, (now, ticks, 0))
        if now - at >= WINDOW:
            percent = min(100, round(100 * (ticks - before) / TICKS / (now - at)))
            at, before = now, ticks
        self._before[use.pid] = (at, before, percent)
        return percent if percent >= QUIET else 0
