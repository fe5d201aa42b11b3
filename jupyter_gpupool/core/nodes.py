"""What happens to nodes and devices, and what follows for the leases on them.

Rule 1: a silent node keeps its leases and gets nothing new; a lost one has lost them, and their work moves.
Rule 2: what a node brings back that the pool has given up is ended before its part is granted again.
Rule 3: a verdict says how urgently work must move (`MOVES`); `restart_worker` moves nothing.
Rule 4: cordoned, out, used from outside: nothing new goes there; what is there is left alone, unless
        drained.
Rule 5: what an administrator has said stands until an administrator says otherwise, though the device be
        gone in between. One that is retired has its work finished first, and does not come back.

Not its business: what makes a device unfit (`health`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import TYPE_CHECKING

from jupyter_gpupool.core import grants, lives, replace
from jupyter_gpupool.core.model import (
    ANY,
    Device,
    DrainMode,
    Notice,
    Notify,
    Reason,
    RestartWorker,
    Slice,
    SliceState,
    StopSlice,
    Verdict,
)
from jupyter_gpupool.core.state import (
    WORKING,
    DeviceRecord,
    KeptOut,
    Lease,
    Leaving,
    NodeRecord,
    NodeState,
)
from jupyter_gpupool.core.xids import concerned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jupyter_gpupool.core.model import (
        Cordoned,
        Node,
        NodeJoined,
        NodeLost,
        NodeSilent,
        OutsideUse,
        SliceFreed,
        Uncordoned,
        VerdictChanged,
    )
    from jupyter_gpupool.core.strokes import State

#: How long the old slice of an `evacuate` may wait for its replacement to run, in milliseconds.
EVACUATION = 30_000
#: How long what runs on a device that is retired may take to end: long, for nobody waits for the device.
RETIREMENT = 24 * 3_600_000
#: How work leaves a device of that verdict, and within how long (None: the default of a drain).
MOVES: dict[Verdict, tuple[DrainMode, int | None]] = {
    Verdict.RETIRE_SOON: (DrainMode.FINISH, None),
    Verdict.EVACUATE: (DrainMode.NOW, EVACUATION),
    Verdict.GONE: (DrainMode.NOW, 0),
}


def slices_on(state: State, target: str) -> Iterator[tuple[Lease, Slice]]:
    """All slices on a node or device, in the order of their ids, each as it is when its turn comes.

    What is done about one may change another: a replacement's replacement, say, when that one has gone.
    """
    record = state.devices.get(target)
    node = record.device.node if record else target
    for ident in sorted(state.on_node.get(node, {})):
        found = state.slice_of(ident)
        if found and (not record or found[1].device == target):
            yield found


def tell_administrators(state: State, sentence: str) -> None:
    """Tell the administrators one sentence about a device or node."""
    state.emit(Notify, user=ANY, notice=Notice.DEVICE, lease="", sentence=sentence)


# ---------------------------------------------------------------------------------------------------- nodes


def on_joined(state: State, event: NodeJoined) -> None:
    """A node is there, for the first time or again."""
    node = _unclaimed(state, event.node)
    record = state.nodes.get(node.name)
    if record is None:
        record = state.nodes[node.name] = NodeRecord(node=node)
    record.node = node = dataclasses.replace(node, generation=record.node.generation)
    record.state, record.lost_at = NodeState.UP, 0
    state.version += 1
    state.stir()
    missing = state.cluster.update_node(node)
    state.unhold(missing)
    _take_in_devices(state, record)
    for lease, slice_ in slices_on(state, node.name):
        if slice_.id in missing:
            lives.lost(state, lease, slice_, f"{node.name} came back without its GPU")
        else:
            _take_back(state, lease, slice_, adopted=slice_.id in event.adopted)
    _lay_ghosts(state, record, event.adopted)


def _unclaimed(state: State, node: Node) -> Node:
    """The node without devices that another node has, unless that one is lost."""
    kept: list[Device] = []
    for device in node.devices:
        known = state.devices.get(device.uuid)
        other = state.nodes.get(known.device.node) if known else None
        if (
            known
            and other
            and other.node.name != node.name
            and device in _devices_of(state, other, device.uuid)
        ):
            if other.state is not NodeState.LOST:
                tell_administrators(
                    state, f"GPU {device.uuid} of {node.name} is already in the pool with {other.node.name}."
                )
                continue
            state.unhold(state.cluster.remove_node(other.node.name))
            del state.nodes[other.node.name]
        kept.append(device)
    return node if len(kept) == len(node.devices) else dataclasses.replace(node, devices=tuple(kept))


def _devices_of(state: State, record: NodeRecord, uuid: str) -> tuple[Device, ...]:
    del state
    return tuple(each for each in record.node.devices if each.uuid == uuid)


def _take_in_devices(state: State, record: NodeRecord) -> None:
    """Make or renew the records of a node's devices, and bar those that may take no work."""
    for device in record.node.devices:
        known = state.devices.get(device.uuid)
        if known is None:
            known = state.devices[device.uuid] = DeviceRecord(device=device)
            said = state.absent.pop(device.uuid, KeptOut(why=""))
            known.cordoned, known.retired = said.why, said.retired
        known.device = device
        bar(state, known)
    here = {device.uuid for device in record.node.devices}
    for uuid in [uuid for uuid, each in state.devices.items() if each.device.node == record.node.name]:
        if uuid not in here:
            _take_out_device(state, state.devices.pop(uuid))


