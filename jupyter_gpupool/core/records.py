"""Writing the pool's records as JSON-able data, and making the indexes from them.

Rule 1: a snapshot holds records, never indexes; what is restored behaves as what was written.

Not its business: where a snapshot is kept (`controller.store`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core import grants, lives, nodes, shares
from jupyter_gpupool.core.demand import Demand
from jupyter_gpupool.core.model import (
    Defaults,
    DrainMode,
    DrainSlice,
    EndLease,
    Instruction,
    LeaseState,
    Project,
    Slice,
    SliceState,
    StartLease,
    StopSlice,
    decode,
    encode,
)
from jupyter_gpupool.core.state import (
    HOLDING,
    DeviceRecord,
    Lease,
    NodeRecord,
    NodeState,
    SchedulerState,
    State,
)

if TYPE_CHECKING:
    from collections.abc import Callable

#: Written into each snapshot; a change of form gets a new number and a step in `UPGRADES`.
FORM = 1
#: form -> a step to the next one.
UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}


def snapshot(state: State) -> dict[str, Any]:
    """Write everything that the pool knows."""
    return {
        "form": FORM,
        "now": state.now,
        "version": state.version,
        "defaults": encode(state.defaults),
        "projects": encode(state.projects),
        "nodes": encode(state.nodes),
        "devices": encode(state.devices),
        "leases": encode(state.leases),
        "ended": list(state.ended),
        "needy": list(state.needy),
        "demand": state.cluster.demand.snapshot(),
    }


def restore(data: dict[str, Any]) -> State:
    """Read back a snapshot and make its indexes."""
    try:
        while data["form"] != FORM:
            data = UPGRADES[data["form"]](data)
        return _restore(data)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a snapshot of a pool: {error!r}") from error


def _restore(data: dict[str, Any]) -> State:
    state = State()
    state.now, state.version = data["now"], data["version"]
    state.defaults = decode(Defaults, data["defaults"])
    state.projects = tuple(decode(Project, each) for each in data["projects"])
    for name, each in data["nodes"].items():
        state.nodes[name] = decode(NodeRecord, each)
    for uuid, each in data["devices"].items():
        state.devices[uuid] = decode(DeviceRecord, each)
    for ident, each in data["leases"].items():
        state.leases[ident] = decode(Lease, each)
    state.ended = dict.fromkeys(data["ended"])
    state.needy = dict.fromkeys(data["needy"])
    if "demand" in data:
        state.cluster.demand = Demand.restore(data["demand"])
    _index(state)
    return state


def _index(state: State) -> None:
    for record in state.nodes.values():
        state.cluster.add_node(record.node)
    for device in state.devices.values():
        nodes.bar(state, device)
    state.version -= len(state.devices)
    for record in state.nodes.values():
        nodes.bar_node(state, record)
        for ghost in record.ghosts.values() if record.state is not NodeState.LOST else ():
            state.cluster.occupy(ghost)
        if record.lost_at:
            state.at(record.lost_at, "node", record.node.name)
    for lease in state.leases.values():
        _index_lease(state, lease)
    rebuild_tree(state)
    state.stirred = False


def _index_lease(state: State, lease: Lease) -> None:
    for slice_ in lease.slices.values():
        state.cluster.occupy(slice_)
        state.on_node.setdefault(slice_.node, {})[slice_.id] = None
    if lease.state not in (LeaseState.DRAINING, LeaseState.ENDED):
        state.names[lease.request.user, lease.request.name] = lease.id
    if lease.state in (LeaseState.PENDING, LeaseState.SUSPENDED):
        state.waiting[lease.id] = None
    if lease.state in HOLDING:
        times = [leaving.deadline for leaving in lease.leaving.values()]
        times += [lease.ends_at, grants.expiry_warning(lease), lives.idle_due(state, lease)]
        for when in filter(None, times):
            state.at(when, "lease", lease.id)


def rebuild_tree(state: State) -> None:
    """Make the tree of the present configuration and charge it with what is held."""
    state.tree = shares.Tree(state.projects)
    for lease in state.leases.values():
        for charge in lease.charges.values():
            state.tree.user(lease.request.project, lease.request.user).charge(charge, 1)


def orders(state: State, node: str) -> list[Instruction]:
    """The instructions that are outstanding, as they were given; `node`: only those for its slices."""
    state.cause, state.out = "outstanding", []
    for lease in state.leases.values():
        if not node and lease.scheduler is SchedulerState.STARTING:
            state.emit(StartLease, lease=lease.id, request=lease.request, slices=())
        if not node and lease.scheduler is SchedulerState.ENDING:
            state.emit(EndLease, lease=lease.id, why=lease.why)
        for slice_ in lease.slices.values():
            if not node or slice_.node == node:
                _order(state, lease, slice_)
    out, state.out = state.out, []
    return out


def _order(state: State, lease: Lease, slice_: Slice) -> None:
    if slice_.state is SliceState.STARTING:
        grants.add_slice(state, lease, slice_)
    elif slice_.state is SliceState.STOPPING:
        state.emit(StopSlice, lease=lease.id, slice=slice_.id, node=slice_.node)
    elif slice_.state is SliceState.DRAINING:
        leaving = lease.leaving.get(slice_.id)
        mode = leaving.mode if leaving else DrainMode.NOW
        deadline = leaving.deadline if leaving and mode is DrainMode.FINISH else 0
        why = leaving.why if leaving else lease.why
        state.emit(DrainSlice, lease=lease.id, slice=slice_.id, mode=mode, deadline=deadline, why=why)
