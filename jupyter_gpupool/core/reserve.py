"""Reservations: when the blocked heads of the queue will start, and who may pass them.

Rule 1: a blocked head is to start when, by the time limits of what runs, there is room for it.
Rule 2: others may pass a head if they end before that time, or use only what is left over at that time.
Rule 3: a reservation is worked out from the present state whenever it matters, and forgotten as soon as
        anything has changed, so that an early end of a lease is used at once.
Rule 4: whole devices are counted, not named: what is asked is only how many are left over.

Not its business: who is ahead of whom (`tree`).
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jupyter_gpupool.core import bounds, counts, placement, wants
from jupyter_gpupool.core.cluster import Part
from jupyter_gpupool.core.line import Base, Kind
from jupyter_gpupool.core.model import WHOLE, Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from jupyter_gpupool.core.counts import Mask
    from jupyter_gpupool.core.line import Shape
    from jupyter_gpupool.core.model import Slice
    from jupyter_gpupool.core.state import Lease
    from jupyter_gpupool.core.strokes import State


@dataclass(slots=True, kw_only=True)
class Reservation:
    """When a blocked head starts, and what is left over then."""

    lease: Lease
    base: Base
    #: By the pool's clock.
    start: int
    #: Devices that it could use as well and that are left over at its start. Unused where parts are named.
    spare: int = 0
    #: Free parts that are kept for it.
    parts: tuple[Part, ...] = ()


def look(state: State, kind: Kind) -> Kind:
    """Bring up to date which devices a kind of slices could use, and how many of them are wholly free."""
    cluster = state.cluster
    if kind.mark != cluster.moment:
        if kind.open is None or kind.barred != cluster.bars:
            kind.open, kind.barred = counts.usable(cluster, kind.want), cluster.bars
            kind.every = counts.all_of(cluster, kind.open)
        kind.free = cluster.wholes if kind.every else counts.wholly_free(cluster, kind.open)
        kind.mark = cluster.moment
    return kind


def usable(state: State, kind: Kind) -> Mask:
    """Devices that a slice may use and that take new work."""
    found = look(state, kind).open
    assert found is not None
    return found


def count_free(state: State, kind: Kind) -> int:
    """How many wholly free devices a kind of slices could use."""
    return look(state, kind).free


def overlap(state: State, one: Kind, other: Kind) -> bool:
    """Whether there is a device that both could use."""
    return one is other or counts.overlap(state.cluster, one.want, other.want)


class Book:
    """The reservations of the first blocked heads, in their order; good until anything changes."""

    def __init__(self, state: State) -> None:
        """Start without any; at most `Defaults.reservations` are made."""
        self.state = state
        self.kept: list[Reservation] = []
        self._blocked: list[tuple[Lease, Base]] = []
        #: How many heads have been noted.
        self.count = 0
        #: By kind and time limit: what `spare` has found beside so many of the kept.
        self._spares: dict[tuple[Kind, int], tuple[int, int]] = {}

    @property
    def blocked(self) -> bool:
        """There is a head that cannot start now."""
        return self.count > 0

    @property
    def full(self) -> bool:
        """No further head gets a reservation."""
        return self.count >= self.state.defaults.reservations

    def block(self, lease: Lease, shape: Shape) -> None:
        """Note a head that cannot start now."""
        if not self.full:
            self.count += 1
            self._blocked.append((lease, self._bounded(lease, shape.base)))

    def _bounded(self, lease: Lease, base: Base) -> Base:
        """The base of a request within the limits of its user: for the models that it may have."""
        request = bounds.narrowed(self.state, lease.request, base.count * base.each)
        if request is lease.request:
            return base
        kind = Kind(wants.want_of(request), whole=base.kind.whole)
        return Base((), kind, request, base.count, base.each)

    def resolve(self) -> list[Reservation]:
        """Work out the reservations of the heads noted so far."""
        if self._blocked:
            blocked, self._blocked = self._blocked, []
            for lease, base in blocked:
                found = self._reserve(lease, base)
                if found:
                    self.kept.append(found)
        return self.kept

    def late(self, limit: int) -> list[Reservation]:
        """The reservations that something of that time limit would still run into."""
        end = self.state.now + limit
        return [each for each in self.resolve() if each.start < end]

    def passing(self, shapes: Iterable[Shape]) -> dict[Shape, None]:
        """Those of some shapes that could pass the heads noted so far, at a quick look."""
        steps: dict[Kind, list[tuple[int, int]]] = {}
        found: dict[Shape, None] = {}
        for shape in shapes:
            base = shape.base
            if not (base.plain or base.together):
                found[shape] = None
                continue
            known = steps.get(base.kind)
            if known is None:
                known = steps[base.kind] = self._steps(base.kind)
            for limit, most in known:
                if shape.limit > limit:
                    if base.count <= most:
                        found[shape] = None
                    break
            else:
                found[shape] = None
        return found

    def _steps(self, kind: Kind) -> list[tuple[int, int]]:
        """Above which time limits a kind may use how many free devices at most, the longest limit first."""
        now, kept = self.state.now, sorted(self.resolve(), key=lambda each: each.start)
        if not all(each.base.plain for each in kept):
            return [(each.start - now, self._spare(kind, each.start - now + 1)) for each in reversed(kept)]
        least, steps = count_free(self.state, kind), []
        for each in kept:
            least = min(least, self._beside(kind, each))
            steps.append((each.start - now, least))
        return steps[::-1]

    def spare(self, base: Base, limit: int) -> int:
        """How many free devices a request of whole devices may use, for so long, at most."""
        return self._spare(base.kind, limit)

    def _spare(self, kind: Kind, limit: int) -> int:
        kept = self.resolve()
        seen, least = self._spares.get((kind, limit), (0, count_free(self.state, kind)))
        if seen < len(kept):
            end, named = self.state.now + limit, False
            for each in kept[seen:]:
                if each.start < end and each.base.plain:
                    least = min(least, self._beside(kind, each))
                named = named or (each.start < end and not each.base.plain)
            if named:
                least = min(least, self._not_kept(kind, self.late(limit)))
            self._spares[kind, limit] = len(kept), least
        return max(0, least)

    def _not_kept(self, kind: Kind, late: list[Reservation]) -> int:
        """How many free devices are not kept by name."""
        return count_free(self.state, kind) - sum(self._counts(kind, each) for each in _devices(late))

    def _counts(self, kind: Kind, device: str) -> bool:
        """Whether a device is wholly free, and of use for a kind."""
        cluster = self.state.cluster
        return counts.has(cluster, usable(self.state, kind), device) and cluster.free_of(device) == WHOLE

    def _beside(self, kind: Kind, head: Reservation) -> int:
        """How many free devices a kind may use beside a head of whole devices, as far as there are any."""
        if kind is head.base.kind:
            return head.spare
        if not overlap(self.state, kind, head.base.kind):
            return count_free(self.state, kind)
        mine, theirs = usable(self.state, kind), usable(self.state, head.base.kind)
        both = counts.wholly_free(self.state.cluster, mine & theirs)
        return count_free(self.state, kind) - both + min(both, head.spare)

    def place(
        self, lease: Lease, base: Base, limit: int, have: Sequence[Slice] = ()
    ) -> tuple[Part, ...] | None:
        """Find room for so long that delays none of the heads noted so far, beside the slices it has."""
        if (base.plain or base.together) and self.spare(base, limit) < base.count:
            return None
        late = self.late(limit)
        parts = self._find(lease, base, late, have)
        if parts is None:
            if not any(each.parts for each in late) and not self.state.leaf(lease.request).limited:
                base.failed = self.state.freed
            return None
        delayed = self._delayed(parts, late)
        if not delayed:
            return parts
        parts = self._find(lease, base, late, have, leave=self._not_left_over(base, parts, delayed))
        return None if parts is None or self._delayed(parts, late) else parts

    def _find(
        self,
        lease: Lease,
        base: Base,
        late: list[Reservation],
        have: Sequence[Slice],
        leave: Sequence[str] | None = (),
    ) -> tuple[Part, ...] | None:
        """A place beside what is kept for the heads, and not on the devices that are to be left."""
        if leave is None:
            return None
        cluster = self.state.cluster
        request = bounds.narrowed(self.state, lease.request, base.count * base.each)
        want = base.kind.want if request is lease.request else None
        kept = [each for each in late if each.parts]
        with cluster.trying() if kept or leave else contextlib.nullcontext():
            for each in kept:
                hold_parts(self.state, each)
            for device in leave:
                cluster.bar(device, Reason.DEVICE_CORDONED, "left to those ahead")
            found = placement.place(request, cluster, count=base.count, have=have, want=want)
        return found.parts if isinstance(found, placement.Placement) else None

    def _delayed(self, parts: tuple[Part, ...], late: list[Reservation]) -> list[Reservation]:
        """The heads of whole devices of which these parts newly use more than is left over."""
        fresh = {part.device for part in parts if self.state.cluster.free_of(part.device) == WHOLE}
        plain = [each for each in late if each.base.plain]
        return [
            each for each in plain if sum(self._counts(each.base.kind, one) for one in fresh) > each.spare
        ]

    def _not_left_over(
        self, base: Base, parts: tuple[Part, ...], delayed: list[Reservation]
    ) -> list[str] | None:
        """The free devices that these heads need, but for those parts that they can spare; None: all are."""
        cluster, found = self.state.cluster, dict[str, None]()
        for each in delayed:
            mine = [part.device for part in parts if self._counts(each.base.kind, part.device)]
            left = set(mine[: each.spare])
            theirs = counts.wholly_free_devices(cluster, usable(self.state, each.base.kind))
            found.update(dict.fromkeys(device for device in theirs if device not in left))
        return list(found) if counts.other_than(cluster, usable(self.state, base.kind), found) else None

    # ------------------------------------------------------------------------------------ working out

    def _reserve(self, lease: Lease, base: Base) -> Reservation | None:
        known = self.state.reserved()
        key = (*(each.base for each in self.kept), base)
        if key not in known:
            known[key] = self._work_out(lease, base)
        found = known[key]
        if found is None or (found.lease is lease and found.start >= self.state.now):
            return found
        start = max(found.start, self.state.now)
        return Reservation(lease=lease, base=base, start=start, spare=found.spare, parts=found.parts)

    def _work_out(self, lease: Lease, base: Base) -> Reservation | None:
        if base.plain:
            return self._count_up(lease, base)
        if base.together:
            return self._count_nodes(lease, base)
        return self._search(lease, base)

    def _count_up(self, lease: Lease, base: Base) -> Reservation | None:
        """Whole devices anywhere: add up what ends, soonest first."""
        state = self.state
        left = count_free(state, base.kind) - base.count
        for each in self.kept:
            left -= each.base.count if overlap(state, base.kind, each.base.kind) else 0
        if left >= 0:
            return Reservation(lease=lease, base=base, start=state.now, spare=left)
        found = _freed(state, base.kind, -left)
        if found is None:
            return None
        when, freed = found
        return Reservation(lease=lease, base=base, start=max(when, state.now), spare=left + freed)

    def _count_nodes(self, lease: Lease, base: Base) -> Reservation | None:
        """Whole devices of one node: add up by node what ends, soonest first."""
        state = self.state
        taken = {part.node for each in self.kept for part in each.parts}
        open_ = usable(state, base.kind)
        free = counts.wholly_free_by_node(state.cluster, open_)
        left = {name: count for name, count in free.items() if name not in taken}
        for when, ident in state.ends:
            for slice_ in state.leases[ident].slices.values():
                if slice_.node in left and counts.has(state.cluster, open_, slice_.device):
                    left[slice_.node] += 1
                    if left[slice_.node] >= base.count:
                        parts = _free_parts(state, slice_.node, base)
                        start = max(when, state.now)
                        return Reservation(lease=lease, base=base, start=start, parts=parts)
        return None

    def _search(self, lease: Lease, base: Base) -> Reservation | None:
        """Anything else: the fewest ends after which there is a place, by halving."""
        state = self.state
        low, high, best = 0, len(state.ends), None
        while low < high or best is None:
            middle = (low + high) // 2
            parts = self._after(base, middle + 1)
            if parts is None:
                if low >= high:
                    return None
                low = middle + 1
            else:
                best, high = (middle, parts), middle
        if not state.ends:
            return None
        at, parts = best
        start = max(state.now, state.ends[min(at, len(state.ends) - 1)][0])
        free = tuple(part for part in parts if state.cluster.free_of(part.device) >= part.milli)
        return Reservation(lease=lease, base=base, start=start, parts=free)

    def _after(self, base: Base, count: int) -> tuple[Part, ...] | None:
        """A place once the first `count` leases have ended."""
        state = self.state
        with state.cluster.trying():
            for each in self.kept:
                hold_parts(state, each)
            for _, ident in state.ends[:count]:
                for slice_id in state.leases[ident].slices:
                    state.cluster.release(slice_id)
            found = placement.place(base.request, state.cluster, count=base.count, want=base.kind.want)
        return found.parts if isinstance(found, placement.Placement) else None


def _devices(reservations: Sequence[Reservation]) -> list[str]:
    """The devices of which parts are kept, each once."""
    return list(dict.fromkeys(part.device for each in reservations for part in each.parts if part.device))


def hold_parts(state: State, reservation: Reservation) -> None:
    """Hold, inside a try, the free parts that are kept for a head."""
    for number, part in enumerate(reservation.parts):
        if state.cluster.free_of(part.device) >= part.milli:
            state.cluster.hold(f"{reservation.lease.id}?{number}", reservation.lease.id, part)


def _freed(state: State, kind: Kind, least: int) -> tuple[int, int] | None:
    """When so many devices that a kind could use have come free by what ends, and how many then."""
    known = state.freed_by_ends()
    if kind not in known:
        known[kind] = [], itertools.accumulate(_counted(state, kind))
    sums, rest = known[kind]
    while not sums or sums[-1] < least:
        more = next(rest, None)
        if more is None:
            return None
        sums.append(more)
    at = bisect.bisect_left(sums, least)
    return state.ends[at][0], sums[at]


def _counted(state: State, kind: Kind) -> Iterator[int]:
    """How many devices become free for a kind at each end, the soonest first."""
    leases = state.leases
    if look(state, kind).every:
        return (len(leases[ident].slices) for _, ident in state.ends)
    cluster, open_ = state.cluster, usable(state, kind)
    return (
        sum(counts.has(cluster, open_, each.device) for each in leases[ident].slices.values())
        for _, ident in state.ends
    )


def _free_parts(state: State, node: str, base: Base) -> tuple[Part, ...]:
    """The free devices of a node that a request could use."""
    open_, devices = usable(state, base.kind), state.nodes[node].node.devices
    free = [
        each
        for each in devices
        if counts.has(state.cluster, open_, each.uuid) and state.cluster.free_of(each.uuid) == WHOLE
    ]
    return tuple(whole_part(node, each.uuid, each.memory) for each in free[: base.count])


def whole_part(node: str, device: str, memory: int) -> Part:
    """A whole device without any of its host."""
    return Part(node=node, device=device, milli=WHOLE, vram=memory)
