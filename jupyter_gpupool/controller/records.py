"""What the store keeps beside the journal: idempotency keys, time marks, notices, secrets, tokens, facts.

Rule 1: all of it is on the disk when the call returns, save notices: replaying the journal says them again.
Rule 2: times here are seconds since the epoch, for expiry and for people; the pool decides nothing by them.
Rule 3: idempotency keys age by the pool's clock: a wall clock that jumps neither ends one early, so that a
        request which is sent again would be granted twice, nor keeps it for ever.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from jupyter_gpupool.controller.clock import Mark
from jupyter_gpupool.core.model import ANY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from jupyter_gpupool.controller.store import Database
    from jupyter_gpupool.core.model import Notify

#: How long an idempotency key is kept, in seconds of the pool's clock.
KEY_AGE = 24 * 3600
#: How many notices are kept.
NOTICES = 10_000
#: How long what has run is remembered, in seconds.
REQUEST_AGE = 400 * 24 * 3600


class StoreError(Exception):
    """The journal cannot be used; one sentence that says what to do."""


class Once(NamedTuple):
    """An idempotency key: who sent it, the key, and a fingerprint of the request that it came with."""

    user: str
    key: str
    fingerprint: str


class Heard(NamedTuple):
    """How far a node's reports have been heard: the life of its agent, and the number of the last one."""

    node: str
    boot: str
    seq: int


class Seen(NamedTuple):
    """What a known idempotency key led to."""

    lease: str
    fingerprint: str


class Ran(NamedTuple):
    """What has run: when it was asked for, for how long it ran (both s), and on how much (thousandths)."""

    lease: str
    time: float
    seconds: float
    milli: int
    project: str
    user: str


class Notices(NamedTuple):
    """An answer to "what is new": the notices, where to go on, and whether some are no longer kept."""

    notices: list[dict[str, Any]]
    next: int
    missed: bool


