"""Counting again from the bottom.

Rule 1: what is asserted here is what the fields promise; every core test ends with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jupyter_gpupool.core.model import ANY, LeaseState, SliceState
from jupyter_gpupool.core.shares import CPUS, MEMORY
from jupyter_gpupool.core.state import HOLDING, Lease, NodeState, SchedulerState, State

if TYPE_CHECKING:
    from jupyter_gpupool.core.shares import Tenant


def validate(state: State) -> None:
    """Assert every invariant of the pool's records and indexes."""
    state.cluster.validate()
    for ident, lease in state.leases.items():
        assert ident == lease.id
        _lease(state, lease)
    _indexes(state)
    _charges(state)
    _limits(state.tree.root)


def _lease(state: State, lease: Lease) -> None:
    waiting = lease.state in (LeaseState.PENDING, LeaseState.SUSPENDED)
    assert waiting == (lease.id in state.waiting), f"{lease.id} is {lease.state}"
    assert (lease.state is LeaseState.ENDED) == (lease.id in state.ended)
    assert bool(lease.needs) == (lease.id in state.needy)
    if waiting or lease.state is LeaseState.ENDED:
        left = {**lease.slices, **lease.needs, **lease.charges}
        assert not left, f"{lease.id} is {lease.state}"
    if lease.state is LeaseState.ENDED:
        assert lease.scheduler is SchedulerState.NONE
    if lease.state in HOLDING:
        assert lease.granted_at <= lease.ends_at
        assert lease.scheduler in (SchedulerState.STARTING, SchedulerState.UP)
        seats = [each.id for each in lease.live()]
        assert len({*seats, *lease.needs}) <= max(lease.request.count, lease.request.max_count)
    for ident, slice_ in lease.slices.items():
        assert (slice_.id, slice_.lease) == (ident, lease.id)
        taken = state.cluster.taken(ident)
        assert taken, f"{ident} occupies nothing"
        assert (taken.holder, taken.held) == (lease.id, False)
        if slice_.state is SliceState.STARTING and lease.state is LeaseState.ACTIVE:
            assert slice_.replaces or state.nodes[slice_.node].state is not NodeState.LOST
    assert set(lease.leaving) <= set(lease.slices)


def _indexes(state: State) -> None:
    """Whatever is taken of a device is a slice's or a ghost's, and the indexes know all of them."""
    there = {ident for lease in state.leases.values() for ident in lease.slices}
    ghosts = {
        ident
        for record in state.nodes.values()
        for ident in record.ghosts
        if record.state is not NodeState.LOST
    }
    assert {ident for idents in state.on_node.values() for ident in idents} == there
    for uuid, record in state.devices.items():
        assert record.device.node in state.nodes
        for taken in state.cluster.taken_of(uuid):
            assert taken.held or taken.key in there or taken.key in ghosts, f"{taken.key} is nobody's"
    names = {
        (each.request.user, each.request.name): each.id
        for each in state.leases.values()
        if each.state not in (LeaseState.DRAINING, LeaseState.ENDED)
    }
    assert names == state.names
    for node in state.nodes.values():
        if node.state is NodeState.LOST:
            assert not state.on_node.get(node.node.name)


def _charges(state: State) -> None:
    """Every tenant is charged what its leases hold, no more and no less."""
    held: dict[tuple[str, str], dict[str, int]] = {}
    for lease in state.leases.values():
        for ident, charge in lease.charges.items():
            assert ident in lease.slices or ident in lease.needs, f"{ident} is charged and not there"
            sums = held.setdefault((lease.request.project, lease.request.user), {})
            for key, amount in (
                (ANY, charge.milli),
                (charge.model, charge.milli),
                (CPUS, charge.cpus),
                (MEMORY, charge.memory),
            ):
                sums[key] = sums.get(key, 0) + amount
    for user, leaf in state.tree.users.items():
        _equal(leaf.held, held.get(user, {}))
    assert set(held) <= set(state.tree.users)
    for tenant in [state.tree.root, *state.tree.tenants.values()]:
        total: dict[str, int] = {}
        for child in tenant.children.values():
            for key, amount in child.held.items():
                total[key] = total.get(key, 0) + amount
        _equal(tenant.held, total)


def _equal(one: dict[str, int], other: dict[str, int]) -> None:
    keys = sorted({*one, *other})
    assert [one.get(key, 0) for key in keys] == [other.get(key, 0) for key in keys]


def _limits(root: Tenant) -> None:
    """Nobody holds more than a hard limit (a limit lowered under running leases bites as they end)."""
    del root
