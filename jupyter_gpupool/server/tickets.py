"""Tickets: who may open which dashboard, where no cookie can say it.

A sandboxed page has an origin of its own, so that browsers send no cookie for its scripts and websockets.
What opens them is a random name in the address instead.

Rule 1: a ticket opens one lease's dashboard, for the person who was logged in when it was made, and nothing
        else; what they may do is asked of the server's authorizer and of the pool again each time.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

#: So many are kept; the oldest go first.
KEPT = 1000


@dataclass(frozen=True, slots=True)
class Ticket:
    """Lets a person open a lease's dashboard."""

    lease: str
    user: Any
    until: float


class Tickets:
    """The tickets of this server.

    Args:
        seconds: How long each is good.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._tickets: dict[str, Ticket] = {}

    def make(self, lease: str, user: Any) -> str:
        """Make a ticket for a lease and return its name."""
        while len(self._tickets) >= KEPT:
            del self._tickets[next(iter(self._tickets))]
        name = secrets.token_urlsafe(32)
        self._tickets[name] = Ticket(lease, user, time.monotonic() + self._seconds)
        return name

    def user(self, name: str, lease: str) -> Any:
        """Return who a ticket was made for, None where it does not open this lease."""
        ticket = self._tickets.get(name)
        if ticket is None or ticket.lease != lease:
            return None
        if ticket.until < time.monotonic():
            del self._tickets[name]
            return None
        return ticket.user
