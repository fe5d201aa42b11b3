"""The list of an agent's lease processes: a file from which the next agent takes them over.

Written before a process is started and after each change, by its owner only (0600). It holds no secret.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from jupyter_gpupool.node.guard import Identity, boot_id

logger = logging.getLogger(__name__)

#: How a lease process fares: it is being started, works, has failed or ended, or is to end.
STARTING, RUNNING, FAILED, STOPPING = "starting", "running", "failed", "stopping"


@dataclass
class Entry:
    """A lease's scheduler, or the host of one of its slices, with all that it starts."""

    #: The slice's id, or the lease's where it is the scheduler.
    key: str
    lease: str
    user: str
    #: `Slice` as `core.model.encode` writes it; empty: the scheduler.
    slice: dict[str, Any] = field(default_factory=dict)
    state: str = STARTING
    pid: int = 0
    started: int = 0
    #: What it last said of itself: address, dashboard…
    said: dict[str, Any] = field(default_factory=dict)
    #: Of a slice: the address of the lease's scheduler that it works for.
    scheduler: str = ""
    #: Processes of its owner's own that use its device (`attach`): PID and start time of each.
    attached: list[list[int]] = field(default_factory=list)
    #: Its processes are clients of the MPS daemon.
    mps: bool = False

    @property
    def is_scheduler(self) -> bool:
        """Whether it is the lease's scheduler."""
        return self.key == self.lease

    @property
    def name(self) -> str:
        """What its log is called."""
        return "scheduler" if self.is_scheduler else f"worker-{self.key.rpartition('/')[2]}"

    @property
    def roots(self) -> set[Identity]:
        """The process itself, where it has been started."""
        return {(self.pid, self.started)} if self.pid else set()


def safe_name(name: str) -> str:
    """Make a name that is one short part of a path, and another one for each id.

    >>> safe_name("a1b2"), safe_name("a1b2/0")
    ('a1b2', 'a1b2_0.0b9711ce')
    """
    if re.fullmatch(r"[A-Za-z0-9-]{1,40}", name):
        return name
    return re.sub(r"[^A-Za-z0-9-]+", "_", name)[:24] + "." + sha256(name.encode()).hexdigest()[:8]


def _is_own(folder: Path) -> bool:
    """Whether it is a folder of this process's user; its name may be another's by now."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


class Table:
    """The lease processes of one agent, in memory and in its file."""

    def __init__(self, path: Path, scratch: str | None = None) -> None:
        self._path = path
        data = self._read()
        same_boot = data.get("boot") == boot_id()
        #: Names this agent in the marks of its processes, over its restarts.
        self.agent: str = data.get("agent") or secrets.token_hex(4)
        #: Where sockets and the leases' own folders are. Short, as the path of a UNIX socket must be.
        self.run = Path(data.get("run") or "")
        if not same_boot or not data.get("run") or not _is_own(self.run):
            self.run = Path(tempfile.mkdtemp(prefix="gpupool-", dir=scratch))
        # systemd-tmpfiles, which tidies the folder of temporary files, leaves alone what is locked.
        self._lock = os.open(self.run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self.entries: dict[str, Entry] = {}
        if same_boot:
            for each in data.get("entries", ()):
                self.entries[each["key"]] = Entry(**each)
        self.save()

    def save(self) -> None:
        """Write the file, whole or not at all."""
        data = {
            "boot": boot_id(),
            "agent": self.agent,
            "run": str(self.run),
            "entries": [asdict(each) for each in self.entries.values()],
        }
        new = self._path.with_suffix(".new")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(data, file)
        new.replace(self._path)

    def note(self) -> None:
        """Write the file if that can be done: a disk that is full keeps no process from being ended."""
        try:
            self.save()
        except OSError as error:
            logger.error("%s cannot be written: %s", self._path, error)  # noqa: TRY400 - the sentence says it all

    def mark(self, key: str) -> str:
        """Answer with the mark of a lease process and all that it starts."""
        return f"{self.agent}:{key}"

    def folder(self, lease: str) -> Path:
        """Answer with a lease's own folder: its logs, and what its workers spill."""
        return self.run / f"w-{safe_name(lease)}"

    def socket(self, key: str) -> Path:
        """Answer with the path of the socket on which a lease process reaches its agent."""
        return self.run / f"s-{safe_name(key)}"

    def log(self, entry: Entry) -> Path:
        """Answer with the path of a lease process's log."""
        return self.folder(entry.lease) / f"{safe_name(entry.name)}.log"

    def of_lease(self, lease: str) -> list[Entry]:
        """Answer with what there is of a lease on this node."""
        return [each for each in self.entries.values() if each.lease == lease]

    def close(self) -> None:
        """Let go of the folder of sockets and work; may be called twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def remove_run(self) -> None:
        """Remove the folder of sockets and work, when no lease is left."""
        shutil.rmtree(self.run, ignore_errors=True)

    def _read(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            data = json.loads(self._path.read_text())
            if isinstance(data, dict):
                return data
        return {}
