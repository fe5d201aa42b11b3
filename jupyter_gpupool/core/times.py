"""When something is due of each lease: the times of a user, in order, kept up to date one by one.

Rule 1: a lease has at most one time here, below one user.
Rule 2: a change costs a search, however many leases a user has.

Not its business: what the times mean (`strokes`).
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jupyter_gpupool.core.tree import Tenant


class Times:
    """A time of each lease, by user, soonest first."""

    def __init__(self) -> None:
        """Start with none."""
        self._of: dict[Tenant, list[tuple[int, str]]] = {}
        self._known: dict[str, tuple[Tenant, int]] = {}
        #: How often a user's times have changed.
        self._marks: dict[Tenant, int] = {}

    def of(self, leaf: Tenant) -> list[tuple[int, str]]:
        """The times of a user's leases and their ids, soonest first."""
        return self._of.get(leaf) or []

    def __contains__(self, ident: object) -> bool:
        """Whether a lease has a time here."""
        return ident in self._known

    def mark(self, leaf: Tenant) -> int:
        """Say how often a user's times have changed."""
        return self._marks.get(leaf, 0)

    def users(self) -> list[Tenant]:
        """The users that have any."""
        return [leaf for leaf, times in self._of.items() if times]

    def put(self, leaf: Tenant, ident: str, when: int) -> None:
        """Set the time of a lease."""
        known = self._known.get(ident)
        if known == (leaf, when):
            return
        self.drop(ident)
        self._known[ident] = leaf, when
        self._marks[leaf] = self._marks.get(leaf, 0) + 1
        bisect.insort(self._of.setdefault(leaf, []), (when, ident))

    def drop(self, ident: str) -> None:
        """Forget the time of a lease, if it has one."""
        known = self._known.pop(ident, None)
        if known:
            times = self._of[known[0]]
            self._marks[known[0]] += 1
            del times[bisect.bisect_left(times, (known[1], ident))]


def after(times: list[tuple[int, str]], now: int) -> int:
    """The first of some times that is still to come; 0: there is none.

    >>> after([(3, "a"), (5, "b"), (7, "c")], 5)
    7
    """
    at = bisect.bisect_left(times, (now + 1, ""))
    return times[at][0] if at < len(times) else 0
