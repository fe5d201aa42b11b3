"""The tables of the journal's file, one step per version of the schema.

Rule 1: a step that has been released is never edited; a change is a new step at the end.
Rule 2: the steps that a file has been through are written down in it (table `migrations`).
Rule 3: what is secret (`secrets`, `tokens`, `once_tokens`) has tables of its own, which no dump reads.
"""

from __future__ import annotations

#: Step n brings a file from version n to version n + 1.
STEPS: tuple[str, ...] = (
    """
    -- `crc` runs on from row to row, so that a changed, missing or foreign row shows.
    CREATE TABLE journal (
        seq INTEGER PRIMARY KEY, now INTEGER NOT NULL, event TEXT NOT NULL, crc INTEGER NOT NULL
    );
    -- The state after event `seq`; `chain` is that event's crc, `crc` that of the state's own text.
    CREATE TABLE snapshot (
        one INTEGER PRIMARY KEY CHECK (one = 1), seq INTEGER NOT NULL, now INTEGER NOT NULL,
        state TEXT NOT NULL, crc INTEGER NOT NULL, chain INTEGER NOT NULL
    );
    CREATE TABLE keys (
        user TEXT NOT NULL, key TEXT NOT NULL, lease TEXT NOT NULL, fingerprint TEXT NOT NULL,
        made REAL NOT NULL, PRIMARY KEY (user, key)
    ) WITHOUT ROWID;
    CREATE INDEX keys_made ON keys (made);
    CREATE TABLE mark (
        one INTEGER PRIMARY KEY CHECK (one = 1), boot TEXT NOT NULL, boottime INTEGER NOT NULL,
        pool INTEGER NOT NULL
    );
    -- (`event`, `nth`) makes adding a notice idempotent: replay may say it again.
    CREATE TABLE notices (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, event INTEGER NOT NULL, nth INTEGER NOT NULL,
        time REAL NOT NULL, user TEXT NOT NULL, notice TEXT NOT NULL, lease TEXT NOT NULL,
        sentence TEXT NOT NULL, data TEXT NOT NULL, UNIQUE (event, nth)
    );
    CREATE INDEX notices_user ON notices (user, seq);
    CREATE INDEX notices_lease ON notices (lease, seq);
    CREATE TABLE secrets (lease TEXT PRIMARY KEY, data TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE shares (
        lease TEXT NOT NULL, user TEXT NOT NULL, PRIMARY KEY (lease, user)
    ) WITHOUT ROWID;
    CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE tokens (
        id TEXT PRIMARY KEY, hash BLOB NOT NULL, user TEXT NOT NULL, scopes TEXT NOT NULL,
        groups TEXT NOT NULL, label TEXT NOT NULL, made REAL NOT NULL, expires REAL
    ) WITHOUT ROWID;
    CREATE TABLE once_tokens (
        id TEXT PRIMARY KEY, hash BLOB NOT NULL, kind TEXT NOT NULL, user TEXT NOT NULL,
        scopes TEXT NOT NULL, groups TEXT NOT NULL, made REAL NOT NULL, expires REAL NOT NULL,
        used_by TEXT
    ) WITHOUT ROWID;
    """,
    """
    -- Up to which report each agent's life has been heard; kept with the pool event that the report was.
    CREATE TABLE heard (node TEXT PRIMARY KEY, boot TEXT NOT NULL, seq INTEGER NOT NULL) WITHOUT ROWID
    """,
    """
    -- What has run: when it was asked for, for how long it ran, and thousandths of GPUs; see `trace`.
    CREATE TABLE requests (
        lease TEXT PRIMARY KEY, time REAL NOT NULL, seconds REAL NOT NULL, milli INTEGER NOT NULL,
        project TEXT NOT NULL, user TEXT NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX requests_time ON requests (time)
    """,
)

#: The version that this package writes.
VERSION = len(STEPS)