def _take_out_device(state: State, record: DeviceRecord) -> None:
    """A node has a device no more: what is said of it stays for the day when it is back."""
    state.count_device(record, there=False)
    if record.cordoned:
        state.absent[record.device.uuid] = KeptOut(why=record.cordoned, retired=record.retired)


def _take_back(state: State, lease: Lease, slice_: Slice, *, adopted: bool) -> None:
    """Say again what is outstanding for a slice of a node that is back."""
    if slice_.state in (SliceState.STOPPING, SliceState.DRAINING):
        if not adopted:
            lives.free(state, lease, slice_)
        elif slice_.state is SliceState.STOPPING:
            state.emit(StopSlice, lease=lease.id, slice=slice_.id, node=slice_.node)
    elif slice_.state is SliceState.STARTING:
        grants.add_slice(state, lease, slice_)
    elif not adopted:
        # Its worker died with the agent or the machine; the device is there, so it starts anew in its place.
        grants.add_slice(state, lease, state.set_slice(lease, slice_, SliceState.STARTING))


def _lay_ghosts(state: State, record: NodeRecord, adopted: tuple[str, ...]) -> None:
    """End what the node still runs and the pool has given up; its parts stay taken until it is gone."""
    node = record.node
    ghosts, record.ghosts = record.ghosts, {}
    for ident in ghosts:
        if state.cluster.taken(ident):
            state.cluster.release(ident)
    for ident in adopted:
        if state.slice_of(ident):
            continue
        ghost = ghosts.get(ident)
        if ghost and (not ghost.device or ghost.device in state.devices):
            record.ghosts[ident] = ghost
            state.cluster.occupy(ghost)
        else:
            record.strangers[ident] = ""
        state.emit(StopSlice, lease=ident.rpartition("/")[0], slice=ident, node=node.name)
    for ident in list(record.strangers):
        if ident not in adopted:
            del record.strangers[ident]
    bar_node(state, record)


def on_slice_freed(state: State, event: SliceFreed) -> None:
    """An agent has seen all processes of a slice gone."""
    found = state.slice_of(event.slice)
    if found:
        lives.free(state, *found)
        return
    for record in state.nodes.values():
        ghost = record.ghosts.pop(event.slice, None)
        if ghost and state.cluster.taken(event.slice):
            state.cluster.release(event.slice)
        if ghost or record.strangers.pop(event.slice, None) is not None:
            bar_node(state, record)
            state.version += 1


def on_silent(state: State, event: NodeSilent) -> None:
    """A node's agent does not answer."""
    record = state.nodes.get(event.node)
    if record and record.state is NodeState.UP:
        record.state = NodeState.SILENT
        record.lost_at = state.now + state.defaults.node_silence
        state.at(record.lost_at, "node", record.node.name)
        bar_node(state, record)
        state.version += 1


def on_lost(state: State, event: NodeLost) -> None:
    """A node stayed away too long, or was taken out."""
    lose_node(state, event.node)


def due(state: State, name: str) -> None:
    """A silent node has stayed away too long."""
    record = state.nodes.get(name)
    if record and record.state is NodeState.SILENT and state.now >= record.lost_at:
        lose_node(state, name)


def lose_node(state: State, name: str) -> None:
    """Give up a node: its slices become ghosts, and their leases get replacements elsewhere."""
    record = state.nodes.get(name)
    if record is None or record.state is NodeState.LOST:
        return
    record.state, record.lost_at = NodeState.LOST, 0
    record.node = dataclasses.replace(record.node, generation=record.node.generation + 1)
    bar_node(state, record)
    for ident in list(record.ghosts):
        state.cluster.release(ident)
    state.version += 1
    state.stir()
    tell_administrators(state, f"{name} is lost; the work of its leases moves.")
    for lease, slice_ in slices_on(state, name):
        record.ghosts[slice_.id] = slice_
        lives.lost(state, lease, slice_, f"{name} does not answer")


def bar_node(state: State, record: NodeRecord) -> None:
    """Let a node take new work only while it is up and runs nothing unknown."""
    if record.state is NodeState.UP and not record.strangers:
        state.cluster.unbar(record.node.name, Reason.NODE_SILENT)
    else:
        state.cluster.bar(record.node.name, Reason.NODE_SILENT, f"{record.node.name} is {record.state}")
    for device in record.node.devices:
        if device.uuid in state.devices:
            count(state, state.devices[device.uuid])
    state.stir()


# -------------------------------------------------------------------------------------------------- devices


