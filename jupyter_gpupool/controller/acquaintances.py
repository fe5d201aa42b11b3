"""Whom a pool has heard of, so that a misspelt name is told and not silently taken.

Rule 1: it is a hint. People of a JupyterHub or with a login line not yet used may be unknown, OS accounts may
        be on the nodes and not on the controller's machine, and nothing is refused for it.
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


def no_account(face: ControllerFace, user: str) -> str:
    """Say that leases of a person could not run for want of an OS account; "" where they can."""
    switch = any(record.node.switches_users for record in face.pool.nodes.values())
    if not switch or has_account(face.accounts, user):
        return ""
    account = face.accounts.of(user)
    return (
        f"There is no OS user {account} on the controller's machine: leases of {user} run as that user, and "
        f"fail on each node that has none. Make the account there, or map {user} to another one (--user-map)."
    )
