"""The journal of the pool and what is kept beside it, in one SQLite file. Nobody else imports sqlite3.

Rule 1: what `append` has returned is on the disk (WAL, full sync). What raised `StoreError` has not happened.
Rule 2: the journal is the truth: the last snapshot and the pool events after it give an equal pool. Each
        row's checksum runs on from the row before, so a damaged file is found, never half believed.
Rule 3: one process has a journal open at a time (a lock beside it); a backup may read it at any moment.
Rule 4: what is secret is in tables of its own, is overwritten when deleted, and is in no dump.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import threading
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.controller import schema
from jupyter_gpupool.controller.records import Heard, Once, Records, Seen, StoreError, redacted
from jupyter_gpupool.core.model import LeaseExtended, PoolEvent, RequestSubmitted, decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Database", "Heard", "Once", "Seen", "Store", "StoreError", "lock"]

#: What SQLite's result codes mean to a person; the first prefix that fits. `{path}` is the journal.
SENTENCES: tuple[tuple[str, str], ...] = (
    ("SQLITE_FULL", "The disk that holds {path} is full: free some space and try again."),
    ("SQLITE_CORRUPT", "{path} is damaged: put a backup back with `jupyter gpupool restore FILE`."),
    (
        "SQLITE_NOTADB",
        "{path} is damaged or is no journal: put a backup back with `jupyter gpupool restore FILE`.",
    ),
    (
        "SQLITE_READONLY",
        "{path} cannot be written: make it and its folder writable for the controller's user.",
    ),
    ("SQLITE_CANTOPEN", "{path} cannot be opened: the folder must exist and be the controller's user's."),
    ("SQLITE_BUSY", "{path} is locked by another program: end it and try again."),
    ("SQLITE_IOERR", "{path} cannot be written ({name}): check the disk and its free space, then try again."),
)
#: After these nobody knows what is on the disk: nothing more is confirmed until it is opened anew.
FATAL = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_IOERR_FSYNC", "SQLITE_IOERR_DIR_FSYNC")

PRAGMAS = (
    "journal_mode=WAL",
    "synchronous=FULL",
    "secure_delete=ON",  # a deleted secret is overwritten
    "journal_size_limit=16777216",
    "cache_size=-512",  # KiB; the system caches the file, and SQLite's own 2 MB only look like a leak
)


class Database:
    """One SQLite connection whose every error is a `StoreError` with one sentence."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._broken = ""
        self._durable = True
        uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rw'}"
        if not read_only:
            _touch(path)
        with self.explained():
            # A statement that is kept for the next time keeps what was last bound to it: secrets, and the
            # text of a snapshot. To prepare one anew takes some 2 µs.
            self._sql = sqlite3.connect(
                uri,
                uri=True,
                isolation_level=None,
                check_same_thread=False,
                timeout=5,
                cached_statements=0,
            )
            for pragma in () if read_only else PRAGMAS:
                self._sql.execute(f"PRAGMA {pragma}")

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn SQLite's errors into `StoreError`s; remember those after which the file cannot be trusted."""
        if self._broken:
            raise StoreError(self._broken)
        try:
            yield
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "") or type(error).__name__
            sentence = explain(name, self.path, error)
            if name.startswith(FATAL):
                self._broken = sentence
            raise StoreError(sentence) from error

    @contextlib.contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """Do all or nothing.

        Args:
            durable: It is on the disk at the end; otherwise with the next durable one at the latest.
        """
        with self._lock, self.explained():
            if durable != self._durable:
                self._sql.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
                self._durable = durable
            self._sql.execute("BEGIN IMMEDIATE")
            try:
                yield self._sql
                self._sql.execute("COMMIT")
            except BaseException:
                if self._sql.in_transaction:
                    self._sql.execute("ROLLBACK")
                raise

    def rows(self, query: str, *values: Any) -> list[Any]:
        """Return all rows that a query gives."""
        with self._lock, self.explained():
            return self._sql.execute(query, values).fetchall()

    def row(self, query: str, *values: Any) -> Any:
        """Return the first row that a query gives, or None."""
        with self._lock, self.explained():
            return self._sql.execute(query, values).fetchone()

    def copy_to(self, target: Path) -> None:
        """Copy the whole file, as it is at one moment, to a file that only its owner can read."""
        _touch(target)
        with self.explained(), contextlib.closing(sqlite3.connect(target, isolation_level=None)) as copy:
            self._sql.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")  # so that the copy is one file

    def gather(self) -> None:
        """Bring everything into the one file, so that no other file beside it matters.

        Raises:
            StoreError: It cannot be; the files are as they were.
        """
        with self.explained():
            self._sql.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close the connection; never fails."""
        with contextlib.suppress(sqlite3.Error):
            self._sql.close()


def explain(name: str, path: Path, error: Exception) -> str:
    """Return one sentence for the SQLite result code `name`."""
    for prefix, sentence in SENTENCES:
        if name.startswith(prefix):
            return sentence.format(path=path, name=name)
    return f"{path} cannot be used ({name}: {error}): restart the controller, or put a backup back."


class Store(Records):
    """The journal at `path`, made where there is none.

    Args:
        path: The file; its folder exists.
        wall: Seconds since the epoch, for expiry and for the times that people see.

    Raises:
        StoreError: It is in use, damaged, of a newer version, or cannot be written.
    """

    def __init__(self, path: Path | str, *, wall: Any = None) -> None:
        self.path = Path(path)
        self._guard = lock(self.path)
        try:
            self._db = Database(self.path)
            Records.__init__(self, self._db, wall)
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        _inspect(self._db)
        _migrate(self._db)
        snapshot = self._db.row("SELECT seq, now, chain FROM snapshot")
        last = self._db.row("SELECT seq, now, crc FROM journal ORDER BY seq DESC LIMIT 1")
        self._seq: int
        self._now: int
        self._chain: int
        self._seq, self._now, self._chain = last or snapshot or (0, 0, 0)
        self._snapshot_seq: int = snapshot[0] if snapshot else 0

    @property
    def last_seq(self) -> int:
        """The number of the last pool event of the journal; 0: none yet."""
        return self._seq

    @property
    def last_now(self) -> int:
        """The time of the last pool event of the journal, in milliseconds of the pool's clock."""
        return self._now

    @property
    def since_snapshot(self) -> int:
        """How many pool events a restart would have to replay."""
        return self._seq - self._snapshot_seq

    def append(self, event: PoolEvent, once: Once | None = None, heard: Heard | None = None) -> int:
        """Write a pool event to the journal and return its number; it is on the disk then.

        Args:
            event: The pool event.
            once: The idempotency key that the event's request came with; kept in the same transaction.
            heard: The agent's report that the event was; kept likewise, so that it counts once.

        Raises:
            StoreError: It is not in the journal, and must not be carried out.
        """
        text = json.dumps(encode(event), separators=(",", ":"))
        seq, chain = self._seq + 1, zlib.crc32(text.encode(), self._chain)
        with self._db.transaction() as sql:
            sql.execute("INSERT INTO journal VALUES (?, ?, ?, ?)", (seq, event.now, text, chain))
            if once is not None and isinstance(event, RequestSubmitted | LeaseExtended):
                lease = event.request.id if isinstance(event, RequestSubmitted) else event.lease
                self._keep_key(sql, once, lease, event.now)
            if heard is not None:
                self._keep_heard(sql, heard)
        self._seq, self._chain = seq, chain
        self._now = max(self._now, event.now)
        return seq

    def restore(self) -> tuple[dict[str, Any] | None, int]:
        """Return the last snapshot of the pool's state and the number of the event it was taken after.

        Raises:
            StoreError: The snapshot is damaged.
        """
        row = self._db.row("SELECT seq, state, crc FROM snapshot")
        if row is None:
            return None, 0
        seq, state, crc = row
        if zlib.crc32(state.encode()) != crc:
            raise StoreError(self._damage(f"the snapshot after event {seq}"))
        return json.loads(state), seq

    def replay(self) -> Iterator[tuple[int, PoolEvent]]:
        """Give the pool events after the last snapshot, oldest first, each with its number.

        Raises:
            StoreError: An event is missing, changed or unknown.
        """
        seq, chain = self._db.row("SELECT seq, chain FROM snapshot") or (0, 0)
        while rows := self._db.rows(
            "SELECT seq, event, crc FROM journal WHERE seq > ? ORDER BY seq LIMIT 1000", seq
        ):
            for number, text, crc in rows:
                seq, chain = seq + 1, zlib.crc32(text.encode(), chain)
                if number != seq or chain != crc:
                    raise StoreError(self._damage(f"event {seq}"))
                yield seq, self._decode(seq, text)

    def _decode(self, seq: int, text: str) -> PoolEvent:
        try:
            return decode(PoolEvent, json.loads(text))
        except ValueError as error:
            raise StoreError(self._damage(f"event {seq} ({error})")) from error

    def _damage(self, what: str) -> str:
        return f"{self.path} is damaged at {what}: put a backup back with `jupyter gpupool restore FILE`."

    def snapshot(self, text: str, seq: int | None = None) -> None:
        """Keep the pool's state and drop the events up to it.

        Args:
            text: The state, as JSON.
            seq: The number of the event after which it was so; default: the last one.

        Raises:
            StoreError: Nothing has changed.
        """
        seq = self._seq if seq is None else seq
        with self._db.transaction() as sql:
            row = sql.execute("SELECT now, crc FROM journal WHERE seq = ?", (seq,)).fetchone()
            if row is None and seq != 0:  # nothing has been journaled since the last snapshot
                row = sql.execute("SELECT now, chain FROM snapshot WHERE seq = ?", (seq,)).fetchone()
            now, chain = row or (0, 0)
            sql.execute(
                "INSERT OR REPLACE INTO snapshot VALUES (1, ?, ?, ?, ?, ?)",
                (seq, now, text, zlib.crc32(text.encode()), chain),
            )
            sql.execute("DELETE FROM journal WHERE seq <= ?", (seq,))
        self._snapshot_seq = seq

    def dump(self) -> Iterator[dict[str, Any]]:
        """Give everything that is not secret, for people and bug reports: one JSON-able dictionary a row."""
        for table in ("migrations", "facts", "mark", "snapshot", "journal", "notices", "shares"):
            names = [row[1] for row in self._db.rows(f"PRAGMA table_info({table})")]
            for row in self._db.rows(f"SELECT * FROM {table}"):  # noqa: S608 - names from the list above
                yield {"table": table, **redacted(dict(zip(names, row, strict=True)))}

    def close(self) -> None:
        """Close the file and let another process have it; may be called twice."""
        if hasattr(self, "_db"):
            self._db.close()
        if self._guard >= 0:
            os.close(self._guard)
            self._guard = -1


