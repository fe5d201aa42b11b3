"""Copies of the journal: made while the controller runs, read back before they count, put back with care."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from jupyter_gpupool.controller.store import Database, Store, StoreError, lock


def backup(journal: Path | str, target: Path | str) -> dict[str, Any]:
    """Copy a journal, as it is now, to a new file that only its owner can read, and check the copy.

    The controller may run meanwhile. The leases' credentials are in the copy: keep it as safe.

    Raises:
        StoreError: The file exists, cannot be written, or is not good when read back. Nothing is left then.
    """
    journal, target = _there(journal), Path(target)
    if target.exists():
        raise StoreError(f"{target} exists: name a new file for the backup.")
    part = target.with_name(target.name + ".part")
    with _explained(target):
        try:
            _copy(journal, part)
            found = check(part)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    return found


def check(path: Path | str) -> dict[str, Any]:
    """Read a journal or a backup from end to end and return how much is in it; the file itself is left alone.

    Raises:
        StoreError: It is not there, is damaged, or was written by a newer version.
    """
    path = _there(path)
    with tempfile.TemporaryDirectory(prefix="gpupool-check-") as folder, _explained(path):
        copy = Path(folder) / "journal.sqlite"
        try:
            _copy(path, copy)
            return _read(copy)
        except StoreError as error:
            raise StoreError(str(error).replace(str(copy), str(path))) from error


def requests_of(journal: Path | str, since: float) -> list[dict[str, Any]]:
    """Return what has run and was asked for in the last `since` seconds, oldest first.

    The controller may run meanwhile.

    Raises:
        StoreError: The journal is not there, or cannot be read.
    """
    database = Database(_there(journal), read_only=True)
    try:
        rows = database.rows(
            "SELECT time, seconds, milli, project, user FROM requests WHERE time >= ? ORDER BY time, lease",
            time.time() - since,
        )
    finally:
        database.close()
    return [dict(zip(("time", "seconds", "milli", "project", "user"), row, strict=True)) for row in rows]


def put_back(source: Path | str, journal: Path | str) -> dict[str, Any]:
    """Put a backup in the place of the journal, which is kept beside it as `….before`.

    Raises:
        StoreError: The backup is not good, or a controller runs on the journal. Nothing has changed then.
    """
    journal = Path(journal)
    found = check(source)
    part = journal.with_name(journal.name + ".part")
    guard = lock(journal)
    with _explained(journal):
        try:
            _copy(Path(source), part)  # with what stands in a write-ahead log beside it, if it is a journal
            part.chmod(0o600)
            _to_disk(part)
            _set_aside(journal)
            part.replace(journal)  # at each moment before and after it there is one whole journal
            _to_disk(journal.parent)
        finally:
            part.unlink(missing_ok=True)
            os.close(guard)
    return found


def _set_aside(journal: Path) -> None:
    """Keep a journal as `….before` as well, and leave nothing beside it that belongs to it only.

    A write-ahead log that stayed beside another journal would be read into that one.
    """
    with contextlib.suppress(StoreError), contextlib.closing(Database(journal)) as database:
        database.gather()
    before = journal.with_name(journal.name + ".before")
    for suffix in ("", "-wal", "-shm"):
        before.with_name(before.name + suffix).unlink(missing_ok=True)
    for suffix in ("-wal", "-shm"):  # of a journal that is damaged, or ended by force just now
        with contextlib.suppress(FileNotFoundError):
            journal.with_name(journal.name + suffix).replace(before.with_name(before.name + suffix))
    with contextlib.suppress(FileNotFoundError):
        os.link(journal, before)


def _to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _there(path: Path | str) -> Path:
    path = Path(path)
    if not path.is_file():
        raise StoreError(f"{path} is not there: name a journal, or a file that a backup was written to.")
    return path


def _copy(source: Path, target: Path) -> None:
    database = Database(source, read_only=True)
    try:
        database.copy_to(target)
    finally:
        database.close()


def _read(path: Path) -> dict[str, Any]:
    with contextlib.closing(Store(path)) as store:
        state, seq = store.restore()
        events = sum(1 for _ in store.replay())
        return {"events": events, "last": store.last_seq, "snapshot": seq, "has_snapshot": state is not None}


@contextlib.contextmanager
def _explained(path: Path) -> Any:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path} cannot be written or read: {error.strerror or error}.") from error
