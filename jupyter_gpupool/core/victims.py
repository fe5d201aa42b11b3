"""Who gives back, in which order.

Rule 1: surplus of elastic leases first, wherever it is: it was never anybody's share. Then whole leases,
        only from subtrees above their share, compared right below the project that both have in common.
Rule 2: never twice from a lease within a min run time, nor before it has run that long.
Rule 3: never a non-preemptible lease within its quota. Such leases count against the quota oldest first;
        beyond it, or idle after all warnings, they can be taken as any other.
Rule 4: most over share first, then least work lost (scattered data and actors count, by their size), then
        youngest.

Not its business: how many it takes (`fits`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jupyter_gpupool.core.model import ANY, GB, MINUTE, WHOLE
from jupyter_gpupool.core.plan import Pick, Plan
from jupyter_gpupool.core.state import HOLDING
from jupyter_gpupool.core.times import after

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jupyter_gpupool.core.model import Slice
    from jupyter_gpupool.core.state import Lease
    from jupyter_gpupool.core.strokes import State
    from jupyter_gpupool.core.tree import Tenant


#: A GB that cannot be computed again counts as a minute of a GPU's work.
HELD = WHOLE * MINUTE


def candidates(plan: Plan, useful: Callable[[tuple[Slice, ...]], bool]) -> Iterator[Pick]:
    """Who can give back, in the order in which they should; `useful` says whose slices would help at all.

    Each pick is to be counted (`Plan.take`) before the next is asked for.
    """
    yield from _surplus(plan, useful)
    while best := _most_over(plan, useful):
        yield best


def _surplus(plan: Plan, useful: Callable[[tuple[Slice, ...]], bool]) -> Iterator[Pick]:
    """Surplus slices of elastic leases, of those most over their share first, the latest first."""
    state = plan.state
    elastic = [state.leases[ident] for ident in state.elastic if state.leases[ident].extra]
    ranked = sorted(
        (-plan.over(state.leaf(each.request)), -each.request.arrived, each.id) for each in elastic
    )
    for _, _, ident in ranked:
        lease = state.leases[ident]
        if takeable(state, lease):
            live = {each.id: each for each in lease.live()}
            for slice_id in reversed(lease.extra):
                if slice_id in live and useful((live[slice_id],)):
                    yield Pick(lease, state.leaf(lease.request), (live[slice_id],), whole=False)


def _most_over(plan: Plan, useful: Callable[[tuple[Slice, ...]], bool]) -> Pick | None:
    """The next lease of whoever is most over their share, at any level that claimant and victim share."""
    branches: list[Tenant] = []
    mine = plan.leaf
    for above in [*plan.leaf.path()][1:]:
        if plan.room(mine) >= plan.shape.total:
            branches += [each for each in plan.overs.get(above, ()) if each is not mine]
        mine = above
    return _first_of(plan, useful, branches)


def _first_of(plan: Plan, useful: Callable[[tuple[Slice, ...]], bool], tenants: list[Tenant]) -> Pick | None:
    over = [(-amount, each.place, each) for each in tenants if (amount := plan.over(each)) > 0]
    for _, _, tenant in sorted(over, key=_by_amount):
        if tenant.user:
            found = _next_of(plan, useful, tenant)
        else:
            found = _first_of(plan, useful, plan.overs.get(tenant, []))
        if found:
            return found
    return None


def _by_amount(row: tuple[int, str, Tenant]) -> tuple[int, str]:
    return row[:2]


def _next_of(plan: Plan, useful: Callable[[tuple[Slice, ...]], bool], leaf: Tenant) -> Pick | None:
    """The lease of a user that loses least by giving back."""
    if leaf not in plan.left:
        if leaf not in plan.ranked:
            plan.ranked[leaf] = _ranked(plan.state, leaf)
        plan.left[leaf] = plan.ranked[leaf][:]
    left = plan.left[leaf]
    while left:
        found = left.pop()
        if useful(tuple(found.live())):
            return _whole(plan, found, leaf)
    return None


def _ranked(state: State, leaf: Tenant) -> list[Lease]:
    """The leases of a user that can be taken, the one that loses least last."""
    leases = [state.leases[ident] for ident in state.holding.get(leaf, ())]
    # Who has nothing for sure has only surplus, which comes first anyway.
    taken = [each for each in leases if each.sure and takeable(state, each) and not firm(state, each)]
    return sorted(taken, key=lambda lease: _loss(state, lease), reverse=True)


def _loss(state: State, lease: Lease) -> tuple[int, int, str]:
    ran = lease.ran + state.now - lease.granted_at
    milli = sum(charge.milli for charge in lease.charges.values())
    return (ran * milli + lease.holds_size * HELD // GB, -lease.request.arrived, lease.id)


def _whole(plan: Plan, lease: Lease, leaf: Tenant) -> Pick:
    """All that a lease has and does not give back yet."""
    served: dict[str, int] = {}
    for ident, charge in lease.charges.items():
        if ident not in lease.unserved and ident not in lease.extra:
            for key in (ANY, charge.model):
                served[key] = served.get(key, 0) + charge.milli
    given = {each.id for pick in plan.picks if pick.lease is lease for each in pick.slices}
    slices = tuple(each for each in lease.live() if each.id not in given)
    return Pick(lease, leaf, slices, whole=True, served=served)


def able(state: State) -> dict[Tenant, list[Tenant]]:
    """Who is over their share and has something that can be taken now, by who is above them.

    Those above are there too as soon as one below them is; where only surplus can be taken, just the root.
    """
    found: dict[Tenant, list[Tenant]] = {}
    seen: dict[Tenant, None] = {}
    for leaf in state.tree.overs:
        times = state.takeable_from.of(leaf) if leaf.user else ()
        if times and times[0][0] <= state.now:
            here = leaf
            while here.parent is not None and here not in seen:
                seen[here] = None
                found.setdefault(here.parent, []).append(here)
                here = here.parent
    leases = (state.leases[ident] for ident in state.elastic)
    if any(each.extra and takeable(state, each) for each in leases):
        found.setdefault(state.tree.root, [])
    return found


def next_able(state: State) -> int:
    """When the first lease that is still protected can be taken; 0: there is none."""
    wake = 0
    for leaf in state.tree.overs:
        if leaf.user:
            wake = _sooner(wake, after(state.takeable_from.of(leaf), state.now))
    for ident in state.elastic:
        lease = state.leases[ident]
        if lease.extra and not takeable(state, lease):
            wake = _sooner(wake, state.free_at(lease))
    return wake


def _sooner(wake: int, when: int) -> int:
    """The sooner of two times; 0: there is none."""
    return min(wake, when) if wake and when else wake or when


def takeable(state: State, lease: Lease) -> bool:
    """It runs, and has run long enough since its grant and since something was last taken from it."""
    return lease.state in HOLDING and state.free_at(lease) <= state.now


def firm(state: State, lease: Lease) -> bool:
    """It cannot be taken: non-preemptible, at work, and within every quota above it, oldest first."""
    if not lease.request.interactive or lease.request.preemptible:
        return False
    if lease.idle_steps > state.defaults.idle_warnings:
        return False
    stated = [tenant for tenant in state.leaf(lease.request).path() if tenant.quota]
    return bool(stated) and all(_within_quota(state, tenant, lease) for tenant in stated)


def _within_quota(state: State, tenant: Tenant, lease: Lease) -> bool:
    """With all non-preemptible leases below a tenant that are older, it is within the tenant's quota."""
    mine = _age(lease)
    total: dict[str, int] = {}
    for leaf in _leaves(tenant):
        for ident in state.holding.get(leaf, ()):
            other = state.leases[ident]
            if other.request.interactive and not other.request.preemptible and _age(other) <= mine:
                for charge in other.charges.values():
                    for key in (ANY, charge.model):
                        total[key] = total.get(key, 0) + charge.milli
    return all(total.get(key, 0) <= quota for key, quota in tenant.quota.items())


def _age(lease: Lease) -> tuple[int, int, str]:
    return (lease.granted_at, lease.request.arrived, lease.id)


def _leaves(tenant: Tenant) -> Iterator[Tenant]:
    if tenant.user:
        yield tenant
    for child in tenant.children.values():
        yield from _leaves(child)
