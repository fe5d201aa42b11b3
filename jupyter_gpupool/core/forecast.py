"""When what waits should start, if everything that runs lasts as long as its time limit allows.

Rule 1: amounts are added up, not placed: this is what is told to people. What is promised is a
        `reserve.Book`.
Rule 2: nobody passes anybody here, so that the real start is rather earlier than later.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from jupyter_gpupool.core import bounds, counts, give
from jupyter_gpupool.core.line import planned
from jupyter_gpupool.core.strokes import limits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jupyter_gpupool.core.state import Lease
    from jupyter_gpupool.core.strokes import State

#: So many of those ahead are followed; beyond that, no start is told.
MOST = 20_000


def starts(state: State, leases: Sequence[Lease]) -> dict[str, int]:
    """When each of these, in this order, should start; 0: not known."""
    free = counts.free_milli(state.cluster)
    ends = [(max(when, state.now), _milli(state.leases[ident])) for when, ident in state.ends]
    heapq.heapify(ends)
    found, now = dict.fromkeys((each.id for each in leases), 0), state.now
    for lease in leases[:MOST]:
        if give.at_limit(state, state.leaf(lease.request), lease):
            continue
        while free < lease.milli and ends:
            now, milli = heapq.heappop(ends)
            free += milli
        if free < lease.milli:
            continue
        free -= lease.milli
        found[lease.id] = now
        heapq.heappush(ends, (now + planned(lease.left), lease.milli))
    return found


def _milli(lease: Lease) -> int:
    return sum(each.milli for each in lease.slices.values())


def within_limit(state: State, lease: Lease) -> int:
    """When enough of what its user or project holds has ended for a request to be within their limits."""
    request, count, each = lease.request, lease.sure, lease.estimate
    soonest = _within(state, lease, bounds.most(state, request, count, each))
    models = [_within(state, lease, [(model, count * each)]) for model in bounds.models(state, request)]
    return max(soonest, min(models, default=soonest))


def _within(state: State, lease: Lease, wanted: Sequence[tuple[str, int]]) -> int:
    """When so much more is within the limits."""
    leaf = state.leaf(lease.request)
    latest = state.now
    for tenant in leaf.path():
        for key, amount in wanted:
            most = tenant.limit.get(key)
            over = 0 if most is None else tenant.held.get(key, 0) + amount - most
            for when, ident in state.ends if over > 0 else ():
                other = state.leases[ident]
                if tenant in state.leaf(other.request).path():
                    over -= sum(dict(limits(charge)).get(key, 0) for charge in other.charges.values())
                    if over <= 0:
                        latest = max(latest, when)
                        break
    return latest
