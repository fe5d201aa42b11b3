"""Counting again from the bottom.

Rule 1: what is asserted here is what the fields promise; every core test ends with it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from jupyter_gpupool.core import turns
from jupyter_gpupool.core.line import rank
from jupyter_gpupool.core.model import ANY, LeaseState
from jupyter_gpupool.core.shares import deserved
from jupyter_gpupool.core.state import HOLDING, WAITING, WORKING, Lease, NodeState, SchedulerState
from jupyter_gpupool.core.strokes import limits, stretches
from jupyter_gpupool.core.tree import want

if TYPE_CHECKING:
    from jupyter_gpupool.core.strokes import State
    from jupyter_gpupool.core.tree import Tenant

Sums = dict[str, int]


def validate(state: State) -> None:
    """Assert every invariant of the pool's records and indexes."""
    state.cluster.validate()
    for ident, lease in state.leases.items():
        assert ident == lease.id
        _lease(state, lease)
        _slices(state, lease)
    _indexes(state)
    _queue(state)
    _devices(state)
    _charges(state)
    _shares(state)
    _hours(state)


def _lease(state: State, lease: Lease) -> None:
    """What a lease in its state has, and has not."""
    what = f"{lease.id} is {lease.state}"
    assert (lease.state is LeaseState.ENDED) == (lease.id in state.ended), what
    assert bool(lease.needs) == (lease.id in state.needy), what
    assert not lease.suspending or lease.state is LeaseState.DRAINING, what
    assert lease.claim is None or lease.state in WAITING, what
    if lease.state not in HOLDING:
        assert not lease.needs, what
    if lease.state in (*WAITING, LeaseState.ENDED):
        left = {**lease.slices, **lease.charges, **lease.meters, **lease.extra, **lease.unserved}
        assert not left, what
    if lease.state is LeaseState.ENDED:
        assert lease.scheduler is SchedulerState.NONE, what
    if lease.state in HOLDING:
        assert lease.granted_at <= lease.ends_at, what
        assert lease.scheduler is not SchedulerState.NONE, what
        assert lease.keys or lease.scheduler is not SchedulerState.ENDING, what
        seats = {*lease.needs, *(each.id for each in lease.live())}
        assert len(seats) <= lease.wanted, what
        assert len({*lease.seats()}) <= max(lease.sure, 0), what


def _slices(state: State, lease: Lease) -> None:
    """Each slice occupies its part, and is charged or its replacement is."""
    for ident, slice_ in lease.slices.items():
        assert (slice_.id, slice_.lease) == (ident, lease.id)
        taken = state.cluster.taken(ident)
        assert taken, f"{ident} occupies nothing"
        assert (taken.holder, taken.held) == (lease.id, False)
        assert state.nodes[slice_.node].state is not NodeState.LOST
        replaced = any(each.replaces == ident for each in lease.slices.values())
        assert replaced or slice_.state not in WORKING or ident in lease.charges, f"{ident} is not charged"
    assert set(lease.leaving) <= set(lease.slices)
    assert set(lease.charges) <= {*lease.slices, *lease.needs}, f"{lease.id} is charged for what is not there"
    assert {*lease.meters, *lease.extra, *lease.unserved} <= set(lease.charges)
    assert not set(lease.extra) & set(lease.unserved)
    for ident in lease.meters:
        assert ident in lease.slices and ident not in lease.unserved  # noqa: PT018 - one thought
    for ident in lease.unserved:
        assert lease.slices[ident].state not in WORKING or ident in lease.leaving


def _indexes(state: State) -> None:
    """Every index is what the records say."""
    leases = state.leases.values()
    there = {ident for lease in leases for ident in lease.slices}
    assert {ident for idents in state.on_node.values() for ident in idents} == there
    names = {
        (each.request.user, each.request.name): each.id
        for each in leases
        if each.state in (*WAITING, *HOLDING) or each.suspending
    }
    assert names == state.names
    assert set(state.claims) == {each.id for each in leases if each.claim}
    assert set(state.ready) == {each.id for each in leases if each.claim and not each.claim.awaited}
    awaited = {ident: each.id for each in leases if each.claim for ident in each.claim.awaited}
    assert awaited == state.awaited
    held = {key: part for each in leases if each.claim for key, part in each.claim.held.items()}
    assert held == {taken.key: taken.part for taken in state.cluster.held()}
    elastic = {each.id for each in leases if stretches(each)}
    assert set(state.elastic) == elastic
    assert {ident for idents in state.holding.values() for ident in idents} == {
        each.id for each in leases if each.state in HOLDING
    }
    ends = [(each.ends_at, each.id) for each in leases if each.slices and not each.suspending]
    assert state.ends == sorted(ends)
    for leaf, idents in state.holding.items():
        own = [state.leases[ident] for ident in idents]
        assert state.ends_of.of(leaf) == sorted((each.ends_at, each.id) for each in own)
        assert state.takeable_from.of(leaf) == sorted((state.free_at(each), each.id) for each in own)
    assert all(state.holding[leaf] for leaf in state.takeable_from.users())
    assert state.end_of == {ident: when for when, ident in ends}


def _queue(state: State) -> None:
    """What waits stands in its user's line, once, in its place."""
    waiting = {each.id: each for each in state.leases.values() if each.state in WAITING and not each.claim}
    assert set(state.waiting) == set(waiting)
    counted: dict[int, int] = {}
    for leaf in state.tree.users.values():
        for shape, line in leaf.line.shapes.items() if leaf.line else ():
            assert line == sorted(line)
            assert line
            counted[id(shape)] = counted.get(id(shape), 0) + len(line)
            for place, ident in line:
                lease = waiting.pop(ident)
                assert state.leaf(lease.request) is leaf
                assert state.waiting.shape(lease) is shape
                assert place == rank(lease.request, state.defaults)
        for room, found in leaf.parted.items():
            if turns.stands(state, leaf, found):
                anew = turns.part(state, leaf, found.heads, room)
                assert (found.soon, found.later) == (anew.soon, anew.later), leaf.title()
    assert not waiting
    assert counted == {id(shape): shape.waiting for shape in state.waiting.shapes.values()}


