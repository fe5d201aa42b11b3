"""What was used, by whom, of what; and what taking back and doing nothing have cost.

Rule 1: usage is thousandths of a GPU times milliseconds, added up when a meter stops; nothing is rounded, so
        that it adds up over any sequence of restarts.
Rule 2: a slice's meter runs from its grant until it is taken back, ended or seen gone.
Rule 3: every reclaim has a record of who, from whom, why, and by which numbers.
Rule 4: what a reclaim costs is the work that has to be done again, as the victims' schedulers say.
Rule 5: what each person used is also kept by the hour of the pool's clock, in all projects together, for
        `KEEP_HOURS`; what is older is in the sums only.

Not its business: the decayed usage that decides who is next (`tree`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from jupyter_gpupool.core.model import HOUR

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from jupyter_gpupool.core.model import Request
    from jupyter_gpupool.core.state import Charge

#: So many reclaims are remembered one by one; all of them count in the sums.
KEEP_RECLAIMS = 1000
#: So many hours are remembered one by one: two weeks of days in any time zone.
KEEP_HOURS = 15 * 24
#: So many more are let stand, so that they are thrown away together, not one by one.
_SPARE_HOURS = 24


@dataclass(slots=True, kw_only=True)
class Account:
    """Sums of one user in one project, of one model and kind of slice."""

    user: str
    project: str
    model: str
    #: "whole", "share", or the MIG profile.
    kind: str
    #: Thousandths of a GPU times milliseconds: used; of that while idle; and work that reclaims undid.
    used: int = 0
    idle: int = 0
    lost: int = 0
    #: What is used, as `shares.Decay` keeps it.
    kept: int = 0


class Hours:
    """What one person used, by hours: thousandths of a GPU times milliseconds, and of that while idle."""

    def __init__(self, rows: Iterable[Sequence[int]] = ()) -> None:
        #: Hour of the pool's clock -> used, idle; none of both zero.
        self.found: dict[int, tuple[int, int]] = {hour: (used, idle) for hour, used, idle in rows}

    def add(self, milli: int, since: int, until: int, *, idle: bool = False) -> None:
        """Add a span of time in which that much was held; what is too old to be kept is left out."""
        oldest = until // HOUR - KEEP_HOURS + 1
        at = max(since, oldest * HOUR)
        while at < until:
            hour = at // HOUR
            end = min(until, (hour + 1) * HOUR)
            used, unused = self.found.get(hour, (0, 0))
            amount = milli * (end - at)
            self.found[hour] = (used, unused + amount) if idle else (used + amount, unused)
            at = end
        if len(self.found) > KEEP_HOURS + _SPARE_HOURS:
            self.found = {hour: each for hour, each in self.found.items() if hour >= oldest}

    def rows(self, now: int) -> list[list[int]]:
        """Return those that are kept as hour, used, idle, the first hour first."""
        return [[hour, *self.found[hour]] for hour in sorted(self.found) if hour > now // HOUR - KEEP_HOURS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """From whom a reclaim took."""

    lease: str
    user: str
    project: str
    slices: int
    milli: int
    #: The whole lease was suspended; otherwise surplus was taken.
    whole: bool
    #: For how long it had run, in milliseconds.
    ran: int
    #: The user or project that was compared with the claimant or theirs; what that was served when it was its
    #: turn to give, and deserved.
    of: str = ""
    served: int = 0
    share: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaim:
    """One reclaim: who got it, from whom, by which numbers (thousandths of a GPU)."""

    now: int
    lease: str
    user: str
    project: str
    milli: int
    #: What the claimant is served with it, and deserves.
    served: int
    share: int
    victims: tuple[Victim, ...]
    #: Squared over-shares before and after: of all GPUs, then of single models.
    before: tuple[int, int]
    after: tuple[int, int]
    #: Reclaims are numbered from 1.
    number: int = 0
    #: Work that it undid, in thousandths of a GPU times milliseconds; known when the victims have drained.
    cost: int = 0


@dataclass(slots=True)
class Ledger:
    """All accounts of a pool."""

    accounts: dict[str, Account] = field(default_factory=dict)
    #: The latest reclaims, and how many there were.
    reclaims: list[Reclaim] = field(default_factory=list)
    count: int = 0
    #: What each person used lately.
    hours: dict[str, Hours] = field(default_factory=dict)

    def account(self, user: str, project: str, model: str, kind: str) -> Account:
        """Find an account, or open it."""
        key = f"{project}/{user}/{model}/{kind}"
        found = self.accounts.get(key)
        if found is None:
            found = self.accounts[key] = Account(user=user, project=project, model=model, kind=kind)
        return found

    def person(self, user: str) -> Hours:
        """Find a person's hours, or begin them."""
        return self.hours.setdefault(user, Hours())

    def cost(self, number: int, request: Request, charge: Charge, work: int) -> None:
        """Write down that a reclaim has undone work of a slice, in milliseconds."""
        lost = charge.milli * work
        self.account(request.user, request.project, charge.model, charge.kind).lost += lost
        for at, each in enumerate(self.reclaims):
            if each.number == number:
                self.reclaims[at] = replace(each, cost=each.cost + lost)

    def renew(self, bits: int) -> None:
        """Begin a new epoch of the decay."""
        for each in self.accounts.values():
            each.kept >>= bits

    def note(self, reclaim: Reclaim) -> None:
        """Write down a reclaim."""
        self.count += 1
        if len(self.reclaims) >= KEEP_RECLAIMS:
            del self.reclaims[0]
        self.reclaims.append(reclaim)
