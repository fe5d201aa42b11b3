"""How many have to give back until a request fits, and who of them turns out not to be needed.

Rule 1: whole devices are counted; anything else is placed, after 1, 2, 4 … picks, and then as few as will
        do.
Rule 2: none of those ahead in the queue is delayed: what is free counts as far as their reservations leave
        it.

Not its business: who is picked (`victims`), and whether the plan may be committed (`plan`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jupyter_gpupool.core import bounds, counts, give, placement, turns
from jupyter_gpupool.core.cluster import part_of
from jupyter_gpupool.core.model import WHOLE
from jupyter_gpupool.core.reserve import Book, hold_parts, usable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jupyter_gpupool.core.cluster import Part
    from jupyter_gpupool.core.model import Slice
    from jupyter_gpupool.core.plan import Plan
    from jupyter_gpupool.core.strokes import State
    from jupyter_gpupool.core.tree import Tenant


class Ahead:
    """The reservations of those ahead of claimants, which they may not delay; worked out as far as asked."""

    def __init__(self, state: State) -> None:
        """Begin at the front of the queue."""
        self._state = state
        self._book = Book(state)
        self._users = self._walk()
        #: The user that is looked at; None: before the first, or after the last.
        self._here: Tenant | None = None

    def of(self, leaf: Tenant) -> Book:
        """The reservations ahead of a user; ask for users in the order of the queue."""
        while self._here is not leaf and not self._book.full:
            self._here = next(self._users, None)
            if self._here is None:
                break
        return self._book

    def _walk(self) -> Iterator[Tenant]:
        """The users in their order; the first request of each is noted when it is asked for the next."""
        for leaf, heads in turns.turns(self._state, sure=True):
            yield leaf
            for _, ident, shape in heads:
                lease = self._state.leases[ident]
                if not give.at_limit(self._state, leaf, lease):
                    self._book.block(lease, shape)
                    break


class Counted:
    """Whole devices anywhere: it fits when enough of them are free or given back."""

    def __init__(self, plan: Plan, ahead: Book) -> None:
        """Count what is free for the plan's request."""
        self.plan = plan
        self.base = plan.shape.base
        self.open = usable(plan.state, self.base.kind)
        self.free = ahead.spare(self.base, plan.shape.limit)
        #: How many are given back by so many picks.
        self.given = self.seen = 0

    def useful(self, slices: tuple[Slice, ...]) -> bool:
        """Whether any of these slices is on a device that the request could use."""
        return any(self._counts(each) for each in slices)

    def _counts(self, slice_: Slice) -> bool:
        cluster = self.plan.state.cluster
        return slice_.milli >= WHOLE and counts.has(cluster, self.open, slice_.device)

    def enough(self, *, last: bool = False) -> bool:
        """Whether it fits with the picks so far."""
        del last
        for pick in self.plan.picks[self.seen :]:
            self.given += sum(self._counts(each) for each in pick.slices)
        self.seen = len(self.plan.picks)
        return self.free + self.given >= self.base.count

    def put_back(self) -> tuple[Part, ...] | None:
        """Put back who is not needed, the last picked first, and name the parts."""
        spare = self.free + self.given - self.base.count
        for pick in reversed(self.plan.picks[:]):
            count = sum(self._counts(each) for each in pick.slices)
            if count <= spare:
                spare -= count
                self.plan.picks.remove(pick)
                self.plan.take(pick, -1)
        given = [part_of(each) for pick in self.plan.picks for each in pick.slices if self._counts(each)]
        given.sort(key=lambda part: (part.node, part.device))
        wanting = self.base.count - len(given)
        if wanting <= 0:
            return tuple(given[: self.base.count])
        found = placement.place(self.plan.lease.request, self.plan.state.cluster, count=wanting)
        return (*given, *found.parts) if isinstance(found, placement.Placement) else None


class Placed:
    """Anything else: it fits when a place is found."""

    def __init__(self, plan: Plan, ahead: Book) -> None:
        """Work out what those ahead leave."""
        self.plan = plan
        self.open = usable(plan.state, plan.shape.base.kind)
        self.late = ahead.late(plan.shape.limit)
        self.asked = bounds.narrowed(plan.state, plan.lease.request, plan.shape.total)
        #: Look for a place after so many picks.
        self.next = 1

    def useful(self, slices: tuple[Slice, ...]) -> bool:
        """Whether any of these slices is on a device that the request could use."""
        cluster = self.plan.state.cluster
        return any(bool(each.device) and counts.has(cluster, self.open, each.device) for each in slices)

    def enough(self, *, last: bool = False) -> bool:
        """Whether it fits with the picks so far, looked at now and then and at last."""
        if len(self.plan.picks) < self.next and not last:
            return False
        self.next *= 2
        return self._place(len(self.plan.picks)) is not None

    def put_back(self) -> tuple[Part, ...] | None:
        """Put back who is not needed: all after the fewest that do, and then who is not touched."""
        picks, low, high = self.plan.picks[:], 1, len(self.plan.picks)
        while low < high:
            middle = (low + high) // 2
            if self._place(middle) is None:
                low = middle + 1
            else:
                high = middle
        parts = self._place(high)
        assert parts is not None, "a place with more picks was found before"
        where = {part.device for part in parts} | {part.node for part in parts if not part.device}
        kept = [
            pick for pick in picks[:high] if any({each.device, each.node} & where for each in pick.slices)
        ]
        for pick in picks:
            if pick not in kept:
                self.plan.take(pick, -1)
        self.plan.picks = kept
        return self._place(len(kept))

    def _place(self, count: int) -> tuple[Part, ...] | None:
        """A place once the first picks have given back."""
        state, plan = self.plan.state, self.plan
        with state.cluster.trying():
            for reservation in self.late:
                hold_parts(state, reservation)
            for pick in plan.picks[:count]:
                for slice_ in pick.slices:
                    state.cluster.release(slice_.id)
            found = placement.place(self.asked, state.cluster, count=plan.shape.base.count)
        return found.parts if isinstance(found, placement.Placement) else None
