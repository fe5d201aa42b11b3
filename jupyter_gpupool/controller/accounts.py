"""As which OS user a person's leases run: their name, unless a map says another one.

Rule 1: the map is the controller's, one for all nodes; what a request or a server says of itself counts for
        nothing. Who a person is in the pool, and what is theirs, does not follow from it: two people with one
        OS user are two people who trust each other.
Rule 2: nobody becomes root by it. A name of a JupyterHub that is root's own stands for nobody here either.
"""

from __future__ import annotations

import contextlib
import pwd
from typing import TYPE_CHECKING, Any

import yaml

from jupyter_gpupool.controller.auth import valid_user

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

#: Whom the map names where it does not name somebody.
EVERYBODY = "*"


class Accounts:
    """The map of names to OS users.

    Args:
        known: OS users by name; "*" stands for all other names.

    Raises:
        ValueError: It names root, or what cannot be the name of a user.

    >>> Accounts({"ben@example.org": "ben"}).of("ben@example.org")
    'ben'
    >>> Accounts().of("ann")
    'ann'
    """

    def __init__(self, known: Mapping[str, str] | None = None) -> None:
        self._known = dict(known or {})
        for name, account in self._known.items():
            _check(name, account)

    def of(self, user: str) -> str:
        """Return the OS user as whom the leases of `user` run."""
        return self._known.get(user) or self._known.get(EVERYBODY) or user


def _check(name: Any, account: Any) -> None:
    if not isinstance(name, str) or not isinstance(account, str) or not valid_user(account):
        raise ValueError(f"The map of users: {name!r} cannot be {account!r}; write NAME: OS-USER.")
    if is_root(account):
        raise ValueError(f"The map of users: {name} would be root; name another OS user.")


def is_root(account: str) -> bool:
    """Return whether an OS user is root, by whatever name.

    >>> is_root("root"), is_root("no-such-user")
    (True, False)
    """
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(account).pw_uid == 0
    return account == "root"


def read_accounts(path: Path | None) -> Accounts:
    """Read the map from a YAML file of `NAME: OS-USER` lines; none: everybody is who they are.

    Raises:
        ValueError: It cannot be read, or is no such map.
    """
    if path is None:
        return Accounts()
    try:
        said = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"The map of users {path} cannot be read: {error}.") from error
    if not isinstance(said, dict):
        raise ValueError(  # noqa: TRY004 - what a file says is no argument's type
            f"The map of users {path} has no lines such as `ben@example.org: ben`."
        )
    return Accounts(said)