class Records:
    """The tables beside the journal; `Store` is the only one to make it."""

    def __init__(self, database: Database, wall: Callable[[], float] | None = None) -> None:
        self._db = database
        #: User -> the leases that are shared with them; None: to be read anew.
        self._shared: dict[str, frozenset[str]] | None = None
        #: Grows whenever notices are kept, or another may use a lease.
        self.revision = 0
        self._wall = wall or time.time
        #: By person: the number of the last notice for them that has been kept since the file was opened.
        self._told: dict[str, int] = {}

    # ------------------------------------------------------------------------------------ idempotency keys

    def _keep_key(self, sql: Any, once: Once, lease: str, now: int) -> None:
        """Keep a key within the transaction of its event (at `now`, in ms), and forget what is too old."""
        made = now / 1000
        sql.execute("DELETE FROM keys WHERE made < ?", (made - KEY_AGE,))
        sql.execute(
            "INSERT OR REPLACE INTO keys VALUES (?, ?, ?, ?, ?)",
            (once.user, once.key, lease, once.fingerprint, made),
        )

    def seen(self, user: str, key: str, now: int) -> Seen | None:
        """Return what this person's idempotency key led to within the day before `now` (ms), or None."""
        oldest = now / 1000 - KEY_AGE
        row = self._db.row(
            "SELECT lease, fingerprint FROM keys WHERE user = ? AND key = ? AND made >= ?", user, key, oldest
        )
        return Seen(*row) if row else None

    def forget_key(self, user: str, key: str) -> None:
        """Forget a key whose request was refused, so that it may be used for a better one."""
        with self._db.transaction(durable=False) as sql:
            sql.execute("DELETE FROM keys WHERE user = ? AND key = ?", (user, key))

    # ------------------------------------------------------------------------------------- agents' reports

    def _keep_heard(self, sql: Any, heard: Heard) -> None:
        """Remember a report within the transaction of the pool event that it was."""
        sql.execute("INSERT OR REPLACE INTO heard VALUES (?, ?, ?)", heard)

    def heard(self) -> list[Heard]:
        """Return how far each node's reports have become pool events."""
        return [Heard(*row) for row in self._db.rows("SELECT node, boot, seq FROM heard ORDER BY node")]

    # ------------------------------------------------------------------------------------------ time marks

    def last_mark(self) -> Mark | None:
        """Return the last time mark, or None in a new store."""
        row = self._db.row("SELECT boot, boottime, pool FROM mark")
        return Mark(*row) if row else None

    def mark(self, mark: Mark) -> None:
        """Keep a time mark in place of the last one.

        Raises:
            StoreError: It cannot be written.
        """
        with self._db.transaction() as sql:
            sql.execute("INSERT OR REPLACE INTO mark VALUES (1, ?, ?, ?)", mark)

    # --------------------------------------------------------------------------------------------- notices

    def add_notices(self, event: int | None, notices: Iterable[Notify]) -> bool:
        """Keep what followed from journal event number `event`; return whether there is anything new.

        With None it follows from no event, and is kept as often as it is said.

        Saying it again (at replay) changes nothing. It is not synced to the disk by itself: a power cut takes
        away no more than what replaying the journal brings back.
        """
        return self.add_all_notices([(-time.time_ns() if event is None else event, notices)])

    def add_all_notices(self, said: Iterable[tuple[int, Iterable[Notify]]]) -> bool:
        """Keep what followed from many events, as a replay says it, in one go; see `add_notices`."""
        now = round(self._wall(), 3)
        rows = [
            (event, nth, now, each.user, each.notice.value, each.lease, each.sentence, each.data)
            for event, notices in said
            for nth, each in enumerate(notices)
        ]
        if not rows:
            return False
        with self._db.transaction(durable=False) as sql:
            before = sql.total_changes
            sql.executemany(
                "INSERT OR IGNORE INTO notices (event, nth, time, user, notice, lease, sentence, data)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                rows,
            )
            added = sql.total_changes > before
            last = sql.execute("SELECT max(seq) FROM notices").fetchone()[0]
            sql.execute("DELETE FROM notices WHERE seq <= ?", (last - NOTICES,))
        self._told.update((row[3], last) for row in rows)
        self.revision += 1
        return added

    def keep_ran(self, ran: Iterable[Ran]) -> None:
        """Remember what has run, once each; like notices, it is said again at a replay of the journal."""
        with self._db.transaction(durable=False) as sql:
            sql.executemany("INSERT OR IGNORE INTO requests VALUES (?, ?, ?, ?, ?, ?)", ran)
            sql.execute("DELETE FROM requests WHERE time < ?", (self._wall() - REQUEST_AGE,))

    def is_told(self, user: str, after: int, *, admin: bool = False) -> bool:
        """Return whether a person may have notices above `after` that came since the file was opened."""
        told = self._told.get(user, 0), self._told.get(ANY, 0) if admin else 0
        return max(told) > after

    def notices(self, after: int, user: str, *, admin: bool = False, limit: int = 100) -> Notices:
        """Return a person's notices with numbers above `after`, oldest first.

        Args:
            after: The `next` of the last answer; 0 at first.
            user: Whose.
            admin: Those for administrators too.
            limit: How many at most.
        """
        oldest, last = self._db.row("SELECT coalesce(min(seq), 0), coalesce(max(seq), 0) FROM notices")
        missed = after > last or 0 < after < oldest - 1
        after = 0 if after > last else after  # numbers from before a backup was put back
        rows = self._db.rows(
            "SELECT seq, time, user, notice, lease, sentence, data FROM notices"
            " WHERE seq > ? AND user IN (?, ?) ORDER BY seq LIMIT ?",
            *(after, user, ANY if admin else user, limit),
        )
        return Notices([_notice(row) for row in rows], rows[-1][0] if len(rows) == limit else last, missed)

    def notes(self, lease: str, limit: int = 5) -> list[str]:
        """Return the last sentences that were said about a lease, oldest first."""
        return [sentence for _, sentence in self.dated_notes(lease, limit)]

    def dated_notes(self, lease: str, limit: int = 5) -> list[tuple[float, str]]:
        """Return the same, each with how many seconds ago it was said."""
        now = self._wall()
        rows = self._db.rows(
            "SELECT time, sentence FROM notices WHERE lease = ? ORDER BY seq DESC LIMIT ?", lease, limit
        )
        return [(max(0.0, now - then), sentence) for then, sentence in reversed(rows)]

    # ------------------------------------------------------------------------------------- secrets, shares

    def keep_secret(self, lease: str, data: dict[str, Any]) -> None:
        """Keep a lease's credentials and secrets until `forget_secret`.

        Raises:
            StoreError: They are not kept, and must not be used.
        """
        with self._db.transaction() as sql:
            sql.execute("INSERT OR REPLACE INTO secrets VALUES (?, ?)", (lease, json.dumps(data)))

    def secret(self, lease: str) -> dict[str, Any] | None:
        """Return what `keep_secret` kept of a lease, or None."""
        row = self._db.row("SELECT data FROM secrets WHERE lease = ?", lease)
        return json.loads(row[0]) if row else None

    def forget_secret(self, lease: str) -> None:
        """Erase a lease's secrets and with whom it was shared, when the lease has ended."""
        # A power cut may bring them back for as long as the machine is off: the next start erases them.
        with self._db.transaction(durable=False) as sql:
            sql.execute("DELETE FROM secrets WHERE lease = ?", (lease,))
            sql.execute("DELETE FROM shares WHERE lease = ?", (lease,))
        self._shared = None

    def secret_leases(self) -> list[str]:
        """Return the ids of the leases whose secrets are kept, to erase those of leases long gone."""
        return [row[0] for row in self._db.rows("SELECT lease FROM secrets ORDER BY lease")]

    def share(self, lease: str, users: Iterable[str]) -> None:
        """Let these people, besides the owner, reach the lease; in place of those who could before."""
        with self._db.transaction() as sql:
            sql.execute("DELETE FROM shares WHERE lease = ?", (lease,))
            sql.executemany(
                "INSERT INTO shares VALUES (?, ?)", [(lease, user) for user in sorted(set(users))]
            )
        self._shared = None
        self.revision += 1

    def shared_with(self, lease: str) -> tuple[str, ...]:
        """Return who, besides the owner, may reach the lease, sorted."""
        return tuple(
            row[0] for row in self._db.rows("SELECT user FROM shares WHERE lease = ? ORDER BY user", lease)
        )

    def shared_to(self, user: str) -> frozenset[str]:
        """Return the ids of the leases that are shared with a person."""
        if self._shared is None:  # asked for each waiting server at each change, and seldom another
            found: dict[str, set[str]] = {}
            for lease, other in self._db.rows("SELECT lease, user FROM shares"):
                found.setdefault(other, set()).add(lease)
            self._shared = {other: frozenset(leases) for other, leases in found.items()}
        return self._shared.get(user, frozenset())

    # ----------------------------------------------------------------------------------------------- facts

    def put(self, name: str, value: Any) -> None:
        """Keep a JSON-able fact under a name (the ports, for one).

        Raises:
            StoreError: It is not kept.
        """
        with self._db.transaction() as sql:
            sql.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, json.dumps(value)))

    def get(self, name: str, default: Any = None) -> Any:
        """Return the fact of that name."""
        row = self._db.row("SELECT value FROM facts WHERE name = ?", name)
        return json.loads(row[0]) if row else default

    # ---------------------------------------------------------------------------------------------- tokens

    def add_token(self, row: dict[str, Any], *, once: bool = False) -> None:
        """Keep a token's row (its hash, never the token); `once`: among those that can be used one time.

        Raises:
            StoreError: It is not kept.
        """
        table, marks = ("once_tokens" if once else "tokens"), ", ".join(f":{name}" for name in row)
        with self._db.transaction() as sql:
            sql.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", row)  # noqa: S608 - our names

    def token(self, token: str, *, once: bool = False) -> dict[str, Any] | None:
        """Return the row of the token with this id, or None."""
        names = ONCE_COLUMNS if once else TOKEN_COLUMNS
        table = "once_tokens" if once else "tokens"
        row = self._db.row(f"SELECT {', '.join(names)} FROM {table} WHERE id = ?", token)  # noqa: S608 - our names
        return dict(zip(names, row, strict=True)) if row else None

    def tokens(self, user: str | None = None) -> list[dict[str, Any]]:
        """Return the rows of a person's tokens, or of everybody's, oldest first."""
        names = ", ".join(TOKEN_COLUMNS)
        rows = self._db.rows(
            f"SELECT {names} FROM tokens WHERE ? IS NULL OR user = ? ORDER BY made, id",  # noqa: S608 - our names
            *(user, user),
        )
        return [dict(zip(TOKEN_COLUMNS, row, strict=True)) for row in rows]

    def remove_token(self, token: str, user: str) -> bool:
        """Forget a token by its id, and a person's login lines that are unused; return whether it was there.

        Raises:
            StoreError: All of them are still valid.
        """
        with self._db.transaction() as sql:
            sql.execute(
                "DELETE FROM once_tokens WHERE user = ? AND kind = 'login' AND used_by IS NULL", (user,)
            )
            return sql.execute("DELETE FROM tokens WHERE id = ?", (token,)).rowcount > 0

    def use_token(self, token: str, by: str) -> bool:
        """Mark a one-time token as used; return False where it has been used before. Old ones are forgotten.

        Raises:
            StoreError: It is still unused.
        """
        now = self._wall()
        with self._db.transaction() as sql:
            sql.execute("DELETE FROM once_tokens WHERE expires < ?", (now,))
            done = sql.execute(
                "UPDATE once_tokens SET used_by = ? WHERE id = ? AND used_by IS NULL", (by, token)
            )
            return done.rowcount > 0


