"""Whether a pool of whole GPUs keeps its promise to those below their share, seen from outside.

The checker is told every pool event and every instruction, as a journal would be, and counts by itself: what
is free, who has what, who waits, what each deserves, who could give back. Of the product it knows the names
of events and instructions only, none of its decisions.

Rule 1: a request is *feasible* when granting it keeps its project within its share, and as many GPUs are
        free, or can be had back from projects above their shares: of the one most over first, there the lease
        with the least work to lose, until nobody is over any more.
Rule 2: what is being given back for a request counts as its own from the notice on: neither free nor to be
        had back, and its project is served that much more.
Rule 3: a request that is feasible for longer than min run time and grace, without a break, is a violation,
        unless by the time limits of what runs it would delay one of a project below its share for which the
        room is kept: an earlier one of its own project, or one that is wider than the whole share of its own.
        Of several such projects it is the first of each, one after the other, as many as get reservations.

Not its business: trees, models, shares of GPUs.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jupyter_gpupool.core import model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from jupyter_gpupool.core.model import Instruction, PoolEvent


def fill(total: int, quota: int, demands: Mapping[str, int]) -> dict[str, int]:
    """Max-min fair shares of whole GPUs over equal quotas; what is left over goes by name.

    Example:
        >>> fill(10, 2, {"a": 1, "b": 9, "c": 9})
        {'a': 1, 'b': 5, 'c': 4}
    """
    given = {name: min(quota, demand) for name, demand in demands.items()}
    left = total - sum(given.values())
    while left > 0:
        open_ = sorted(name for name, demand in demands.items() if demand > given[name])
        if not open_:
            break
        each = left // len(open_)
        for name in open_ if each else open_[:left]:
            more = min(max(1, each), demands[name] - given[name])
            given[name] += more
            left -= more
    return given


@dataclass(slots=True)
class _Job:
    project: str
    gpus: int
    limit: int
    arrived: int
    waits_since: int
    granted_at: int = -1
    ran: int = 0

    @property
    def key(self) -> tuple[str, int, int]:
        """Requests of one project that are alike."""
        return self.project, self.gpus, self.limit

    @property
    def ends_at(self) -> int:
        """When it ends by its time limit."""
        return self.granted_at + self.limit - self.ran


@dataclass(slots=True)
class _Group:
    """Requests of a project that are alike and wait, with their arrivals; those that wait again apart."""

    fresh: dict[str, int] = field(default_factory=dict)
    again: dict[str, int] = field(default_factory=dict)

    def first(self) -> tuple[int, str]:
        """Arrival and id of the first of them."""
        firsts = itertools.chain(self.again.items(), itertools.islice(self.fresh.items(), 1))
        return min((arrived, lease) for lease, arrived in firsts)

    def add(self, lease: str, job: _Job, *, again: bool) -> None:
        """Let it wait."""
        (self.again if again else self.fresh)[lease] = job.arrived

    def remove(self, lease: str) -> bool:
        """Let it wait no longer; whether it did."""
        return self.fresh.pop(lease, None) is not None or self.again.pop(lease, None) is not None

    def __bool__(self) -> bool:
        return bool(self.fresh or self.again)

    def __iter__(self) -> Iterator[str]:
        yield from self.fresh
        yield from self.again


@dataclass(slots=True)
class _Claim:
    """What is being given back for a request."""

    until: int
    slices: int = 0


@dataclass(frozen=True, slots=True)
class Violation:
    """A request that was passed over, since when and until when."""

    lease: str
    project: str
    gpus: int
    since: int
    until: int


@dataclass(slots=True)
class Checker:
    """Call it with each event and instruction and the time; then ask for `violations`."""

    gpus: int
    quota: int
    #: Whose each request is, whatever project it was made in.
    project_of: Mapping[str, str]
    defaults: model.Defaults = field(default_factory=model.Defaults)
    violations: dict[str, Violation] = field(default_factory=dict)
    _now: int = 0
    _free: int = 0
    _jobs: dict[str, _Job] = field(default_factory=dict)
    #: By project: what it wants in all, what it is served (claims included).
    _demand: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _served: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _running: dict[str, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    #: Who waits, by project, width and time limit.
    _waiting: dict[tuple[str, int, int], _Group] = field(default_factory=lambda: defaultdict(_Group))
    _claims: dict[str, _Claim] = field(default_factory=dict)
    #: For whom a slice is being given back.
    _given: dict[str, str] = field(default_factory=dict)
    #: Since when requests of a project, width and time limit could have been granted.
    _feasible: dict[tuple[str, int, int], int] = field(default_factory=dict)
    _dirty: bool = False

    def __post_init__(self) -> None:
        """All GPUs are free."""
        self._free = self.gpus

    def __call__(self, item: PoolEvent | Instruction, now: int) -> None:
        """Take in what has happened, or what was ordered."""
        if now > self._now:
            self.settle(now)
        take_in = _TAKE_IN.get(type(item))
        if take_in:
            take_in(self, item)
            self._dirty = True

    def settle(self, now: int) -> None:
        """Nothing more happens before `now`: judge how things stood since the last change."""
        for lease in [each for each, claim in self._claims.items() if claim.until <= self._now]:
            self._unclaim(lease)
            self._dirty = True
        if self._dirty:
            self._judge()
            self._dirty = False
        self._overdue(now)
        self._now = now

    # ----------------------------------------------------------------------------------------- judging

    def _judge(self) -> None:
        """See what is feasible now, and forget since when what is feasible no longer was."""
        share = fill(self.gpus, self.quota, self._demand)
        room = {name: amount - self._served[name] for name, amount in share.items()}
        there = self._unclaimed() + self._to_be_had(share)
        waiting = {key: group for key, group in self._waiting.items() if group}
        heads = sorted(((key, group.first()) for key, group in waiting.items()), key=lambda each: each[1])
        feasible = set()
        for key, first in heads:
            if key[1] <= min(room[key[0]], there):
                kept, closed = self._kept(key, first, heads, share, room)
                if key[1] <= min(closed, there - max(0, self._unclaimed() - kept)):
                    feasible.add(key)
        for key in [each for each in self._feasible if each not in feasible]:
            del self._feasible[key]
        for key in sorted(feasible):
            self._feasible.setdefault(key, self._now)

    def _to_be_had(self, share: Mapping[str, int]) -> int:
        """So many can be had back."""
        over = {name: self._served[name] - amount for name, amount in share.items()}
        left = {name: self._by_loss(name) for name in over if over[name] > 0}
        found = 0
        while left:
            name = max(left, key=lambda each: (over[each], each))
            if left[name]:
                gives = left[name].pop(0)
                found += gives
                over[name] -= gives
            if not left[name] or over[name] <= 0:
                del left[name]
        return found

    def _kept(
        self,
        key: tuple[str, int, int],
        first: tuple[int, str],
        heads: list[tuple[tuple[str, int, int], tuple[int, str]]],
        share: Mapping[str, int],
        room: Mapping[str, int],
    ) -> tuple[int, int]:
        """How many of the free GPUs, and how much of its project's share, others leave to a request."""
        (project, _, limit), free = key, self._unclaimed()
        kept, closed, wide = free, self.gpus, dict[str, int]()
        everybody = [each for running in self._running.values() for each in running]
        for (whose, gpus, _), other in heads:
            own = whose == project and other < first
            if own and room[whose] < gpus <= share[whose]:
                closed = min(closed, self._spare(room[whose], gpus, limit, self._running[project]))
            elif gpus > free and own:
                kept = min(kept, self._spare(free, gpus, limit, everybody))
            elif gpus > free and whose != project and gpus > share[whose] > self._served[whose]:
                wide.setdefault(whose, gpus)
        ahead, most = 0, free + sum(self._jobs[each].gpus for each in everybody)
        for gpus in [*wide.values()][: self.defaults.reservations]:
            if ahead + gpus <= most:
                ahead += gpus
                kept = min(kept, self._spare(free, ahead, limit, everybody))
        return kept, closed

    def _spare(self, left: int, gpus: int, limit: int, running: Iterable[str]) -> int:
        """With so much left now, how much something may take for so long without delaying so many GPUs."""
        now = left
        for job in sorted((self._jobs[each] for each in running), key=lambda each: each.ends_at):
            left += job.gpus
            if left >= gpus:
                return now if self._now + limit <= job.ends_at else min(now, left - gpus)
        return 0

    def _unclaimed(self) -> int:
        """GPUs that are free and not held for a claim."""
        held = sum(max(0, self._jobs[each].gpus - claim.slices) for each, claim in self._claims.items())
        return self._free - held

    def _by_loss(self, project: str) -> list[int]:
        """The widths of what a project runs, the one with the least work to lose first."""
        running = [self._jobs[each] for each in self._running[project]]
        running.sort(key=lambda job: (job.ran + self._now - job.granted_at) * job.gpus)
        return [job.gpus for job in running]

    def _overdue(self, now: int) -> None:
        """Note who was feasible for too long by now."""
        longest = self.defaults.min_run + self.defaults.grace
        for key, since in self._feasible.items():
            if now - since > longest:
                for lease in self._waiting[key]:
                    from_ = max(since, self._jobs[lease].waits_since)
                    if now - from_ > longest:
                        self.violations[lease] = Violation(lease, *key[:2], from_, now)

    # --------------------------------------------------------------------------------------- taking in

    def submitted(self, event: model.RequestSubmitted) -> None:
        """A request waits."""
        request = event.request
        project = self.project_of[request.id]
        job = self._jobs[request.id] = _Job(
            project, request.count, request.time_limit, event.now, waits_since=event.now
        )
        self._demand[job.project] += job.gpus
        self._waiting[job.key].add(request.id, job, again=False)

    def started(self, lease: str, slices: int) -> None:
        """A request has got some or all of its GPUs."""
        job = self._jobs[lease]
        self._unclaim(lease)
        self._free -= slices
        if self._waiting[job.key].remove(lease):
            job.granted_at = self._now
            self._served[job.project] += job.gpus
            self._running[job.project][lease] = None

    def told(self, order: model.Notify) -> None:
        """Somebody is to give back, or waits again."""
        if order.notice is model.Notice.RECLAIM:
            data = json.loads(order.data)
            until = data["deadline"] + self.defaults.hold
            if data["for"] not in self._claims:
                claimant = self._jobs[data["for"]]
                self._served[claimant.project] += claimant.gpus
                self._waiting[claimant.key].remove(data["for"])
            claim = self._claims.setdefault(data["for"], _Claim(until))
            claim.slices += len(data["slices"])
            self._given.update(dict.fromkeys(data["slices"], data["for"]))
            job = self._jobs[order.lease]
            job.ran += self._now - job.granted_at
            self._no_longer(order.lease)
        elif order.notice is model.Notice.SUSPENDED:
            job = self._jobs[order.lease]
            job.waits_since = self._now
            self._waiting[job.key].add(order.lease, job, again=True)

    def released(self, event: model.LeaseReleased) -> None:
        """A request's work is done, whatever state it is in."""
        job = self._jobs[event.lease]
        self._no_longer(event.lease)
        self._unclaim(event.lease)
        self._waiting[job.key].remove(event.lease)
        self._demand[job.project] -= job.gpus

    def refused(self, order: model.RefuseRequest) -> None:
        """A request will never get anything."""
        job = self._jobs.get(order.lease)
        if job and self._waiting[job.key].remove(order.lease):
            self._demand[job.project] -= job.gpus

    def freed(self, event: model.SliceFreed) -> None:
        """A GPU is free, or held for whom it was given back."""
        self._free += 1
        claim = self._claims.get(self._given.pop(event.slice, ""))
        if claim:
            claim.slices -= 1

    def _no_longer(self, lease: str) -> None:
        job = self._jobs[lease]
        if self._running[job.project].pop(lease, 0) is None:
            self._served[job.project] -= job.gpus

    def _unclaim(self, lease: str) -> None:
        if self._claims.pop(lease, None):
            job = self._jobs[lease]
            self._served[job.project] -= job.gpus
            self._waiting[job.key].add(lease, job, again=True)


_TAKE_IN: dict[type, Callable[..., None]] = {
    model.RequestSubmitted: Checker.submitted,
    model.LeaseReleased: Checker.released,
    model.SliceFreed: Checker.freed,
    model.RefuseRequest: Checker.refused,
    model.Notify: Checker.told,
    model.StartLease: lambda self, order: self.started(order.lease, len(order.slices)),
    model.AddSlice: lambda self, order: self.started(order.lease, 1),
}
