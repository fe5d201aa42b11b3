"""Whose turn it is: the users of the queue, each with the requests that they may start now.

Rule 1: users go by the tree, less served first, level by level; each has their requests in their own order,
        one of each shape.
Rule 2: a request that takes its user, or a project of theirs, above what they deserve goes after all that do
        not. So a big request of somebody who is almost at their share holds up nobody who is well below it.
        One that is wider than its user's whole share can never stay within it, and goes in its user's place.
Rule 3: a request that would stay within its user's share, were it not for leases of theirs that run, waits
        for those to end. A later one of the same user goes with those within the share only if it does not
        delay it.
Rule 4: where nobody may pass, the order is that of rule 1 alone.

Not its business: whether there is room (`give`), and who gives back (`reclaim`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from jupyter_gpupool.core.model import ANY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jupyter_gpupool.core.line import Shape
    from jupyter_gpupool.core.state import Lease
    from jupyter_gpupool.core.strokes import State
    from jupyter_gpupool.core.tree import Tenant

#: For so many rooms it is kept which of a user's requests have their turn.
_ROOMS = 4
#: A request's rank among its user's own, its id and its shape.
Head = tuple[int, str, "Shape"]
#: Served their share, decayed usage by weight, the request that waits longest, their name.
Standing = tuple[bool, int, tuple[int, str], str]


def order(state: State) -> Iterator[Tenant]:
    """The users who wait, less served first, level by level."""
    yield from _below(state.tree.root, ranks_of(state))


def _below(tenant: Tenant, ranks: Ranks) -> Iterator[Tenant]:
    for each in ranks.children(tenant):
        if each.user:
            yield each
        else:
            yield from _below(each, ranks)


class Ranks:
    """How tenants stand at one moment, worked out as far as asked; good until anything changes."""

    __slots__ = ("_children", "_standings", "at", "weight")

    def __init__(self, at: tuple[int, ...], weight: int) -> None:
        """Begin; `weight` is the decay's at the time that usage is charged up to."""
        self.at = at
        self.weight = weight
        self._children: dict[Tenant, list[Tenant]] = {}
        self._standings: dict[Tenant, Standing] = {}

    def children(self, tenant: Tenant) -> list[Tenant]:
        """Those right below a tenant who wait, less served first."""
        found = self._children.get(tenant)
        if found is None:
            found = [each for each in tenant.children.values() if each.waiting]
            if len(found) > 1:
                found.sort(key=self.standing)
            self._children[tenant] = found
        return found

    def standing(self, tenant: Tenant) -> Standing:
        """How a tenant stands among its siblings; less is less served."""
        found = self._standings.get(tenant)
        if found is None:
            used = tenant.used(self.weight)
            full = tenant.served[ANY] >= tenant.share[ANY]
            found = (full, used, (0, "") if used else first(tenant), tenant.name)
            self._standings[tenant] = found
        return found


def ranks_of(state: State) -> Ranks:
    """How tenants stand now."""
    at = (state.now, state.tree.mark, state.tree.metered, state.waiting.mark, state.ends_mark)
    if state.ranks is None or state.ranks.at != at:
        state.ranks = Ranks(at, state.tree.decay.at(state.now + state.defaults.charged_ahead))
    return state.ranks


def first(tenant: Tenant) -> tuple[int, str]:
    """Rank and id of the request that has waited longest below a tenant."""
    if tenant.user:
        return tenant.line.first() if tenant.line else (0, "")
    return min(first(each) for each in tenant.children.values() if each.waiting)


def turns(state: State, *, sure: bool = False) -> Iterator[tuple[Tenant, list[Head]]]:
    """The users with their requests: those that stay within their shares, then, unless `sure`, the others."""
    later: list[tuple[Tenant, list[Head]]] = []
    for leaf in order(state):
        if state.defaults.passing:
            heads, rest = split(state, leaf, _least_room(leaf))
            if rest:
                later.append((leaf, rest))
        else:
            heads = leaf.line.heads() if leaf.line else []
        if heads:
            yield leaf, heads
    if not sure:
        yield from later


def _least_room(leaf: Tenant) -> int:
    """How much more a user may be served with all above them within their shares."""
    here, room = leaf, leaf.share[ANY] - leaf.served[ANY]
    while here.parent is not None:
        left = here.share[ANY] - here.served[ANY]
        room = left if left < room else room  # noqa: FURB136 - min() takes three times as long
        here = here.parent
    return room


def split(state: State, leaf: Tenant, room: int) -> tuple[list[Head], list[Head]]:
    """A user's requests: those that have their turn with so much room, and those that come later."""
    line, share = leaf.line, leaf.share[ANY]
    heads = line.heads() if line else []
    if line is None or line.most <= room:
        return heads, []
    if room < line.least and line.most <= share:
        return [], heads
    found = leaf.parted.get(room)
    if found is None or not stands(state, leaf, found):
        if len(leaf.parted) >= _ROOMS:
            leaf.parted.clear()
        found = leaf.parted[room] = part(state, leaf, heads, room)
    return found.soon, found.later


class Parted(NamedTuple):
    """A user's requests in two parts; good while these are the same, from one time up to another."""

    heads: list[Head]
    #: The user's share, and how often what is served of it, and the ends of their leases, have changed.
    at: tuple[int, int, int]
    since: int
    until: float
    soon: list[Head]
    later: list[Head]


def _at(state: State, leaf: Tenant) -> tuple[int, int, int]:
    return leaf.share[ANY], leaf.serves, state.ends_of.mark(leaf)


def stands(state: State, leaf: Tenant, found: Parted) -> bool:
    """Whether what was found of a user's requests is still so."""
    same = leaf.line is not None and leaf.line.heads() is found.heads and _at(state, leaf) == found.at
    return same and found.since <= state.now < found.until


def part(state: State, leaf: Tenant, heads: list[Head], room: int) -> Parted:
    """Part a user's requests with so much room; see `split`."""
    share, until = leaf.share[ANY], math.inf
    soon: list[Head] = []
    later: list[Head] = []
    #: The first that has to wait for its user's own leases; when it is due, and what it leaves over then.
    waits: Head | None = None
    due: tuple[int, int] | None = None
    for head in heads:
        total, limit = head[2].total, head[2].limit
        if room < total <= share:
            later.append(head)
            waits = waits or head
            continue
        if waits and not due and total <= room:
            due = _due(state, leaf, waits[2].total)
        if not (due and due[1] < total <= room):
            soon.append(head)
        elif state.now + limit > due[0]:
            later.append(head)
        else:
            soon.append(head)
            until = min(until, due[0] - limit + 1)
    return Parted(heads, _at(state, leaf), state.now, until, soon, later)


def _due(state: State, leaf: Tenant, total: int) -> tuple[int, int]:
    """When enough of a user's leases have ended for so much to stay within their share; what is left then."""
    left, when = leaf.share[ANY] - leaf.served[ANY] - total, state.now
    for end, ident in state.ends_of.of(leaf):
        if left >= 0:
            break
        left += _served(state.leases[ident])
        when = max(when, end)
    return when, max(0, left)


def _served(lease: Lease) -> int:
    """What a lease counts for its user's share, in thousandths of a GPU."""
    charges, extra, unserved = lease.charges, lease.extra, lease.unserved
    if not extra and not unserved:
        return sum(charge.milli for charge in charges.values())
    return sum(
        charge.milli for ident, charge in charges.items() if ident not in extra and ident not in unserved
    )