def _devices(state: State) -> None:
    """Whatever is taken of a device is a slice's, a ghost's, or held for a claim."""
    there = {ident for lease in state.leases.values() for ident in lease.slices}
    held = {key for lease in state.leases.values() if lease.claim for key in lease.claim.held}
    for record in state.nodes.values():
        if record.state is not NodeState.LOST:
            there |= set(record.ghosts)
    assert not set(state.absent) & set(state.devices), "what a node has is not absent"
    orders = [(each.cordoned, each.retired) for each in state.nodes.values()]
    orders += [(each.cordoned, each.retired) for each in state.devices.values()]
    assert all(why or not retired for why, retired in orders), "what is retired is cordoned"
    for uuid, each in state.devices.items():
        assert each.device.node in state.nodes
        for taken in state.cluster.taken_of(uuid):
            assert taken.key in (held if taken.held else there), f"{taken.key} is nobody's"


def _charges(state: State) -> None:
    """Every tenant is charged, served and metered what its leases are, no more and no less."""
    held: dict[Tenant, Sums] = {}
    served: dict[Tenant, Sums] = {}
    rates: dict[Tenant, int] = {}
    waiting: dict[Tenant, int] = {}
    for lease in state.leases.values():
        if not (lease.charges or lease.claim or lease.id in state.waiting):
            continue  # it adds nothing
        path = [*state.leaf(lease.request).path()]
        claimed = lease.claim.charges if lease.claim else ()
        mine = {ident: each for ident, each in lease.charges.items() if ident not in lease.unserved}
        sure = [each for ident, each in mine.items() if ident not in lease.extra]
        for tenant in path:
            waiting[tenant] = waiting.get(tenant, 0) + (lease.id in state.waiting)
            rates[tenant] = rates.get(tenant, 0) + sum(lease.charges[each].rate for each in lease.meters)
            for charge in (*lease.charges.values(), *claimed):
                _add(held.setdefault(tenant, {}), limits(charge))
            for charge in (*sure, *claimed):
                _add(served.setdefault(tenant, {}), ((ANY, charge.milli), (charge.model, charge.milli)))
    for tenant in state.tree.everybody():
        _equal(tenant.held, held.get(tenant, {}))
        _equal(tenant.served, served.get(tenant, {}))
        assert tenant.rate == rates.get(tenant, 0), tenant.title()
        assert tenant.waiting == waiting.get(tenant, 0), tenant.title()


def _shares(state: State) -> None:
    """Demands are what the leases want, and shares are what the demands deserve."""
    tree = state.tree
    wants: dict[Tenant, Sums] = {}
    for lease in state.leases.values():
        asked = tree.asked.get(lease.id, ())
        assert asked == state.wants(lease), lease.id
        _add(wants.setdefault(state.leaf(lease.request), {}), asked)
    assert set(tree.asked) <= set(state.leases)
    tree.refresh()
    _equal(tree.root.share, {key: state.capacity[key] for key in tree.root.share})
    for tenant in reversed(tree.everybody()):
        for child in tenant.children.values():
            _add(wants.setdefault(tenant, {}), tuple(child.capped.items()))
        _equal(tenant.demand, wants.get(tenant, {}))
        if tenant.parent is not None:
            for key, amount in tenant.demand.items():
                assert tenant.capped.get(key, 0) == min(amount, tenant.limit.get(key, amount))
        children = list(tenant.children.values())
        for key, total in tenant.share.items():
            shares = _deserved(total, tuple(want(each, key) for each in children))
            assert shares == [each.share[key] for each in children], f"{tenant.title()}: {key}"
        over = any(tenant.served.get(key, 0) > amount for key, amount in tenant.share.items())
        assert (tenant.parent is not None and over) == (tenant in tree.overs), tenant.title()
        below = sum(child.hungry for child in children)
        assert tenant.hungry == (int(tenant in tree.hungry) if tenant.user else below), tenant.title()
    for leaf in tree.users.values():
        room = leaf.share[ANY] - leaf.served[ANY]
        within = any(shape.total <= room for shape in leaf.line.shapes) if leaf.line else False
        assert within == (leaf in tree.hungry), leaf.title()
    assert tree.potential() == _potential(tree.everybody())


def _potential(tenants: list[Tenant]) -> tuple[int, int]:
    """Sum up the squared over-shares: of all GPUs, then of single models."""
    found = {True: 0, False: 0}
    for tenant in tenants:
        for key, share in tenant.share.items():
            found[key == ANY] += max(0, tenant.served.get(key, 0) - share) ** 2
    return found[True], found[False]


#: Most of them are as they were when they were last looked at.
_deserved = functools.lru_cache(maxsize=4096)(deserved)


def _add(sums: Sums, amounts: tuple[tuple[str, int], ...]) -> None:
    for key, amount in amounts:
        sums[key] = sums.get(key, 0) + amount


def _equal(one: Sums, other: Sums) -> None:
    keys = sorted({*one, *other})
    assert [one.get(key, 0) for key in keys] == [other.get(key, 0) for key in keys]


def _hours(state: State) -> None:
    """No hour has more than the accounts."""
    for user, hours in state.ledger.hours.items():
        accounts = [each for each in state.ledger.accounts.values() if each.user == user]
        for at, name in enumerate(("used", "idle")):
            assert sum(each[at] for each in hours.found.values()) <= sum(
                getattr(each, name) for each in accounts
            )
