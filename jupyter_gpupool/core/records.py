"""Writing the pool's records as JSON-able data, and making the indexes from them.

Rule 1: a snapshot holds records, never indexes; what is restored behaves as what was written.
Rule 2: its text is made record by record: all at once, it would take more memory than the pool itself, in
        many small objects, and much of that would stay with the process.

Not its business: where a snapshot is kept (`controller.store`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core import grants, idle, nodes
from jupyter_gpupool.core.demand import Demand
from jupyter_gpupool.core.ledger import Account, Hours, Reclaim
from jupyter_gpupool.core.line import Waiting
from jupyter_gpupool.core.model import (
    Defaults,
    DrainMode,
    DrainSlice,
    EndLease,
    Instruction,
    Project,
    Slice,
    SliceState,
    StartLease,
    StopSlice,
    decode,
    encode,
)
from jupyter_gpupool.core.shares import Decay
from jupyter_gpupool.core.state import (
    HOLDING,
    WAITING,
    DeviceRecord,
    KeptOut,
    Lease,
    NodeRecord,
    NodeState,
    SchedulerState,
)
from jupyter_gpupool.core.strokes import State, limits
from jupyter_gpupool.core.times import Times
from jupyter_gpupool.core.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jupyter_gpupool.core.tree import Tenant

#: Written into each snapshot; a change of form gets a new number and a step in `UPGRADES`.
FORM = 4
#: form -> a step to the next one.
UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {
    1: lambda data: {**data, "form": 2, "hours": {}},  # what people used was not kept by hours
    2: lambda data: {**data, "form": 3, "absent": {}},  # a cordon was forgotten with a device that was gone
    3: lambda data: {**data, "form": 4, "leases": _hold_what_is_there(data)},
}


_JSON = json.JSONEncoder(separators=(",", ":")).encode


def snapshot(state: State) -> dict[str, Any]:
    """Write everything that the pool knows."""
    data: dict[str, Any] = encode(_contents(state))
    return data


def text(state: State) -> str:
    """Write everything that the pool knows as the JSON of its `snapshot`."""
    return "".join(_pieces(_contents(state), 2))


def _pieces(value: Any, levels: int) -> Iterator[str]:
    """The JSON of a value; what it holds is written piece by piece, down to so many levels."""
    if not levels or not isinstance(value, dict | list):
        yield _JSON(encode(value))
        return
    names = [f"{_JSON(name)}:" for name in value] if isinstance(value, dict) else [""] * len(value)
    begin, end = "{}" if isinstance(value, dict) else "[]"
    for name, each in zip(names, value.values() if isinstance(value, dict) else value, strict=True):
        yield begin + name
        yield from _pieces(each, levels - 1)
        begin = ","
    yield end if begin == "," else begin + end


def _contents(state: State) -> dict[str, Any]:
    """Everything that the pool knows, by the names that it has in a snapshot."""
    return {
        "form": FORM,
        "now": state.now,
        "version": state.version,
        "defaults": state.defaults,
        "projects": state.projects,
        "nodes": state.nodes,
        "devices": state.devices,
        "absent": state.absent,
        "leases": state.leases,
        "ended": list(state.ended),
        "needy": list(state.needy),
        "wake_at": state.wake_at,
        "demand": state.cluster.demand.snapshot(),
        "epoch": state.tree.decay.epoch,
        "usage": usage(state),
        "accounts": state.ledger.accounts,
        "hours": _hours(state),
        "reclaims": state.ledger.reclaims,
        "reclaim_count": state.ledger.count,
    }


def _hours(state: State) -> dict[str, list[list[int]]]:
    found = {user: each.rows(state.now) for user, each in state.ledger.hours.items()}
    return {user: rows for user, rows in found.items() if rows}


def usage(state: State) -> list[list[Any]]:
    """The decayed usage of everybody who has any: project, user ("": the project itself), usage."""
    found = [
        [each.project, each.name if each.user else "", each.usage]
        for each in state.tree.everybody()
        if each.usage
    ]
    return sorted(found)


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
    for uuid, each in data["absent"].items():
        state.absent[uuid] = decode(KeptOut, each)
    for ident, each in data["leases"].items():
        state.leases[ident] = decode(Lease, each)
    state.ended = dict.fromkeys(data["ended"])
    state.needy = dict.fromkeys(data["needy"])
    state.wake_at = data["wake_at"]
    state.cluster.demand = Demand.restore(data["demand"])
    for key, each in data["accounts"].items():
        state.ledger.accounts[key] = decode(Account, each)
    state.ledger.hours = {user: Hours(rows) for user, rows in data["hours"].items()}
    state.ledger.reclaims = [decode(Reclaim, each) for each in data["reclaims"]]
    state.ledger.count = data["reclaim_count"]
    _index(state)
    state.tree = Tree(state.projects, Decay(state.defaults.half_life, data["epoch"]))
    state.tree.capacity(state.capacity)
    for lease in state.leases.values():
        _count(state, lease)
    for project, user, used in data["usage"]:
        _tenant(state, project, user).usage = used
    state.tree.refresh()
    state.stirred = False
    return state


def _hold_what_is_there(data: dict[str, Any]) -> dict[str, Any]:
    """The leases of a snapshot, with no part held for them on a device that is gone."""
    leases = {**data["leases"]}
    for ident, lease in leases.items():
        if claim := lease.get("claim"):
            held = {key: each for key, each in claim["held"].items() if _is_there(data, each)}
            leases[ident] = {**lease, "claim": {**claim, "held": held}}
    return leases


def _is_there(data: dict[str, Any], part: dict[str, Any]) -> bool:
    return part["device"] in data["devices"] if part["device"] else part["node"] in data["nodes"]


def _tenant(state: State, project: str, user: str) -> Tenant:
    return state.tree.user(project, user) if user else state.tree.project(project)


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
    if state.wake_at:
        state.at(state.wake_at, "wake", "")
    for lease in state.leases.values():
        _index_lease(state, lease)


def _index_lease(state: State, lease: Lease) -> None:
    for slice_ in lease.slices.values():
        state.cluster.occupy(slice_)
        state.on_node.setdefault(slice_.node, {})[slice_.id] = None
    if lease.state in (*WAITING, *HOLDING) or lease.suspending:
        state.names[lease.request.user, lease.request.name] = lease.id
    times = [leaving.deadline for leaving in lease.leaving.values()]
    times += [grants.overdue(lease, lease.slices[ident]) for ident in lease.leaving]
    if lease.state in HOLDING:
        times += [lease.ends_at, grants.expiry_warning(lease), idle.due(state, lease)]
    for when in filter(None, times):
        state.at(when, "lease", lease.id)
    if lease.claim:
        state.at(lease.claim.until, "claim", lease.id)
        state.awaited.update(dict.fromkeys(lease.claim.awaited, lease.id))
        for key, part in lease.claim.held.items():
            state.cluster.hold(key, lease.id, part)


def _count(state: State, lease: Lease) -> None:
    """Charge a lease in the tree and put it where it belongs; usage is kept apart, only its rate is set."""
    leaf = state.leaf(lease.request)
    for ident, charge in lease.charges.items():
        state.tree.hold(leaf, limits(charge), 1)
        if ident not in lease.extra and ident not in lease.unserved:
            state.tree.serve(leaf, charge.model, charge.milli)
        if ident in lease.meters:
            for tenant in leaf.path():
                tenant.rate += charge.rate
    for charge in lease.claim.charges if lease.claim else ():
        state.tree.hold(leaf, limits(charge), 1)
        state.tree.serve(leaf, charge.model, charge.milli)
    state.place(lease)


def reconfigure(state: State, projects: tuple[Project, ...], defaults: Defaults) -> None:
    """Take over another configuration: everybody keeps what they have, and what they have used."""
    old = state.tree
    state.projects, state.defaults = projects, defaults
    fresh = Decay(defaults.half_life, state.now)
    for account in state.ledger.accounts.values():
        account.kept = fresh.kept(old.decay.worth(account.kept, state.now), state.now)
    worth = {
        (each.project, each.name if each.user else ""): old.worth(each, state.now) for each in old.everybody()
    }
    state.tree = Tree(projects, fresh)
    state.tree.capacity(state.capacity)
    state.waiting = Waiting()
    state.ranks = None
    state.takeable_from, state.ends_of = Times(), Times()
    state.holding = {}
    for lease in state.leases.values():
        _count(state, lease)
    for (project, user), amount in worth.items():
        if amount and project in state.tree.tenants:
            state.tree.use(_tenant(state, project, user), amount, state.now)
    state.tree.refresh()


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
        deadline = leaving.deadline if leaving and mode is not DrainMode.NOW else 0
        why = leaving.why if leaving else lease.why
        state.emit(DrainSlice, lease=lease.id, slice=slice_.id, mode=mode, deadline=deadline, why=why)
