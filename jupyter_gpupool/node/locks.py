"""One lock a real GPU, for the whole machine: no two pools may grant the same device.

Each lock is a file named after the GPU's UUID in a folder that every user can write, held with `flock` by
the agent, so that it is free the moment the agent is gone, however that happened. What the file says (who
holds it) is for people only. Simulated GPUs are nobody else's and are not locked.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jupyter_gpupool.core.model import Device

#: Folders that every user can write, sticky; the first one that is there is used by all pools of the machine.
FOLDERS = (Path("/run/lock"), Path("/var/lock"), Path("/tmp"))  # noqa: S108 - files there are opened with care
#: How much of a file is read: it may be somebody else's.
LONGEST = 500


@dataclass(slots=True)
class DeviceLocks:
    """The locks that this agent holds."""

    #: Who holds them, for the sentence that another pool shows: the pool's address and the OS user.
    address: str
    owner: str
    folder: Path | None = None
    _held: dict[str, int] = field(default_factory=dict)

    def take(self, devices: Iterable[Device]) -> tuple[tuple[Device, ...], dict[str, str]]:
        """Lock devices; return those that are this agent's now, and by UUID a sentence for each other one."""
        mine: list[Device] = []
        refused: dict[str, str] = {}
        for device in devices:
            if sentence := self._take(device.uuid):
                refused[device.uuid] = sentence
            else:
                mine.append(device)
        return tuple(mine), refused

    def _take(self, uuid: str) -> str:
        if uuid in self._held:
            return ""
        folder = self.folder or next((each for each in FOLDERS if each.is_dir()), FOLDERS[-1])
        path = folder / f"gpupool-{uuid}.lock"
        try:
            handle = _open(path)
        except OSError as error:
            return f"GPU {uuid} cannot be locked ({error.strerror}: {path}): remove that file."
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            sentence = f"GPU {uuid} is in {_holder(handle)}: stop that one, or leave this GPU to it."
            os.close(handle)
            return sentence
        _write(handle, {"address": self.address, "owner": self.owner})
        self._held[uuid] = handle
        return ""

    def release(self) -> None:
        """Let all go; the files stay, as somebody may be waiting at them."""
        for handle in self._held.values():
            os.close(handle)
        self._held.clear()


def _open(path: Path) -> int:
    """Open a lock file, making it where there is none; never through a link, and a plain file only.

    Linux refuses to open with `O_CREAT` what somebody else made in such a folder, so making comes second.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        handle = os.open(path, flags)
    except FileNotFoundError:
        try:
            handle = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            os.fchmod(handle, 0o666)  # whatever the umask: every user's pool must be able to hold it
        except FileExistsError:  # somebody was faster
            handle = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "not a plain file", str(path))
    return handle


def _write(handle: int, holder: dict[str, str]) -> None:
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(holder).encode()[:LONGEST], 0)


def _holder(handle: int) -> str:
    """Say who holds a lock, from what its file says; anybody may have written it."""
    try:
        said = json.loads(os.pread(handle, LONGEST, 0))
        address, owner = str(said["address"]), str(said["owner"])
    except (ValueError, KeyError, TypeError):
        return "another pool on this machine"
    if not (address + owner).isprintable():
        return "another pool on this machine"
    return f"the pool at {address} of user {owner}"