TOKEN_COLUMNS = ("id", "hash", "user", "scopes", "groups", "label", "made", "expires")
ONCE_COLUMNS = ("id", "hash", "kind", "user", "scopes", "groups", "made", "expires", "used_by")


def _notice(row: tuple[Any, ...]) -> dict[str, Any]:
    names = ("seq", "time", "user", "notice", "lease", "sentence", "data")
    return {**dict(zip(names, row, strict=True)), "data": json.loads(row[-1])}


def redacted(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without the values of the environment variables that people's requests bring."""
    text = {name: row[name] for name in ("event", "state") if isinstance(row.get(name), str)}
    return {**row, **{name: json.dumps(_without_values(json.loads(each))) for name, each in text.items()}}


def _without_values(data: Any) -> Any:
    """Walk through JSON-able data; `options` is JSON text within it."""
    if isinstance(data, list):
        return [_without_values(each) for each in data]
    if not isinstance(data, dict):
        return data
    found: dict[str, Any] = {}
    for name, value in data.items():
        if name == "variables" and isinstance(value, dict):
            found[name] = dict.fromkeys(value, "…")
        elif name == "options" and isinstance(value, str):
            found[name] = json.dumps(_without_values(json.loads(value)))
        else:
            found[name] = _without_values(value)
    return found
