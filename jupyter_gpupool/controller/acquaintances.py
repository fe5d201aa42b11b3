"""Whom a pool has heard of, so that a misspelt name is told and not silently shared with.

Rule 1: it is a hint. People of a JupyterHub or with a login line not yet used may be unknown, and nothing is
        refused for it.
"""

from __future__ import annotations

import pwd
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jupyter_gpupool.controller.accounts import Accounts
    from jupyter_gpupool.controller.face import ControllerFace


def strangers(face: ControllerFace, users: Iterable[str]) -> list[str]:
    """Return those of some people who have no token, lease, project or OS account here."""
    known = _known(face)
    return [each for each in sorted(users) if each not in known and not has_account(face.accounts, each)]


def has_account(accounts: Accounts, user: str) -> bool:
    """Return whether the OS user as whom somebody's leases run exists on this machine."""
    try:
        pwd.getpwnam(accounts.of(user))
    except KeyError:
        return False
    return True


def _known(face: ControllerFace) -> set[str]:
    projects = face.pool.projects
    return {
        *(each["user"] for each in face.store.tokens()),
        *(each.request.user for each in face.pool.leases.values()),
        *(each.name for project in projects for each in project.users),
        *(each for project in projects for each in project.members),
    }


def warning(face: ControllerFace, lease: str, users: Iterable[str]) -> str:
    """Say which of those with whom a lease is shared are strangers; "" where none is."""
    unknown = strangers(face, users)
    if not unknown:
        return ""
    nobody = (
        f"{', '.join(unknown)}: nobody of that name has a token, a lease, a project or an OS account here"
    )
    return f"{nobody}. If it is misspelt, share {lease} anew with the right names."