def _touch(path: Path) -> None:
    """Make the file, for its owner only, where it is not there."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise StoreError(explain("SQLITE_CANTOPEN", path, error)) from error


def lock(path: Path) -> int:
    """Take the lock beside the journal and return its file; it goes with the process, however that ends.

    Raises:
        StoreError: Another process has it; the sentence names it.
    """
    try:
        guard = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(explain("SQLITE_CANTOPEN", path, error)) from error
    try:
        fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(guard, 32, 0).decode("ascii", "replace").strip()
        os.close(guard)
        raise StoreError(f"{path} is in use by process {holder}: stop that controller first.") from None
    os.ftruncate(guard, 0)
    os.pwrite(guard, f"{os.getpid()}\n".encode(), 0)
    return guard


def _inspect(database: Database) -> None:
    """Let SQLite look for damage to the file's own structure."""
    found = database.row("PRAGMA quick_check(1)")
    if found is None or found[0] != "ok":
        raise StoreError(explain("SQLITE_CORRUPT", database.path, Exception(str(found))))


def _migrate(database: Database) -> None:
    """Bring the file to the version that this package writes, one step after the other."""
    with database.transaction() as sql:
        sql.execute("CREATE TABLE IF NOT EXISTS migrations (version INTEGER PRIMARY KEY, at TEXT NOT NULL)")
        version = sql.execute("SELECT coalesce(max(version), 0) FROM migrations").fetchone()[0]
        if version > schema.VERSION:
            raise StoreError(
                f"{database.path} was written by a newer version (schema {version}, this one knows "
                f"{schema.VERSION}): upgrade jupyter-gpupool."
            )
        for number, step in enumerate(schema.STEPS[version:], start=version + 1):
            for statement in step.split(";\n"):  # executescript() would commit half-way
                sql.execute(statement)
            sql.execute("INSERT INTO migrations VALUES (?, datetime('now'))", (number,))