def bar(state: State, record: DeviceRecord) -> None:
    """Let a device take new work only while nothing speaks against it."""
    node = state.nodes[record.device.node]
    words = {
        Reason.DEVICE_OUT: record.sentence or record.verdict if record.verdict in MOVES else "",
        Reason.DEVICE_CORDONED: record.cordoned or node.cordoned,
        Reason.DEVICE_OUTSIDE_USE: record.outside,
    }
    for reason, why in words.items():
        if why:
            state.cluster.bar(record.device.uuid, reason, why)
        else:
            state.cluster.unbar(record.device.uuid, reason)
    state.cluster.doubt(record.device.uuid, record.verdict is Verdict.WATCH or record.probation)
    count(state, record)
    state.stir()
    state.version += 1


def count(state: State, record: DeviceRecord) -> None:
    """Count a device for what there is to share out, while it may take work or its node is only silent."""
    node = state.nodes[record.device.node]
    out = record.verdict in MOVES or record.cordoned or node.cordoned or record.outside
    state.count_device(record, there=not out and node.state is not NodeState.LOST)


def on_verdict(state: State, event: VerdictChanged) -> None:
    """The health rules judge a device anew."""
    record = state.devices.get(event.device)
    if record is None:
        return
    record.verdict, record.sentence, record.evidence = event.verdict, event.sentence, event.evidence
    record.probation = event.probation
    bar(state, record)
    name = state.device_name(event.device)
    tell_administrators(state, f"{name} is {event.verdict}: {event.sentence}")
    if event.verdict is Verdict.RESTART_WORKER:
        _restart_worker(state, event)
    if event.verdict in MOVES:
        mode, within = MOVES[event.verdict]
        deadline = state.now + (state.defaults.drain_deadline if within is None else within)
        move(state, event.device, Leaving(mode=mode, deadline=deadline, why=f"{name}: {event.sentence}"))


def _restart_worker(state: State, event: VerdictChanged) -> None:
    """Restart the worker on a device; in MIG mode those on the instance that the driver names, or all.

    Where leases share a device in another way, nobody can say whose process has failed. Each finds out by its
    own errors, so that the fault of one tenant restarts no other's worker.
    """
    there = [*slices_on(state, event.device)]
    shared = any(slice_.instance is None for _, slice_ in there) and len({lease.id for lease, _ in there}) > 1
    numbers = [(each.id, each.instance.gpu_instance if each.instance else -1) for _, each in there]
    named = () if shared else concerned(_instance_of(event), numbers)
    for lease, slice_ in there:
        if slice_.id in named and slice_.state is SliceState.RUNNING:
            state.emit(RestartWorker, lease=lease.id, slice=slice_.id, node=slice_.node, why=event.sentence)


def _instance_of(event: VerdictChanged) -> int:
    """Return the MIG instance that a verdict is about, or -1: the whole device."""
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        return int(json.loads(event.evidence).get("instance", -1))
    return -1


def move(state: State, target: str, leaving: Leaving) -> None:
    """Move all work off a device or node."""
    for lease, slice_ in slices_on(state, target):
        replace.leave(state, lease, slice_, leaving)


def on_outside_use(state: State, event: OutsideUse) -> None:
    """Somebody from outside the pool computes on a device, or has stopped to."""
    record = state.devices.get(event.device)
    if record and record.outside != event.who:
        record.outside = event.who
        bar(state, record)
        if event.who:
            tell_administrators(
                state, f"{state.device_name(event.device)} is in use outside the pool: {event.who}."
            )


def on_cordoned(state: State, event: Cordoned) -> None:
    """An administrator keeps new work off a device or node, or moves the present work away too."""
    if not _cordon(state, event.target, event.why or "cordoned by an administrator", retire=event.retire):
        return
    if event.drain:
        usual = RETIREMENT if event.retire else state.defaults.drain_deadline
        deadline = state.now + (event.deadline or usual)
        why = event.why or "maintenance"
        move(state, event.target, Leaving(mode=DrainMode.FINISH, deadline=deadline, why=why))


def on_uncordoned(state: State, event: Uncordoned) -> None:
    """A device or node takes work again; work that has not been moved yet stays."""
    if not _cordon(state, event.target, ""):
        return
    for lease, slice_ in slices_on(state, event.target):
        waiting = slice_.id in lease.needs and slice_.state in WORKING
        if waiting and state.devices[slice_.device].verdict not in MOVES:
            del lease.leaving[slice_.id]
            replace.forgo(state, lease, slice_.id)
            state.touch(lease)


def _cordon(state: State, target: str, why: str, *, retire: bool = False) -> bool:
    node, record = state.nodes.get(target), state.devices.get(target)
    if node is None and record is None:
        lives.refuse(
            state,
            "",
            Reason.UNKNOWN_NODE,
            f"There is no device or node {target}.",
            "List the devices for names.",
        )
        return False
    if node is not None:
        node.cordoned, node.retired = why, bool(why) and (retire or node.retired)
        for device in node.node.devices:
            bar(state, state.devices[device.uuid])
    elif record is not None:
        record.cordoned, record.retired = why, bool(why) and (retire or record.retired)
        bar(state, record)
    return True
