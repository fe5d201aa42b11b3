"""What a lease's processes said: read while they run, kept for a while after they have ended.

The logs of a running lease stand in a folder of the lease's own user, so an agent that is root reads nothing
there that is not a plain file of that user's: no link, no device, no other user's file by another name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

#: Bytes of the end of each log that are shown and kept, and how large a log may grow before it is cut.
SHOWN, LARGEST = 64 * 2**10, 16 * 2**20
#: Of so many ended leases the logs are kept.
KEPT = 32


def read_tail(path: Path, uid: int, size: int = SHOWN) -> str:
    """Read the end of a log; empty where there is none that may be read.

    Args:
        path: The file.
        uid: Whose it must be.
        size: Bytes at most.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != uid:
            return ""
        return os.pread(descriptor, size, max(0, found.st_size - size)).decode(errors="replace")
    finally:
        os.close(descriptor)


def cut(path: Path, uid: int) -> None:
    """Empty a log that has grown too large; its process goes on writing at the new end."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if stat.S_ISREG(found.st_mode) and found.st_uid == uid and found.st_size > LARGEST:
                os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)


class KeptLogs:
    """The logs of leases that have ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)

    def keep(self, lease: str, logs: list[dict[str, str]]) -> None:
        """Keep logs of a lease beside those that are kept of it already, and forget the oldest leases'."""
        if not logs:
            return
        folder = self._folder / lease
        folder.mkdir(mode=0o700, exist_ok=True)
        for each in logs:
            path = folder / (each["name"].replace("/", "_") + ".log")
            path.touch(0o600)
            path.write_text(each["text"])
        for old in sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    def read(self, lease: str) -> list[dict[str, str]]:
        """Answer with the kept logs of a lease."""
        folder = self._folder / lease
        if not folder.is_dir():
            return []
        return [
            {"name": path.stem, "text": path.read_text(errors="replace")} for path in sorted(folder.iterdir())
        ]
