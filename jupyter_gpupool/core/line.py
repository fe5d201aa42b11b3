"""What waits: requests by their user and by their shape, so that equal hopeless ones are looked at once.

Rule 1: two requests of one `Shape` fit or fail together; of each shape only a user's first is ever tried.
Rule 2: a user's own requests are ordered by arrival; a step of priority is worth `ageing_step` of waiting,
        and at most `ageing_most` steps count, so that none of one's own can wait behind newer ones for
        ever.
Rule 3: a shape for which there was no room is not tried again until something has become free
        (`State.freed`).
Rule 4: plans take a time limit rounded up a little (`planned`), so that shapes stay few.

Not its business: whose turn it is (`tree`), and whether there is room (`give`).
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from jupyter_gpupool.core import wants
from jupyter_gpupool.core.model import HOUR, MINUTE, WHOLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jupyter_gpupool.core.counts import Mask
    from jupyter_gpupool.core.model import Defaults, Request
    from jupyter_gpupool.core.state import Lease
    from jupyter_gpupool.core.tree import Tenant

#: Time limits are rounded up to the coarsest of these that is at most a sixtieth of them.
_GRAINS = (6 * HOUR, HOUR, 15 * MINUTE, 5 * MINUTE, MINUTE)


def planned(limit: int) -> int:
    """Round a time limit up a little, for plans (round ones stay as they are)."""
    grain = next((each for each in _GRAINS if each * 60 <= limit), MINUTE)
    return -(-limit // grain) * grain


class Kind:
    """What one slice of requests needs, however many they are; see `reserve.free_of`."""

    __slots__ = ("barred", "bases", "every", "free", "mark", "open", "want", "whole")

    def __init__(self, want: wants.Want, *, whole: bool) -> None:
        """Slices that need this; `whole`: whole devices with their part of the host, which can be counted."""
        self.want = want
        self.whole = whole
        #: Bases of this kind that wait.
        self.bases: dict[Base, None] = {}
        #: With these bars of the cluster: the devices that it could use, and whether these are all.
        self.barred: object = None
        self.open: Mask | None = None
        self.every = False
        #: At this moment of the cluster: how many of them are wholly free.
        self.mark: object = None
        self.free = 0


class Base:
    """All that decides where requests can go, but for how long."""

    __slots__ = ("count", "each", "failed", "key", "kind", "plain", "request", "shapes", "together")

    def __init__(self, key: tuple[object, ...], kind: Kind, request: Request, count: int, each: int) -> None:
        """Describe requests for `count` slices like this one's, of `each` thousandths as far as is known."""
        self.key = key
        self.kind = kind
        #: One of them.
        self.request = request
        #: Shapes of this base that wait.
        self.shapes: dict[Shape, None] = {}
        self.count = count
        self.each = each
        whole = kind.whole and not request.same_device
        #: Whole devices, wherever they are: can be counted.
        self.plain = whole and not (request.same_node or request.nvlink or request.spread)
        #: Whole devices of one node: can be counted by node.
        self.together = whole and request.same_node and not request.nvlink and not request.spread
        #: `State.freed` when there last was no room for it.
        self.failed = -1


class Shape:
    """Requests that fit or fail together."""

    __slots__ = ("base", "limit", "total", "waiting")

    def __init__(self, base: Base, limit: int) -> None:
        """Requests of a base, for at most `limit` milliseconds."""
        self.base = base
        self.limit = limit
        #: Thousandths of GPUs, as far as is known.
        self.total = base.count * base.each
        #: How many wait.
        self.waiting = 0


class Line:
    """One user's waiting requests, by shape; each in its order."""

    __slots__ = ("_heads", "least", "most", "shapes")

    def __init__(self) -> None:
        """Start with none."""
        self.shapes: dict[Shape, list[tuple[int, str]]] = {}
        self._heads: list[tuple[int, str, Shape]] | None = []
        #: The fewest, and the most, thousandths that any of them asks for.
        self.least = self.most = 0

    def add(self, shape: Shape, place: tuple[int, str]) -> bool:
        """Let a request wait; whether it is the first of its shape."""
        waiting = self.shapes.get(shape)
        if waiting is None:
            self.shapes[shape] = [place]
            self._measure()
            return True
        bisect.insort(waiting, place)
        if waiting[0] is place:
            self._heads = None
            return True
        return False

    def remove(self, shape: Shape, place: tuple[int, str]) -> None:
        """Let a request wait no longer."""
        waiting = self.shapes[shape]
        at = bisect.bisect_left(waiting, place)
        del waiting[at]
        if not waiting:
            del self.shapes[shape]
            self._measure()
        elif not at:
            self._heads = None

    def _measure(self) -> None:
        self._heads = None
        totals = [shape.total for shape in self.shapes]
        self.least, self.most = min(totals, default=0), max(totals, default=0)

    def heads(self) -> list[tuple[int, str, Shape]]:
        """The first of each shape, in the user's own order; the same list until that changes."""
        if self._heads is None:
            self._heads = [(*waiting[0], shape) for shape, waiting in self.shapes.items()]
            self._heads.sort(key=_by_rank)
        return self._heads

    def first(self) -> tuple[int, str]:
        """The first of all: rank and id."""
        return self.heads()[0][:2]

    def all(self) -> list[tuple[int, str]]:
        """All, in the user's own order."""
        return sorted(each for waiting in self.shapes.values() for each in waiting)


