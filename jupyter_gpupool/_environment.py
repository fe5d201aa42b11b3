"""Where a lease's processes run: as here, where the node can; and how to tell that they do not.

Rule 1: what is sent is a wish (`preferred_…`), unless the person has said it: then the node obeys or says no.
Rule 2: what differs is said before the first task, in a sentence, once for each lease; nothing is refused for
        it, as most work does not mind.
Rule 3: nobody waits for it longer than a person notices. Workers say what they have when they register; none
        is asked, as one that keeps the GIL answers in minutes only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.versions import ENVIRONMENT, versions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: The wish, and the field by which a person says the same for sure.
_SURE = {"preferred_python": "python", "preferred_directory": "working_directory"}
#: What it means that a worker has not what its request would have liked.
_MISSED = {
    "python": "Its workers run in the Python of their node, which has no {} that would do.",
    "folder": "Its workers do not work in {}, which their node does not have: what is beside this notebook "
    "cannot be read or imported there.",
}


class EnvironmentDiffersWarning(UserWarning):
    """The workers of a lease have another Python, or other versions, than this process."""


def with_wishes(what: Mapping[str, Any]) -> dict[str, Any]:
    """Add to a request that its workers run as this process does, in its Python and its folder."""
    given = what.get("environment")
    if given is not None and not isinstance(given, dict):
        return dict(what)  # the pool says what is wrong with it
    said = given or {}
    wishes = {name: each for name, each in _here().items() if _SURE[name] not in said and name not in said}
    environment = {**said, **wishes}
    return {**what, "environment": environment} if environment else dict(what)


def _here() -> dict[str, str]:
    found = {"preferred_python": sys.executable or ""}
    with contextlib.suppress(OSError):  # it has been deleted
        found["preferred_directory"] = os.getcwd()  # noqa: PTH109 - a text is sent
    return {name: each for name, each in found.items() if each}


def differences(lease: str, mine: Mapping[str, str], theirs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Say what differs between this process and the workers of a lease.

    Args:
        lease: Its name.
        mine: As `versions` returns.
        theirs: What each worker answers: its `versions`, and what it has `missed` of the request's wishes.

    >>> differences("train", {"dask": "2026.7.1"}, [{"versions": {"dask": "2026.1.0"}}])[0]
    'The workers of lease train have dask 2026.1.0 and this process has 2026.7.1.'
    """
    answers = list(theirs)
    others: dict[str, set[str]] = {}
    for each in answers:
        for name, other in (each.get("versions") or {}).items():
            if name in mine and _matters(name, other) != _matters(name, mine[name]):
                others.setdefault(name, set()).add(str(other))
    said = [
        f"The workers of lease {lease} have {name} {' and '.join(sorted(found))} "
        f"and this process has {mine[name]}."
        for name, found in sorted(others.items())
    ]
    missed = {
        _MISSED[name].format(wish)
        for each in answers
        for name, wish in (each.get("missed") or {}).items()
        if name in _MISSED
    }
    if said:
        said.append(
            "Tasks may fail when they are unpickled: install the same versions, or request with "
            "environment={'python': PATH} an interpreter on the nodes that has them."
        )
    return [*said, *sorted(missed)]


def _matters(name: str, full: str) -> str:
    """Leave out what makes no difference: the last part of Python's own version."""
    return ".".join(full.split(".")[:2]) if name == "python" else full


#: Seconds for a lease's scheduler to say what its workers have.
PATIENCE_S = 5.0
#: Leases whose workers have been asked.
_asked: set[str] = set()


async def tell(scheduler: Any, ident: str, lease: str) -> None:
    """Ask a lease's scheduler what its workers have, and warn of what differs.

    Args:
        scheduler: An `rpc` to the lease's scheduler.
        ident: The lease's id.
        lease: Its name.
    """
    if ident in _asked:
        return
    _asked.add(ident)
    workers: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # a lease that cannot be asked is used all the same
        asking = scheduler.identity(n_workers=-1)
        workers = (await asyncio.wait_for(asking, PATIENCE_S))["workers"]
    theirs = [each[ENVIRONMENT] for each in workers.values() if isinstance(each.get(ENVIRONMENT), dict)]
    if said := differences(lease, versions(), theirs):
        warnings.warn(" ".join(said), EnvironmentDiffersWarning, stacklevel=2)
