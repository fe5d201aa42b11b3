"""Checkpoints: what `gpupool.checkpoint(name=object)` in a cell on a lease has kept.

Rule 1: they are files of the person who wrote the cell, on the machine where their notebook runs (0600, below
        Jupyter's data folder): the node that a cell ran on may be what is lost.
Rule 2: a copy is replaced when the new one is complete, so one that was cut short harms nothing.
Rule 3: nothing is read as Python here; only the lease that has written a copy, or its owner's next one, does.
"""

from __future__ import annotations

import os
import re
import time
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Bytes that are read at a time.
PIECE = 2**22
#: Seconds after which a lease's copies are removed by the next that writes one.
OLD = 30 * 86400.0


def folder(lease: str, place: int = 0) -> Path:
    """Answer with the folder of the checkpoints of one of a lease's namespaces.

    Args:
        lease: The lease's id.
        place: Which of its slices, as `--on` counts them.
    """
    from jupyter_core.paths import jupyter_data_dir

    return Path(jupyter_data_dir()) / "gpupool" / "checkpoints" / _part(lease) / str(place)


def kept(lease: str, place: int = 0) -> dict[str, float]:
    """List what is kept of a namespace: the names, and when each was written, in seconds since the epoch."""
    found = {}
    for path in sorted(folder(lease, place).glob("*.pickle")):
        found[path.stem] = path.stat().st_mtime
    return found


def words(lease: str, place: int = 0) -> str:
    """Say what is kept of a namespace; empty if that is nothing."""
    found = kept(lease, place)
    if not found:
        return ""
    last = time.strftime("%H:%M", time.localtime(max(found.values())))
    return f"`gpupool.restore()` in a cell brings back {', '.join(found)} as of {last}."


class Writer:
    """Writes one copy, piece by piece.

    Args:
        lease: The lease's id.
        place: Which of its slices.
        name: The variable's name.
    """

    def __init__(self, lease: str, place: int, name: str) -> None:
        there = folder(lease, place)
        if not name.isidentifier():
            raise ValueError(f"{name!r} is no name of a variable")
        _forget_old(there.parents[1])
        there.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = there / f"{name}.pickle"
        self._new = self._path.with_suffix(f".{os.getpid()}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(self._new, flags, 0o600), "wb")

    def add(self, data: bytes, *, last: bool) -> None:
        """Write a piece; after the last one the copy is there."""
        self._file.write(data)
        if last:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._new.replace(self._path)

    def abandon(self) -> None:
        """Drop a copy that is not complete."""
        self._file.close()
        self._new.unlink(missing_ok=True)


def pieces(lease: str, place: int, name: str) -> Iterator[tuple[bytes, bool]]:
    """Read a copy, piece by piece; with each goes whether it is the last.

    Raises:
        OSError: There is none.
    """
    path = folder(lease, place) / f"{name}.pickle"
    left = path.stat().st_size
    with path.open("rb") as file:
        while True:
            data = file.read(PIECE)
            left -= len(data)
            yield data, left <= 0 or not data
            if left <= 0 or not data:
                return


def _part(lease: str) -> str:
    """Make one part of a path of a lease's id."""
    return lease if re.fullmatch(r"[A-Za-z0-9-]{1,60}", lease) else sha256(lease.encode()).hexdigest()[:40]


def _forget_old(above: Path) -> None:
    for path in above.glob("*/*/*.*"):
        if time.time() - path.stat().st_mtime > OLD:
            path.unlink(missing_ok=True)
    for each in (*above.glob("*/*/"), *above.glob("*/")):
        if not any(each.iterdir()):
            each.rmdir()