def _by_rank(head: tuple[int, str, Shape]) -> tuple[int, str]:
    return head[:2]


class Waiting:
    """All waiting requests."""

    def __init__(self) -> None:
        """Start with none."""
        self.kinds: dict[wants.Want, Kind] = {}
        self.bases: dict[tuple[object, ...], Base] = {}
        self.shapes: dict[tuple[Base, int], Shape] = {}
        #: Waiting requests: id -> rank, shape and user.
        self.placed: dict[str, tuple[int, Shape, Tenant]] = {}
        #: Grows with each change.
        self.mark = 0

    def __contains__(self, ident: object) -> bool:
        """Whether the request of that id waits here."""
        return ident in self.placed

    def __iter__(self) -> Iterator[str]:
        """The ids of all that wait, in no order."""
        return iter(self.placed)

    def __len__(self) -> int:
        """How many wait."""
        return len(self.placed)

    def base(self, request: Request, count: int, each: int) -> Base:
        """The base of requests like this one."""
        key = (count, each, *fields(request))
        found = self.bases.get(key)
        if found is None:
            found = self.bases[key] = Base(key, self.kind(request), request, count, each)
        return found

    def kind(self, request: Request) -> Kind:
        """The kind of slices like this request's."""
        want = wants.want_of(request)
        found = self.kinds.get(want)
        if found is None:
            bare = not (request.vram or want.instance or request.cpus or request.memory)
            found = self.kinds[want] = Kind(want, whole=bare and request.milli == WHOLE)
        return found

    def shape(self, lease: Lease) -> Shape:
        """The shape of a waiting request."""
        base = self.base(lease.request, lease.sure, lease.estimate)
        limit = planned(lease.left)
        found = self.shapes.get((base, limit))
        if found is None:
            found = self.shapes[base, limit] = Shape(base, limit)
            base.shapes[found] = None
            base.kind.bases[base] = None
        return found

    def add(self, lease: Lease, leaf: Tenant, defaults: Defaults) -> bool:
        """Let a request wait; whether it is the first of its user and shape."""
        self.mark += 1
        shape, place = self.shape(lease), rank(lease.request, defaults)
        if leaf.line is None:
            leaf.line = Line()
        first = leaf.line.add(shape, (place, lease.id))
        shape.waiting += 1
        self.placed[lease.id] = (place, shape, leaf)
        for tenant in leaf.path():
            tenant.waiting += 1
        return first

    def remove(self, ident: str) -> None:
        """Let a request wait no longer; nothing if it does not."""
        if ident not in self.placed:
            return
        self.mark += 1
        place, shape, leaf = self.placed.pop(ident)
        line = leaf.line
        assert line is not None
        line.remove(shape, (place, ident))
        shape.waiting -= 1
        if not shape.waiting:
            self._forget(shape)
        for tenant in leaf.path():
            tenant.waiting -= 1

    def _forget(self, shape: Shape) -> None:
        base, kind = shape.base, shape.base.kind
        del self.shapes[base, shape.limit]
        del base.shapes[shape]
        if not base.shapes:
            del self.bases[base.key]
            del kind.bases[base]
        if not kind.bases:
            del self.kinds[kind.want]


def rank(request: Request, defaults: Defaults) -> int:
    """A request's place among its user's own: lower goes first."""
    most = defaults.ageing_most
    return request.arrived - max(-most, min(most, request.priority)) * defaults.ageing_step


def fields(request: Request) -> tuple[object, ...]:
    """All of a request that decides where it can go."""
    return (
        request.milli,
        request.vram,
        request.mig,
        request.isolated,
        request.cpus,
        request.memory,
        request.model,
        request.min_vram,
        request.same_node,
        request.nvlink,
        request.node,
        request.exclude,
        request.spread,
        request.same_device,
    )
