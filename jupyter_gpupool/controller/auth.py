"""Who is asking: tokens, and the person that each stands for.

Rule 1: a token is 256 random bits behind a public id. The store has its SHA-256 only (slow hashes are for
        what people can remember), and comparing takes the same time whether it fits or not.
Rule 2: what a person is comes from the token's row in the store, never from what the caller says of itself.
Rule 3: scopes: "read" looks, "use" requests and releases too, "admin" changes the pool; each holds those
        before it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.controller.authority import (
    Authority,
    lease_credentials,
    new_secret,
    private_folder,
    security,
    write_private,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from jupyter_gpupool.controller.store import Store

__all__ = [
    "SCOPES",
    "Authority",
    "Person",
    "Tokens",
    "lease_credentials",
    "new_secret",
    "private_folder",
    "security",
    "write_private",
]

#: From the least to the most; a scope holds those before it.
SCOPES = ("read", "use", "admin")
PREFIX = "gpupool"
#: How long a one-time token waits to be used, in seconds.
ONCE_AGE = 24 * 3600.0
#: Names of users: what an OS or a Hub may call one, and nothing that could pass for something else.
NAME_LENGTH = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """Who a request is from."""

    user: str
    scopes: frozenset[str] = frozenset(("read", "use"))
    #: Names of the groups that an identity provider told of; projects have them as members with "@" before.
    groups: tuple[str, ...] = ()
    #: The id of the token that was shown, for the log.
    token: str = ""

    @property
    def admin(self) -> bool:
        """Whether the person may change the pool and see everybody's leases."""
        return "admin" in self.scopes

    def may(self, scope: str) -> bool:
        """Return whether the token covers a scope."""
        return scope in self.scopes


class Tokens:
    """The pool's tokens.

    Args:
        store: Where their rows are.
        wall: Seconds since the epoch; expiry is by the wall clock, as a person expects.
    """

    def __init__(self, store: Store, wall: Callable[[], float] = time.time) -> None:
        self._store = store
        self._wall = wall

    def create(
        self,
        user: str,
        scopes: Iterable[str] = ("read", "use"),
        *,
        groups: Iterable[str] = (),
        expires_in: float | None = None,
        label: str = "",
    ) -> str:
        """Make a token for a person and return it; it cannot be shown again.

        Args:
            user: For whom.
            scopes: What it may be used for.
            groups: The person's groups.
            expires_in: Seconds; None: never.
            label: What it is for, in its list.

        Raises:
            StoreError: It could not be kept.
            ValueError: No such scope, or no name.
        """
        now = self._wall()
        row, text = _new(user, scopes, groups, now)
        expires = None if expires_in is None else now + expires_in
        self._store.add_token({**row, "label": label, "expires": expires})
        return text

    def verify(self, text: str) -> Person | None:
        """Return the person whom a token stands for, or None where it is unknown or too old."""
        name, digest = _parts(text)
        row = self._store.token(name)
        known = row["hash"] if row else bytes(32)
        if not hmac.compare_digest(known, digest) or row is None:
            return None
        if row["expires"] is not None and row["expires"] <= self._wall():
            return None
        scopes, groups = json.loads(row["scopes"]), json.loads(row["groups"])
        return Person(user=row["user"], scopes=frozenset(scopes), groups=tuple(groups), token=name)

    def list(self, user: str | None = None) -> list[dict[str, Any]]:
        """Return what is known of a person's tokens, or of everybody's, without what could be used."""
        return [_public(row) for row in self._store.tokens(user)]

    def revoke(self, token: str, user: str | None = None) -> bool:
        """Make the token with this id worthless; `user`: only if it is theirs. Return whether there was one.

        With it go the login lines that its person has not used yet: who had the token could have made them.

        Raises:
            StoreError: It is still good.
        """
        row = self._store.token(token)
        if row is None or user not in (None, row["user"]):
            return False
        return self._store.remove_token(token, row["user"])

    def create_once(
        self,
        kind: str,
        *,
        user: str = "",
        scopes: Iterable[str] = ("read", "use"),
        groups: Iterable[str] = (),
        expires_in: float = ONCE_AGE,
    ) -> str:
        """Make a token that works once, for a join ("agent") or login ("login") line, and return it.

        Args:
            kind: What it is good for.
            user: Who logs in with it; nobody for an agent.
            scopes: Of the token that it is exchanged for.
            groups: Of the person who logs in.
            expires_in: Seconds.

        Raises:
            StoreError: It could not be kept.
            ValueError: No such scope.
        """
        now = self._wall()
        row, text = _new(user or f"({kind})", scopes, groups, now)
        self._store.add_token({**row, "user": user, "kind": kind, "expires": now + expires_in}, once=True)
        return text

    def redeem(self, text: str, kind: str, by: str) -> dict[str, Any] | None:
        """Use a one-time token up; return its "user", "scopes" and "groups", or None where it is not good.

        Args:
            text: The token.
            kind: What it must be good for.
            by: Who uses it (the node's name, the person's address), for the record.

        Raises:
            StoreError: It is still unused.
        """
        name, digest = _parts(text)
        row = self._store.token(name, once=True)
        known = row["hash"] if row else bytes(32)
        if not hmac.compare_digest(known, digest) or row is None:
            return None
        if row["kind"] != kind or row["expires"] <= self._wall() or not self._store.use_token(name, by):
            return None
        return {"user": row["user"], "scopes": json.loads(row["scopes"]), "groups": json.loads(row["groups"])}

    def login(self, text: str, by: str) -> tuple[str, str] | None:
        """Exchange a one-time login token for a lasting one; return it and its user, or None.

        Raises:
            StoreError: Nothing has been exchanged, or the one-time token is used up without a new one.
        """
        found = self.redeem(text, "login", by)
        if found is None:
            return None
        user = found["user"]
        return self.create(user, found["scopes"], groups=found["groups"], label=f"login from {by}"), user


def _new(user: str, scopes: Iterable[str], groups: Iterable[str], now: float) -> tuple[dict[str, Any], str]:
    wanted = tuple(scopes)
    if not wanted or not set(wanted) <= set(SCOPES):
        raise ValueError(f"The scopes of a token are {', '.join(SCOPES)}; not {', '.join(wanted) or 'none'}.")
    if not valid_user(user):
        raise ValueError(f"{user!r} is no name of a user: name one, without spaces or control characters.")
    most = max(SCOPES.index(scope) for scope in wanted)
    name, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    row = {
        "id": name,
        "hash": hashlib.sha256(secret.encode()).digest(),
        "user": user,
        "scopes": json.dumps(SCOPES[: most + 1]),
        "groups": json.dumps(sorted(set(groups))),
        "made": now,
    }
    return row, f"{PREFIX}_{name}_{secret}"


def valid_user(user: str) -> bool:
    """Return whether a text can be a user's name: printable, no spaces, not the sign for everybody."""
    return (
        0 < len(user) <= NAME_LENGTH
        and user.isprintable()
        and not set(user) & set(" /*\\")
        and user[0] not in "-@"
    )


def _parts(text: str) -> tuple[str, bytes]:
    """Return a token's public id and the hash of its secret; of something else, what fits nothing."""
    prefix, _, rest = text.partition("_")
    name, _, secret = rest.partition("_")
    return (name if prefix == PREFIX else ""), hashlib.sha256(secret.encode("utf-8", "replace")).digest()


def _public(row: dict[str, Any]) -> dict[str, Any]:
    shown = {name: row[name] for name in ("id", "user", "label", "made", "expires")}
    return {**shown, "scopes": json.loads(row["scopes"]), "groups": json.loads(row["groups"])}
